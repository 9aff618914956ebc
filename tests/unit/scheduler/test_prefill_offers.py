# SPDX-License-Identifier: Apache-2.0
"""scheduler/prefill_offers.py: what prefill tells its workers in each step, and when a request's blocks are free."""

from __future__ import annotations

from typing import Any

import pytest
from support.clocks import ManualClock
from support.engine_fakes import PATIENCE, TOKENS, Asked, Pool, context, of_prefill, with_states

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.context import Progress
from kvcached_nixl.scheduler.kept_offers import ASK_AGAIN_SECONDS
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.step import BlockIds, OfferUpdate, Revocation, Revoke, Step, Stop

P1 = PrefillRequestId("p1")
BLOCKS = ([7, 3, 9],)


def revoked_in(step: Step) -> dict[PrefillRequestId, Revocation]:
    return {one.request_id: one.revocation for one in step.of(Revoke)}


class Prefill:
    """`PrefillOffers` and `KeptOffers` with blocks; each call is told to the next step."""

    def __init__(self, pool: Pool | None = None, **changed: Any) -> None:
        self.clock = ManualClock()
        self.pool = Pool() if pool is None else pool
        self.engine = context(self.pool, self.clock, **changed)
        self.holds, self.failures = self.engine.holds, self.engine.failures
        self.offering = PrefillOffers(self.engine)
        self.kept = self.offering.kept

    def take(self) -> Step:
        return self.engine.take_step()

    def arrive(self, request: Asked) -> Asked:
        self.offering.arrived(request)
        return request

    def compute(self, tokens: int, block_ids: BlockIds = (), *, replaces: bool = False, name: str = "p1") -> Step:
        """One step, which computes up to so many tokens."""
        self.offering.scheduled([Progress(name, block_ids, replaces, tokens)])
        return self.take()

    def finish(self, request: Asked, is_whole: bool = True, block_ids: BlockIds = BLOCKS) -> tuple[bool, Any]:
        return self.offering.finished(request, is_whole, block_ids)


# ----------------------------------------------------------------------------------------------------------- revocation


def three_kept(**changed: Any) -> Prefill:
    """Three offers of three blocks each, of which the workers know."""
    prefill = Prefill(**changed)
    for name in ("p1", "p2", "p3"):
        request = prefill.arrive(of_prefill(name))
        prefill.compute(TOKENS, BLOCKS, replaces=True, name=name)
        assert prefill.finish(request)[0]
    prefill.take()
    prefill.clock.advance(PATIENCE / 2)
    prefill.kept.give_way(RevocationCause.LIMIT, 9)
    assert not prefill.take().has_news, "decode may fetch them at any moment"
    prefill.clock.advance(PATIENCE / 2)
    return prefill


def test_an_offer_that_is_fetched_after_all_does_not_count_for_long() -> None:
    prefill = three_kept()
    prefill.kept.give_way(RevocationCause.LIMIT, 3)
    prefill.clock.advance(ASK_AGAIN_SECONDS - 0.1)
    prefill.kept.give_way(RevocationCause.LIMIT, 3)
    assert list(revoked_in(prefill.take())) == ["p1"]
    prefill.clock.advance(0.1)
    prefill.kept.give_way(RevocationCause.LIMIT, 6)
    revoked = revoked_in(prefill.take())
    assert list(revoked) == ["p2", "p3"] and all(one.spares_wanted for one in revoked.values()), "others give way first"
    assert len({one.number for one in revoked.values()} - {0}) == 2
    prefill.clock.advance(ASK_AGAIN_SECONDS)
    prefill.kept.give_way(RevocationCause.BLOCKS, 9, keeps_wanted=True)
    assert not revoked_in(prefill.take()), "decode waits for all of them"
    prefill.kept.give_way(RevocationCause.LIMIT, 9)
    revoked = revoked_in(prefill.take())
    assert list(revoked) == ["p1", "p2", "p3"] and not any(one.spares_wanted for one in revoked.values())


def test_offers_give_way_only_if_none_was_fetched_for_a_while() -> None:
    """One that ends without that, because its lease does, says nothing. Nor does a fetch, to one that waits in vain."""
    prefill = three_kept()
    prefill.kept.fetched()
    prefill.kept.ended(["p1"])
    prefill.kept.give_way(RevocationCause.LIMIT, 3, heeds_fetches=False)
    assert list(revoked_in(prefill.take())) == ["p2"]
    prefill.clock.advance(PATIENCE - 0.1)
    prefill.kept.ended(["p2"])
    prefill.kept.give_way(RevocationCause.LIMIT, 3)
    assert not prefill.take().has_news
    prefill.clock.advance(0.1)
    prefill.kept.give_way(RevocationCause.LIMIT, 3)
    assert list(revoked_in(prefill.take())) == ["p3"]


def test_a_preempted_prompt_has_no_blocks() -> None:
    """Nor when that happens again: it is not read while it is computed then."""
    prefill = Prefill(mode=TransferMode.PUSH)
    prefill.arrive(of_prefill("p1"))
    assert prefill.offering.are_awaited and not prefill.offering.computing
    for _ in range(2):
        prefill.compute(4, BLOCKS, replaces=True)
        assert prefill.offering.computing == {P1} and not prefill.offering.are_awaited
        prefill.offering.preempted("p1")
        assert prefill.offering.are_awaited and not prefill.offering.computing


@pytest.mark.parametrize(
    ("cause", "num_owed"), [(RevocationCause.BLOCKS, 0), (RevocationCause.LIMIT, 3), (RevocationCause.NEIGHBOUR, 3)]
)
def test_what_has_ended_is_told_apart(cause: RevocationCause, num_owed: int) -> None:
    """Blocks that were freed for others must not stay in the prefix cache."""
    prefill = three_kept()
    prefill.kept.give_way(cause, 3)
    prefill.offering.revoke(RevocationCause.CLEARED, "")
    assert prefill.kept.ended(["p1", "unknown"]) == num_owed
    assert prefill.kept.ended(["p1"]) == 0
    assert three_kept().kept.ended(["p2"]) == 0


def test_what_a_still_decode_is_sent_is_held_and_gives_no_blocks_back() -> None:
    prefill = three_kept()
    kept, prefill.pool.of = prefill.kept, {"p1": [7, 3, 9]}
    kept.stuck([P1, PrefillRequestId("unknown")])
    assert kept.let_go() == {"p1"} and prefill.holds.num_blocks == 3, "others may end for want of blocks"
    kept.stuck([P1])
    assert kept.let_go() == set()
    kept.give_way(RevocationCause.LIMIT, 3)
    assert list(revoked_in(prefill.take())) == ["p2"]
    kept.ended(["p1"])
    assert prefill.pool.freed == [7, 3, 9] and not prefill.holds.num_blocks


# ------------------------------------------------------------------------------------------------------------------ end


@pytest.mark.parametrize("now", [([7, 3],), ([7, 3, 8],), ([7, 9, 3],), ([],), (), ([7, 3, 9], [1, 2, 3])], ids=str)
def test_a_request_that_has_lost_its_blocks_is_not_handed_over(now: BlockIds, caplog: pytest.LogCaptureFixture) -> None:
    """What its manifest names is not what it ends with: preempted behind our back, or a window has moved on."""
    prefill = Prefill()
    request = prefill.arrive(of_prefill())
    prefill.compute(TOKENS, BLOCKS, replaces=True)
    assert prefill.finish(request, block_ids=now) == (False, None)
    assert prefill.failures.counts == {FailureCause.RANGE: 1}
    assert [one.request_id for one in prefill.take().of(Stop)] == [P1]
    assert "no longer has the blocks of its prompt" in caplog.text


def test_offers_of_other_requests_stay_in_the_step_that_revokes_one() -> None:
    prefill = Prefill(mode=TransferMode.PUSH)
    for name, adapter in (("p1", 0), ("p2", 3)):
        request = of_prefill(name)
        request.adapter = adapter
        prefill.arrive(request)
        progress = [Progress(name, ([7],), True, 4)]
        prefill.offering.scheduled(progress)
    prefill.offering.revoke(RevocationCause.WEIGHTS, "an adapter was loaded again", adapter=3)
    step = prefill.take()
    assert list(revoked_in(step)) == ["p2"]
    assert [(one.request_id, one.ready_tokens) for one in step.of(OfferUpdate) if one.ready_tokens] == [("p1", 4)]


def test_the_blocks_of_a_prompt_of_one_token_are_read_too() -> None:
    prefill = Prefill(mode=TransferMode.PUSH)
    prefill.arrive(of_prefill(tokens=[5]))
    assert not prefill.offering.is_read("p1")
    prefill.compute(1, ([7],), replaces=True)
    assert prefill.offering.is_read("p1")


# -------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("mode", TransferMode)
def test_an_offer_is_withdrawn_before_a_later_token_overwrites_its_states(mode: TransferMode) -> None:
    """Whatever makes vLLM compute one: in a pull, decode may be reading already."""
    prefill = Prefill(Pool(0, 0), groups=with_states(), mode=mode)
    request = prefill.arrive(of_prefill())
    prefill.compute(TOKENS, ([7, 3, 9], [5, 6]), replaces=True)
    step = prefill.compute(TOKENS + 1)
    assert list(revoked_in(step)) == [P1] and "overwritten" in revoked_in(step)[P1].reason
    assert step.of(OfferUpdate) == []
    assert prefill.finish(request, block_ids=([7, 3, 9], [5, 6]))[1] is None


def test_a_prompt_that_stays_whole_is_not_offered() -> None:
    """Its states are those behind its last token, which decode computes again."""
    request = of_prefill()
    request.whole_because = "a prompt of one token"
    prefill = Prefill(Pool(0, 0), groups=with_states())
    prefill.arrive(request)
    assert prefill.compute(TOKENS, ([7, 3, 9], [5, 6]), replaces=True).of(OfferUpdate) == []
    assert prefill.finish(request, block_ids=([7, 3, 9], [5, 6])) == (False, None)
    assert prefill.failures.counts == {FailureCause.RANGE: 1}
    without = Prefill()
    without.arrive(request)
    assert len(without.compute(TOKENS, BLOCKS, replaces=True).of(OfferUpdate)) == 1, (
        "it matters where there are states only"
    )
