# SPDX-License-Identifier: Apache-2.0
"""Serves one request: attempts of one or two legs each, until the client has a response or an error.

    pull     prefill is asked first; its kv_transfer_params go to decode unchanged
    push     both are asked at once, with a new transfer_id. Decode gets the coordinates that prefill reported before.
             If prefill has several data-parallel ranks, it is told which one these belong to
    alone    decode computes the prompt itself

A failed attempt may be followed by another until the response to the client has begun. After that nothing is retried.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack

from kvcached_nixl.proxy.account import Share
from kvcached_nixl.proxy.asked import Alone, Asked
from kvcached_nixl.proxy.client import Response
from kvcached_nixl.proxy.failure import Answered, LegFailed, Refusal, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Booking, Role
from kvcached_nixl.proxy.legs import Legs
from kvcached_nixl.proxy.offer import Beside, NoParameters
from kvcached_nixl.proxy.policy import Wanted
from kvcached_nixl.proxy.ranks import Found
from kvcached_nixl.proxy.record import Record
from kvcached_nixl.proxy.server_choice import ServerChoice
from kvcached_nixl.wire.params import KvTransferParams

__all__ = ["Journey"]

FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.05, 1.0
LATE_PREFILL_SECONDS = 1.0
"""How long a finished request waits for the end of prefill's leg, so that its connection can be reused."""


class Journey:
    """See the module. Once per request.

    Args:
        headers: for each leg, without its X-Request-Id.
        share: of the router's memory.
        preferred: a prefill server that is to be preferred, by name.
        follows: another sequence of the same request came before this one.
    """

    def __init__(
        self,
        fleet: Fleet,
        asked: Asked,
        headers: dict[str, str],
        out: Response,
        record: Record,
        share: Share,
        preferred: str = "",
        follows: bool = False,
    ) -> None:
        self._fleet = fleet
        self._follows = follows
        self._options = fleet.options
        self._asked = asked
        self._out = out
        self._record = record
        self._may_push = True
        self._wanted = Wanted(
            *(asked.namespace, asked.prefix, asked.prompt_tokens, asked.max_tokens), piece_tokens=asked.piece_tokens
        )
        self._choice = ServerChoice(fleet, self._wanted, record, preferred)
        self._legs = Legs(fleet, asked, self._wanted, headers, out, record, share)

    async def run(self) -> None:
        """Serve the request until the client has the whole response.

        Raises:
            Refusal: no server is up, or the request is not allowed.
            LegFailed: the last attempt failed; the client may have received a part of the response.
            Answered: a server answered 4xx.
        """
        asked, options = self._asked, self._options
        if asked.needs_leave and not options.decode_alone:
            raise Refusal(400, RouterFailure.SEVERAL, f"{asked.reason}.", param=asked.param)
        # With parameters of a client, prefill has computed already, or nothing but prefill is asked for.
        waits = asked.alone is not Alone.CLIENT
        async with AsyncExitStack() as admitted:
            with self._record.trace.part("admission"):
                admission = self._fleet.admission.admitted(asked.prompt_tokens, waits=waits, follows=self._follows)
                await admitted.enter_async_context(admission)
            self._choice.begin()
            await self._attempts()

    async def _attempts(self) -> None:
        options = self._options
        delivered, pause_seconds = 0, FIRST_PAUSE_SECONDS
        while True:
            self._record.attempts += 1
            try:
                return await self._attempt()
            except LegFailed as failure:
                if self._out.has_begun or not failure.is_retriable:
                    raise
                delivered += failure.is_delivered
                if delivered >= options.attempts or not self._may_retry(failure):
                    if not self._may_go_alone(failure):
                        raise
                    return await self._alone(Alone.NO_PREFILL)
                self._note_failed(failure)
            with self._record.trace.part("pause"):
                await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, MOST_PAUSE_SECONDS)

    def _may_retry(self, failure: LegFailed) -> bool:
        """Whether another attempt may follow: of what was delivered by the budget, of the rest by the queue's time."""
        if failure.is_delivered:
            return self._fleet.retry_budget.take()
        return self._choice.has_time

    def _note_failed(self, failure: LegFailed) -> None:
        self._fleet.metrics.retries.labels(failure.cause.value).inc()
        self._choice.avoid(failure.server)
        if failure.cause in (RouterFailure.HANDOVER, RouterFailure.SERVER):
            # Decode may have failed because of prefill, so another prefill is preferred, too.
            self._choice.avoid(self._record.prefill)
            if self._record.prefill:
                self._fleet.suspect(self._record.prefill)
        if failure.cause in (RouterFailure.HANDOVER, RouterFailure.SERVER, RouterFailure.RESTARTED):
            # Decode may have been sent to a dead incarnation of prefill. In pull, prefill reports where it is.
            self._may_push = False
        self._record.reason = failure.reason

    async def _attempt(self) -> None:
        if self._asked.alone is not None:
            return await self._alone(self._asked.alone)
        if self._options.decode_alone and not self._fleet.is_up(Role.PREFILL, beside=Role.DECODE):
            return await self._alone(Alone.NO_PREFILL)
        if self._record.attempts == 1 and (cheaper := self._fleet.alone(self._wanted)) is not None:
            return await self._alone(Alone.CHEAPER, *cheaper)
        place = await self._choice.choose(Role.PREFILL, beside=Role.DECODE)
        prefill = place.server
        self._record.prefill = prefill.name
        if prefill.ranks.wants_count:
            await self._legs.count_ranks(prefill)
            place = self._fleet.choose_rank(prefill, self._wanted)
        with prefill.counted(keeping=1) as taken:
            self._legs.on_first = taken
            found = prefill.ranks.found(place.rank)
            if found is not None and found.mode.is_push and self._may_push:
                return await self._push(place, found)
            return await self._pull(place)

    # ------------------------------------------------------------------------------------------------------ directions

    async def _alone(self, reason: Alone, place: Booking | None = None, tokens: int | None = None) -> None:
        asked, role = self._asked, Role.DECODE
        if asked.params is not None and asked.params.do_remote_decode:
            role = Role.PREFILL
        if place is None:
            place = await self._choice.choose(role)
        self._fleet.metrics.alone.labels(reason.value).inc()
        self._record.direction, self._record.alone = "alone", reason.value
        if reason is not Alone.NO_PARAMETERS:
            self._record.prefill = ""
        # Prefill keeps nothing for a request that decode computes.
        self._legs.on_first()
        tokens = asked.prompt_tokens if tokens is None else tokens
        ahead, begun_seconds = place.server.computing_tokens + tokens, time.monotonic()
        with place.server.counted(computing_tokens=tokens) as self._legs.on_first:
            await self._legs.answer(place.server, asked.raw_params)
        if reason in (Alone.CHEAPER, Alone.NO_PREFILL) and asked.streams and self._legs.first_at_seconds is not None:
            self._fleet.costs.computed_alone(self._legs.first_at_seconds - begun_seconds, ahead)

    async def _pull(self, prefill: Booking) -> None:
        self._record.direction = "pull"
        begun_seconds = time.monotonic()
        offer = await self._legs.prefill(prefill, None)
        kind = prefill.server.kind
        # What prefill took is no waiting for a server.
        self._choice.extend(time.monotonic() - begun_seconds)
        if offer.raw is None:
            return await self._alone(Alone.NO_PARAMETERS)
        refusals = 0
        while True:
            # Chosen only now, by the present load: prefill may have taken long.
            decode = (await self._choice.choose(Role.DECODE, prefill=prefill.server.name, fits=kind)).server
            begun_seconds = time.monotonic()
            try:
                await self._legs.answer(decode, offer.raw, cached_tokens=offer.cached_tokens)
                return self._note_added(begun_seconds)
            except Answered as answered:
                await self._legs.give_back(decode, offer.raw, answered)
                raise
            except LegFailed as failure:
                # Else decode may have fetched the KV, and prefill may have released it.
                is_busy = failure.cause is RouterFailure.UPSTREAM_BUSY
                refusals += is_busy
                is_kept = not failure.is_delivered or (is_busy and refusals < self._options.attempts)
                if not is_kept or not self._may_retry(failure):
                    raise
                self._note_failed(failure)
            with self._record.trace.part("pause"):
                await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def _push(self, prefill: Booking, found: Found) -> None:
        self._record.direction = "push"
        place = await self._choice.choose(Role.DECODE, prefill=prefill.server.name, fits=prefill.server.kind)
        decode = place.server
        transfer_id = secrets.token_hex(16)
        params = KvTransferParams.for_decode(found.where, transfer_id)
        prefilling = asyncio.create_task(self._legs.prefill(prefill, transfer_id))
        beside = Beside(prefilling, prefill.server, found)
        try:
            await self._legs.answer(decode, params, beside)
            self._note_added(self._legs.prefilled_at_seconds)
            await asyncio.wait({prefilling}, timeout=LATE_PREFILL_SECONDS)
        except NoParameters:
            if self._out.has_begun:
                raise
            await self._alone(Alone.NO_PARAMETERS)
        except Answered as answered:
            if (offer := beside.offer) is not None and offer.raw is not None:
                await self._legs.give_back(decode, params, answered)
            raise
        finally:
            # Cancelling closes the connection, which makes prefill abort the request.
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)

    def _note_added(self, begun_seconds: float | None) -> None:
        """Measure what a hand-over has added to prefill's time, from ``begun_seconds`` on."""
        if self._asked.streams and self._legs.first_at_seconds is not None and begun_seconds is not None:
            self._fleet.costs.handed_over(max(0.0, self._legs.first_at_seconds - begun_seconds))

    def _may_go_alone(self, failure: LegFailed) -> bool:
        return self._options.decode_alone and self._asked.alone is None and failure.server == self._record.prefill
