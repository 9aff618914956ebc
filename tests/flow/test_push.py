# SPDX-License-Identifier: Apache-2.0
"""A push from request to peer, in one process, with every fault that the network and the engines can have."""

from __future__ import annotations

import pytest
from chaos import Chaos
from push_pair import LEASE_SECONDS, TIMEOUT_SECONDS, Pair

from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.wire.push import Peer, Registration, Withdrawal, decode, encode
from kvcached_nixl.worker import push_attempt

CHAOS_RUNS = 400
TOKENS = 18


@pytest.fixture
def pair() -> Pair:
    return Pair()


def matched(pair: Pair) -> PrefillRequestId:
    """A request that both sides know of, of which nothing is computed yet."""
    pair.decode.register("d", 1, TOKENS, "t")
    request = pair.prefill.start("p", 1, TOKENS, "t")
    pair.settle()
    return request


@pytest.mark.parametrize("cached_tokens", [0, 8])
@pytest.mark.parametrize("order", ["decode first", "prefill first", "between two steps"])
def test_both_orders_deliver_the_same_bytes(pair: Pair, order: str, cached_tokens: int) -> None:
    """Decode registers before, during or after prefill computes; only what it lacks is written."""
    if order == "decode first":
        pair.decode.register("d", 1, TOKENS, "t", cached_tokens)
        pair.settle()
    request = pair.prefill.start("p", 1, TOKENS, "t")
    pair.prefill.compute(request, 10)
    pair.settle()
    if order == "between two steps":
        pair.decode.register("d", 1, TOKENS, "t", cached_tokens)
        pair.settle()
    pair.prefill.compute(request, 10)
    pair.settle()
    if order == "prefill first":
        pair.decode.register("d", 1, TOKENS, "t", cached_tokens)
        pair.settle()
    assert pair.decode.outcome.received == ["d"]
    written = sum(int(one.local[:, 1].sum()) for one in pair.prefill.transport.posted if one.local is not None)
    assert written == 2 * 2 * (20 - cached_tokens), "whole blocks of the missing tokens, once each"
    pair.assert_nothing_is_left()


def test_a_step_s_blocks_travel_while_the_next_computes(pair: Pair) -> None:
    """After the last step only its own blocks remain to be posted."""
    pair.decode.register("d", 1, 32, "t")
    request = pair.prefill.start("p", 1, 32, "t")
    for step in range(4):
        pair.settle()
        assert len(pair.prefill.transport.posted) == step
        pair.prefill.compute(request, 8)
    pair.settle()
    assert [int(one.local[:, 1].sum()) for one in pair.prefill.transport.posted if one.local is not None] == [32] * 4
    assert pair.decode.outcome.received == ["d"]


def test_a_full_prefix_hit_frees_prefill_at_once(pair: Pair) -> None:
    request = pair.prefill.start("p", 1, TOKENS, "t")
    pair.decode.transport.add_peer(b"prefill")
    pair.decode.receiver.decline("t", ["prefill"])
    pair.settle()
    pair.prefill.compute(request, TOKENS)
    pair.settle()
    pair.assert_nothing_is_left()


def test_prefill_that_is_aborted_fails_the_request_and_waits_for_its_writes(pair: Pair) -> None:
    """Its blocks are read until the WRITE has ended, and free after."""
    request = matched(pair)
    pair.prefill.compute(request, 12)
    pair.step()
    pair.prefill.abort(request)
    pair.step()
    assert request in pair.prefill.requests, "a WRITE still reads its blocks"
    pair.settle()
    assert list(pair.decode.outcome.failed) == ["d"]
    assert "aborted" in pair.decode.outcome.failed[DecodeRequestId("d")]
    pair.assert_nothing_is_left()


def test_decode_that_is_aborted_keeps_its_blocks_until_prefill_has_stopped(pair: Pair) -> None:
    """vllm#48633, C1: a WRITE in flight would land in blocks of another request."""
    request = matched(pair)
    pair.prefill.compute(request, 12)
    pair.step()
    (write,) = pair.network.pending
    pair.decode.abort("d")
    for operation in [one for one in pair.network.pending if one is not write]:
        pair.network.deliver(operation)
    pair.step()
    assert pair.decode.requests, "its blocks are still being written"
    pair.settle()
    assert not pair.decode.requests
    pair.prefill.compute(request, TOKENS)
    pair.settle()
    assert len(pair.prefill.transport.posted) == 1, "nothing is written after the withdrawal"
    pair.assert_nothing_is_left()


def test_a_withdrawal_that_overtakes_its_registration_wins(pair: Pair) -> None:
    """The late registration is not taken in: its blocks belong to others by then."""
    request = pair.prefill.start("p", 1, TOKENS, "t")
    pair.prefill.compute(request, TOKENS)
    pair.decode.register("d", 1, TOKENS, "t")
    (registration,) = pair.network.pending
    pair.decode.abort("d")
    withdrawal = pair.network.pending[-1]
    pair.network.deliver(withdrawal)
    pair.step()
    pair.network.deliver(pair.network.pending[-1])
    pair.step()
    assert list(pair.decode.outcome.failed) == ["d"]
    pair.network.deliver(registration)
    pair.let_time_pass()
    assert pair.prefill.transport.posted == []
    pair.assert_nothing_is_left()


def test_a_preempted_request_keeps_its_old_blocks_while_they_are_read_and_goes_on_in_new_ones(pair: Pair) -> None:
    request = matched(pair)
    pair.prefill.compute(request, 12)
    pair.step()
    pair.prefill.preempt(request)
    pair.step()
    assert pair.prefill.held
    pair.settle()
    assert not pair.prefill.held
    for _ in range(3):
        pair.prefill.compute(request, 8)
        pair.settle()
    assert pair.decode.outcome.received == ["d"]
    pair.assert_nothing_is_left()


def test_a_write_that_fails_fails_the_request(pair: Pair) -> None:
    request = matched(pair)
    pair.prefill.compute(request, TOKENS)
    pair.step()
    pair.network.fail(pair.network.pending[0], moved=0.5)
    pair.settle()
    assert "a WRITE failed" in pair.decode.outcome.failed[DecodeRequestId("d")]
    pair.assert_nothing_is_left()


def test_a_write_that_cannot_be_posted_fails_the_request(pair: Pair) -> None:
    """vllm#50754: prefill tells decode, instead of leaving it to wait."""
    request = matched(pair)
    pair.prefill.transport.refuse_writes = True
    pair.prefill.compute(request, TOKENS)
    pair.settle()
    assert "not posted" in pair.decode.outcome.failed[DecodeRequestId("d")]
    pair.assert_nothing_is_left()


def test_a_registration_that_nobody_answers_fails_after_its_timeout(pair: Pair) -> None:
    pair.decode.register("d", 1, TOKENS, "t")
    pair.network.drop(pair.network.pending[0])
    pair.clock.advance(TIMEOUT_SECONDS - 1)
    pair.settle()
    assert pair.decode.requests
    pair.clock.advance(1)
    pair.settle()
    assert "60 s" in pair.decode.outcome.failed[DecodeRequestId("d")]
    pair.assert_nothing_is_left()


def test_a_lease_that_is_renewed_lasts_and_one_that_is_not_is_not_sheltered_by_it(pair: Pair) -> None:
    renewed, left = (pair.prefill.start(name, 1, TOKENS, name) for name in ("p1", "p2"))
    for request in (renewed, left):
        pair.prefill.compute(request, TOKENS)
    for _ in range(10):
        pair.clock.advance(LEASE_SECONDS / 3)
        pair.prefill.sender.renew([renewed])
        pair.settle()
    assert renewed in pair.prefill.requests and left not in pair.prefill.requests
    assert pair.prefill.sender.take_expired() == [left]
    pair.decode.register("d", 1, TOKENS, "p1")
    pair.settle()
    assert pair.decode.outcome.received == [DecodeRequestId("d")]
    pair.assert_nothing_is_left()


def test_blocks_that_decode_never_asks_for_are_free_after_the_lease(pair: Pair) -> None:
    request = pair.prefill.start("p", 1, TOKENS, "t")
    pair.prefill.compute(request, TOKENS)
    pair.clock.advance(LEASE_SECONDS - 1)
    pair.settle()
    assert request in pair.prefill.requests
    pair.clock.advance(1)
    pair.settle()
    pair.assert_nothing_is_left()
    pair.decode.register("late", 1, TOKENS, "t")
    pair.settle()
    assert "let go" in pair.decode.outcome.failed[DecodeRequestId("late")]
    assert pair.prefill.transport.posted == []


@pytest.mark.parametrize("moment", ["registered", "computing", "writing", "written"])
def test_prefill_that_dies_fails_the_request_within_the_timeout(pair: Pair, moment: str) -> None:
    """A WRITE that ended without its notification is not trusted either."""
    pair.decode.register("d", 1, TOKENS, "t")
    request = pair.prefill.start("p", 1, TOKENS, "t")
    if moment != "registered":
        pair.settle()
    if moment == "computing":
        pair.prefill.compute(request, 8)
        pair.settle()
    if moment in ("writing", "written"):
        pair.prefill.compute(request, TOKENS)
        pair.step()
    if moment == "written":
        pair.network.deliver(pair.network.pending[0])
    pair.network.kill("prefill")
    pair.let_time_pass()
    assert list(pair.decode.outcome.failed) == ["d"]
    pair.assert_nothing_is_left()


def test_decode_that_dies_leaves_nothing_on_prefill(pair: Pair) -> None:
    request = matched(pair)
    pair.prefill.compute(request, 8)
    pair.step()
    pair.network.kill("decode")
    pair.prefill.compute(request, TOKENS)
    pair.let_time_pass()
    pair.assert_nothing_is_left()


def test_two_requests_of_prefill_under_one_name_are_refused(pair: Pair) -> None:
    """Which of them decode means is not known, and neither is guessed."""
    pair.decode.register("d", 1, TOKENS, "t")
    first, second = (pair.prefill.start(name, prompt, TOKENS, "t") for name, prompt in (("p1", 1), ("p2", 2)))
    pair.prefill.compute(first, 8)
    pair.prefill.compute(second, TOKENS)
    pair.settle()
    pair.prefill.compute(first, TOKENS)
    pair.settle()
    assert "two requests" in pair.decode.outcome.failed[DecodeRequestId("d")]
    pair.assert_nothing_is_left()


def test_two_registrations_of_one_rank_under_one_name_are_refused(pair: Pair) -> None:
    for name in ("d1", "d2"):
        pair.decode.register(name, 1, TOKENS, "t")
    request = pair.prefill.start("p", 1, TOKENS, "t")
    pair.settle()
    pair.prefill.compute(request, TOKENS)
    pair.settle()
    assert sorted(pair.decode.outcome.failed) == ["d1", "d2"]
    assert pair.prefill.transport.posted == []
    pair.clock.advance(LEASE_SECONDS)
    pair.settle()
    pair.assert_nothing_is_left()


def test_prefill_that_computes_less_than_decode_wants_fails_the_request(pair: Pair) -> None:
    """The blocks hold fewer tokens than decode would take from them."""
    pair.decode.register("d", 1, TOKENS, "t")
    request = pair.prefill.start("p", 1, TOKENS - 2, "t")
    pair.prefill.compute(request, TOKENS)
    pair.settle()
    assert "computed 16 of 18 tokens" in pair.decode.outcome.failed[DecodeRequestId("d")]
    pair.assert_nothing_is_left()


def test_another_peer_cannot_withdraw(pair: Pair) -> None:
    """Only the rank that registered may."""
    pair.decode.register("d", 1, TOKENS, "t")
    request = pair.prefill.start("p", 1, TOKENS, "t")
    stranger = pair.network.agent("stranger")
    stranger.add_peer(b"prefill")
    registration = decode(pair.network.pending[0].notification)
    assert isinstance(registration, Registration)
    pair.settle()
    stranger.send("prefill", encode(Withdrawal("t", registration.attempt, registration.decode)))
    pair.settle()
    assert pair.prefill.sender.dropped == {"withdrawal by another peer": 1}
    pair.prefill.compute(request, TOKENS)
    pair.settle()
    assert pair.decode.outcome.received == ["d"]


def test_a_request_preempted_again_keeps_the_blocks_that_are_being_read(pair: Pair) -> None:
    pair.decode.register("d", 1, 24, "t")
    request = pair.prefill.start("p", 1, 24, "t")
    pair.settle()
    pair.prefill.preempt(request)
    pair.prefill.sender.tick()
    pair.prefill.compute(request, 12)
    pair.prefill.sender.tick()
    pair.prefill.preempt(request)
    pair.step()
    assert list(pair.prefill.held) == [1]
    pair.settle()
    pair.prefill.compute(request, 24)
    pair.settle()
    assert pair.decode.outcome.received == ["d"]
    pair.assert_nothing_is_left()


def test_a_request_that_ended_before_it_was_computed_is_refused_to_decode(pair: Pair) -> None:
    """Whether decode has registered before or does so afterwards."""
    pair.decode.register("d1", 1, 24, "t1")
    pair.settle()
    pair.prefill.sender.refuse("t1", "aborted")
    pair.prefill.sender.refuse("t2", "aborted")
    pair.decode.register("d2", 1, 24, "t2")
    pair.settle()
    assert set(pair.decode.outcome.failed) == {"d1", "d2"}
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("known", [True, False], ids=["registered", "never registered"])
def test_a_withdrawal_while_prefill_computes_lets_prefill_go_at_its_end(pair: Pair, known: bool) -> None:
    """Decode will not come again; the lease need not end first."""
    request = pair.prefill.start("p", 1, 24, "t")
    pair.prefill.compute(request, 12)
    pair.settle()
    if known:
        pair.decode.register("d", 1, 24, "t")
        pair.settle()
        pair.decode.abort("d")
    else:
        there = Peer(EngineId("d"), "127.0.0.1", 1, 1, 0)
        pair.prefill.sender.handle("d", Withdrawal("t", 7, there))
    pair.settle()
    pair.prefill.compute(request, 24)
    pair.settle()
    pair.assert_nothing_is_left()


def test_a_name_may_be_used_again_when_its_request_was_served(pair: Pair) -> None:
    """Clients repeat ids, and decode may come first with the next request."""
    for turn in ("1", "2"):
        pair.decode.register(f"d{turn}", 1, 24, "t")
        pair.settle()
        request = pair.prefill.start(f"p{turn}", 1, 24, "t")
        pair.prefill.compute(request, 24)
        pair.settle()
    assert pair.decode.outcome.received == ["d1", "d2"]
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("limit", [1, 2])
def test_a_push_of_many_descriptors_is_cut_into_writes_of_few(
    pair: Pair, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None has more than the limit, few are under way at a time, and decode has everything when the last one is in."""
    monkeypatch.setattr(push_attempt, "DESCRIPTORS_PER_WRITE", limit)
    monkeypatch.setattr(push_attempt, "WRITES_IN_FLIGHT", 1)
    # One descriptor a plane, unless the blocks in between are somebody else's.
    pair.decode.register("d", 1, 24, "t")
    pair.settle()
    request = pair.prefill.start("p", 1, 24, "t")
    pair.prefill.compute(request, 24)
    pair.prefill.sender.tick()
    assert len(pair.prefill.transport.posted) == 1
    pair.settle()
    rows = [len(one.local) for one in pair.prefill.transport.posted if one.local is not None]
    assert max(rows) == limit
    assert sum(rows) == len(pair.prefill.pool.planes.bases)
    assert pair.decode.outcome.received == ["d"]
    pair.assert_nothing_is_left()


def test_a_request_preempted_between_its_writes_keeps_its_blocks_until_the_last(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits to be posted reads the earlier blocks too."""
    monkeypatch.setattr(push_attempt, "DESCRIPTORS_PER_WRITE", 1)
    monkeypatch.setattr(push_attempt, "WRITES_IN_FLIGHT", 1)
    pair.decode.register("d", 1, 24, "t")
    pair.settle()
    request = pair.prefill.start("p", 1, 24, "t")
    pair.prefill.compute(request, 12)
    pair.prefill.sender.tick()
    pair.prefill.preempt(request)
    pair.step()
    assert pair.prefill.held
    pair.settle()
    assert not pair.prefill.held
    pair.prefill.compute(request, 24)
    pair.settle()
    assert pair.decode.outcome.received == ["d"]
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("seed", range(CHAOS_RUNS))
def test_whatever_happens_no_byte_is_wrong_and_nothing_is_left(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, delay, doubling, reordering, failed WRITEs, aborts, preemptions and deaths, in any order.

    Each request of decode ends once: received with every byte right, or failed. Blocks that are free are never touched.
    """
    monkeypatch.setattr(push_attempt, "DESCRIPTORS_PER_WRITE", 1 if seed % 2 else 256)
    monkeypatch.setattr(push_attempt, "WRITES_IN_FLIGHT", 1 + seed % 3)
    chaos = Chaos(seed)
    for _ in range(chaos.dice.randint(5, 60)):
        chaos.happen()
    chaos.compute_the_rest()
    chaos.pair.let_time_pass()
    if chaos.pair.alive[1]:
        outcome = chaos.pair.decode.outcome
        assert {*outcome.received, *outcome.failed} == chaos.registered
    chaos.pair.assert_nothing_is_left()
