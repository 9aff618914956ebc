# SPDX-License-Identifier: Apache-2.0
"""What is revoked: by changed weights, pauses, a shutdown, and hand-overs past their deadline (rules R4, R11, R12)."""

from __future__ import annotations

import pytest
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Request, Status
from support.flow_pair import DIRECTIONS, PROMPT, PULL, PUSH, Pair, is_computed, is_right, kind

from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.handshake import Tensors, Weights
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY

OTHER = Weights(Tensors("1" * 32, "8" * 32), files="9" * 32)


def pair_of(mode: TransferMode, **decode: object) -> Pair:
    return Pair(mode, None, kind(caches_prefixes=False, **decode))


@DIRECTIONS
def test_other_weights_are_refused_until_both_have_the_same(mode: TransferMode) -> None:
    """Findings A1 and A3 (c): a rolling update, in either order."""
    pair = pair_of(mode)
    pair.acquaint()
    for first, second in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
        weights = OTHER if first is pair.prefill else Weights(Tensors("1" * 32, "7" * 32))
        first.update(weights)
        assert is_computed(pair.hand_over()), "one is older than the other"
        second.update(weights)
        assert is_right(pair.hand_over()), "they serve again"
    assert set(pair.causes()) <= {"refused", "restarted", "revoked"}


@DIRECTIONS
@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_was_kept_when_weights_change_is_used_by_nobody(mode: TransferMode, who: str, is_known: bool) -> None:
    """Also where both have the new weights when decode comes: what prefill keeps was computed with the old ones."""
    pair = pair_of(mode)
    pair.acquaint()
    offered = pair.offered()
    engines = (pair.prefill, pair.decode) if who == "prefill" else (pair.decode, pair.prefill)
    for engine in engines:
        engine.update(OTHER, is_known=is_known)
        pair.settle()
    assert not pair.prefill.requests, "its blocks are free at once"
    found = pair.ask_decode(offered)
    pair.settle()
    assert is_computed(found) and set(pair.causes()) <= {"restarted", "lease"}
    assert is_right(pair.hand_over())


class Busy:
    """A pair whose engines are never idle: on each runs a request that begins as all others, and does not end."""

    def __init__(self, mode: TransferMode, adapter: int = 0) -> None:
        self.pair = Pair(mode, kind(num_blocks=1000), kind(num_blocks=1000))
        self.adapter = adapter
        self.pair.acquaint()
        self.engines = (self.pair.prefill, self.pair.decode)
        self.busy = [self.pair.ask_decode(None, engine=one, max_tokens=3000, adapter=adapter) for one in self.engines]
        self.go_on(*self.busy, until=Status.RUNNING)

    def offered(self, prompt: tuple[int, ...]) -> Request:
        return self.pair.ask_prefill(prompt, adapter=self.adapter)

    def go_on(self, *requests: Request, until: Status = Status.STOPPED) -> None:
        """Nothing is slow, and nothing waits for the engines to have done their work."""
        for _ in range(60):
            if all(one.status is until for one in requests):
                return
            self.pair.wire.deliver_all()
            self.pair.round()
        raise AssertionError(f"found {requests}; expected {until}")

    def hand_over(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """Returns how many tokens prefill had cached, and how many decode has fetched. All others it had cached."""
        upstream = self.offered(prompt)
        self.go_on(upstream)
        assert upstream.answer is not None, "it is offered"
        found = self.pair.ask_decode(upstream.answer, prompt, max_tokens=1, adapter=self.adapter)
        self.go_on(found)
        assert all(one.status is Status.RUNNING for one in self.busy)
        return upstream.answer[CACHED_TOKENS_KEY], found.num_external

    def end(self) -> None:
        for engine, one in zip(self.engines, self.busy, strict=True):
            engine.abort(one)
        self.pair.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)

    def change(self) -> None:
        for engine in self.engines:
            if self.adapter:
                engine.load_again(self.adapter)
            else:
                engine.update(OTHER)


def tail(number: int) -> tuple[int, ...]:
    """A prompt of 18 tokens, of which all prompts have the first 12."""
    return (*PROMPT[:12], *(100 * number + token for token in PROMPT[12:]))


@pytest.fixture(params=[0, 1], ids=["weights", "adapter"])
def adapter(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@DIRECTIONS
def test_engines_that_are_never_idle_serve_a_shared_prompt_again_at_once(mode: TransferMode, adapter: int) -> None:
    """Once it is computed anew, and from then on it is begun with blocks of the new content, on both sides."""
    busy = Busy(mode, adapter)
    assert busy.hand_over(tail(1)) == (12, 6)
    busy.change()
    assert [busy.hand_over(tail(2)), busy.hand_over(tail(3))] == [(0, 18), (12, 6)]
    assert not busy.pair.causes()
    busy.end()


@DIRECTIONS
def test_nobody_begins_with_what_was_computed_in_part_before_the_change(mode: TransferMode, adapter: int) -> None:
    """A conversation goes on from the answer to a request that was running then, and went on."""
    busy = Busy(mode, adapter)
    busy.change()
    asked = busy.busy[1]
    before = asked.num_computed
    busy.pair.round(40)
    assert asked.num_computed > before + 20
    turns = tuple(asked.sequence.tokens[: asked.num_computed])
    # What of it is shared would be on the way of each of these: a prefix, a later part, and all of it.
    assert busy.hand_over(turns[:40]) == (0, 40)
    assert busy.hand_over((*turns, 7))[0] == 40
    assert not busy.pair.causes()
    busy.end()


@DIRECTIONS
def test_a_request_that_was_computed_in_part_before_the_change_is_not_offered(mode: TransferMode, adapter: int) -> None:
    """Also if it is preempted meanwhile: what it has told the workers is of both."""
    for is_preempted in (False, True):
        busy = Busy(mode, adapter)
        prefill = busy.pair.prefill
        long = tuple(range(200, 260))
        upstream = busy.offered(long)
        busy.go_on(upstream, until=Status.RUNNING)
        busy.change()
        if is_preempted:
            prefill.running.remove(upstream)
            prefill.preempt(upstream)
        busy.go_on(upstream)
        assert upstream.answer is None
        assert busy.hand_over(long) == (0, 60), "nobody begins with it"
        busy.end()


@DIRECTIONS
@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
def test_what_is_under_way_when_weights_change_is_used_by_nobody(mode: TransferMode, who: str) -> None:
    """At every point of a hand-over; its blocks are held until nothing is in flight."""
    for rounds in range(12):
        pair = Pair(mode, kind(budget=6), kind(caches_prefixes=False))
        pair.acquaint()
        upstream = pair.ask_prefill()
        if mode is PULL:
            pair.settle()
            found = pair.ask_decode(upstream.answer)
        else:
            found = pair.ask_decode(pair.meet())
        pair.round(rounds)
        was_under_way = found.status is Status.REMOTE
        for engine in (pair.prefill, pair.decode):
            if who in ("both", "prefill" if engine is pair.prefill else "decode"):
                engine.update(OTHER)
        pair.settle()
        if was_under_way and who != "prefill":
            assert is_computed(found), rounds
        elif was_under_way:
            # What decode has of the old weights is right for it: it has not been updated.
            assert is_computed(found) or is_right(found), rounds
        pair.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS + 20)


def test_two_halves_of_one_prompt_with_other_weights_are_never_one(mode: TransferMode = PUSH) -> None:
    """Finding A3 (a): chunk 1 is streamed, all are preempted, weights change, chunk 2 is computed with the new ones."""
    pair = Pair(mode, kind(budget=6), kind(caches_prefixes=False))
    pair.acquaint()
    found = pair.ask_decode(pair.meet())
    upstream = pair.ask_prefill()
    for _ in range(30):
        pair.round()
        if pair.written_bytes():
            break
    assert pair.written_bytes() and upstream.status is not Status.STOPPED
    pair.prefill.handover.revocations.paused(grace_seconds=0.0, clears=True)
    pair.prefill.running.remove(upstream)
    pair.prefill.preempt(upstream)
    pair.prefill.update(OTHER)
    pair.decode.update(OTHER)
    pair.prefill.handover.revocations.resumed()
    pair.settle()
    assert upstream.status is Status.STOPPED and upstream.answer is None, "it is offered to nobody"
    assert is_computed(found)


def test_an_adapter_that_is_loaded_anew_takes_back_what_was_computed_with_it_and_nothing_else() -> None:
    """Its name and its number stay, its content does not (load_inplace)."""
    pair = pair_of(PULL)
    asked = [pair.prefill.add(Request(f"p{at}", PROMPT, {"do_remote_decode": True}, adapter=at)) for at in range(3)]
    pair.settle()
    assert set(pair.prefill.requests) == {"p0", "p1", "p2"}
    pair.prefill.handover.revocations.adapters_changed(1)
    pair.settle()
    assert set(pair.prefill.requests) == {"p0", "p2"} and all(one.answer for one in asked)
    pair.prefill.handover.revocations.adapters_changed()
    pair.settle()
    assert set(pair.prefill.requests) == {"p0"}, "of any adapter, where nobody says of which"
    pair.nothing_is_left(LEASE_SECONDS + 10)


def test_a_rank_that_has_ended_says_so_once() -> None:
    """Else what one rank says twice would stand for another one, which still reads the blocks."""
    pair = Pair(PUSH, kind(tp_size=2, caches_prefixes=False), kind(tp_size=2, caches_prefixes=False))
    pair.acquaint()
    upstream = pair.ask_prefill()
    pair.settle()
    pair.ask_decode(upstream.answer)
    pair.round(10)
    for posted in [one for one in pair.transfers if one.sender.endswith("/0")]:
        pair.wire.deliver(posted)
    pair.round(6)
    assert pair.transfers and upstream.request_id in pair.prefill.requests
    pair.prefill.handover.revocations.paused(grace_seconds=0.0, clears=True)
    pair.round(6)
    assert pair.transfers and pair.prefill.handover.revocations.has_blocks, "rank 1 is still writing"
    # A pause waits for all requests, and decode may have vanished: vLLM has it no more, and its blocks are nobody's.
    assert upstream.request_id not in pair.prefill.requests and pair.prefill.handover.offering.kept.keeps(
        upstream.request_id
    )
    pair.settle()


@DIRECTIONS
@pytest.mark.parametrize("change", ["weights", "cache"])
def test_what_has_come_and_is_not_used_yet_is_revoked_as_well(mode: TransferMode, change: str) -> None:
    """A paused or a full engine lets it go on much later: with other weights, or into a cache that was cleared."""
    pair = Pair(mode, None, kind())
    pair.acquaint()
    found = pair.ask_decode(pair.offered())
    pair.until(found, Status.REMOTE)
    decode = pair.decode
    decode.admits = False
    for _ in range(40):
        for posted in list(pair.transfers):
            pair.wire.deliver(posted)
        pair.round()
    assert found.request_id in decode.finished_receiving and decode.handover.revocations.has_blocks
    if change == "weights":
        for engine in (pair.prefill, decode):
            engine.update(OTHER)
    else:
        decode.handover.revocations.clear()
        pair.round(4)
        assert not decode.handover.revocations.has_blocks
    decode.admits = True
    pair.settle()
    assert is_computed(found) and pair.causes() == {"revoked": 1}


# -------------------------------------------------------------------------------------------------------------- pauses


@DIRECTIONS
def test_a_paused_prefill_keeps_nothing_though_decode_renews(mode: TransferMode) -> None:
    """Finding B2: decode is paused with a queued hand-over, and its transfer thread renews on."""
    pair = Pair(mode, None, kind(num_blocks=7, caches_prefixes=False))
    offered = pair.offered()
    pair.decode.pool.free.clear()
    found = pair.ask_decode(offered)
    pair.pass_time(1.0)
    pair.prefill.handover.revocations.paused(grace_seconds=0.0, clears=True)
    pair.settle()
    assert not pair.prefill.requests and not pair.prefill.handover.revocations.quiet_in_seconds
    pair.prefill.handover.revocations.resumed()
    pair.decode.pool.free.update(dict.fromkeys(range(1, 7)))
    pair.settle()
    assert is_computed(found) and pair.causes() == {"lease": 1}
    assert is_right(pair.hand_over()), "it offers again"
    pair.nothing_is_left(LEASE_SECONDS + 10)


def test_an_engine_that_waits_for_its_last_requests_leaves_decode_a_moment_for_them() -> None:
    """/pause?mode=wait: what ends is handed over if decode comes at once, and else keeps nobody."""
    pair = pair_of(PULL)
    pair.acquaint()
    first, second = pair.ask_prefill(), pair.ask_prefill(name="cmpl-2-0")
    pair.prefill.handover.revocations.paused(grace_seconds=1.0, clears=True)
    pair.settle()
    found = pair.ask_decode(first.answer)
    pair.settle()
    assert is_right(found)
    assert second.request_id in pair.prefill.requests
    pair.pass_time(1.5)
    assert not pair.prefill.requests


def test_a_prefill_that_shuts_down_tells_who_is_registered() -> None:
    """llm-d#927: without a message decode would wait until the connection is lost or its deadline has passed."""
    pair = Pair(PUSH, kind(budget=6), kind(caches_prefixes=False))
    pair.acquaint()
    found = pair.ask_decode(pair.meet())
    pair.settle()
    assert found.status is Status.REMOTE
    for worker in pair.prefill.workers:
        worker.registry.close("prefill is shut down")
    pair.settle()
    assert is_computed(found) and pair.causes() == {"revoked": 1}


# --------------------------------------------------------------------------------------------------------------- media


@pytest.mark.parametrize("recomputes", [True, False])
@DIRECTIONS
def test_a_decode_leg_without_its_media_is_an_error_also_where_it_would_recompute(
    mode: TransferMode, recomputes: bool
) -> None:
    """Finding A10: placeholders are never computed."""
    pair = pair_of(mode, recomputes=recomputes)
    tokens = (*PROMPT[:-1], PROMPT[-1] + 1)
    found = pair.decode.add(Request("d1", tokens, pair.offered(num_media=1), num_media=0))
    pair.settle()
    assert found.status is Status.ERROR and pair.causes() == {"media": 1}
    alone = pair.decode.add(Request("d2", tokens, {**pair.meet(), "transfer_id": "nobody"}, lacks_media=True))
    pair.settle()
    if mode is PUSH:
        pair.pass_time(TIMEOUT_SECONDS + 10)
    assert alone.status is Status.ERROR
    same = pair.decode.add(Request("d3", PROMPT, pair.offered(num_media=1), lacks_media=True))
    pair.settle()
    assert same.status is Status.STOPPED, "where the digests are equal, what looks like a placeholder is text"
