# SPDX-License-Identifier: Apache-2.0
"""Reads prefill's response, and in push ends decode's leg when that response rules the hand-over out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import msgspec

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.client import Outgoing
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.fan_out import Child
from kvcached_nixl.proxy.instance import Instance
from kvcached_nixl.proxy.ranks import Found
from kvcached_nixl.wire.params import Malformed, parse

__all__ = ["Beside", "NoParameters", "RemoteOffer", "read_offer"]


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_prefill_answer = msgspec.json.Decoder(_PrefillAnswer)


@dataclass(frozen=True)
class RemoteOffer:
    """What prefill's response says about the hand-over.

    Attributes:
        raw: its kv_transfer_params, unchanged, for decode; None if there are none.
        found: where prefill is; None without kv_transfer_params.
    """

    raw: msgspec.Raw | None
    found: Found | None


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
        return RemoteOffer(raw, Found.of(params))
    except (msgspec.MsgspecError, Malformed, RecursionError) as error:
        reason = f"prefill's response cannot be used: {str(error)[:200]}"
        raise LegFailed(RouterFailure.ANSWER, name, reason) from error


class NoParameters(LegFailed):
    """In push, prefill answered without kv_transfer_params, so decode waits for a hand-over that will not come."""


class Beside:
    """In push: watches prefill's leg, and ends decode's leg when the hand-over cannot succeed any more."""

    def __init__(self, prefilling: asyncio.Task[RemoteOffer], prefill: Instance, found: Found) -> None:
        self._prefilling = prefilling
        self._prefill = prefill
        self._found = found

    def watch(self, guard: Guard, out: Outgoing | Child) -> None:
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
