# SPDX-License-Identifier: Apache-2.0
"""The leg whose response goes to the client: sent, checked at its beginning, then passed on. Once per leg."""

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
from kvcached_nixl.proxy.request_body import ApiRoute, Asked

__all__ = ["relay", "require_success"]

FIRST_EVENTS = 2
"""Events of a chat that are held back: vLLM sends the role first, and only after it an error."""


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
    """Send the request to a server, and pass its response on to the client.

    Raises:
        LegFailed: the server did not answer, or not completely. ``out.has_begun`` tells whether the response had begun.
        Answered: the server answered 4xx.
        ClientLeft: the client did not read in time.
    """
    streams = bytes(asked.fields["stream"]) == b"true" if "stream" in asked.fields else False
    seconds = options.first_token_timeout_seconds if streams else options.response_timeout_seconds
    late = LegFailed(RouterFailure.TIME, server.name, "the server did not answer in time", status=504)
    guard.limit(seconds, late)
    reply = await server.connections.ask("POST", asked.route.value, headers, body)
    try:
        if not reply.is_plain:
            raise LegFailed(
                RouterFailure.ANSWER, server.name, "the server's response is compressed", is_retriable=False
            )
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
    route: ApiRoute,
    reply: Reply,
    pieces: AsyncIterator[bytes],
    out: Outgoing,
    guard: Guard,
    options: Options,
    record: Record,
) -> None:
    events = Events()
    pause = LegFailed(RouterFailure.TIME, server.name, "the server stopped in the middle of its response", status=504)
    slow = ClientLeft()
    try:
        held = await _first(events, pieces, FIRST_EVENTS if route is ApiRoute.CHAT else 1)
        if events.has_ended and not events.is_complete:
            raise LegFailed(RouterFailure.BROKEN, server.name, "the server's response ended before its first token")
        if events.has_error:
            # Only the tags of the error: its text may contain parts of the prompt.
            tags = hand_over_tags(held)
            reason = f"the KV hand-over failed: {tags}" if tags else "the server's response begins with an error"
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
        raise LegFailed(RouterFailure.ANSWER, server.name, f"the server sent {error}") from error
    if not events.is_complete:
        raise LegFailed(RouterFailure.BROKEN, server.name, "the server's response ended without [DONE]")
    guard.limit(options.client_timeout_seconds, slow)
    await out.end()
    if events.has_error:
        record.outcome = RouterFailure.SERVER.value
        record.reason = "the server ended its response with an error"


async def _first(events: Events, pieces: AsyncIterator[bytes], count: int) -> bytes:
    """Returns the first events, held back until they show whether this is a response or an error."""
    held = b""
    async for piece in pieces:
        held += events.cut(piece)
        if events.count >= count or events.has_error or events.is_complete:
            return held
    events.has_ended = True
    return held


def _require_reason(events: Events, server: str) -> None:
    """Check that a stream with ``[DONE]`` has a finish_reason.

    vLLM skips an output without tokens in a stream, even if it is the last one and reports a failure.
    """
    if events.is_complete and not (events.is_whole or events.has_error):
        raise LegFailed(
            RouterFailure.HANDOVER, server, "the server sent [DONE], but no finish_reason of a complete response"
        )


class _Choice(msgspec.Struct):
    finish_reason: str


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


_answer = msgspec.json.Decoder(_Answer)


def _require_answer(said: bytes, server: str) -> None:
    """Check that a 200 response has choices that finished. The generated text is not checked."""
    try:
        choices = _answer.decode(said).choices
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LegFailed(
            RouterFailure.ANSWER, server, "the server answered 200 without JSON that has finished choices"
        ) from error
    if any(one.finish_reason in GIVEN_UP for one in choices):
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
        raise LegFailed(RouterFailure.UPSTREAM_BUSY, server, f"the server answered {status}", status=503)
    if 400 <= status < 500:
        raise Answered(status, reply.content_type, said)
    if status >= 500:
        tags = hand_over_tags(said)
        cause = RouterFailure.HANDOVER if tags else RouterFailure.SERVER
        raise LegFailed(cause, server, f"the server answered {status}{tags and f', the KV hand-over failed: {tags}'}")
    raise LegFailed(RouterFailure.ANSWER, server, f"the server answered {status}", is_retriable=False)
