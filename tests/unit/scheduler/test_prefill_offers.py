# SPDX-License-Identifier: Apache-2.0
"""scheduler/prefill_offers.py: what prefill tells its workers in each step, and when a request's blocks are free."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.engine_fakes import (
    LEASE,
    OWN,
    OWN_START,
    PATIENCE,
    TOKENS,
    Asked,
    Pool,
    grown,
    of_prefill,
    prompt,
    terms,
    with_states,
)
from support.parameter_ids import plain_id

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.scheduler.kept_offers import ASK_AGAIN_SECONDS, KeptOffers
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.terms import ANY_ADAPTER
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest, digest_of
from kvcached_nixl.wire.params import prefill_params
from kvcached_nixl.wire.step import BlockIds, Finish, OfferUpdate, Preempt, Revocation, Revoke, Step, Stop, WakeAddress

P1 = PrefillRequestId("p1")
BLOCKS = ([7, 3, 9],)
DIGEST = digest_of(prompt(), TOKENS)


def revoked_in(step: Step) -> dict[PrefillRequestId, Revocation]:
    return {one.request_id: one.revocation for one in step.of(Revoke)}


class Prefill:
    """`PrefillOffers` and `KeptOffers` with blocks; each call is told to the next step."""

    def __init__(self, pool: Pool | None = None, **changed: Any) -> None:
        self.holds = Holds()
        self.clock = ManualClock()
        self.pool = Pool() if pool is None else pool
        self.failures = Failures()
        timelines = Timelines(self.clock, None, is_push=False)
        settings = terms(**changed)
        self.kept = KeptOffers(settings, self.clock, self.holds)
        self.offering = PrefillOffers(OWN, OWN_START, settings, self.kept, self.holds, self.failures, timelines)
        self.step = Step("h", 1, WakeAddress("h", 1, "k"), "s")

    def take(self) -> Step:
        step, self.step = self.step, Step("h", 1, WakeAddress("h", 1, "k"), "s")
        return step

    def arrive(self, request: Asked) -> Asked:
        self.offering.arrived(request, self.step)
        return request

    def compute(self, tokens: int, block_ids: BlockIds = (), *, replaces: bool = False, name: str = "p1") -> Step:
        """One step, which computes up to so many tokens."""
        self.offering.scheduled([Progress(name, block_ids, replaces, tokens)], self.pool, self.step)
        return self.take()

    def finish(self, request: Asked, is_whole: bool = True, block_ids: BlockIds = BLOCKS) -> tuple[bool, Any]:
        return self.offering.finished(request, is_whole, block_ids, self.pool, self.step)

    def preempt(self) -> int:
        self.pool.of["p1"] = ["a block"]
        self.offering.preempted("p1", self.pool, self.step)
        (preempted,) = self.step.of(Preempt)
        return preempted.hold


def manifest(groups: tuple[BlockRange, ...] = (BlockRange(0, (7, 3, 9)),)) -> Manifest:
    return Manifest(PROTOCOL, OWN_START, "p1", DIGEST, TOKENS, (4,) * len(groups), (1, 1), groups, LEASE, 0)


def offered(
    block_ids: BlockIds, ready_tokens: int, made: Manifest | None = None, *, is_held: bool = False
) -> OfferUpdate:
    return OfferUpdate(P1, "transfer:t", DIGEST, TOKENS, grown(*block_ids), ready_tokens, made, is_held)


held = partial(offered, is_held=True)
"""What may be read before its request has ended."""


# ------------------------------------------------------------------------------------------------------------ its steps


def test_a_pull_is_offered_once_when_its_prompt_is_computed() -> None:
    """With everything that decode compares, and the blocks of the prompt only."""
    prefill = Prefill()
    request = prefill.arrive(of_prefill())
    assert not prefill.take().has_news
    assert prefill.compute(4, ([7],), replaces=True).of(OfferUpdate) == []
    assert prefill.compute(8, ([3],)).of(OfferUpdate) == []
    assert prefill.compute(12, ([9, 4],)).of(OfferUpdate) == [offered(([7, 3, 9],), TOKENS, manifest())]
    assert request.digested == 1
    # The tokens that prefill generates are none of decode's business (A1 a).
    assert prefill.compute(13, ([8],)).of(OfferUpdate) == []
    assert prefill.compute(16).of(OfferUpdate) == []
    keep, params = prefill.finish(request, block_ids=([7, 3, 9, 4, 8],))
    assert keep
    assert params == prefill_params(OWN, manifest(), transfer_id="t", transfer_mode=TransferMode.PULL, cached_tokens=0)
    assert prefill.take().of(Finish) == [Finish(P1)]


def test_each_group_is_offered_in_blocks_of_its_own_size() -> None:
    prefill = Prefill(Pool(0, 0), block_sizes=(8, 4))
    request = prefill.arrive(of_prefill())
    (last,) = prefill.compute(TOKENS, ([7, 3], [1, 2, 5]), replaces=True).of(OfferUpdate)
    assert last.manifest is not None and last.manifest.block_sizes == (8, 4)
    assert last.manifest.groups == (BlockRange(0, (7, 3)), BlockRange(0, (1, 2, 5)))
    assert prefill.finish(request, block_ids=([7, 3], [1, 2, 5]))[0]


def test_a_window_keeps_what_the_next_token_looks_at() -> None:
    """Decode computes the last token again, so its window begins one token earlier."""
    prefill = Prefill(Pool(0, 5), drops_blocks=True, block_sizes=(4, 4))
    request = prefill.arrive(of_prefill())
    (last,) = prefill.compute(TOKENS, ([7, 3, 9], [0, 2, 5]), replaces=True).of(OfferUpdate)
    assert last.manifest is not None
    assert last.manifest.groups == (BlockRange(0, (7, 3, 9)), BlockRange(4, (2, 5)))
    assert prefill.pool.asked_for == [TOKENS - 1]
    assert prefill.finish(request, block_ids=([7, 3, 9], [0, 2, 5]))[0]


def test_what_a_manifest_names_is_known() -> None:
    """Such a request keeps every block until it is asked for its end."""
    prefill = Prefill()
    request = prefill.arrive(of_prefill())
    prefill.compute(8, ([7, 3],), replaces=True)
    assert not prefill.offering.is_named("p1") and not prefill.offering.is_named("p2")
    prefill.compute(TOKENS, ([9],))
    assert prefill.offering.is_named("p1")
    prefill.finish(request)
    assert not prefill.offering.is_named("p1")


@pytest.mark.parametrize(
    "more",
    [{"transfer_id": 7}, {"transfer_id": "\ud800"}, {"do_remote_decode": "yes"}, {"remote_request_id": []}],
    ids=plain_id,
)
def test_a_request_that_cannot_be_offered_is_computed_even_so(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Warned of and counted once; vLLM frees its blocks as ever."""
    prefill = Prefill(mode=TransferMode.PUSH)
    request = prefill.arrive(of_prefill(**more))
    assert prefill.failures.counts == {FailureCause.PARAMETERS: 1}
    assert not prefill.compute(TOKENS, BLOCKS, replaces=True).of(OfferUpdate)
    assert not prefill.offering.is_read("p1")
    assert prefill.finish(request) == (False, None)
    assert not prefill.take().has_news
    assert caplog.text.count("KV is not offered: cause=parameters prefill_request=p1: ") == 1
    assert next(iter(more)) in caplog.text


# ----------------------------------------------------------------------------------------------------------- preemption


def test_a_preempted_push_starts_over_in_other_blocks_and_the_old_ones_are_held() -> None:
    """Also one whose prompt was computed."""
    prefill = Prefill(mode=TransferMode.PUSH)
    request = prefill.arrive(of_prefill())
    prefill.take()
    prefill.compute(TOKENS, BLOCKS, replaces=True)
    assert prefill.offering.is_read("p1")
    hold = prefill.preempt()
    assert not prefill.offering.is_read("p1"), "it has no blocks to lose"
    assert prefill.take().of(Preempt) == [Preempt(P1, hold)]
    assert prefill.holds.num_blocks == 1
    # Not streamed any more: held again, its blocks would make no room the second time either.
    assert prefill.compute(4, ([5],), replaces=True).of(OfferUpdate) == []
    assert prefill.compute(TOKENS, ([6, 2],)).of(OfferUpdate) == [] and not prefill.offering.is_read("p1")
    again = manifest((BlockRange(0, (5, 6, 2)),))
    assert prefill.finish(request, block_ids=([5, 6, 2],))[0]
    assert prefill.take().of(OfferUpdate) == [offered(([5, 6, 2],), TOKENS, again)]
    prefill.offering.drained([hold + 1], prefill.pool)
    assert prefill.pool.freed == []
    prefill.offering.drained([hold], prefill.pool)
    assert prefill.pool.freed == ["a block"]
    prefill.offering.drained([hold], prefill.pool)
    assert prefill.holds.num_blocks == 0


# ----------------------------------------------------------------------------------------------------------- revocation


def kept_and_running(mode: TransferMode = TransferMode.PULL) -> Prefill:
    """p1 and p2 have ended, the latter with adapter 3; p3 and p4 are computed, the latter with adapter 3."""
    prefill = Prefill(mode=mode)
    for name, adapter in (("p1", 0), ("p2", 3), ("p3", 0), ("p4", 3)):
        request = of_prefill(name)
        request.adapter = adapter
        prefill.arrive(request)
        prefill.compute(TOKENS if name < "p3" else 4, BLOCKS if name < "p3" else ([7],), replaces=True, name=name)
        if name < "p3":
            assert prefill.finish(request)[0]
            prefill.take()
    return prefill


def test_what_is_kept_now_is_counted_with_the_age_of_the_oldest() -> None:
    prefill = Prefill()
    assert prefill.kept.kept_now() == (0, 0, 0.0)
    prefill = kept_and_running()
    prefill.clock.advance(2.0)
    assert prefill.kept.kept_now() == (2, 2 * len(BLOCKS[0]), 2.0)


@pytest.mark.parametrize(
    ("chosen", "revoked"),
    [
        ({}, ["p1", "p2", "p3", "p4"]),
        ({"adapter": 3}, ["p2", "p4"]),
        ({"adapter": ANY_ADAPTER}, ["p2", "p4"]),
        ({"adapter": 4}, []),
    ],
    ids=str,
)
def test_what_is_revoked_is_what_was_meant(chosen: dict[str, Any], revoked: list[str]) -> None:
    """And once: neither a second revocation of it nor its end is told again."""
    prefill = kept_and_running()
    prefill.offering.revoke(RevocationCause.WEIGHTS, "the weights were changed", prefill.step, **chosen)
    assert revoked_in(prefill.take()) == dict.fromkeys(
        revoked, Revocation(RevocationCause.WEIGHTS, "the weights were changed")
    )
    prefill.offering.revoke(RevocationCause.WEIGHTS, "again", prefill.step, **chosen)
    assert revoked_in(prefill.take()) == {}
    assert prefill.kept.num_kept == 2, "until every rank has reported it"


def test_an_offer_that_is_revoked_before_the_workers_know_it_is_not_told() -> None:
    prefill = Prefill()
    request = prefill.arrive(of_prefill())
    prefill.offering.scheduled([Progress("p1", BLOCKS, True, TOKENS)], prefill.pool, prefill.step)
    assert prefill.finish(request)[0] and len(prefill.step.of(OfferUpdate)) == 1
    prefill.offering.revoke(RevocationCause.WEIGHTS, "the weights were changed", prefill.step)
    step = prefill.take()
    assert (step.of(OfferUpdate), list(revoked_in(step))) == ([], [P1])


def three_kept(**changed: Any) -> Prefill:
    """Three offers of three blocks each, of which the workers know."""
    prefill = Prefill(**changed)
    for name in ("p1", "p2", "p3"):
        request = prefill.arrive(of_prefill(name))
        prefill.compute(TOKENS, BLOCKS, replaces=True, name=name)
        assert prefill.finish(request)[0]
    prefill.take()
    prefill.clock.advance(PATIENCE)
    return prefill


@pytest.mark.parametrize(
    ("num_blocks", "given_way"), [(0, []), (1, ["p1"]), (3, ["p1"]), (4, ["p1", "p2"]), (99, ["p1", "p2", "p3"])]
)
def test_the_oldest_offers_give_way_and_only_as_many_as_are_needed(num_blocks: int, given_way: list[str]) -> None:
    prefill = three_kept()
    for _ in range(2):
        prefill.kept.give_way(RevocationCause.BLOCKS, num_blocks, prefill.step)
    step = prefill.take()
    assert list(revoked_in(step)) == given_way
    assert all(one.cause is RevocationCause.BLOCKS and one.cause.is_of_memory for one in revoked_in(step).values())
    assert prefill.kept.num_kept == 3, "their blocks are free when the workers have reported it"


def test_an_offer_that_is_fetched_after_all_does_not_count_for_long() -> None:
    prefill = three_kept()
    prefill.kept.give_way(RevocationCause.LIMIT, 3, prefill.step)
    prefill.clock.advance(ASK_AGAIN_SECONDS - 0.1)
    prefill.kept.give_way(RevocationCause.LIMIT, 3, prefill.step)
    assert list(revoked_in(prefill.take())) == ["p1"]
    prefill.clock.advance(0.1)
    prefill.kept.give_way(RevocationCause.LIMIT, 6, prefill.step)
    revoked = revoked_in(prefill.take())
    assert list(revoked) == ["p2", "p3"] and all(one.spares_wanted for one in revoked.values()), "others give way first"
    assert len({one.number for one in revoked.values()} - {0}) == 2
    prefill.clock.advance(ASK_AGAIN_SECONDS)
    prefill.kept.give_way(RevocationCause.BLOCKS, 9, prefill.step, keeps_wanted=True)
    assert not revoked_in(prefill.take()), "decode waits for all of them"
    prefill.kept.give_way(RevocationCause.LIMIT, 9, prefill.step)
    revoked = revoked_in(prefill.take())
    assert list(revoked) == ["p1", "p2", "p3"] and not any(one.spares_wanted for one in revoked.values())


def test_what_workers_spare_is_told_at_once_and_others_give_way() -> None:
    """Not one a second: with many that decode waits for, nobody would ever get memory."""
    prefill = three_kept()
    asked = []
    for name in ("p1", "p2", "p3"):
        prefill.kept.give_way(RevocationCause.LIMIT, 3, prefill.step)
        (found,) = revoked_in(prefill.take()).items()
        asked.append(found[0])
        assert found == (name, found[1]) and found[1].spares_wanted
        assert prefill.kept.spared([found[1].number]) and not prefill.kept.spared([found[1].number, 99])
    prefill.kept.give_way(RevocationCause.LIMIT, 3, prefill.step)
    (found,) = revoked_in(prefill.take()).items()
    assert found[0] == "p1" and not found[1].spares_wanted
    assert prefill.kept.ended(["p2"], prefill.pool) == (1, 0), "decode has fetched what was spared"
    assert prefill.kept.ended(["p1"], prefill.pool) == (0, 3)


@pytest.mark.parametrize(
    ("cause", "num_owed"), [(RevocationCause.BLOCKS, 0), (RevocationCause.LIMIT, 3), (RevocationCause.NEIGHBOUR, 3)]
)
def test_what_has_ended_is_told_apart(cause: RevocationCause, num_owed: int) -> None:
    """Blocks that were freed for others must not stay in the prefix cache."""
    prefill = three_kept()
    prefill.kept.give_way(cause, 3, prefill.step)
    prefill.offering.revoke(RevocationCause.CLEARED, "", prefill.step)
    assert prefill.kept.ended(["p1", "unknown"], prefill.pool) == (0, num_owed)
    assert prefill.kept.ended(["p1"], prefill.pool) == (0, 0)
    assert three_kept().kept.ended(["p2"], prefill.pool) == (1, 0)


def test_an_adapter_that_was_replaced_while_its_request_was_computed_makes_no_manifest() -> None:
    """The digest names the adapter's content, so decode would compare it with the other one."""
    prefill = Prefill()
    request = of_prefill()
    request.adapter = 3
    prefill.arrive(request)
    request.tokens = prompt(1)
    assert prefill.compute(TOKENS, BLOCKS, replaces=True).of(OfferUpdate) == []
    assert prefill.finish(request) == (False, None)
    assert prefill.failures.counts == {FailureCause.REVOKED: 1}


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


def test_blocks_that_cannot_be_those_of_the_prompt_make_no_manifest(caplog: pytest.LogCaptureFixture) -> None:
    """A null block twice in a group that is said to keep all."""
    prefill = Prefill()
    request = prefill.arrive(of_prefill())
    assert prefill.compute(TOKENS, ([0, 0, 9],), replaces=True).of(OfferUpdate) == []
    assert prefill.finish(request, block_ids=([0, 0, 9],)) == (False, None)
    assert "cause=range prefill_request=p1: " in caplog.text and "no block twice" in caplog.text
    assert prefill.failures.counts == {FailureCause.RANGE: 1}


@pytest.mark.parametrize("pushes", [True, False])
def test_a_session_is_not_offered(pushes: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Row A9: its blocks go on being filled with what comes later, which no digest of its first input has."""
    prefill = Prefill(mode=TransferMode.PUSH if pushes else TransferMode.PULL)
    request = of_prefill()
    request.is_session = True
    prefill.arrive(request)
    assert not prefill.compute(TOKENS, BLOCKS).of(OfferUpdate)
    assert prefill.finish(request) == (False, None)
    assert prefill.failures.counts == {FailureCause.PARAMETERS: 1}
    for word in ("a streaming session", "expected a complete prompt", "computed as without", "Send them with"):
        assert word in caplog.text


def test_offers_of_other_requests_stay_in_the_step_that_revokes_one() -> None:
    """Workers are told of the others' tokens, and not of those that were revoked."""
    prefill = Prefill(mode=TransferMode.PUSH)
    for name, adapter in (("p1", 0), ("p2", 3)):
        request = of_prefill(name)
        request.adapter = adapter
        prefill.arrive(request)
        progress = [Progress(name, ([7],), True, 4)]
        prefill.offering.scheduled(progress, prefill.pool, prefill.step)
    prefill.offering.revoke(RevocationCause.WEIGHTS, "an adapter was loaded again", prefill.step, adapter=3)
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


def test_of_a_state_the_block_behind_the_last_token_is_offered() -> None:
    """A block of one token, as peers count; before that, there is none."""
    prefill = Prefill(Pool(0, 0), groups=with_states(), mode=TransferMode.PUSH)
    request = prefill.arrive(of_prefill())
    assert prefill.take().of(OfferUpdate) == [offered((), 0)]
    (early,) = prefill.compute(8, ([7, 3], [5]), replaces=True).of(OfferUpdate)
    assert early.groups == (BlockRange(0, (7, 3)), BlockRange(TOKENS - 1, ())) and early.is_held
    (last,) = prefill.compute(TOKENS, ([9], [6])).of(OfferUpdate)
    assert last.groups == (BlockRange(0, (7, 3, 9)), BlockRange(TOKENS - 1, (6,)))
    assert last.manifest is not None and last.manifest.block_sizes == (4, 1)
    assert last.manifest.groups == last.groups
    # Look-ahead blocks of speculative decoding follow.
    assert prefill.finish(request, block_ids=([7, 3, 9], [5, 6, 8]))[0]


@pytest.mark.parametrize("blocks", [([7, 3, 9], [5, 8]), ([7, 3, 9], [5, 0]), ([7, 3, 9], [6])])
def test_a_state_whose_block_is_gone_is_not_offered(blocks: BlockIds) -> None:
    prefill = Prefill(Pool(0, 0), groups=with_states())
    request = prefill.arrive(of_prefill())
    prefill.compute(TOKENS, ([7, 3, 9], [5, 6]), replaces=True)
    assert prefill.finish(request, block_ids=blocks) == (False, None)
    assert prefill.failures.counts == {FailureCause.RANGE: 1}


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
