# SPDX-License-Identifier: Apache-2.0
"""What prefill's answer says of a hand-over, and what follows from it for a decode that was asked at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import msgspec

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.instance import Instance
from kvcached_nixl.proxy.outgoing import Outgoing
from kvcached_nixl.proxy.ranks import Found
from kvcached_nixl.wire.params import Malformed, parse

__all__ = ["Beside", "NoParameters", "Offer", "read_offer"]


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_prefill_answer = msgspec.json.Decoder(_PrefillAnswer)


@dataclass(frozen=True)
class Offer:
    """What prefill's answer says.

    Attributes:
        raw: its parameters as they came, for decode; None if there are none.
        found: where it is; None without parameters.
    """

    raw: msgspec.Raw | None
    found: Found | None


def read_offer(name: str, said: bytes) -> Offer:
    """Read prefill's answer.

    Args:
        name: of the server.

    Raises:
        LegFailed: it cannot be used.
    """
    try:
        raw = _prefill_answer.decode(said).kv_transfer_params
        if bytes(raw) == b"null":
            return Offer(None, None)
        params = parse(raw)
        if not params.do_remote_prefill:
            return Offer(None, None)
        return Offer(raw, Found.of(params))
    except (msgspec.MsgspecError, Malformed, RecursionError) as error:
        reason = f"prefill's answer cannot be used: {str(error)[:200]}"
        raise LegFailed(RouterFailure.ANSWER, name, reason) from error


class NoParameters(LegFailed):
    """Prefill was asked together with decode, and hands nothing over."""


class Beside:
    """In push: prefill's leg, which ends decode's when nothing can come of it any more."""

    def __init__(self, prefilling: asyncio.Task[Offer], prefill: Instance, found: Found) -> None:
        self._prefilling = prefilling
        self._prefill = prefill
        self._found = found

    def watch(self, guard: Guard, out: Outgoing) -> None:
        """From now on ``guard`` is ended by prefill's failure, unless the client has heard of decode."""

        def judge(prefilling: asyncio.Task[Offer]) -> None:
            if out.has_begun or prefilling.cancelled():
                return
            failure = prefilling.exception()
            if failure is None:
                failure = self._judge(prefilling.result())
            if isinstance(failure, Exception):
                guard.end(failure)

        self._prefilling.add_done_callback(judge)

    def _judge(self, offer: Offer) -> Exception | None:
        if offer.found is None:
            return NoParameters(RouterFailure.ANSWER, self._prefill.name, "prefill hands nothing over")
        if replace(offer.found, incarnation=self._found.incarnation) != self._found:
            reason = "prefill was started again, and is not where it was"
            return LegFailed(RouterFailure.RESTARTED, self._prefill.name, reason)
        return None
