# SPDX-License-Identifier: Apache-2.0
"""All settings of the router: read once at start, validated, immutable.

Keys come from the environment, so that a list of processes does not show them:

    KVCACHED_NIXL_API_KEY         clients must send it as "Authorization: Bearer ..."; unset: no key is needed
    KVCACHED_NIXL_ADMIN_KEY       the same for /instances; unset: /instances answers on --admin-socket only
    KVCACHED_NIXL_UPSTREAM_KEY    sent to servers in place of the client's key; unset: the client's key is passed on
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.address import address_of

__all__ = ["Options", "add_arguments", "from_arguments"]

MIB = 1 << 20
MOST_WEIGHT = 1000.0


def _number(default: Any, description: str, *, least: float | None = None) -> Any:
    """A numeric setting whose flag has its name, without ``_seconds``. ``least`` is 1 if not given, or 0 if the default
    is 0."""
    return field(default=default, metadata={"help": description, "least": least})


@dataclass(frozen=True)
class Options:
    """The settings; ``kvcached-nixl proxy --help`` describes all of them."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    admin_socket: str | None = None
    policy: str = "least-tokens"
    weights: tuple[tuple[str, float], ...] = ()
    decode_alone: bool = False
    client_params: bool = False
    log_json: bool = False
    otlp_traces_endpoint: str | None = None
    alone_most_tokens: int = _number(
        0, "tokens of a prompt that decode may compute itself, where it costs less than a hand-over; 0: never"
    )
    decode_fill: float = _number(
        1.5,
        "how much decode servers may have to do before requests wait, relative to what they can hold; 0: no limit",
        least=0,
    )
    attempts: int = _number(2, "how often a request is tried at most, before its response has begun")
    max_inflight: int = _number(1024, "requests in flight at once; one more is answered 429")
    max_connections: int = _number(4096, "connections of clients; above it the one that is idle longest is closed")
    max_body_bytes: int = _number(16 * MIB, "body size of one request; a larger one is answered 413")
    max_memory_bytes: int = _number(
        1024 * MIB, "memory of all requests in flight together; a request beyond it is answered 429"
    )
    max_response_bytes: int = _number(64 * MIB, "size of a response that is not streamed")
    connect_timeout_seconds: float = _number(5.0, "seconds to connect to a server")
    queue_timeout_seconds: float = _number(30.0, "seconds that a request waits for a server that takes it, then 503")
    prefill_timeout_seconds: float = _number(300.0, "seconds for the response of prefill")
    first_token_timeout_seconds: float = _number(300.0, "seconds until the first piece of a streamed response")
    inter_token_timeout_seconds: float = _number(120.0, "seconds between two tokens of a streamed response")
    response_timeout_seconds: float = _number(3600.0, "seconds for a response that is not streamed")
    keep_alive_seconds: float = _number(
        1.0, "seconds between empty lines in a stream that waits for its first token; its status is 200 from then on"
    )
    client_timeout_seconds: float = _number(
        60.0, "seconds for a client to send its body, or to read one piece of the response"
    )
    drain_delay_seconds: float = _number(
        5.0, "seconds after SIGTERM in which new requests are still served: load balancers need time to notice"
    )
    drain_timeout_seconds: float = _number(25.0, "seconds after SIGTERM, in all, for the requests in flight to finish")
    health_interval_seconds: float = _number(2.0, "seconds between two checks of a server's /health")
    health_failures: int = _number(3, "checks in a row that find nobody listening, after which a server is down")
    unresponsive_timeout_seconds: float = _number(
        60.0, "seconds without a byte from a server whose checks go unanswered, after which it is down"
    )
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    upstream_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        names = [address_of(url) for url in (*self.prefill, *self.decode)]
        for name in names:
            if names.count(name) > 1:
                raise _bad(f"the server {name} is given twice", "each server once, as prefill or as decode")
        for one in _NUMBERS:
            _check_number(one, getattr(self, one.name))
        for name, weight in self.weights:
            if name not in names or not 0 < weight <= MOST_WEIGHT:
                raise _bad(f"--weight {name}={weight}", f"a server that is given, and above 0 up to {MOST_WEIGHT:g}")
        if not 0 <= self.port <= 65_535:
            raise _bad(f"port={self.port}", "0 to 65535")
        for key in (self.api_key, self.admin_key, self.upstream_key):
            if not (key.isascii() and key.isprintable()) or key != key.strip():
                raise _bad(
                    "a key with characters that an HTTP header cannot carry",
                    "printable ASCII, without spaces around it",
                )


_NUMBERS: tuple[Field[Any], ...] = tuple(one for one in fields(Options) if "help" in one.metadata)


def _check_number(one: Field[Any], value: float) -> None:
    if one.name.endswith("_seconds"):
        if not 0 < value <= 86_400:
            raise _bad(f"{one.name}={value}", "a number of seconds above 0 and up to 86,400")
    elif not value >= (least := one.metadata["least"] if one.metadata["least"] is not None else bool(one.default)):
        raise _bad(f"{one.name}={value}", f"at least {int(least)}")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    prefill: list[str] = []
    decode: list[str] = []
    weights: dict[str, float] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the router's flags to a parser."""
    default = Options()
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="a prefill server; repeatable")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode server; repeatable")
    parser.add_argument(
        "--servers",
        type=Path,
        metavar="FILE",
        help='file with more servers, as JSON: {"prefill": [URL, ...], "decode": [...], "weights": {"HOST:PORT": W}}',
    )
    parser.add_argument(
        "--weight",
        action="append",
        default=[],
        metavar="HOST:PORT=W",
        help="share of the requests of one server, relative to the others of its role, which have 1; repeatable",
    )
    parser.add_argument("--host", default=default.host, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=default.port, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--admin-socket",
        metavar="PATH",
        default=default.admin_socket,
        help="Unix socket on which /instances answers this user without a key (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        default=default.policy,
        help="round-robin, least-tokens, power-of-two, prefix-affinity, or your module:Class (default: %(default)s)",
    )
    parser.add_argument(
        "--decode-alone",
        action="store_true",
        help="let decode compute prompts where no prefill server is up. It also computes beam searches, which are "
        "otherwise answered 400",
    )
    parser.add_argument(
        "--client-params",
        action="store_true",
        help="accept kv_transfer_params from clients: they then choose which server decode connects to",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        default=default.otlp_traces_endpoint,
        help="where to send an OpenTelemetry trace of each request, over OTLP; as vLLM's flag of that name",
    )
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per request instead of key=value")
    for one in _NUMBERS:
        parser.add_argument(
            f"--{one.name.removesuffix('_seconds').replace('_', '-')}",
            dest=one.name,
            type=type(one.default),
            default=one.default,
            metavar="N",
            help=f"{one.metadata['help']} (default: %(default)s)",
        )


def from_arguments(found: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Returns the options of a parsed command line and the environment.

    Raises:
        SettingsError: an option has an unusable value, or the file of servers cannot be read.
    """
    servers = _read(found.servers) if found.servers is not None else _File()
    given = vars(found)
    plain = {one.name: given[one.name] for one in fields(Options) if one.name in given}
    return Options(
        **{
            **plain,
            "prefill": (*servers.prefill, *found.prefill),
            "decode": (*servers.decode, *found.decode),
            "weights": (*servers.weights.items(), *map(_weight, found.weight)),
            "api_key": environ.get("KVCACHED_NIXL_API_KEY", ""),
            "admin_key": environ.get("KVCACHED_NIXL_ADMIN_KEY", ""),
            "upstream_key": environ.get("KVCACHED_NIXL_UPSTREAM_KEY", ""),
        }
    )


def _weight(said: str) -> tuple[str, float]:
    name, _, weight = said.rpartition("=")
    try:
        return name, float(weight)
    except ValueError as error:
        raise _bad(f"--weight {said}", "HOST:PORT=W, such as 127.0.0.1:8101=0.05") from error


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(
            found=f"--servers {path}: {error}",
            expected='JSON: {"prefill": ["http://HOST:PORT", ...], "decode": [...], "weights": {"HOST:PORT": 0.05}}',
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
