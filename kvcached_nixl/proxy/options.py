# SPDX-License-Identifier: Apache-2.0
"""Everything that the router's operator can set, read once, checked, frozen.

Environment, so that no key is seen in a list of processes:

    KVCACHED_NIXL_API_KEY         what clients must send as "Authorization: Bearer ..."; unset: nothing is asked of them
    KVCACHED_NIXL_ADMIN_KEY       the same for /instances; unset: /instances answers on loopback only
    KVCACHED_NIXL_UPSTREAM_KEY    what servers get in place of the client's; unset: what the client has sent
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.address import address_of

__all__ = ["Options", "add_arguments", "from_arguments"]

MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """See ``kvcached-nixl proxy --help``, which says the same for each.

    Attributes:
        attempts: how often a request is tried at most, before anything of it has reached the client.
        decode_alone: decode may compute prompts, where there is no prefill or nothing can be handed over.
        prefill_seconds: for the whole answer of a prefill leg.
        first_token_seconds: of a streamed answer; ``token_seconds``: between two pieces of it.
        answer_seconds: for the whole of an answer that is not streamed.
        client_seconds: how long a client may take for its head, its body, or to read one piece.
        drain_seconds: how long requests in flight may take after SIGTERM.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "least-tokens"
    attempts: int = 2
    decode_alone: bool = False
    client_params: bool = False
    most_requests: int = 1024
    body_bytes: int = 16 * MIB
    bodies_bytes: int = 1024 * MIB
    answer_bytes: int = 64 * MIB
    connect_seconds: float = 2.0
    prefill_seconds: float = 300.0
    first_token_seconds: float = 300.0
    token_seconds: float = 120.0
    answer_seconds: float = 3600.0
    client_seconds: float = 60.0
    drain_seconds: float = 60.0
    health_seconds: float = 2.0
    health_failures: int = 3
    log_json: bool = False
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    upstream_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        names = [address_of(url) for url in (*self.prefill, *self.decode)]
        for name in names:
            if names.count(name) > 1:
                raise _bad(f"the server {name} twice", "each server once, as prefill or as decode")
        for key in ("attempts", "most_requests", "body_bytes", "bodies_bytes", "answer_bytes", "health_failures"):
            if getattr(self, key) < 1:
                raise _bad(f"{key}={getattr(self, key)}", "at least 1")
        for key in self.__dataclass_fields__:
            if key.endswith("_seconds") and not 0 < getattr(self, key) <= 86_400:
                raise _bad(f"{key}={getattr(self, key)}", "a number of seconds above 0 and up to 86,400")
        if not 0 <= self.port <= 65_535:
            raise _bad(f"port={self.port}", "0 to 65535")
        for key in (self.api_key, self.admin_key, self.upstream_key):
            if not (key.isascii() and key.isprintable()):
                raise _bad("a key with characters that no header can carry", "printable ASCII")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    prefill: list[str] = []
    decode: list[str] = []


_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("attempts", int, "how often a request is tried at most, before anything of it has reached the client"),
    ("most_requests", int, "in flight; one more is answered 429"),
    ("body_bytes", int, "of a request; a longer one is answered 413"),
    ("bodies_bytes", int, "of all requests in flight together; one more is answered 429"),
    ("answer_bytes", int, "of an answer that is not streamed"),
    ("connect_seconds", float, "to a server"),
    ("prefill_seconds", float, "for a prefill leg"),
    ("first_token_seconds", float, "until the first piece of a streamed answer"),
    ("token_seconds", float, "between two pieces of it"),
    ("answer_seconds", float, "for an answer that is not streamed"),
    ("client_seconds", float, "for a client to send its head or its body, or to read a piece"),
    ("drain_seconds", float, "for requests in flight after SIGTERM"),
    ("health_seconds", float, "between two looks at a server's /health"),
    ("health_failures", int, "in a row, after which a server gets no requests"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of the router."""
    default = Options()
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="a prefill server; repeatable")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode server; repeatable")
    parser.add_argument(
        "--servers", type=Path, metavar="FILE", help='more of them, as JSON: {"prefill": [URL, ...], "decode": [...]}'
    )
    parser.add_argument("--host", default=default.host, help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=default.port, help="(%(default)s)")
    parser.add_argument(
        "--policy",
        default=default.policy,
        help="round-robin, least-tokens, power-of-two, prefix-affinity, or module:Class of your own (%(default)s)",
    )
    parser.add_argument(
        "--decode-alone",
        action="store_true",
        help="let decode compute prompts where no prefill is up, and those of n > 1 and of prompt lists, which are "
        "answered 400 else",
    )
    parser.add_argument(
        "--client-params",
        action="store_true",
        help="take kv_transfer_params of clients: they then say which server decode connects to",
    )
    parser.add_argument("--log-json", action="store_true", help="one JSON object per request, not a line of words")
    for name, kind, words in _NUMBERS:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(default, name),
            metavar="N",
            help=f"{words} (%(default)s)",
        )


def from_arguments(found: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Options of a command line.

    Raises:
        SettingsError: one cannot be used, or the file of servers cannot be read.
    """
    servers = _read(found.servers) if found.servers is not None else _File()
    plain = ("host", "port", "policy", "decode_alone", "client_params", "log_json", *(name for name, _, _ in _NUMBERS))
    return Options(
        prefill=(*servers.prefill, *found.prefill),
        decode=(*servers.decode, *found.decode),
        api_key=environ.get("KVCACHED_NIXL_API_KEY", ""),
        admin_key=environ.get("KVCACHED_NIXL_ADMIN_KEY", ""),
        upstream_key=environ.get("KVCACHED_NIXL_UPSTREAM_KEY", ""),
        **{name: getattr(found, name) for name in plain},
    )


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError) as cause:
        raise SettingsError(
            found=f"--servers {path}: {cause}",
            expected='JSON: {"prefill": ["http://HOST:PORT", ...], "decode": [...]}',
            consequence="It is not known which servers there are.",
            remedy="Correct the file or its name.",
        ) from cause


def _bad(found: str, expected: str) -> SettingsError:
    return SettingsError(
        found=found,
        expected=expected,
        consequence="The router does not start.",
        remedy="See kvcached-nixl proxy --help.",
    )
