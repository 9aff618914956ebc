# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: limits on its head and body, the headers passed on, and its disconnection."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope

from kvcached_nixl.proxy.auth import header
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import ClientLeft, Refusal, RouterFailure
from kvcached_nixl.proxy.outgoing import Outgoing

__all__ = ["Receive", "BodyBudget", "draw_id", "passed_on", "read_body", "refuse_odd_head", "until_left"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MOST_HEAD_BYTES = 32 << 10
_USABLE_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_TRACES = (b"traceparent", b"tracestate")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
"""Header values without line ends."""


def draw_id(scope: Scope) -> tuple[str, bytes]:
    """Returns the router's id for this request, and the response's ``X-Request-Id``: the client's, or the router's.

    The router's id is unique. It begins with the client's id, if that is usable: a search of a server's log for the
    client's id finds it, too.
    """
    theirs = header(scope, b"x-request-id")
    drawn = secrets.token_hex(8)
    if theirs is None or not _USABLE_ID.fullmatch(theirs):
        return f"router-{drawn}", f"router-{drawn}".encode()
    return f"{theirs.decode('ascii')}-{drawn}", theirs


def refuse_odd_head(scope: Scope, max_body_bytes: int) -> None:
    """Check the head, before the body is read.

    Raises:
        Refusal: the head is too large, or declares a body that is too large, compressed, or not JSON.
    """
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEAD_BYTES:
        raise Refusal(
            431, RouterFailure.SIZE, f"The headers have more than {MOST_HEAD_BYTES} bytes, which is the limit."
        )
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() != b"identity":
            raise Refusal(415, RouterFailure.BODY, "The body is compressed; expected an uncompressed body.")
        if name == b"content-length" and (not value.isdigit() or int(value) > max_body_bytes):
            raise _too_large(max_body_bytes)
    kind = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Refusal(415, RouterFailure.BODY, "The Content-Type is not JSON; expected Content-Type: application/json.")


class BodyBudget:
    """Limits the memory for the bodies of all requests in flight together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.taken_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that reserves bytes for one request; leaving the block releases them.

        Raises:
            Refusal: by that function, if the limit would be exceeded. The client may try again.
        """
        own = 0

        def take(size: int) -> None:
            nonlocal own
            if self.taken_bytes + size > self._limit_bytes:
                raise Refusal(
                    429, RouterFailure.BUSY, "No memory is left for the body now. Try again.", retry_after_seconds=1
                )
            own += size
            self.taken_bytes += size

        try:
            yield take
        finally:
            self.taken_bytes -= own


async def read_body(receive: Receive, limit_bytes: int, seconds: float, take: Callable[[int], None]) -> bytes:
    """Returns the whole body. The time limit is for all of it, not for each piece.

    Args:
        take: reserves memory for each piece, and may refuse it (`BodyBudget.share`).

    Raises:
        Refusal: the body is too large, or takes too long.
        ClientLeft: the client disconnected before the end of the body.
    """
    parts: list[bytes] = []
    size = 0
    late = Refusal(408, RouterFailure.TIME, f"The body did not arrive within {seconds:g} s.")
    with Guard() as guard:
        guard.limit(seconds, late)
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


async def until_left(receive: Receive, guard: Guard, out: Outgoing) -> None:
    """End ``guard`` when the client closes its connection, or its sending half, before the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not out.has_ended:
        guard.end(ClientLeft())


def passed_on(scope: Scope, upstream_key: str) -> list[tuple[bytes, bytes]]:
    """Returns the headers for each leg. All others are dropped: vLLM reads ranks, sessions and priorities from some."""
    headers = [(b"Content-Type", b"application/json")]
    if upstream_key:
        headers.append((b"Authorization", b"Bearer " + upstream_key.encode()))
    elif (key := header(scope, b"authorization")) is not None and _VALUE.fullmatch(key):
        headers.append((b"Authorization", key))
    for name in _TRACES:
        if (value := header(scope, name)) is not None and _VALUE.fullmatch(value):
            headers.append((name, value))
    return headers


def _too_large(limit_bytes: int) -> Refusal:
    return Refusal(
        413,
        RouterFailure.SIZE,
        f"The body has more than {limit_bytes} bytes. Send a smaller one, or raise --max-body-bytes.",
    )
