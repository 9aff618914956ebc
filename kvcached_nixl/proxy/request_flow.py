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
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import Answered, LegFailed, Refusal, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Booking, Instance, Role
from kvcached_nixl.proxy.offer import Beside, NoParameters, RemoteOffer, read_offer
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.outgoing import Outgoing
from kvcached_nixl.proxy.policy import Wanted
from kvcached_nixl.proxy.rank_count import ask_rank_count
from kvcached_nixl.proxy.ranks import RANK_HEADER, Found, range_of
from kvcached_nixl.proxy.record import Record
from kvcached_nixl.proxy.relay import relay, require_success
from kvcached_nixl.proxy.request_body import Alone, Asked, decode_body, prefill_body
from kvcached_nixl.wire.params import KvTransferParams

__all__ = ["Journey"]

logger = logging.getLogger("kvcached_nixl.proxy")

MOST_PREFILL_ANSWER_BYTES = 8 << 20
PAUSE_SECONDS = 0.05
LATE_PREFILL_SECONDS = 1.0
"""How long a finished request waits for the end of prefill's leg, so that its connection can be reused."""


class Journey:
    """See the module. Once per request.

    Args:
        headers: for each leg, without its X-Request-Id.
    """

    def __init__(
        self,
        fleet: Fleet,
        options: Options,
        asked: Asked,
        headers: list[tuple[bytes, bytes]],
        out: Outgoing,
        record: Record,
    ) -> None:
        self._fleet = fleet
        self._options = options
        self._asked = asked
        self._headers = headers
        self._out = out
        self._record = record
        self._tried: set[str] = set()
        self._legs = 0
        self._may_push = True
        self._wanted = Wanted(asked.namespace, asked.prefix, asked.prompt_tokens, asked.max_tokens)

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
        attempt = 0
        while True:
            attempt += 1
            self._record.attempts = attempt
            try:
                return await self._attempt()
            except LegFailed as failure:
                if self._out.has_begun or not failure.is_retriable:
                    raise
                if attempt >= options.attempts:
                    if not self._may_go_alone(failure):
                        raise
                    return await self._alone(Alone.NO_PREFILL)
                self._fleet.metrics.retries.labels(failure.cause.value).inc()
                self._tried.add(failure.server)
                if failure.cause in (RouterFailure.HANDOVER, RouterFailure.SERVER):
                    # Decode may have failed because of prefill, so another prefill is preferred, too.
                    self._tried.add(self._record.prefill)
                if failure.cause in (RouterFailure.HANDOVER, RouterFailure.SERVER, RouterFailure.RESTARTED):
                    # Decode may have been sent to a dead incarnation of prefill. In pull, prefill reports where it is.
                    self._may_push = False
                self._record.reason = failure.reason
            await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))

    async def _attempt(self) -> None:
        if self._asked.alone is not None:
            return await self._alone(self._asked.alone)
        place = self._fleet.choose(Role.PREFILL, self._wanted, self._tried)
        if place is None:
            if self._options.decode_alone:
                return await self._alone(Alone.NO_PREFILL)
            raise _nobody(Role.PREFILL)
        if not self._fleet.is_up(Role.DECODE):
            raise _nobody(Role.DECODE)
        prefill = place.server
        self._record.prefill = prefill.name
        if prefill.ranks.wants_count:
            await ask_rank_count(prefill, self._asked, self._headers_of(self._leg_id()), self._options)
            place = self._fleet.choose_rank(prefill, self._wanted)
        with prefill.kept() as taken:
            self._record.on_first = taken
            found = prefill.ranks.found(place.rank)
            if found is not None and found.mode.is_push and self._may_push:
                return await self._push(place, found)
            return await self._pull(place)

    # ------------------------------------------------------------------------------------------------------ directions

    async def _alone(self, reason: Alone) -> None:
        asked, role = self._asked, Role.DECODE
        if asked.params is not None and asked.params.do_remote_decode:
            role = Role.PREFILL
        place = self._fleet.choose(role, self._wanted, self._tried)
        if place is None:
            raise _nobody(role)
        self._fleet.metrics.alone.labels(reason.value).inc()
        self._record.direction, self._record.alone = "alone", reason.value
        if reason is not Alone.NO_PARAMETERS:
            self._record.prefill = ""
        await self._answer_leg(place.server, asked.raw_params)

    async def _pull(self, prefill: Booking) -> None:
        self._record.direction = "pull"
        offer = await self._prefill_leg(prefill, None)
        if offer.raw is None:
            return await self._alone(Alone.NO_PARAMETERS)
        # Chosen only now, by the present load: prefill may have taken long.
        decode = self._choose_decode()
        while True:
            try:
                return await self._answer_leg(decode, offer.raw)
            except LegFailed as failure:
                self._tried.add(decode.name)
                other = self._fleet.choose(Role.DECODE, self._wanted, self._tried)
                # If the request was delivered, decode may have fetched the KV, and prefill may have released it.
                if failure.cause is not RouterFailure.UNREACHABLE or other is None or other.server.name in self._tried:
                    raise
                self._fleet.metrics.retries.labels(failure.cause.value).inc()
                decode = other.server

    async def _push(self, prefill: Booking, found: Found) -> None:
        self._record.direction = "push"
        decode = self._choose_decode()
        transfer_id = secrets.token_hex(16)
        prefilling = asyncio.create_task(self._prefill_leg(prefill, transfer_id))
        try:
            params = KvTransferParams.for_decode(found.where, transfer_id)
            await self._answer_leg(decode, params, Beside(prefilling, prefill.server, found))
            await asyncio.wait({prefilling}, timeout=LATE_PREFILL_SECONDS)
        except NoParameters:
            await self._alone(Alone.NO_PARAMETERS)
        finally:
            # Cancelling closes the connection, which makes prefill abort the request.
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------------ legs

    async def _prefill_leg(self, place: Booking, transfer_id: str | None) -> RemoteOffer:
        asked, options, prefill = self._asked, self._options, place.server
        leg_id = self._leg_id()
        late = LegFailed(RouterFailure.TIME, prefill.name, "prefill did not answer in time", status=504)
        with self._leg(prefill, asked.prompt_tokens, place.rank) as guard:
            guard.limit(options.prefill_timeout_seconds, late)
            body = prefill_body(asked, transfer_id, leg_id)
            headers = self._headers_of(leg_id, place.rank)
            reply = await prefill.connections.ask("POST", asked.route.value, headers, body)
            try:
                said = await reply.body(MOST_PREFILL_ANSWER_BYTES)
            finally:
                reply.close()
            if place.rank is not None and reply.status == 400 and range_of(said, place.rank) is not None:
                reason = f"prefill was restarted, and no longer has data-parallel rank {place.rank}"
                raise LegFailed(RouterFailure.RESTARTED, prefill.name, reason)
            require_success(reply, said, prefill.name, has_own_key=bool(options.upstream_key))
            offer = read_offer(prefill.name, said)
        self._learn(place, offer)
        return offer

    async def _answer_leg(
        self, server: Instance, params: KvTransferParams | msgspec.Raw | None, beside: Beside | None = None
    ) -> None:
        """Run the leg whose response goes to the client."""
        asked = self._asked
        if server.role is Role.DECODE:
            self._record.decode = server.name
        leg_id = self._leg_id()
        with self._leg(server, asked.prompt_tokens + asked.max_tokens) as guard:
            if beside is not None:
                beside.watch(guard, self._out)
            body = decode_body(asked, params, leg_id)
            await relay(server, asked, self._headers_of(leg_id), body, self._out, guard, self._options, self._record)

    @contextmanager
    def _leg(self, server: Instance, tokens: int, rank: int | None = None) -> Iterator[Guard]:
        metrics, outcome, begun = self._fleet.metrics, "ok", time.perf_counter()
        try:
            with server.leg(tokens, rank) as guard:
                yield guard
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

    def _headers_of(self, leg_id: str, rank: int | None = None) -> list[tuple[bytes, bytes]]:
        headers = [(b"X-Request-Id", leg_id.encode()), *self._headers]
        return headers if rank is None else [*headers, (RANK_HEADER, b"%d" % rank)]

    def _leg_id(self) -> str:
        """Returns a new id for a leg. No two legs share one, so a server never confuses two legs."""
        self._legs += 1
        return f"{self._record.request_id}-leg{self._legs}"

    def _choose_decode(self) -> Instance:
        decode = self._fleet.choose(Role.DECODE, self._wanted, self._tried)
        if decode is None:
            raise _nobody(Role.DECODE)
        return decode.server

    def _may_go_alone(self, failure: LegFailed) -> bool:
        return self._options.decode_alone and self._asked.alone is None and failure.server == self._record.prefill


def _nobody(role: Role) -> Refusal:
    return Refusal(503, RouterFailure.NO_SERVER, f"No {role.value} server is up. Try again.", retry_after_seconds=2)
