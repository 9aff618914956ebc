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
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import anyio
import msgspec

from kvcached_nixl.proxy.account import Share
from kvcached_nixl.proxy.asked import Alone, Asked
from kvcached_nixl.proxy.client import Response
from kvcached_nixl.proxy.failure import Answered, ClientLeft, LegFailed, Refusal, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Booking, Instance, Leg, Role
from kvcached_nixl.proxy.kind import Kind
from kvcached_nixl.proxy.leg_body import decode_body, one_token_body
from kvcached_nixl.proxy.offer import Beside, NoParameters, RemoteOffer, read_offer
from kvcached_nixl.proxy.policy import Wanted
from kvcached_nixl.proxy.rank_count import ask_rank_count
from kvcached_nixl.proxy.ranks import RANK_HEADER, Found, range_of
from kvcached_nixl.proxy.record import Record
from kvcached_nixl.proxy.relay import Relay, require_success
from kvcached_nixl.proxy.tracing import NOT_TRACED, Part
from kvcached_nixl.wire.params import KvTransferParams

__all__ = ["Journey"]

logger = logging.getLogger("kvcached_nixl.proxy")

MOST_PREFILL_ANSWER_BYTES = 8 << 20
LOOK_AGAIN_SECONDS = 1.0
"""How long a request for which no pair fits waits before the servers are looked at again."""
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.05, 1.0
NO_PAIR = "No prefill and no decode server that are up have the same model, version and direction. Try again."
GIVE_BACK_SECONDS = 2.0
LATE_PREFILL_SECONDS = 1.0
"""How long a finished request waits for the end of prefill's leg, so that its connection can be reused."""


class Journey:
    """See the module. Once per request.

    Args:
        headers: for each leg, without its X-Request-Id.
        share: of the router's memory.
        preferred: a prefill server that is to be preferred, by name.
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
    ) -> None:
        self._preferred = preferred
        self._fleet = fleet
        self._options = fleet.options
        self._asked = asked
        self._headers = headers
        self._out = out
        self._record = record
        self._relay = Relay(fleet.upstream, asked, out, share, fleet.options)
        self._tried: set[str] = set()
        self._legs = 0
        self._may_push = True
        self._on_first: Callable[[], None] = lambda: None
        self._first_at_seconds: float | None = None
        self._prefilled_at_seconds: float | None = None
        self._answering: Part = NOT_TRACED
        record.on_first = self._first
        self._wanted = Wanted(
            *(asked.namespace, asked.prefix, asked.prompt_tokens, asked.max_tokens), piece_tokens=asked.piece_tokens
        )
        self._queue_deadline_seconds = time.monotonic() + fleet.options.queue_timeout_seconds

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
                await admitted.enter_async_context(self._fleet.admission.admitted(asked.prompt_tokens, waits=waits))
            self._queue_deadline_seconds = time.monotonic() + options.queue_timeout_seconds
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
        return time.monotonic() < self._queue_deadline_seconds

    def _first(self) -> None:
        self._first_at_seconds = time.monotonic()
        self._answering.follow("answer")
        self._on_first()

    def _note_failed(self, failure: LegFailed) -> None:
        self._fleet.metrics.retries.labels(failure.cause.value).inc()
        self._tried.add(failure.server)
        if failure.cause in (RouterFailure.HANDOVER, RouterFailure.SERVER):
            # Decode may have failed because of prefill, so another prefill is preferred, too.
            self._tried.add(self._record.prefill)
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
        place = await self._choose(Role.PREFILL, beside=Role.DECODE)
        prefill = place.server
        self._record.prefill = prefill.name
        if prefill.ranks.wants_count:
            with self._record.trace.part("ranks", server=prefill.name) as part:
                headers = self._headers_of(self._leg_id(), part)
                await ask_rank_count(prefill, self._asked, headers, self._fleet.upstream, self._options)
            place = self._fleet.choose_rank(prefill, self._wanted)
        with prefill.counted(keeping=1) as taken:
            self._on_first = taken
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
            place = await self._choose(role)
        self._fleet.metrics.alone.labels(reason.value).inc()
        self._record.direction, self._record.alone = "alone", reason.value
        if reason is not Alone.NO_PARAMETERS:
            self._record.prefill = ""
        # Prefill keeps nothing for a request that decode computes.
        self._on_first()
        tokens = asked.prompt_tokens if tokens is None else tokens
        ahead, begun_seconds = place.server.computing_tokens + tokens, time.monotonic()
        with place.server.counted(computing_tokens=tokens) as self._on_first:
            await self._answer_leg(place.server, asked.raw_params)
        if reason in (Alone.CHEAPER, Alone.NO_PREFILL) and asked.streams and self._first_at_seconds is not None:
            self._fleet.costs.computed_alone(self._first_at_seconds - begun_seconds, ahead)

    async def _pull(self, prefill: Booking) -> None:
        self._record.direction = "pull"
        begun_seconds = time.monotonic()
        offer = await self._prefill_leg(prefill, None)
        kind = prefill.server.kind
        # What prefill took is no waiting for a server.
        self._queue_deadline_seconds += time.monotonic() - begun_seconds
        if offer.raw is None:
            return await self._alone(Alone.NO_PARAMETERS)
        refusals = 0
        while True:
            # Chosen only now, by the present load: prefill may have taken long.
            decode = (await self._choose(Role.DECODE, prefill=prefill.server.name, fits=kind)).server
            begun_seconds = time.monotonic()
            try:
                await self._answer_leg(decode, offer.raw, cached_tokens=offer.cached_tokens)
                return self._note_added(begun_seconds)
            except Answered as answered:
                await self._give_back(decode, offer.raw, answered)
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
        place = await self._choose(Role.DECODE, prefill=prefill.server.name, fits=prefill.server.kind)
        decode = place.server
        transfer_id = secrets.token_hex(16)
        params = KvTransferParams.for_decode(found.where, transfer_id)
        prefilling = asyncio.create_task(self._prefill_leg(prefill, transfer_id))
        beside = Beside(prefilling, prefill.server, found)
        try:
            await self._answer_leg(decode, params, beside)
            self._note_added(self._prefilled_at_seconds)
            await asyncio.wait({prefilling}, timeout=LATE_PREFILL_SECONDS)
        except NoParameters:
            if self._out.has_begun:
                raise
            await self._alone(Alone.NO_PARAMETERS)
        except Answered as answered:
            if (offer := beside.offer) is not None and offer.raw is not None:
                await self._give_back(decode, params, answered)
            raise
        finally:
            # Cancelling closes the connection, which makes prefill abort the request.
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------------ legs

    async def _prefill_leg(self, place: Booking, transfer_id: str | None) -> RemoteOffer:
        asked, options, prefill = self._asked, self._options, place.server
        leg_id = self._leg_id()
        late = LegFailed(RouterFailure.TIME, prefill.name, "prefill did not answer in time", status=504)
        with self._leg(prefill, asked.prompt_tokens, place.rank) as (leg, part):
            leg.guard.limit(options.prefill_timeout_seconds, late)
            url, headers = prefill.url + asked.route.value, self._headers_of(leg_id, part, place.rank)
            body = one_token_body(asked, KvTransferParams.for_prefill(transfer_id), leg_id)
            ahead, begun_seconds = prefill.tokens, time.monotonic()
            async with self._fleet.upstream.ask("POST", url, prefill.name, headers, body) as reply:
                leg.heard()
                with part.part("read"):
                    said = await reply.body(MOST_PREFILL_ANSWER_BYTES)
            if place.rank is not None and reply.status == 400 and range_of(said, place.rank) is not None:
                reason = f"prefill was restarted, and no longer has data-parallel rank {place.rank}"
                raise LegFailed(RouterFailure.RESTARTED, prefill.name, reason)
            require_success(reply, said, prefill.name, has_own_key=bool(options.upstream_key))
            offer = read_offer(prefill.name, said)
        prefill.succeeded()
        self._prefilled_at_seconds = time.monotonic()
        self._fleet.costs.prefilled(self._prefilled_at_seconds - begun_seconds, ahead)
        self._learn(place, offer)
        return offer

    def _note_added(self, begun_seconds: float | None) -> None:
        """Measure what a hand-over has added to prefill's time, from ``begun_seconds`` on."""
        if self._asked.streams and self._first_at_seconds is not None and begun_seconds is not None:
            self._fleet.costs.handed_over(max(0.0, self._first_at_seconds - begun_seconds))

    async def _give_back(self, decode: Instance, params: KvTransferParams | msgspec.Raw, answered: Answered) -> None:
        """Let decode take what it has refused to use, so that prefill need not keep it until its lease ends.

        The same prompt with a limit of one token: decode mostly refuses a limit that prefill did not get. The client
        waits for it, so that it counts as this request's.
        """
        if answered.status not in (400, 422):
            return
        late = LegFailed(RouterFailure.TIME, decode.name, "decode did not answer in time")
        leg_id = self._leg_id()
        body = one_token_body(self._asked, params, leg_id)
        try:
            with (
                self._record.trace.part("give back", server=decode.name) as part,
                decode.leg(self._asked.prompt_tokens) as leg,
            ):
                leg.guard.limit(GIVE_BACK_SECONDS, late)
                url, headers = decode.url + self._asked.route.value, self._headers_of(leg_id, part)
                async with self._fleet.upstream.ask("POST", url, decode.name, headers, body) as reply:
                    await reply.body(MOST_PREFILL_ANSWER_BYTES)
        except LegFailed as failure:
            logger.debug("%s: prefill keeps what decode has refused until its lease ends: %s", decode.name, failure)

    async def _answer_leg(
        self,
        server: Instance,
        params: KvTransferParams | msgspec.Raw | None,
        beside: Beside | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Run the leg whose response goes to the client."""
        asked = self._asked
        if server.role is Role.DECODE:
            self._record.decode = server.name

        def cached() -> int | None:
            offer = None if beside is None else beside.offer
            return cached_tokens if offer is None else offer.cached_tokens

        leg_id = self._leg_id()
        counted = self._fleet.admission.at_decode(server, asked.prompt_tokens)
        with counted, self._leg(server, asked.prompt_tokens + asked.max_tokens) as (leg, part):
            self._answering = part
            if beside is not None:
                beside.watch(leg.guard, self._out)
            body = decode_body(asked, params, leg_id)
            await self._relay.run(server, leg, self._headers_of(leg_id, part), body, self._record, cached)
        self._fleet.decoded(server, self._wanted)

    @contextmanager
    def _leg(self, server: Instance, tokens: int, rank: int | None = None) -> Iterator[tuple[Leg, Part]]:
        # Of a cancellation in the same tick as a failure only one is delivered, before Python 3.11.
        if not self._out.is_client_there:
            raise ClientLeft
        metrics, outcome, begun = self._fleet.metrics, "ok", time.perf_counter()
        try:
            with (
                self._record.trace.part(server.role.value, server=server.name) as part,
                server.leg(tokens, rank) as leg,
            ):
                yield leg, part
        except LegFailed as failure:
            outcome = failure.cause.value
            # In push, decode's leg may be ended by a failure of prefill, which must not count against decode.
            if failure.server == server.name:
                server.failed(failure)
            raise
        except Answered:
            outcome = RouterFailure.SERVER_SAID_NO.value
            raise
        except BaseException:
            outcome = "ended"
            raise
        finally:
            metrics.leg_seconds.labels(server.role.value).observe(time.perf_counter() - begun)
            if self._fleet.is_known(server):
                metrics.legs.labels(server.role.value, server.name, outcome).inc()

    def _learn(self, place: Booking, offer: RemoteOffer) -> None:
        """Update what the router knows about prefill from its response."""
        prefill = place.server
        if offer.found is not None:
            prefill.ranks.learn(place.rank, offer.found)
            prefill.heard_of_capacity(offer.capacity)
            prefill.is_warned = False
            return
        prefill.ranks.lost(place.rank)
        if self._fleet.is_known(prefill):
            self._fleet.metrics.without_parameters.labels(prefill.name).inc()
        if not prefill.is_warned:
            prefill.is_warned = True
            logger.warning(
                "prefill server %s answers without kv_transfer_params, expected them from a NixlConnector. Decode "
                "computes those prompts again. Start prefill with --kv-transfer-config; its log names prompts that it "
                "does not hand over. Logged once until the server hands over again; the metric "
                "kvcached_nixl_router_prefills_without_parameters_total counts them.",
                prefill.name,
            )

    def _headers_of(self, leg_id: str, part: Part, rank: int | None = None) -> dict[str, str]:
        headers = {"X-Request-Id": leg_id, **self._headers, **part.headers}
        return headers if rank is None else {**headers, RANK_HEADER: str(rank)}

    def _leg_id(self) -> str:
        """Returns a new id for a leg. No two legs share one, so a server never confuses two legs."""
        self._legs += 1
        return f"{self._record.request_id}-leg{self._legs}"

    async def _choose(
        self, role: Role, beside: Role | None = None, prefill: str = "", fits: Kind | None = None
    ) -> Booking:
        """Returns where the request goes. Waits in the queue while none is up that `Fleet.choose` would take.

        Args:
            prefill: name of the server that ``fits`` is the kind of.

        Raises:
            Refusal: none came up in time.
            LegFailed: decode servers are up, but none fits this prefill server any more.
        """
        with self._record.trace.part("queue", role=role.value):
            return await self._chosen(role, beside, prefill, fits)

    async def _chosen(self, role: Role, beside: Role | None, prefill: str, fits: Kind | None) -> Booking:
        while True:
            place = self._fleet.choose(role, self._wanted, self._tried, self._preferred, beside, fits)
            if place is not None:
                return place
            left_seconds = self._queue_deadline_seconds - time.monotonic()
            missing = next((one for one in (role, beside) if one is not None and not self._fleet.is_up(one)), None)
            message = f"No {missing.value} server is up. Try again." if missing else NO_PAIR
            if missing is None:
                self._fleet.suspect()
                left_seconds = min(left_seconds, LOOK_AGAIN_SECONDS)
                if prefill:
                    reason = "no decode server that fits it is up any more"
                    raise LegFailed(RouterFailure.NO_SERVER, prefill, reason, status=503)
            missing = missing or role
            if left_seconds <= 0 or not self._fleet.has(missing):
                retry_seconds = self._fleet.retry_seconds(missing)
                raise Refusal(503, RouterFailure.NO_SERVER, message, retry_after_seconds=retry_seconds)
            with anyio.move_on_after(left_seconds):
                await self._fleet.change()

    def _may_go_alone(self, failure: LegFailed) -> bool:
        return self._options.decode_alone and self._asked.alone is None and failure.server == self._record.prefill
