# SPDX-License-Identifier: Apache-2.0
"""The leg whose answer is the client's: asked, looked at until it is known to be one, passed on. Once per leg."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

import msgspec

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.connections import Reply
from kvcached_nixl.proxy.failure import Answered, ClientLeft, LegFailed, RouterFailure, hand_over_tags
from kvcached_nixl.proxy.instance import Instance
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.outgoing import GIVEN_UP, Events, Outgoing
from kvcached_nixl.proxy.record import Record
from kvcached_nixl.proxy.request_body import Asked, Route

__all__ = ["relay", "require_success"]

FIRST_EVENTS = 2
"""Of a chat: vLLM says the role with the first token, and only behind it that there is none."""


async def relay(
    server: Instance,
    asked: Asked,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    out: Outgoing,
    guard: Guard,
    options: Options,
    record: Record,
) -> None:
    """Ask, and pass the answer on.

    Raises:
        LegFailed: the server did not answer, or not to the end. ``out.has_begun`` says whether the client knows.
        Answered: it says that the request is wrong.
        ClientLeft: the client does not read.
    """
    streams = bytes(asked.fields["stream"]) == b"true" if "stream" in asked.fields else False
    seconds = options.first_token_timeout_seconds if streams else options.response_timeout_seconds
    late = LegFailed(RouterFailure.TIME, server.name, "the server has not answered in time", status=504)
    guard.limit(seconds, late)
    reply = await server.connections.ask("POST", asked.route.value, headers, body)
    try:
        if not reply.is_plain:
            raise LegFailed(RouterFailure.ANSWER, server.name, "the server's answer is compressed", is_retriable=False)
        if reply.status == 200 and reply.is_stream:
            async with aclosing(reply.pieces()) as pieces:
                await _stream(server, asked.route, reply, pieces, out, guard, options, record)
            return
        said = await reply.body(options.max_response_bytes)
    finally:
        reply.close()
    require_success(reply, said, server.name, has_own_key=bool(options.upstream_key))
    _require_answer(said, server.name)
    record.first()
    guard.limit(options.client_timeout_seconds, ClientLeft())
    await out.whole(200, reply.content_type, said)


async def _stream(
    server: Instance,
    route: Route,
    reply: Reply,
    pieces: AsyncIterator[bytes],
    out: Outgoing,
    guard: Guard,
    options: Options,
    record: Record,
) -> None:
    events = Events()
    pause = LegFailed(RouterFailure.TIME, server.name, "the server has stopped in the middle of its answer", status=504)
    slow = ClientLeft()
    try:
        held = await _first(events, pieces, FIRST_EVENTS if route is Route.CHAT else 1)
        if events.has_ended and not events.is_complete:
            raise LegFailed(RouterFailure.BROKEN, server.name, "the server's answer ended before it began")
        if events.has_error:
            # No more of its text: it may be of the prompt.
            tags = hand_over_tags(held)
            reason = f"the KV hand-over failed: {tags}" if tags else "the server's answer begins with an error"
            raise LegFailed(RouterFailure.HANDOVER, server.name, reason)
        _require_reason(events, server.name)
        guard.limit(options.client_timeout_seconds, slow)
        record.first()
        await out.begin(reply.content_type)
        await out.piece(held)
        guard.limit(options.inter_token_timeout_seconds, pause)
        async for piece in pieces:
            whole = events.cut(piece)
            _require_reason(events, server.name)
            if whole:
                guard.limit(options.client_timeout_seconds, slow)
                await out.piece(whole)
                guard.limit(options.inter_token_timeout_seconds, pause)
    except ValueError as error:
        raise LegFailed(RouterFailure.ANSWER, server.name, f"the server sends {error}") from error
    if not events.is_complete:
        raise LegFailed(RouterFailure.BROKEN, server.name, "the server's answer ended before its end")
    guard.limit(options.client_timeout_seconds, slow)
    await out.end()
    if events.has_error:
        record.outcome = RouterFailure.SERVER.value
        record.reason = "the server ended its answer with an error"


async def _first(events: Events, pieces: AsyncIterator[bytes], count: int) -> bytes:
    """The first events, held back until they say whether this is an answer."""
    held = b""
    async for piece in pieces:
        held += events.cut(piece)
        if events.count >= count or events.has_error or events.is_complete:
            return held
    events.has_ended = True
    return held


def _require_reason(events: Events, server: str) -> None:
    """vLLM passes over a streamed output without tokens, also where it is the last one and says what has failed."""
    if events.is_complete and not (events.is_whole or events.has_error):
        raise LegFailed(
            RouterFailure.HANDOVER, server, "the server says [DONE] of an answer that has not come to its end"
        )


class _Choice(msgspec.Struct):
    finish_reason: str


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


_answer = msgspec.json.Decoder(_Answer)


def _require_answer(said: bytes, server: str) -> None:
    """A 200 that is no answer is not passed on as one; what it says is not looked at."""
    try:
        choices = _answer.decode(said).choices
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LegFailed(
            RouterFailure.ANSWER, server, "the server answers 200 and no JSON with choices that ended"
        ) from error
    if any(one.finish_reason in GIVEN_UP for one in choices):
        raise LegFailed(RouterFailure.SERVER, server, "the server has given the request up")


def require_success(reply: Reply, said: bytes, server: str, *, has_own_key: bool) -> None:
    """Check what a server has answered.

    Raises:
        Answered: 4xx, which is the client's to hear.
        LegFailed: anything else but 200.
    """
    status = reply.status
    if status == 200:
        return
    if status in (401, 403) and has_own_key:
        raise LegFailed(RouterFailure.UPSTREAM_KEY, server, "the server refuses the router's key", is_retriable=False)
    if status in (408, 425, 429, 503):
        raise LegFailed(RouterFailure.UPSTREAM_BUSY, server, f"the server answers {status}", status=503)
    if 400 <= status < 500:
        raise Answered(status, reply.content_type, said)
    if status >= 500:
        tags = hand_over_tags(said)
        cause = RouterFailure.HANDOVER if tags else RouterFailure.SERVER
        raise LegFailed(cause, server, f"the server answers {status}{tags and f', the KV hand-over failed: {tags}'}")
    raise LegFailed(RouterFailure.ANSWER, server, f"the server answers {status}", is_retriable=False)
