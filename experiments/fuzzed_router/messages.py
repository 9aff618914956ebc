# SPDX-License-Identifier: Apache-2.0
"""Makes the bytes sent over one connection: bodies with ordinary headers, and odd requests drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from experiments.fuzzed_router.bodies import Body

__all__ = ["BODY_BYTES", "CLIENT_SECONDS", "Case", "Expects", "Message", "odd_http", "plain"]

BODY_BYTES = 200_000
"""The router's --max-body-bytes: small, so that many requests can exceed it."""
CLIENT_SECONDS = 10
"""The router's --client-timeout: the time after which it refuses a body that does not arrive."""


class Expects(str, Enum):
    """Which answers are acceptable. Errors must be in OpenAI's format unless another rule is given."""

    RIGHT = "right"
    """Only 200 with the right answer."""
    RIGHT_OR_REFUSED = "right or refused"
    REFUSED = "refused"
    """4xx with an error."""
    SERVED = "served"
    """Not a completion: any status below 500."""
    NO_HTTP = "no HTTP"
    """4xx in any format, or a closed connection."""


@dataclass(frozen=True)
class Message:
    """One request on a connection. ``body`` determines its right answer."""

    method: str
    body: Body
    expects: Expects


@dataclass(frozen=True)
class Case:
    """What is sent over one connection.

    Attributes:
        pieces: byte strings, sent one after the other.
        half_closes: whether the client then closes its sending side.
        reads_slowly: whether it reads a few bytes at a time, from a small buffer.
    """

    change: str
    messages: tuple[Message, ...]
    pieces: tuple[bytes, ...]
    half_closes: bool = False
    reads_slowly: bool = False


HOSTS = (b"x", b"x", b"", b"[::1", b"a b", b"\xff", b"x:99999999", b"x/y?z#", b"user@x")
JSON = b"Content-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"


def _request(
    body: Body, *, method: str = "POST", target: bytes = b"", headers: bytes = JSON + CLOSE, host: bytes = b"x"
) -> bytes:
    head = b"%s %s HTTP/1.1\r\nHost: %s\r\n%s" % (method.encode(), target or body.path.encode(), host, headers)
    return head + b"Content-Length: %d\r\n\r\n" % len(body.content) + body.content


def plain(body: Body, expects: Expects) -> Case:
    """Return a connection with one ordinary request."""
    return Case(body.change, (Message("POST", body, expects),), (_request(body),))


# ----------------------------------------------------------------------------------------------------- odd, drawn

Make = Callable[[random.Random, Sequence[Body]], Case]


def odd_http(random_: random.Random, bodies: Sequence[Body]) -> Case:
    """Return a connection with an odd request, drawn at random.

    Args:
        bodies: valid bodies, each with a different salt.
    """
    return random_.choice(_MAKES)(random_, bodies)


def _method(random_: random.Random, bodies: Sequence[Body]) -> Case:
    method = random_.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"))
    return _one(
        f"method {method}",
        bodies[0],
        Expects.REFUSED,
        _request(bodies[0], method=method, host=random_.choice(HOSTS)),
        method,
    )


def _target(random_: random.Random, bodies: Sequence[Body]) -> Case:
    path = bodies[0].path.encode()
    same = (
        path + b"?url=http://127.0.0.1:1",
        path + b"?",
        b"http://elsewhere.example" + path,
        path.replace(b"c", b"%63"),
    )
    none = (
        *(path + b"/", b"/" + path, path.upper(), path + b"%00", path + b"%2f", path + b"/..", b"/v1/../metrics"),
        *(b"/v1/embeddings", b"/v1/responses", b"/v1", b"/" + b"a" * 9000, b"/%ff%fe", b"/v1/completions;a=b", b"//"),
        *(b"/tokenize", b"/collective_rpc", b"/instances/nobody/drain", b"/instances/%00"),
    )
    if random_.random() < 0.3:
        return _one(
            "target same",
            bodies[0],
            Expects.RIGHT,
            _request(bodies[0], target=random_.choice(same), host=random_.choice(HOSTS)),
        )
    return _one(
        "target none",
        bodies[0],
        Expects.REFUSED,
        _request(bodies[0], target=random_.choice(none), host=random_.choice(HOSTS)),
    )


def _target_no_http(random_: random.Random, bodies: Sequence[Body]) -> Case:
    target = random_.choice((b"*", b"x", b"/v1/completions\x00", b"/v1/compl\xe9tions", b"/ HTTP/1.1 /", b"\\v1"))
    return _one("target no HTTP", bodies[0], Expects.NO_HTTP, _request(bodies[0], target=target))


def _elsewhere(random_: random.Random, bodies: Sequence[Body]) -> Case:
    """Request another endpoint of the router, but none that changes its list of servers."""
    method, target, expects = random_.choice(
        (
            *(("GET", b"/health", Expects.SERVED), ("HEAD", b"/health", Expects.SERVED)),
            *(("GET", b"/v1/models", Expects.SERVED), ("GET", b"/metrics", Expects.SERVED)),
            *(("GET", b"/", Expects.SERVED), ("POST", b"/", Expects.REFUSED), ("POST", b"/health", Expects.REFUSED)),
            *(("POST", b"/instances", Expects.REFUSED), ("GET", b"/nothing", Expects.REFUSED)),
            *(("DELETE", b"/instances/nobody?now=true", Expects.REFUSED), ("PUT", b"/instances", Expects.REFUSED)),
            ("POST", b"/instances/nobody/drain", Expects.REFUSED),
        )
    )
    raw = _request(bodies[0], method=method, target=target, host=random_.choice(HOSTS))
    return _one("elsewhere", bodies[0], expects, raw, method)


_RIGHT_HEADERS = (
    *(
        b"X-Request-Id: \xff\xfe",
        b"X-Request-Id: a\r\nX-Request-Id: b",
        b"Accept: text/html",
    ),
    *(b"Authorization: Bearer " + b"k" * 8000, b"Authorization: \xff", b"Authorization:", b"Authorization: a\tb"),
    *(b"traceparent: nothing", b"tracestate: \x80=\t", b"X-data-parallel-rank: 999", b"X-Upstream: http://127.0.0.1:1"),
    *(b"Expect: 100-continue", b"Expect: wonders", b"Cookie: " + b"c" * 8000, b"TE: trailers", b"Range: bytes=0-1"),
    *(b"Upgrade: h2c", b"Accept-Encoding: gzip", b"Content-Encoding: identity", b"Keep-Alive: timeout=1"),
    *(b"X-Forwarded-For: 10.0.0.1", b"Upgrade: websocket"),
)
_REFUSED_HEADERS = (
    *(b"\r\n".join(b"X-%d: y" % number for number in range(300)), b"X-Request-Id: " + b"i" * 9000),
    *(b"Content-Encoding: gzip", b"Host: y", b"X: " + b"y" * 40_000, b"Content-Encoding: br, gzip"),
)
_NO_HTTP_HEADERS = (
    *(b"X: a\x00b", b"no colon", b": no name", b"X y: z", b"X: " + b"y" * 120_000, b"Content-Length: 3"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, identity", b"Content-Length: x", b"X: a\nb: c\rd"),
)
_KINDS = (
    b"",
    b"text/plain",
    b"application/json; charset=utf-16",
    b"APPLICATION/JSON",
    b"multipart/form-data; boundary=x",
)


def _header(random_: random.Random, bodies: Sequence[Body]) -> Case:
    header, expects = random_.choice(
        [
            *((one, Expects.RIGHT) for one in _RIGHT_HEADERS),
            *((one, Expects.REFUSED) for one in _REFUSED_HEADERS),
            *((one, Expects.NO_HTTP) for one in _NO_HTTP_HEADERS),
        ]
    )
    name = header.partition(b":")[0].decode("latin-1")[:20]
    raw = _request(bodies[0], headers=JSON + CLOSE + header + b"\r\n")
    return _one(f"header {name} ({expects.value})", bodies[0], expects, raw)


def _kind(random_: random.Random, bodies: Sequence[Body]) -> Case:
    kind = random_.choice(_KINDS)
    raw = _request(bodies[0], headers=CLOSE + (b"Content-Type: %s\r\n" % kind if kind else b""))
    return _one("content type", bodies[0], Expects.RIGHT_OR_REFUSED, raw)


def _version(random_: random.Random, bodies: Sequence[Body]) -> Case:
    version, expects = random_.choice(((b"1.0", Expects.RIGHT), (b"3.7", Expects.NO_HTTP), (b"x", Expects.NO_HTTP)))
    raw = _request(bodies[0]).replace(b"HTTP/1.1", b"HTTP/" + version, 1)
    return _one(f"version {version.decode()}", bodies[0], expects, raw)


def _chunked(random_: random.Random, bodies: Sequence[Body]) -> Case:
    """Send the body in chunks of any length, with valid chunk extensions and trailers."""
    content, raw = bodies[0].content, b""
    while content:
        size = random_.choice((1, 7, 100, len(content)))
        piece, content = content[:size], content[size:]
        extension = random_.choice((b"", b"", b";a=b", b';a="b c"'))
        raw += b"%x%s\r\n%s\r\n" % (len(piece), extension, piece)
    trailer = random_.choice((b"", b"X: y\r\n"))
    return _one("chunked", bodies[0], Expects.RIGHT, _chunk_head(bodies[0]) + raw + b"0\r\n%s\r\n" % trailer)


def _chunked_no_http(random_: random.Random, bodies: Sequence[Body]) -> Case:
    content = bodies[0].content
    raw = random_.choice((b"x\r\n%s\r\n0\r\n\r\n", b"-1\r\n%s\r\n", b"ffffffffffffffffff\r\n%s", b"1\r\n%s", b"\r\n%s"))
    return _one("chunked no HTTP", bodies[0], Expects.NO_HTTP, _chunk_head(bodies[0]) + raw % content)


def _chunked_long(_: random.Random, bodies: Sequence[Body]) -> Case:
    raw = _chunk_head(bodies[0]) + (b"8000\r\n%s\r\n" % (b" " * 0x8000)) * (BODY_BYTES // 0x8000 + 2) + b"0\r\n\r\n"
    return _one("chunked, too long", bodies[0], Expects.REFUSED, raw)


def _length(random_: random.Random, bodies: Sequence[Body]) -> Case:
    size = len(bodies[0].content)
    said, expects = random_.choice(
        (
            *((b"%d" % (size + 9), Expects.REFUSED), (b"%d" % (BODY_BYTES + 1), Expects.REFUSED)),
            *((b"9" * 18, Expects.REFUSED), (b"%010d" % size, Expects.RIGHT)),
            *(
                (b"9" * 30, Expects.NO_HTTP),
                (b"9" * 5000, Expects.NO_HTTP),
                (b"-1", Expects.NO_HTTP),
                (b"0", Expects.NO_HTTP),
            ),
            *((b"+%d" % size, Expects.NO_HTTP), (b"0x20", Expects.NO_HTTP), (b"", Expects.NO_HTTP)),
            *((b"%d" % (size - 2), Expects.NO_HTTP), (b"%d, %d" % (size, size), Expects.NO_HTTP)),
        )
    )
    raw = _request(bodies[0]).replace(b"Content-Length: %d" % size, b"Content-Length: " + said, 1)
    return _one(f"length ({expects.value})", bodies[0], expects, raw)


def _too_long(_: random.Random, bodies: Sequence[Body]) -> Case:
    content = bodies[0].content[:-1] + b" " * BODY_BYTES + b"}"
    return _one("too long", bodies[0], Expects.REFUSED, _request(Body("", bodies[0].path, content)))


def _leaves(random_: random.Random, bodies: Sequence[Body]) -> Case:
    """The client closes its sending side in the middle of the headers or the body."""
    raw = _request(bodies[0])
    return _one("half closed", bodies[0], Expects.NO_HTTP, raw[: random_.randrange(1, len(raw))], half_closes=True)


def _pieces(random_: random.Random, bodies: Sequence[Body]) -> Case:
    """Send the request in pieces that end at random positions."""
    raw = _request(bodies[0])
    ends = sorted(random_.randrange(len(raw)) for _ in range(random_.choice((1, 3, 30))))
    pieces = tuple(raw[one:other] for one, other in zip([0, *ends], [*ends, len(raw)], strict=True))
    return Case("in pieces", (Message("POST", bodies[0], Expects.RIGHT),), pieces)


def _slow(random_: random.Random, bodies: Sequence[Body]) -> Case:
    """Read the answers a few bytes at a time, those of pipelined requests, too."""
    if random_.random() < 0.5:
        return Case("read slowly", (Message("POST", bodies[0], Expects.RIGHT),), (_request(bodies[0]),), False, True)
    case = _several(random_, bodies)
    return Case(f"{case.change}, read slowly", case.messages, case.pieces, False, True)


def _several(random_: random.Random, bodies: Sequence[Body]) -> Case:
    """Send several requests over one connection, an odd one first: each later one must get its own answer."""
    first = bodies[0]
    change, method, expects, raw = random_.choice(
        (
            ("valid", "POST", Expects.RIGHT, _request(first, headers=JSON)),
            (
                "upgrade",
                "POST",
                Expects.RIGHT,
                _request(first, headers=JSON + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
            ),
            ("no JSON", "POST", Expects.REFUSED, _request(Body("", first.path, b"{"), headers=JSON)),
            ("no kind", "POST", Expects.REFUSED, _request(first, headers=b"")),
            ("other path", "POST", Expects.REFUSED, _request(first, target=b"/v1/embeddings", headers=JSON)),
            ("other method", "PUT", Expects.REFUSED, _request(first, method="PUT", headers=JSON)),
            ("head", "HEAD", Expects.SERVED, b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n"),
            ("expects", "POST", Expects.REFUSED, _request(first, headers=b"Expect: 100-continue\r\n")),
        )
    )
    messages = [Message(method, first, expects), *(Message("POST", one, Expects.RIGHT) for one in bodies[1:])]
    pieces = (raw, *(_request(one, headers=JSON) for one in bodies[1:-1]), _request(bodies[-1]))
    return Case(f"several, {change} first", tuple(messages), (b"".join(pieces),) if random_.random() < 0.5 else pieces)


def _chunk_head(body: Body) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % (body.path.encode(), JSON + CLOSE)


def _one(
    change: str, body: Body, expects: Expects, raw: bytes, method: str = "POST", *, half_closes: bool = False
) -> Case:
    return Case(change, (Message(method, body, expects),), (raw,), half_closes)


_MAKES: tuple[Make, ...] = (
    *(_method, _target, _target_no_http, _elsewhere, _header, _header, _header, _kind, _version, _chunked, _chunked),
    *(_chunked_no_http, _chunked_long, _length, _length, _too_long, _leaves, _pieces, _pieces, _several, _several),
    *(_slow, _slow),
)
