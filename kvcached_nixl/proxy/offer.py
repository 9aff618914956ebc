# SPDX-License-Identifier: Apache-2.0
"""Reads prefill's response, and in push ends decode's leg when that response rules the hand-over out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import msgspec

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.client import Response
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.instance import Instance
from kvcached_nixl.proxy.kind import Capacity
from kvcached_nixl.proxy.ranks import Found
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY, HEADROOM_KEY, Malformed, parse

__all__ = ["Beside", "NoParameters", "RemoteOffer", "read_offer"]


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Usage(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = msgspec.field(default=None, name=CACHED_TOKENS_KEY)


_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Headroom(msgspec.Struct):
    free_tokens: _Tokens
    used_tokens: _Tokens
    queued_tokens: _Tokens


class _Hint(msgspec.Struct):
    headroom: _Headroom | None = msgspec.field(default=None, name=HEADROOM_KEY)


_prefill_answer = msgspec.json.Decoder(_PrefillAnswer)
_usage = msgspec.json.Decoder(_Usage)
_hint = msgspec.json.Decoder(_Hint)


@dataclass(frozen=True)
class RemoteOffer:
    """What prefill's response says about the hand-over.

    Attributes:
        raw: its kv_transfer_params, unchanged, for decode; None if there are none.
        found: where prefill is; None without kv_transfer_params.
        cached_tokens: of the prompt, in prefill's prefix cache; None if prefill does not say it.
        capacity: of the engine that answered; None if it does not say it.
    """

    raw: msgspec.Raw | None
    found: Found | None
    cached_tokens: int | None = None
    capacity: Capacity | None = None


def read_offer(name: str, said: bytes) -> RemoteOffer:
    """Read prefill's response.

    Args:
        name: of the server, for the error.

    Raises:
        LegFailed: the response is malformed.
    """
    try:
        raw = _prefill_answer.decode(said).kv_transfer_params
        if bytes(raw) == b"null":
            return RemoteOffer(None, None)
        params = parse(raw)
        if not params.do_remote_prefill:
            return RemoteOffer(None, None)
        return RemoteOffer(raw, Found.of(params), _usage.decode(raw).cached_tokens, _capacity_in(raw))
    except (msgspec.MsgspecError, Malformed, RecursionError) as error:
        reason = f"prefill's response cannot be used: {str(error)[:200]}"
        raise LegFailed(RouterFailure.ANSWER, name, reason) from error


def _capacity_in(raw: msgspec.Raw) -> Capacity | None:
    try:
        said = _hint.decode(raw).headroom
    except msgspec.MsgspecError:
        # A hint from another version must not cost the request.
        return None
    if said is None:
        return None
    return Capacity(said.free_tokens + said.used_tokens, said.used_tokens + said.queued_tokens)


class NoParameters(LegFailed):
    """In push, prefill answered without kv_transfer_params, so decode waits for a hand-over that will not come."""


class Beside:
    """In push: watches prefill's leg, and ends decode's leg when the hand-over cannot succeed any more."""

    def __init__(self, prefilling: asyncio.Task[RemoteOffer], prefill: Instance, found: Found) -> None:
        self._prefilling = prefilling
        self._prefill = prefill
        self._found = found

    @property
    def offer(self) -> RemoteOffer | None:
        """What prefill has answered; None if it has not yet, or has failed."""
        is_there = self._prefilling.done() and not self._prefilling.cancelled() and not self._prefilling.exception()
        return self._prefilling.result() if is_there else None

    def watch(self, guard: Guard, out: Response) -> None:
        """End ``guard`` when prefill's leg fails, unless the response to the client has begun."""

        def judge(prefilling: asyncio.Task[RemoteOffer]) -> None:
            if out.has_begun or prefilling.cancelled():
                return
            failure = prefilling.exception()
            if failure is None:
                failure = self._judge(prefilling.result())
            if isinstance(failure, Exception):
                guard.end(failure)

        self._prefilling.add_done_callback(judge)

    def _judge(self, offer: RemoteOffer) -> Exception | None:
        if offer.found is None:
            return NoParameters(
                RouterFailure.ANSWER,
                self._prefill.name,
                "prefill answered without kv_transfer_params, so it hands nothing over",
            )
        if replace(offer.found, incarnation=self._found.incarnation) != self._found:
            reason = "prefill was restarted, and its engine is not where the router last found it"
            return LegFailed(RouterFailure.RESTARTED, self._prefill.name, reason)
        return None
