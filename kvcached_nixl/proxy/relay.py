# SPDX-License-Identifier: Apache-2.0
"""The leg whose response goes to the client: sent, checked at its beginning, then passed on. Once per leg."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Annotated

import anyio
import msgspec

from kvcached_nixl.proxy.account import Share
from kvcached_nixl.proxy.api import Api, api_of
from kvcached_nixl.proxy.asked import Asked
from kvcached_nixl.proxy.client import Response
from kvcached_nixl.proxy.events import GIVEN_UP, MOST_EVENT_BYTES, Events
from kvcached_nixl.proxy.failure import Answered, LegFailed, RouterFailure, hand_over_tags
from kvcached_nixl.proxy.instance import Instance, Leg
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.record import Record
from kvcached_nixl.proxy.upstream import Reply, Upstream

__all__ = ["Relay", "require_success", "with_cached_tokens"]

END_SECONDS = 5.0
"""How long the end of a stream is waited for after its last event, so that its connection can be used again."""
_CACHE_READ = re.compile(rb'"cache_read_input_tokens":\s*([0-9]{1,18})\b')
_COUNT = re.compile(rb"[0-9]{1,18}")
_SECONDS = re.compile(r"[0-9]{1,4}")
_CACHED_TOKENS = re.compile(rb'"(cached_tokens|cache_read_input_tokens)":(\s*)[0-9]+')


class Relay:
    """Passes one request's response on.

    Args:
        share: of the router's memory.
    """

    def __init__(self, upstream: Upstream, asked: Asked, out: Response, share: Share, options: Options) -> None:
        self._upstream = upstream
        self._asked = asked
        self._out = out
        self._share = share
        self._options = options

    async def run(
        self,
        server: Instance,
        leg: Leg,
        headers: dict[str, str],
        body: bytes,
        record: Record,
        cached_tokens: Callable[[], int | None],
    ) -> None:
        """Send the request to a server, and pass its response on to the client.

        Args:
            cached_tokens: how many tokens of the prompt prefill had cached, as far as it has said so by then. The
                ``usage`` of the response says them: all tokens look cached to a decode that they were handed over to.

        Raises:
            LegFailed: the server did not answer, or not completely. ``out.has_begun`` tells whether the response had
                begun.
            Answered: the server answered 4xx.
            ClientLeft: the client did not read in time.
        """
        options, asked = self._options, self._asked
        seconds = options.first_token_timeout_seconds if asked.streams else options.response_timeout_seconds
        leg.guard.limit(seconds, _late(server.name))
        url = server.url + asked.route.value
        async with self._upstream.ask("POST", url, server.name, headers, body) as reply:
            leg.heard()
            if not reply.is_plain:
                reason = "the server's response is compressed"
                raise LegFailed(RouterFailure.ANSWER, server.name, reason, is_retriable=False)
            if reply.status == 200 and reply.is_stream:
                await self._stream(server, leg, reply, record, cached_tokens)
                return
            said = await reply.body(options.max_response_bytes, self._share.take)
        require_success(reply, said, server.name, has_own_key=bool(options.upstream_key))
        _require_answer(api_of(asked.route), said, server.name)
        server.succeeded()
        record.first()
        leg.guard.unlimited()
        # Else a leg that was ended in this moment would still answer, and its successor once more.
        leg.guard.check()
        await self._out.whole(200, reply.content_type, with_cached_tokens(said, cached_tokens()))

    async def _stream(
        self, server: Instance, leg: Leg, reply: Reply, record: Record, cached_tokens: Callable[[], int | None]
    ) -> None:
        api, out, guard = api_of(self._asked.route), self._out, leg.guard
        events = Events(api, self._asked.choices)
        pause = LegFailed(
            RouterFailure.TIME, server.name, "the server stopped in the middle of its response", status=504
        )
        held, held_bytes = b"", 0
        pace = _Pace(self._options.inter_token_timeout_seconds)
        while piece := await _next_piece(reply, is_complete=events.is_complete):
            leg.heard()
            pace.came()
            try:
                whole = events.cut(piece)
            except ValueError as error:
                raise LegFailed(RouterFailure.ANSWER, server.name, f"the server sent {error}") from error
            if events.rest_bytes > held_bytes:
                self._share.take(events.rest_bytes - held_bytes)
                held_bytes = events.rest_bytes
            if out.has_begun:
                _require_reason(events, server.name)
            else:
                self._share.take(len(whole))
                whole = held = held + whole
                if len(held) > MOST_EVENT_BYTES:
                    reason = f"the server sent {len(held)} bytes without a token"
                    raise LegFailed(RouterFailure.ANSWER, server.name, reason, is_retriable=False)
                if not (events.count >= api.first or events.has_error or events.is_complete):
                    continue
                _require_begin(events, held, server.name)
                server.succeeded()
                record.first()
                guard.unlimited()
                guard.check()
                await out.begin(reply.content_type)
            if whole:
                guard.unlimited()
                await out.piece(with_cached_tokens(whole, cached_tokens()))
            guard.limit(pace.left_seconds(events.count), pause)
        if not events.is_complete:
            before = "" if out.has_begun else " and its first token"
            raise LegFailed(
                RouterFailure.BROKEN, server.name, f"the server's response ended before its last event{before}"
            )
        guard.unlimited()
        await out.end()
        if events.has_error:
            record.outcome = RouterFailure.SERVER.value
            record.reason = "the server ended its response with an error"


async def _next_piece(reply: Reply, *, is_complete: bool) -> bytes:
    """Returns the next piece of a stream; b"" at its end. One that is complete is not waited for for long: its server,
    or a proxy before it, may leave the connection open.
    """
    with anyio.move_on_after(END_SECONDS if is_complete else math.inf):
        return await reply.piece()
    return b""


class _Pace:
    """How long a stream may still wait for its next token.

    Comments, and an event that comes byte by byte, must not keep a stream without tokens alive. The time in which the
    client does not read does not count.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left_seconds = seconds
        self._count = 0
        self._waits_since_seconds = time.monotonic()

    def came(self) -> None:
        """A piece has come that was waited for."""
        self._left_seconds -= time.monotonic() - self._waits_since_seconds

    def left_seconds(self, count: int) -> float:
        """The next piece is waited for; so many events with tokens have come."""
        if count > self._count:
            self._count, self._left_seconds = count, self._seconds
        self._waits_since_seconds = time.monotonic()
        return max(0.0, self._left_seconds)


def with_cached_tokens(said: bytes, cached_tokens: int | None) -> bytes:
    """Returns an answer, or events of one, in whose usage so many tokens of the prompt were cached."""
    if cached_tokens is None or not _CACHED_TOKENS.search(said):
        return said
    lines = said.split(b"\n")
    return b"\n".join(_in_usage(line, cached_tokens) if _CACHED_TOKENS.search(line) else line for line in lines)


def _in_usage(line: bytes, cached_tokens: int, within: tuple[str, ...] = ("response", "message")) -> bytes:
    """Changes the usage only: the input of a tool that was called is JSON, too, and may have any names."""
    begin = b"data: " if line.startswith(b"data: ") else b""
    try:
        fields = _answer.decode(line.removeprefix(begin))
    except (msgspec.MsgspecError, RecursionError):
        return line
    for name in within:
        if name in fields and bytes(fields[name]).startswith(b"{"):
            fields[name] = msgspec.Raw(_in_usage(bytes(fields[name]), cached_tokens, ()))
    if bytes(fields.get("usage", b"")).startswith(b"{"):
        usage = _answer.decode(_CACHED_TOKENS.sub(rb'"\1":\g<2>%d' % cached_tokens, bytes(fields["usage"])))
        before = _CACHE_READ.search(fields["usage"])
        if before and _COUNT.fullmatch(fresh := bytes(usage.get("input_tokens", b""))):
            # Anthropic counts cached tokens apart from the others.
            usage["input_tokens"] = msgspec.Raw(b"%d" % max(0, int(fresh) + int(before[1]) - cached_tokens))
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    return begin + msgspec.json.encode(fields)


def _late(server: str) -> LegFailed:
    return LegFailed(RouterFailure.TIME, server, "the server did not answer in time", status=504)


def _require_begin(events: Events, held: bytes, server: str) -> None:
    """Check that the first events are those of a response, not of an error."""
    if events.has_error:
        # Only the tags of the error: its text may contain parts of the prompt.
        tags = hand_over_tags(held)
        reason = f"the KV hand-over failed: {tags}" if tags else "the server's response begins with an error"
        raise LegFailed(RouterFailure.HANDOVER, server, reason)
    _require_reason(events, server)


def _require_reason(events: Events, server: str) -> None:
    """Check that a stream with ``[DONE]`` has a finish_reason.

    vLLM skips an output without tokens in a stream, even if it is the last one and reports a failure.
    """
    if events.is_complete and not (events.is_whole or events.has_error):
        raise LegFailed(
            RouterFailure.HANDOVER, server, "the server ended the stream without the reason of a complete response"
        )


_answer = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(Annotated[list[dict[str, msgspec.Raw]], msgspec.Meta(min_length=1)])
_reason = msgspec.json.Decoder(str)


def _require_answer(api: Api, said: bytes, server: str) -> None:
    """Check that a 200 response says why it ended. The generated text is not checked."""
    try:
        answer = _answer.decode(said)
        items = _list.decode(answer[api.reasons_in]) if api.reasons_in else [answer]
        reasons = [_reason.decode(one[api.reason_field]) for one in items]
    except (KeyError, msgspec.MsgspecError, RecursionError) as error:
        raise LegFailed(
            RouterFailure.ANSWER, server, "the server answered 200 without JSON that says why the answer ended"
        ) from error
    if any(one in GIVEN_UP for one in reasons):
        raise LegFailed(RouterFailure.SERVER, server, "the server aborted the request")


def require_success(reply: Reply, said: bytes, server: str, *, has_own_key: bool) -> None:
    """Check the status of a server's response.

    Raises:
        Answered: 4xx, which is passed on to the client.
        LegFailed: any other status than 200, and 4xx that another attempt or the operator can resolve.
    """
    status = reply.status
    if status == 200:
        return
    if status in (401, 403) and has_own_key:
        raise LegFailed(
            RouterFailure.UPSTREAM_KEY,
            server,
            "the server refused the router's key (KVCACHED_NIXL_UPSTREAM_KEY)",
            is_retriable=False,
        )
    if status in (408, 425, 429, 503):
        retry = int(reply.retry_after) if _SECONDS.fullmatch(reply.retry_after) else None
        reason = f"the server answered {status}"
        raise LegFailed(RouterFailure.UPSTREAM_BUSY, server, reason, status=503, retry_after_seconds=retry)
    if 400 <= status < 500:
        raise Answered(status, reply.content_type, said)
    if status >= 500:
        tags = hand_over_tags(said)
        cause = RouterFailure.HANDOVER if tags else RouterFailure.SERVER
        raise LegFailed(cause, server, f"the server answered {status}{tags and f', the KV hand-over failed: {tags}'}")
    raise LegFailed(RouterFailure.ANSWER, server, f"the server answered {status}", is_retriable=False)
