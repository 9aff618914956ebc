# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: its head, its body, and the response to it. Once per request.

Writing to a client that has disconnected raises `ClientLeft`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import msgspec
from aiohttp import web

from kvcached_nixl.proxy.account import Share
from kvcached_nixl.proxy.api import ApiRoute
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import ClientLeft, LegFailed, Refusal, RouterFailure, error_body

__all__ = [
    "STILL_WAITING",
    "Outgoing",
    "Response",
    "draw_id",
    "error_event",
    "header",
    "passed_on",
    "read_body",
    "refuse_odd_head",
    "trace_context",
]

SERVER = "kvcached-nixl"
COPIES = 4
"""Of a body: the client's own, those for prefill and decode, and the prompt while it is read."""
STILL_WAITING = b"\n\n"
"""Keeps a stream alive that has no event yet; every parser of events skips empty lines. Not a comment: behind one that
arrives by itself, `vllm bench serve` skips the first event, and so takes the second token's time for the first's."""
_USABLE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def header(request: web.BaseRequest, name: str) -> str | None:
    """Returns the value of a header that occurs exactly once, and is printable ASCII; otherwise None."""
    found = request.headers.getall(name, ())
    return found[0] if len(found) == 1 and found[0].isascii() and found[0].isprintable() else None


def draw_id(request: web.BaseRequest) -> tuple[str, str]:
    """Returns the router's id for this request, and the response's ``X-Request-Id``: the client's, or the router's.

    The router's id is unique. It begins with the client's id, if that is usable: a search of a server's log for the
    client's id finds it, too.
    """
    theirs, drawn = header(request, "x-request-id"), secrets.token_hex(8)
    if theirs is None or not _USABLE_ID.fullmatch(theirs):
        return f"router-{drawn}", f"router-{drawn}"
    return f"{theirs}-{drawn}", theirs


def refuse_odd_head(request: web.BaseRequest, max_body_bytes: int) -> None:
    """Check the head, before the body is read.

    Raises:
        Refusal: the head declares a body that is too large, compressed, or not JSON.
    """
    if any(value.strip().lower() != "identity" for value in request.headers.getall("content-encoding", ())):
        raise Refusal(415, RouterFailure.BODY, "The body is compressed; expected an uncompressed body.")
    if (request.content_length or 0) > max_body_bytes:
        raise _too_large(max_body_bytes)
    if request.content_type != "application/json" or "content-type" not in request.headers:
        raise Refusal(415, RouterFailure.BODY, "The Content-Type is not JSON; expected Content-Type: application/json.")


async def read_body(request: web.BaseRequest, limit_bytes: int, seconds: float, share: Share) -> bytes:
    """Returns the whole body. The time limit is for all of it, not for each piece.

    Raises:
        Refusal: the body is too large, or takes too long; or no memory is left for it.
        ClientLeft: the client disconnected before the end of the body.
    """
    parts: list[bytes] = []
    size = 0
    late = Refusal(408, RouterFailure.TIME, f"The body did not arrive within {seconds:g} s.")
    with Guard() as guard:
        guard.limit(seconds, late)
        if request.headers.get("expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            while part := await request.content.readany():
                size += len(part)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                share.take(COPIES * len(part))
                parts.append(part)
        except (web.RequestPayloadError, ConnectionError) as error:
            raise ClientLeft from error
        except RuntimeError as error:
            # aiohttp's reader raises this for a connection that was lost before it waits.
            if request.transport is not None:
                raise
            raise ClientLeft from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def passed_on(request: web.BaseRequest, upstream_key: str) -> dict[str, str]:
    """Returns the headers for each leg. All others are dropped: vLLM reads ranks, sessions and priorities from some."""
    headers = {"Content-Type": "application/json"}
    if upstream_key:
        headers["Authorization"] = f"Bearer {upstream_key}"
    elif (value := header(request, "Authorization")) is not None:
        headers["Authorization"] = value
    return headers | trace_context(request)


def trace_context(request: web.BaseRequest) -> dict[str, str]:
    """Returns the client's ``traceparent`` and ``tracestate``; a state may come in several headers."""
    states = [one for one in request.headers.getall("tracestate", ()) if one.isascii() and one.isprintable()]
    found = {"traceparent": header(request, "traceparent"), "tracestate": ",".join(states)}
    return {name: value for name, value in found.items() if value}


class Response(Protocol):
    """What a journey sends its response to: the client, or what merges the responses of several sequences."""

    @property
    def has_begun(self) -> bool:
        """Whether a part of the response was sent, so that no other server can be tried any more."""
        ...

    @property
    def is_client_there(self) -> bool: ...
    async def whole(self, status: int, content_type: str, body: bytes) -> None: ...
    async def begin(self, content_type: str) -> None: ...
    async def piece(self, events: bytes) -> None: ...
    async def end(self) -> None: ...


class Outgoing:
    """The response: a whole one, a stream of whole events, or an error.

    A stream may be kept alive by empty lines before it begins (`kept_alive`). Its status is 200 then, whatever follows,
    and an error becomes an event.

    Args:
        route: of a request that is routed; else None.
        shown_id: value of ``X-Request-Id``: the client's own, or the router's.
        client_timeout_seconds: how long the client may take to read a piece; then it counts as having left.

    Attributes:
        sent_bytes: bytes of the body sent so far.
        has_ended: the client was sent everything.
    """

    def __init__(
        self, request: web.BaseRequest, route: ApiRoute | None, shown_id: str, client_timeout_seconds: float
    ) -> None:
        self._request = request
        self._route = route
        self._transport = request.transport
        self._seconds = client_timeout_seconds
        self._headers = {"Server": SERVER, "X-Request-Id": shown_id}
        self._response: web.StreamResponse | None = None
        self._sending = asyncio.Lock()
        self.has_begun = False
        self.has_ended = False
        self.sent_bytes = 0

    @property
    def response(self) -> web.StreamResponse:
        """What was sent, for aiohttp."""
        assert self._response is not None, "no response was sent"
        return self._response

    @property
    def status(self) -> int:
        """HTTP status of the response; 0 if nothing was sent."""
        return 0 if self._response is None else self._response.status

    @property
    def is_client_there(self) -> bool:
        """Whether the client's connection is open, as far as is known."""
        return self._request.transport is not None and not self._request.transport.is_closing()

    async def whole(
        self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a complete response.

        Raises:
            LegFailed: it was to be streamed, and empty lines were sent.
        """
        async with self._sending:
            self.has_begun = True
            if self._response is not None:
                reason = "the server answered in one piece what was to be streamed"
                raise LegFailed(RouterFailure.ANSWER, "decode", reason, is_retriable=False)
            named = {**self._headers, "Content-Type": content_type or "application/octet-stream", **(headers or {})}
            self.sent_bytes = len(body)
            await self._prepare(web.Response(status=status, body=body, headers=named))
        await self.end()

    async def fail(self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send an error: as a response, or, if a stream was sent already, as an event of it.

        The event is in the endpoint's format, without ``[DONE]``, which would mean success.

        Raises:
            ClientLeft: a whole response was sent already, and nothing can follow it.
        """
        async with self._sending:
            self.has_begun = True
        if self._response is None:
            await self.whole(status, content_type, body, headers)
            return
        if isinstance(self._response, web.Response):
            raise ClientLeft
        await self.piece(error_event(self._route, status, body))
        await self.end()

    async def begin(self, content_type: str) -> None:
        """Begin a stream of events."""
        async with self._sending:
            self.has_begun = True
            if self._response is None:
                await self._prepare_stream(content_type)

    @contextmanager
    def kept_alive(self, interval_seconds: float) -> Iterator[None]:
        """Until the stream begins, send empty lines, so that nobody takes a queue for a dead connection."""
        sending: list[asyncio.Task[None]] = []
        # No task before it has something to do: most streams begin sooner.
        begin = asyncio.get_running_loop().call_later(
            interval_seconds, lambda: sending.append(asyncio.ensure_future(self._keep_alive(interval_seconds)))
        )
        try:
            yield
        finally:
            begin.cancel()
            for one in sending:
                one.cancel()

    async def _keep_alive(self, interval_seconds: float) -> None:
        while True:
            async with self._sending:
                if self.has_begun or not self.is_client_there:
                    return
                try:
                    if self._response is None:
                        await self._prepare_stream("text/event-stream; charset=utf-8")
                    await self.piece(STILL_WAITING)
                except ClientLeft:
                    self.abort()
                    return
            await asyncio.sleep(interval_seconds)

    async def piece(self, events: bytes) -> None:
        """Send whole events. Waits while the client does not read."""
        self.sent_bytes += len(events)
        await self._told(self.response.write(events))

    async def end(self) -> None:
        """End the stream."""
        await self._told(self.response.write_eof())
        self.has_ended = True

    async def _prepare_stream(self, content_type: str) -> None:
        headers = {**self._headers, "Content-Type": content_type, "Cache-Control": "no-cache"}
        await self._prepare(web.StreamResponse(headers=headers))

    async def _prepare(self, response: web.StreamResponse) -> None:
        self._response = response
        # Not reusable: a connection whose request body was not read, and one that offered another protocol, as Java's
        # client does. aiohttp 3.14 drops what has come in the same read behind such an offer.
        if not self._request.content.is_eof() or "upgrade" in self._request.headers:
            response.force_close()
        await self._told(response.prepare(self._request))

    def abort(self) -> None:
        """Close the connection at once, as a client sees it that has not read in time."""
        if self._transport is not None:
            self._transport.abort()

    async def _told(self, telling: Awaitable[object]) -> None:
        with Guard() as guard:
            guard.limit(self._seconds, ClientLeft())
            try:
                await telling
            except ConnectionError as error:
                raise ClientLeft from error


class _Failed(msgspec.Struct):
    error: dict[str, msgspec.Raw]


_failed = msgspec.json.Decoder(_Failed)


def error_event(route: ApiRoute | None, status: int, body: bytes) -> bytes:
    """Returns an error as the last event of a stream.

    Anthropic's client ignores an event without a name, and OpenAI's one without an ``error``: both would take what came
    before for the whole answer.
    """
    try:
        error = _failed.decode(body).error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        error = _failed.decode(error_body(status, "The request failed: a server refused it.")).error
    if route is ApiRoute.MESSAGES:
        begin, event = b"event: error\n", msgspec.json.encode({"type": "error", "error": error})
    else:
        begin, event = b"", msgspec.json.encode({"error": error})
    # A line end would end the event. In JSON it stands between values only, where it may be a space.
    return begin + b"data: " + event.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n\n"


def _too_large(limit_bytes: int) -> Refusal:
    return Refusal(
        413,
        RouterFailure.SIZE,
        f"The body has more than {limit_bytes} bytes. Send a smaller one, or raise --max-body-bytes.",
    )
