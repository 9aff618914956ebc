# SPDX-License-Identifier: Apache-2.0
"""All settings of the router: read once at start, validated, immutable.

Keys come from the environment, so that a list of processes does not show them:

    KVCACHED_NIXL_API_KEY         clients must send it as "Authorization: Bearer ..."; unset: no key is needed
    KVCACHED_NIXL_ADMIN_KEY       the same for /instances; unset: /instances answers on loopback only
    KVCACHED_NIXL_UPSTREAM_KEY    sent to servers in place of the client's key; unset: the client's key is passed on
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.address import address_of

__all__ = ["Options", "add_arguments", "from_arguments"]

MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """The settings; ``kvcached-nixl proxy --help`` describes all of them.

    Attributes:
        attempts: how often a request is tried at most. Nothing is tried again once the response has begun.
        decode_alone: decode may compute prompts itself where no prefill is up, or nothing can be handed over.
        prefill_timeout_seconds: for the whole response of a prefill leg.
        first_token_timeout_seconds: until the first piece of a streamed response.
        inter_token_timeout_seconds: between two pieces of a streamed response.
        response_timeout_seconds: for the whole of a response that is not streamed.
        client_timeout_seconds: how long a client may take for its body, or to read one piece.
        drain_timeout_seconds: how long requests in flight may take after SIGTERM.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "least-tokens"
    attempts: int = 2
    decode_alone: bool = False
    client_params: bool = False
    max_inflight: int = 1024
    max_body_bytes: int = 16 * MIB
    max_total_body_bytes: int = 1024 * MIB
    max_response_bytes: int = 64 * MIB
    connect_timeout_seconds: float = 2.0
    prefill_timeout_seconds: float = 300.0
    first_token_timeout_seconds: float = 300.0
    inter_token_timeout_seconds: float = 120.0
    response_timeout_seconds: float = 3600.0
    client_timeout_seconds: float = 60.0
    drain_timeout_seconds: float = 60.0
    health_interval_seconds: float = 2.0
    health_failures: int = 3
    log_json: bool = False
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    upstream_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        names = [address_of(url) for url in (*self.prefill, *self.decode)]
        for name in names:
            if names.count(name) > 1:
                raise _bad(f"the server {name} is given twice", "each server once, as prefill or as decode")
        for key in (
            "attempts",
            "max_inflight",
            "max_body_bytes",
            "max_total_body_bytes",
            "max_response_bytes",
            "health_failures",
        ):
            if getattr(self, key) < 1:
                raise _bad(f"{key}={getattr(self, key)}", "at least 1")
        for key in self.__dataclass_fields__:
            if key.endswith("_seconds") and not 0 < getattr(self, key) <= 86_400:
                raise _bad(f"{key}={getattr(self, key)}", "a number of seconds above 0 and up to 86,400")
        if not 0 <= self.port <= 65_535:
            raise _bad(f"port={self.port}", "0 to 65535")
        for key in (self.api_key, self.admin_key, self.upstream_key):
            if not (key.isascii() and key.isprintable()):
                raise _bad("a key with characters that an HTTP header cannot carry", "printable ASCII")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    prefill: list[str] = []
    decode: list[str] = []


class _Number(NamedTuple):
    """A numeric flag: the field of `Options`, the flag's name, and its name in earlier releases."""

    field: str
    flag: str
    old_flag: str
    kind: type
    description: str


_NUMBERS = (
    _Number("attempts", "--attempts", "", int, "how often a request is tried at most, before its response has begun"),
    _Number(
        "max_inflight", "--max-inflight", "--most-requests", int, "requests in flight at once; one more is answered 429"
    ),
    _Number(
        "max_body_bytes",
        "--max-body-bytes",
        "--body-bytes",
        int,
        "body size of one request; a larger one is answered 413",
    ),
    _Number(
        "max_total_body_bytes",
        "--max-total-body-bytes",
        "--bodies-bytes",
        int,
        "body size of all requests in flight together; a request beyond it is answered 429",
    ),
    _Number(
        "max_response_bytes", "--max-response-bytes", "--answer-bytes", int, "size of a response that is not streamed"
    ),
    _Number(
        "connect_timeout_seconds", "--connect-timeout", "--connect-seconds", float, "seconds to connect to a server"
    ),
    _Number(
        "prefill_timeout_seconds",
        "--prefill-timeout",
        "--prefill-seconds",
        float,
        "seconds for the response of prefill",
    ),
    _Number(
        "first_token_timeout_seconds",
        "--first-token-timeout",
        "--first-token-seconds",
        float,
        "seconds until the first piece of a streamed response",
    ),
    _Number(
        "inter_token_timeout_seconds",
        "--inter-token-timeout",
        "--token-seconds",
        float,
        "seconds between two pieces of a streamed response",
    ),
    _Number(
        "response_timeout_seconds",
        "--response-timeout",
        "--answer-seconds",
        float,
        "seconds for a response that is not streamed",
    ),
    _Number(
        "client_timeout_seconds",
        "--client-timeout",
        "--client-seconds",
        float,
        "seconds for a client to send its body, or to read one piece of the response",
    ),
    _Number(
        "drain_timeout_seconds",
        "--drain-timeout",
        "--drain-seconds",
        float,
        "seconds for the requests in flight to finish after SIGTERM",
    ),
    _Number(
        "health_interval_seconds",
        "--health-interval",
        "--health-seconds",
        float,
        "seconds between two checks of a server's /health",
    ),
    _Number(
        "health_failures", "--health-failures", "", int, "failed checks in a row, after which a server gets no requests"
    ),
)


class _OldFlag(argparse.Action):
    """A flag's earlier name, accepted for one release. Prints the new name, which is in ``const``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        sys.stderr.write(
            f"{parser.prog}: {option_string} is deprecated, use {self.const}; the next release removes the old name\n"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the router's flags to a parser."""
    default = Options()
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="a prefill server; repeatable")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode server; repeatable")
    parser.add_argument(
        "--servers",
        type=Path,
        metavar="FILE",
        help='file with more servers, as JSON: {"prefill": [URL, ...], "decode": [...]}',
    )
    parser.add_argument("--host", default=default.host, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=default.port, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--policy",
        default=default.policy,
        help="round-robin, least-tokens, power-of-two, prefix-affinity, or your module:Class (default: %(default)s)",
    )
    parser.add_argument(
        "--decode-alone",
        action="store_true",
        help="let decode compute prompts where no prefill server is up. It also computes n > 1 and prompt lists, "
        "which are otherwise answered 400",
    )
    parser.add_argument(
        "--client-params",
        action="store_true",
        help="accept kv_transfer_params from clients: they then choose which server decode connects to",
    )
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per request instead of key=value")
    for one in _NUMBERS:
        parser.add_argument(
            one.flag,
            dest=one.field,
            type=one.kind,
            default=getattr(default, one.field),
            metavar="N",
            help=f"{one.description} (default: %(default)s)",
        )
        if one.old_flag:
            parser.add_argument(
                one.old_flag,
                dest=one.field,
                action=_OldFlag,
                const=one.flag,
                type=one.kind,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def from_arguments(found: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Returns the options of a parsed command line and the environment.

    Raises:
        SettingsError: an option has an unusable value, or the file of servers cannot be read.
    """
    servers = _read(found.servers) if found.servers is not None else _File()
    plain = ("host", "port", "policy", "decode_alone", "client_params", "log_json", *(one.field for one in _NUMBERS))
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
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(
            found=f"--servers {path}: {error}",
            expected='JSON: {"prefill": ["http://HOST:PORT", ...], "decode": [...]}',
            consequence="The router does not know its servers, and does not start.",
            remedy="Correct the file, or the path.",
        ) from error


def _bad(found: str, expected: str) -> SettingsError:
    return SettingsError(
        found=found,
        expected=expected,
        consequence="The router does not start.",
        remedy="See kvcached-nixl proxy --help.",
    )
