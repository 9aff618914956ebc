# SPDX-License-Identifier: Apache-2.0
"""The response to the client: a whole response, a stream of whole events, or an error. Once per request.

Sending to a client that has disconnected raises `ClientLeft`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvcached_nixl.proxy.failure import ClientLeft, Refusal, error_body

__all__ = ["GIVEN_UP", "Events", "Outgoing", "Send"]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
END = b"data: [DONE]\n\n"
GIVEN_UP = ("abort", "error")
"""vLLM's finish_reasons of a response that is incomplete."""
# Quotes are escaped inside a JSON string, so generated text cannot match any of these.
_ERROR = b'data: {"error"'
_CHOICE = re.compile(rb'"choices":\s*\[\s*\{')
_REASON = re.compile(rb'"finish_reason":\s*"')
_GIVEN_UP = re.compile(rb'"finish_reason":\s*"(?:%s)"' % "|".join(GIVEN_UP).encode())
MOST_EVENT_BYTES = 16 << 20


class Outgoing:
    """See the module.

    Args:
        request_id: value of ``X-Request-Id``: the client's own, or the router's.
        is_closing: returns whether the connection has ended, or is about to.

    Attributes:
        status: HTTP status of the response; 0 before it has begun.
        has_ended: the whole response was written to the connection.
        sent_bytes: bytes of the body sent so far.
    """

    def __init__(self, send: Send, request_id: bytes, is_closing: Callable[[], bool] = bool) -> None:
        self._send = send
        self._request_id = request_id
        self._is_closing = is_closing
        self._is_open = False
        self._is_said = False
        self.status = 0
        self.has_ended = False
        self.sent_bytes = 0

    @property
    def has_begun(self) -> bool:
        """Whether the response has begun. If so, the request cannot be tried again."""
        return self.status != 0

    async def whole(self, status: int, content_type: bytes, body: bytes, *more: tuple[bytes, bytes]) -> None:
        """Send a complete response."""
        await self._begin(status, content_type, (b"content-length", str(len(body)).encode()), *more)
        self.sent_bytes = len(body)
        self.has_ended = True
        await self._say({"type": "http.response.body", "body": body})

    async def refuse(self, refusal: Refusal, *more: tuple[bytes, bytes]) -> None:
        """Send an error response; only before the response has begun."""
        if refusal.retry_after_seconds is not None:
            more = (*more, (b"retry-after", str(refusal.retry_after_seconds).encode()))
        body = error_body(refusal.status, refusal.message, refusal.param)
        await self.whole(refusal.status, b"application/json", body, *more)

    async def begin(self, content_type: bytes) -> None:
        """Begin a stream of events."""
        self._is_open = True
        await self._begin(200, content_type, (b"cache-control", b"no-cache"))

    async def piece(self, events: bytes) -> None:
        """Send whole events. Waits while the client does not read."""
        self.sent_bytes += len(events)
        await self._say({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """End the stream."""
        self._is_open = False
        self.has_ended = True
        await self._say({"type": "http.response.body", "body": b""})

    async def break_off(self, status: int, message: str) -> None:
        """End a stream that failed: an error event in vLLM's format, without ``[DONE]``, which would mean success."""
        if self._is_open:
            await self.piece(b"data: " + error_body(status, message) + b"\n\n")
            await self.end()

    async def _begin(self, status: int, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.status = status
        await self._say(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type or b"application/octet-stream"),
                    (b"x-request-id", self._request_id),
                    *headers,
                ],
            }
        )

    async def _say(self, message: MutableMapping[str, Any]) -> None:
        try:
            await self._send(message)
        except RuntimeError as error:
            # Unlike asyncio, uvloop raises RuntimeError for a lost connection before uvicorn is told that it is lost.
            if self._is_said or not self._is_closing():
                raise
            raise ClientLeft from error
        self._is_said = message["type"] == "http.response.body" and not message.get("more_body")


class Events:
    """Splits a stream at the ends of events, so that an error event is never appended to half an event.

    Attributes:
        is_complete: the last event was ``[DONE]``.
        has_ended: no more data will arrive; set by the reader.
        has_error: an event was an error of the server.
        has_reason: an event had a finish_reason.
        is_given_up: a finish_reason was one of `GIVEN_UP`.
        count: number of events so far with a choice.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.is_complete = False
        self.has_ended = False
        self.has_error = False
        self.has_reason = False
        self.is_given_up = False
        self.count = 0

    @property
    def is_whole(self) -> bool:
        """Whether the response has a finish_reason, and none of `GIVEN_UP`."""
        return self.has_reason and not self.is_given_up

    def cut(self, piece: bytes) -> bytes:
        """Returns the events that are complete now; the rest is kept for the next call.

        Raises:
            ValueError: an event is longer than `MOST_EVENT_BYTES`.
        """
        if self._rest:
            piece = self._rest + piece
            self._rest = b""
        if not piece.endswith(b"\n\n"):
            cut = piece.rfind(b"\n\n") + 2 if b"\n\n" in piece else 0
            piece, self._rest = piece[:cut], piece[cut:]
            if len(self._rest) > MOST_EVENT_BYTES:
                raise ValueError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        if piece:
            self.count += len(_CHOICE.findall(piece))
            self.is_complete = piece.endswith(END)
            self.has_error = self.has_error or _ERROR in piece
            if _REASON.search(piece) is not None:
                self.has_reason = True
                self.is_given_up = self.is_given_up or _GIVEN_UP.search(piece) is not None
        return piece
