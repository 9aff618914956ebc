# SPDX-License-Identifier: Apache-2.0
"""The legs of one request: what prefill and decode are sent, and what their responses say. Once per request.

A leg knows one server and nothing of other attempts. `request_flow` decides which legs there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from kvcached_nixl.proxy.account import Share
from kvcached_nixl.proxy.asked import Asked
from kvcached_nixl.proxy.client import Response
from kvcached_nixl.proxy.failure import Answered, ClientLeft, LegFailed, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Booking, Instance, Leg, Role
from kvcached_nixl.proxy.leg_body import decode_body, one_token_body
from kvcached_nixl.proxy.offer import Beside, RemoteOffer, read_offer
from kvcached_nixl.proxy.policy import Wanted
from kvcached_nixl.proxy.rank_count import ask_rank_count
from kvcached_nixl.proxy.ranks import RANK_HEADER, range_of
from kvcached_nixl.proxy.record import Record
from kvcached_nixl.proxy.relay import Relay, require_success
from kvcached_nixl.proxy.tracing import NOT_TRACED, Part
from kvcached_nixl.wire.params import KvTransferParams

__all__ = ["Legs"]

logger = logging.getLogger("kvcached_nixl.proxy")

MOST_PREFILL_ANSWER_BYTES = 8 << 20
GIVE_BACK_SECONDS = 2.0


class Legs:
    """See the module.

    Args:
        headers: for each leg, without its X-Request-Id.
        share: of the router's memory.

    Attributes:
        on_first: called when the client has the first piece.
        first_at_seconds: ``time.monotonic`` then; None before.
        prefilled_at_seconds: ``time.monotonic`` of prefill's last response; None before.
    """

    def __init__(
        self,
        fleet: Fleet,
        asked: Asked,
        wanted: Wanted,
        headers: dict[str, str],
        out: Response,
        record: Record,
        share: Share,
    ) -> None:
        self._fleet = fleet
        self._options = fleet.options
        self._asked = asked
        self._wanted = wanted
        self._headers = headers
        self._out = out
        self._record = record
        self._relay = Relay(fleet.upstream, asked, out, share, fleet.options)
        self._count = 0
        self._answering: Part = NOT_TRACED
        self.on_first: Callable[[], None] = lambda: None
        self.first_at_seconds: float | None = None
        self.prefilled_at_seconds: float | None = None
        record.on_first = self._first

    async def count_ranks(self, prefill: Instance) -> None:
        """Ask a prefill server how many data-parallel ranks it has (`rank_count`)."""
        with self._record.trace.part("ranks", server=prefill.name) as part:
            headers = self._headers_of(self._leg_id(), part)
            await ask_rank_count(prefill, self._asked, headers, self._fleet.upstream, self._options)

    async def prefill(self, place: Booking, transfer_id: str | None) -> RemoteOffer:
        """Have prefill compute the prompt.

        Args:
            transfer_id: in push, of this hand-over; None in pull.

        Raises:
            LegFailed: it failed, or its response cannot be used.
            Answered: the server answered 4xx.
        """
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
        self.prefilled_at_seconds = time.monotonic()
        self._fleet.costs.prefilled(self.prefilled_at_seconds - begun_seconds, ahead)
        self._learn(place, offer)
        return offer

    async def answer(
        self,
        server: Instance,
        params: KvTransferParams | msgspec.Raw | None,
        beside: Beside | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Run the leg whose response goes to the client.

        Args:
            params: kv_transfer_params for it; None if it computes the prompt itself.
            beside: in push, watches prefill's leg.
            cached_tokens: of the prompt, in prefill's prefix cache; None if that is not known.

        Raises:
            LegFailed: it failed; the client may have received a part of the response.
            Answered: the server answered 4xx.
        """
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

    async def give_back(self, decode: Instance, params: KvTransferParams | msgspec.Raw, answered: Answered) -> None:
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

    def _first(self) -> None:
        self.first_at_seconds = time.monotonic()
        self._answering.follow("answer")
        self.on_first()

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
        self._count += 1
        return f"{self._record.request_id}-leg{self._count}"
