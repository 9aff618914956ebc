# SPDX-License-Identifier: Apache-2.0
"""scheduler/facade.py: prefill's and decode's half between vLLM's scheduler and the workers, in any order of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.engine_fakes import (
    ALLOCATION,
    BLOCK_SIZE,
    OWN,
    OWN_START,
    TIMEOUT,
    TOKENS,
    WAKE,
    Asked,
    Pool,
    Reads,
    at_once,
    grown,
    of_decode,
    of_prefill,
    prompt,
    reports,
    terms,
    with_states,
)
from support.internals import fetching_of, holds_of, leftovers, offering_of

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.scheduler.facade import SchedulerFacade
from kvcached_nixl.scheduler.giving_way import RING_TIMEOUTS
from kvcached_nixl.scheduler.starvation import STOOD_SECONDS
from kvcached_nixl.scheduler.terms import ANY_ADAPTER
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.headroom import BlockUsage, read_headroom
from kvcached_nixl.wire.step import (
    FAILING,
    FetchSpec,
    Finish,
    Mark,
    OfferUpdate,
    Preempt,
    Revoke,
    Step,
    Stop,
    Withdraw,
    failed_mark,
    finished_attempt_id,
    idle_hold_id,
    mark,
)

BLOCKS = ([7, 3, 9],)


class Engine:
    def __init__(self, **changed: Any) -> None:
        self.clock = ManualClock()
        self.pool = Pool()
        self.handover = SchedulerFacade(OWN, OWN_START, WAKE, terms(**changed), self.clock, Reads())
        self.handover.bind(self.pool)

    def passes(self, seconds: float) -> None:
        """Time passes in which the engine steps, as one does that can only wait; its next step comes now."""
        while seconds > 5:
            seconds -= 5
            self.clock.advance(5)
            assert not self.starved()
        self.clock.advance(seconds)

    def starved(self) -> set[str]:
        """Builds a step. Returns the requests that have to end afterwards."""
        self.handover.take_step([])
        return self.handover.take_ending()

    def waiting(self, name: str = "d1") -> int:
        """Adds a request of decode that waits for its KV. Returns its attempt."""
        request = of_decode(name)
        self.handover.arrived(request)
        self.pool.of[name] = [(name, 7), (name, 3), (name, 9)]
        self.handover.allocated(request, BLOCKS, self.handover.matched(request, 0)[0])
        (wanted,) = self.handover.take_step([]).of(FetchSpec)
        return wanted.attempt

    def sending(self, name: str = "p1", tokens: int = TOKENS) -> Asked:
        request = of_prefill(name)
        self.handover.arrived(request)
        self.pool.of[name] = [(name, 7)]
        self.handover.take_step([Progress(name, BLOCKS, True, tokens)])
        return request


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_step_is_handed_out_once_and_does_not_change_afterwards() -> None:
    """A step may wait in the executor's queue while the next one is built."""
    engine = Engine(mode=TransferMode.PUSH)
    engine.handover.arrived(of_prefill())
    first = engine.handover.take_step([Progress("p1", ([7],), True, 4)])
    told = list(first.of(OfferUpdate))
    second = engine.handover.take_step([Progress("p1", ([3],), False, 8)])
    assert first.of(OfferUpdate) == told and len(second.of(OfferUpdate)) == 1
    assert (first.of(OfferUpdate)[-1].groups, second.of(OfferUpdate)[0].groups) == (grown([7]), grown([7, 3]))
    assert engine.handover.take_step([]) == Step(OWN.host, OWN.port, WAKE, OWN_START)


@pytest.mark.parametrize("adapter", [None, 3, ANY_ADAPTER])
def test_an_idle_engine_steps_once_its_weights_have_changed(adapter: int | None, engine: Engine) -> None:
    """So that its workers are told; only the model's own weights are another incarnation."""
    engine.handover.revocations.weights_changed(adapter)
    assert engine.handover.pending
    step = engine.handover.take_step([])
    assert (step.incarnation == engine.handover.incarnation != OWN_START) is (adapter is None)
    assert len(step.incarnation) == 16 and not engine.handover.pending
    assert engine.handover.take_step([]).incarnation == step.incarnation


def with_adapters(engine: Engine) -> None:
    """d0 and d3 wait for their KV, and p0 and p3 are computed; each number is that of its adapter."""
    for name, adapter in (("d0", 0), ("d3", 3)):
        request = of_decode(name)
        request.adapter = adapter
        engine.handover.arrived(request)
        engine.handover.allocated(request, BLOCKS, engine.handover.matched(request, 0)[0])
    for name, adapter in (("p0", 0), ("p3", 3)):
        request = of_prefill(name)
        request.adapter = adapter
        engine.handover.arrived(request)
        engine.handover.take_step([Progress(name, ([7],), True, 4)])


@pytest.mark.parametrize(("adapter", "revoked"), [(None, "03"), (3, "3"), (4, ""), (ANY_ADAPTER, "3")], ids=str)
def test_what_changed_weights_have_computed_is_revoked_and_nothing_else(
    adapter: int | None, revoked: str, engine: Engine
) -> None:
    """On both sides: what prefill offers, and what decode waits for."""
    with_adapters(engine)
    engine.handover.revocations.weights_changed(adapter)
    assert {one.request_id for one in engine.handover.take_step([]).of(Revoke)} == {f"p{number}" for number in revoked}
    told = reports()
    engine.handover.collect(told)
    assert told.received == engine.handover.take_failed() == {f"d{number}" for number in revoked}
    assert engine.handover.num_waiting == 2 - len(revoked)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("pushes", [False, True])
def test_kv_of_an_adapter_that_was_replaced_while_decode_had_no_blocks_is_not_fetched(
    recomputes: bool, pushes: bool
) -> None:
    """Decode would go on from KV of the adapter of before with the one of now."""
    engine = Engine(recomputes=recomputes, mode=TransferMode.PUSH if pushes else TransferMode.PULL)
    request = at_once() if pushes else of_decode()
    request.adapter = 3
    engine.handover.arrived(request)
    missing, is_loaded = engine.handover.matched(request, 0)
    assert (missing, is_loaded) == (TOKENS, True), "and vLLM has no blocks for it"
    engine.handover.revocations.adapters_changed(3)
    # As of all that its digest covers, its adapter's content is another one.
    request.tokens = prompt(1)
    missing, is_loaded = engine.handover.matched(request, 0)
    if missing:
        engine.pool.of["d1"] = [("d1", 7), ("d1", 3), ("d1", 9)]
    engine.handover.allocated(request, BLOCKS, missing)
    step = engine.handover.take_step([])
    assert not step.of(FetchSpec)
    engine.handover.collect(told := reports())
    assert told.received == engine.handover.take_failed() == ({"d1"} if missing else set())
    assert step.counts == {FailureCause.REVOKED: 1}


def test_without_a_number_any_adapter_may_have_changed(engine: Engine) -> None:
    with_adapters(engine)
    engine.handover.revocations.adapters_changed()
    assert {one.request_id for one in engine.handover.take_step([]).of(Revoke)} == {
        "p3"
    } and engine.handover.num_waiting == 1


def meant(engine: Engine) -> list[tuple[str, bool]]:
    """What was taken out of the prefix cache: of the model alone ("m"), and of which adapters; and of whom."""
    adapters = {"m": (0, ""), "3": (3, "three"), "4": (4, "four")}
    found = ["".join(key for key, one in adapters.items() if is_meant(*one)) for is_meant, _ in engine.pool.outdated]
    return [(keys, even_waiting) for keys, (_, even_waiting) in zip(found, engine.pool.outdated, strict=True)]


def test_only_under_its_name_an_adapter_begins_with_nothing_of_another_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do requests that wait with that one. They go on: their digests say which adapter they are computed with."""
    engine.sending()
    engine.handover.arrived(of_prefill("p2"))
    assert not engine.pool.outdated
    monkeypatch.setattr(engine.handover.read, "take_renamed", lambda: {"four"})
    engine.handover.arrived(of_prefill("p3"))
    assert meant(engine) == [("4", True)]
    assert not engine.handover.take_step([]).of(Revoke)


def test_a_request_under_another_one_s_id_is_told_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """An idle engine steps once more, so that the client is told."""
    engine.handover.refuse("p1", 3)
    assert engine.handover.pending
    assert engine.handover.take_refused() == [("p1", 3)]
    assert engine.handover.take_refused() == [] and not engine.handover.pending
    for word in ("under the id p1", "expected an unused id", "It fails", "Let vLLM make"):
        assert word in caplog.text


def test_what_is_kept_for_decode_is_not_freed_by_what_another_connector_has_loaded(engine: Engine) -> None:
    """Another connector reports a load as finished while decode may still read the blocks: vLLM is not told."""
    request = engine.sending()
    assert engine.handover.finished(request, True, BLOCKS)[0]
    engine.handover.kept("p1")
    told = reports(received={"p1", "another"})
    engine.handover.collect(told)
    assert told.received == {"another"}
    told = reports(sent={"p1"}, received={"p1"})
    engine.handover.collect(told)
    assert told.sent == {"p1"} and not engine.handover.num_kept


def test_a_request_that_is_aborted_while_another_connector_keeps_it_is_told_by_that_one(engine: Engine) -> None:
    """vLLM frees a request at the first report and fails at a second one, so only the other connector reports it."""
    attempt = engine.waiting()
    engine.handover.finished(of_decode(), False, BLOCKS)
    engine.handover.kept("d1")
    told = reports(received={finished_attempt_id(attempt)})
    engine.handover.collect(told)
    assert not told.received and not engine.pool.freed
    engine.handover.collect(reports(sent={"d1"}))
    assert len(engine.pool.freed) == 3


def test_a_request_that_nothing_frees_blocks_for_ends_in_words(engine: Engine) -> None:
    """With nothing in quarantine, and none that is a hand-over. Those behind it have their turn then."""
    engine.pool.stalled, engine.pool.starved = ["a", "b"], ("a", 7)
    assert not engine.starved()
    assert engine.handover.due_in_seconds == ALLOCATION
    engine.passes(ALLOCATION - 0.1)
    assert not engine.starved()
    engine.clock.advance(0.1)
    assert engine.handover.pending
    step = engine.handover.take_step([])
    assert step.is_stalled and engine.handover.pending
    assert step.counts == {FailureCause.NO_BLOCKS: 1} and not engine.handover.take_step([]).counts
    assert engine.handover.take_ending() == {"a"}
    engine.handover.finished(of_decode("a"), False, BLOCKS)
    (told,) = engine.handover.take_told().values()
    assert told.startswith("KV memory is short: cause=no_blocks request=a: found 90 free KV-cache blocks")
    assert "expected at least 97" in told and "Raise kvcached's limit" in told
    # It has waited as long. But vLLM may start it now.
    engine.pool.stalled, engine.pool.starved = ["b"], None
    assert not engine.starved() and not engine.handover.pending
    engine.pool.stalled = []
    assert not engine.starved() and not engine.handover.take_step([]).is_stalled
    assert engine.handover.due_in_seconds is None


def test_none_starves_while_something_frees_blocks(engine: Engine) -> None:
    attempt = engine.waiting("d2")
    engine.pool.stalled, engine.pool.starved = ["a"], ("a", 7)
    engine.clock.advance(TIMEOUT - 1)
    assert not engine.starved() and not engine.handover.take_step([]).is_stalled, "KV is under way"
    engine.handover.collect(reports(received={finished_attempt_id(attempt)}))
    engine.pool.of["another"] = [1]
    assert not engine.starved() and engine.handover.take_step([]).is_stalled
    engine.passes(ALLOCATION)
    assert not engine.starved(), "another connector may keep blocks, or a session that waits for input"
    del engine.pool.of["another"]
    assert not engine.starved(), "d2 has its KV, and waits for more blocks, too"
    engine.passes(ALLOCATION - 1)
    engine.pool.stalled = []
    assert not engine.starved(), "something runs"
    engine.pool.stalled = ["a"]
    assert not engine.starved()
    engine.passes(ALLOCATION)
    assert engine.starved() == {"a"}


def test_time_counts_while_nothing_comes_free_and_the_engine_steps(engine: Engine) -> None:
    engine.pool.stalled, engine.pool.starved = ["a"], ("a", 7)
    engine.passes(ALLOCATION)
    engine.pool.starved = ("a", 6)
    assert not engine.starved(), "a neighbour gives memory back, block by block"
    engine.passes(ALLOCATION - 1)
    engine.pool.starved = ("a", 7)
    assert not engine.starved()
    engine.clock.advance(STOOD_SECONDS + 1)
    assert not engine.starved(), "it was paused"
    engine.passes(ALLOCATION - 1)
    engine.pool.starved = ("a", 6)
    assert not engine.starved()
    engine.clock.advance(1)
    assert engine.starved() == {"a"}, "what comes and goes is no more than before"


def test_only_hand_overs_that_have_kept_others_waiting_all_the_time_are_given_up() -> None:
    """Those that came last first, and no more than have the blocks that are needed."""
    engine = Engine(mode=TransferMode.PUSH)
    attempts = [engine.waiting(name) for name in ("d1", "d2", "d3")]
    engine.handover.arrived(of_prefill())
    engine.pool.starved = ("p1", 4)
    engine.handover.relieve()
    engine.clock.advance(1)
    young = engine.waiting("d4")
    for _ in range(round(RING_TIMEOUTS * TIMEOUT)):
        engine.clock.advance(1)
        engine.handover.collect(reports(invalid={mark(Mark.KNOWN, one) for one in (*attempts, young)}))
    assert {one.attempt for one in engine.handover.take_step([]).of(Withdraw)} == set(attempts[1:])
    assert engine.handover.num_quarantined_blocks == 6


def test_ids_and_blocks_of_others_pass_untouched(engine: Engine) -> None:
    """Ids and blocks of vLLM and of other connectors are passed on; those of another of our connectors are removed."""
    attempt = engine.waiting()
    others = Engine()
    other_attempt = others.waiting("d2")
    told = reports({"s1", "p9"}, {"r1", finished_attempt_id(other_attempt)}, {4, 0})
    engine.handover.collect(told)
    # Ours of no meaning here are taken out: vLLM ends at an id that it does not know.
    assert (told.sent, told.received, told.invalid) == ({"s1", "p9"}, {"r1"}, {4, 0})
    told = reports(set(), {finished_attempt_id(attempt), "r2"}, {4})
    engine.handover.collect(told)
    assert (told.sent, told.received, told.invalid) == (set(), {"d1", "r2"}, {4})


# ------------------------------------------------------------------------------------------------------- when it sleeps


def test_a_workers_report_ends_the_sleep(engine: Engine) -> None:
    woken: list[int] = []
    engine.handover.side_channel.woken()
    assert engine.handover.pending, "even before anyone can be woken"
    engine.handover.take_step([])
    assert not engine.handover.pending
    engine.handover.bind_wake(lambda: woken.append(1))
    engine.handover.side_channel.woken()
    assert woken == [1] and engine.handover.pending


def test_whose_blocks_are_spared_until_its_end_is_told(engine: Engine) -> None:
    """vLLM would free blocks that have left a sliding window, while peers may still read or write them."""
    for one, is_dropping in ((Engine(drops_blocks=True), True), (engine, False)):
        one.waiting()
        one.sending()
        assert one.handover.spares("d1") is one.handover.spares("p1") is is_dropping
        assert not one.handover.spares("another")
        one.handover.finished(of_decode(), False, BLOCKS)
        assert not one.handover.spares("d1")


@pytest.mark.parametrize("zeroes_blocks", [True, False])
def test_blocks_that_a_fetch_fills_in_part_are_zeroed_first(zeroes_blocks: bool) -> None:
    """The last one of each attention group; vLLM does not zero what a connector loads. A state fills its block."""
    request = at_once()
    engine = Engine(groups=with_states(), zeroes_blocks=zeroes_blocks, mode=TransferMode.PUSH)
    engine.handover.arrived(request)
    engine.pool.of["d1"] = [("d1", 7)]
    engine.handover.allocated(request, ([7, 3, 9], [0, 5]), engine.handover.matched(request, 0)[0])
    step = engine.handover.take_step([])
    assert len(step.of(FetchSpec)) == 1
    assert engine.handover.filled_in_part(step) == ([9] if zeroes_blocks else [])
    assert engine.handover.keeps_states and not Engine().handover.keeps_states


def test_its_blocks_are_bound_once(engine: Engine) -> None:
    """A second call of `bind` changes nothing."""
    engine.handover.bind(Pool())
    attempt = engine.waiting()
    engine.handover.finished(of_decode(), False, BLOCKS)
    engine.handover.collect(reports(received={finished_attempt_id(attempt)}))
    assert len(engine.pool.freed) == 3


def test_the_side_channel_answers_anew_and_is_closed_with_it(engine: Engine) -> None:
    heard: list[Any] = []

    class Listener:
        def answer(self, answers: Any) -> None:
            heard.append(answers)

        def close(self) -> None:
            heard.append("closed")

    def listen(answers: Any) -> Listener:
        heard.append(answers)
        return Listener()

    engine.handover.close()
    engine.handover.side_channel.introduce({}, listen)
    engine.handover.side_channel.introduce({}, listen)
    assert heard == [{}, {}], "vLLM registers again after its engine has slept"
    engine.handover.close()
    engine.handover.close()
    assert heard == [{}, {}, "closed"]


def test_what_an_engine_says_of_its_memory_and_of_what_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.pool, "usage", lambda: BlockUsage(4, 2, 1 << 30, 7), raising=False)
    monkeypatch.setattr(engine.pool, "mapped_bytes", iter((100, 30, 50)).__next__, raising=False)
    for _ in range(2):
        engine.handover.side_channel.watch_memory()
    engine.waiting()
    engine.clock.advance(3.0)
    said = read_headroom(engine.handover.side_channel.headroom())
    assert (said.mapped_bytes, said.map_bytes, said.unmap_bytes) == (50, 120, 70)
    assert (said.waiting_fetches, said.oldest_fetch_seconds, said.oldest_offer_seconds) == (1, 3.0, 0.0)


def test_an_engine_says_nothing_before_its_first_step() -> None:
    unbound = SchedulerFacade(OWN, OWN_START, WAKE, terms(), ManualClock(), Reads())
    unbound.side_channel.watch_memory()
    assert unbound.side_channel.headroom() == b""


def test_no_block_of_the_prefix_cache_is_dropped_while_a_step_is_built(engine: Engine) -> None:
    """vLLM may copy blocks in that step that nothing but the prefix cache keeps (scheduler.py, copy on write)."""
    engine.pool.num_cached, engine.pool.wanted = 9, (4, True)
    for _ in range(8):
        engine.handover.take_step([])
        engine.clock.advance(1.0)
    assert engine.pool.num_cached == 9
    for _ in range(4):
        engine.handover.take_step([])
        engine.handover.collect(reports())
        engine.clock.advance(1.0)
    assert engine.pool.num_cached < 9


# ----------------------------------------------------------------------------------------------- anything, in any order


class AnyOrder(RuleBasedStateMachine):
    """vLLM's scheduler around a hand-over that pushes, and workers that answer in their own time.

    A block is free, with a request, or held. The workers may touch those they were told of until they say that they do
    not; none of these may be free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.handover = SchedulerFacade(OWN, OWN_START, WAKE, terms(mode=TransferMode.PUSH), self.clock, Reads())
        self.handover.bind(self)
        self.are_shared = self.is_producer = False
        self.number = 0
        self.starved: tuple[str, int] | None = None
        self.free = set(range(1, 61))
        self.of: dict[str, list[int]] = {}
        self.requests: dict[str, Asked] = {}
        self.computed: dict[str, int] = {}
        self.told: Counter[str] = Counter()
        self.ended: dict[str, list[int]] = {}
        # The workers' side: blocks that they may touch, and what they still have to say.
        self.attempts: dict[int, list[int]] = {}
        self.offers: dict[str, set[int]] = {}
        self.holds: dict[int, set[int]] = {}
        self.owed_done: set[str] = set()

    # what `SchedulerFacade` asks of vLLM

    blocks_over_limit = num_cached = num_running_blocks = 0
    has_reserve = is_paused = False
    stalled: list[str] = []
    starved = None

    def others_have_blocks(self, request_ids: Collection[str]) -> bool:
        return bool(self.of)

    def usage(self) -> BlockUsage:
        return BlockUsage(0, 0, 0, 0)

    def apply_limit(self) -> None:
        """It has none."""

    def tell_neighbours(self, needs_others: Callable[[str], bool]) -> bool:
        return False

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        return (0, False)

    def neighbours_served(self) -> None:
        """They say again what they still want."""

    def trim(self) -> int:
        return 0

    def drop_cached(self, num_blocks: int) -> int:
        return 0

    def take(self, request_id: str) -> list[int]:
        return self.of.pop(request_id, [])

    def give_back(self, blocks: list[int]) -> None:
        assert self.free.isdisjoint(blocks), "given back twice"
        self.free |= set(blocks)

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        return None

    def outdate(self, is_meant: Any, *, even_waiting: bool = False) -> set[str]:
        return set()

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        return (0,)

    # requests

    def new(self, tokens: int, kind: Any) -> Asked:
        self.number += 1
        request: Asked = kind(f"r{self.number}", prompt(self.number, tokens))
        return request

    def grow(self, name: str, tokens: int) -> list[int]:
        count = -(-tokens // BLOCK_SIZE) - len(self.of.setdefault(name, []))
        further = [self.free.pop() for _ in range(max(0, count))]
        self.of[name] += further
        return further

    @precondition(lambda self: len(self.free) > 12)
    @rule(tokens=st.integers(1, 18), starts=st.booleans())
    def prefill_arrives(self, tokens: int, starts: bool) -> None:
        request = self.new(tokens, of_prefill)
        self.handover.arrived(request)
        if starts:
            self.requests[request.request_id], self.computed[request.request_id] = request, 0
        else:
            assert self.handover.finished(request, False, ()) == (False, None)

    def some(self, data: st.DataObject) -> str:
        return str(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests and len(self.free) > 12)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def prefill_computes(self, data: st.DataObject, tokens: int) -> None:
        name = self.some(data)
        is_new = name not in self.of
        self.computed[name] += tokens
        further = self.grow(name, self.computed[name])
        self.take_step([Progress(name, (further,) if further else (), is_new, self.computed[name])])

    @precondition(lambda self: self.of.keys() & self.requests.keys())
    @rule(data=st.data())
    def prefill_is_preempted(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.of.keys() & self.requests.keys())))
        self.handover.preempted(name)
        self.give_back(self.of.pop(name, []))
        self.computed[name] = 0

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_aborted=st.booleans())
    def prefill_ends(self, data: st.DataObject, is_aborted: bool) -> None:
        name = self.some(data)
        request, computed = self.requests.pop(name), self.computed.pop(name)
        blocks = self.of.pop(name, [])
        is_whole = computed >= request.num_prompt_tokens and not is_aborted
        keep, params = self.handover.finished(request, is_whole, (blocks,))
        assert (params is not None) == is_whole
        assert keep == (is_whole or bool(self.offers.get(name, set()) & set(blocks)))
        if keep:
            self.ended[name] = blocks
        else:
            self.give_back(blocks)

    @precondition(lambda self: len(self.free) > 12)
    @rule(tokens=st.integers(1, 18), cached=st.integers(0, 3), is_sound=st.booleans(), starts=st.booleans())
    def decode_arrives(self, tokens: int, cached: int, is_sound: bool, starts: bool) -> None:
        request = self.new(tokens, at_once)
        assert request.params is not None
        if not is_sound:
            request.params["remote_port"] = 0
        self.handover.arrived(request)
        if not starts:
            assert self.handover.finished(request, False, ()) == (False, None)
            return
        name = request.request_id
        num_cached = min(cached * BLOCK_SIZE, tokens // BLOCK_SIZE * BLOCK_SIZE)
        missing, is_waiting = self.handover.matched(request, num_cached)
        assert is_waiting == (missing > 0) and missing == tokens - num_cached
        self.grow(name, tokens)
        self.handover.allocated(request, (list(self.of[name]),), missing)
        self.waiting[name] = request
        if not missing:
            self.told[name] += 1
            self.decode_ends(name)

    @property
    def waiting(self) -> dict[str, Asked]:
        return self.__dict__.setdefault("_waiting", {})

    def decode_ends(self, name: str) -> None:
        request = self.waiting.pop(name)
        assert self.handover.finished(request, True, (self.of.get(name, []),)) == (False, None)
        if self.told[name]:
            self.give_back(self.of.pop(name, []))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def decode_is_aborted(self, data: st.DataObject) -> None:
        """vLLM keeps the blocks of a request that waits until it is reported."""
        self.decode_ends(str(data.draw(st.sampled_from(sorted(self.waiting)))))

    @rule(seconds=st.sampled_from([1.0, 30.0, TIMEOUT]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(data=st.data(), num_blocks=st.sampled_from([0, 3, 60]))
    def memory_is_short(self, data: st.DataObject, num_blocks: int) -> None:
        """Whether the workers take back what gives way, or find that decode fetches it, makes no difference here."""
        self.starved = (data.draw(st.sampled_from(["another", *self.requests])), num_blocks) if num_blocks else None
        self.handover.relieve()

    # the workers

    def take_step(self, progress: list[Progress]) -> None:
        step = self.handover.take_step(progress)
        for wanted in step.of(FetchSpec):
            self.attempts[wanted.attempt] = list(wanted.groups[0].block_ids)
        for preempted in step.of(Preempt):
            self.holds[preempted.hold] = self.offers.get(preempted.request_id, set())
            self.offers[preempted.request_id] = set()
        for offered in step.of(OfferUpdate):
            self.offers.setdefault(offered.request_id, set()).update(*(group.block_ids for group in offered.groups))
        self.owed_done |= {one.request_id for one in step.of(Finish)}
        self.owed_done |= {one.request_id for one in step.of(Stop) if one.is_kept}
        assert self.handover.pending == (
            fetching_of(self.handover).failed.has_news or self.handover.due_in_seconds == 0
        )

    @rule()
    def a_step_without_requests(self) -> None:
        self.take_step([])

    @rule(data=st.data())
    def workers_report(self, data: st.DataObject) -> None:
        attempts = data.draw(st.sets(st.sampled_from(sorted(self.attempts)))) if self.attempts else set()
        failing = data.draw(st.sets(st.sampled_from(sorted(self.attempts)))) if self.attempts else set()
        holds = data.draw(st.sets(st.sampled_from(sorted(self.holds)))) if self.holds else set()
        done = data.draw(st.sets(st.sampled_from(sorted(self.owed_done)))) if self.owed_done else set()
        for attempt in attempts:
            del self.attempts[attempt]
        for hold in holds:
            del self.holds[hold]
        for name in done:
            self.offers.pop(name, None)
        self.owed_done -= done
        told = reports(
            {*done, *map(idle_hold_id, holds)},
            set(map(finished_attempt_id, attempts)),
            {failed_mark(attempt, FailureCause.LOST) for attempt in failing},
        )
        self.handover.collect(told)
        failed = self.handover.take_failed()
        assert failed <= told.received and bool(failed) == (FAILING in told.invalid)
        for name in told.sent:
            self.give_back(self.ended.pop(name, []))
        for name in told.received:
            self.told[name] += 1
            if name not in self.waiting or name in failed:
                self.waiting.pop(name, None)
                self.handover.finished(at_once(name), False, ())
                self.give_back(self.of.pop(name, []))

    @invariant()
    def nothing_that_may_be_touched_is_free(self) -> None:
        touched = set().union(*self.attempts.values(), *self.offers.values(), *self.holds.values())
        assert not touched & self.free

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        held = [block for one in holds_of(self.handover).values() for block in one]
        owned = [block for one in (*self.of.values(), *self.ended.values()) for block in one]
        everywhere = [*self.free, *held, *owned]
        assert sorted(everywhere) == list(range(1, 61))
        assert self.handover.num_quarantined_blocks <= len(held)
        assert max(self.told.values(), default=0) <= 1, "vLLM is told once of each request"

    def teardown(self) -> None:
        """When everything has ended, everything is free and nothing is kept."""
        for name in sorted(self.requests):
            request = self.requests[name]
            blocks = self.of.pop(name, [])
            if self.handover.finished(request, False, (blocks,))[0]:
                self.ended[name] = blocks
            else:
                self.give_back(blocks)
        for name in sorted(self.waiting):
            self.decode_ends(name)
        self.take_step([])
        told = reports(
            {*self.owed_done, *map(idle_hold_id, self.holds)}, set(map(finished_attempt_id, self.attempts)), set()
        )
        self.handover.collect(told)
        for name in told.sent:
            self.give_back(self.ended.pop(name))
        for name in told.received:
            self.give_back(self.of.pop(name, []))
        assert len(self.free) == 60
        fetching = fetching_of(self.handover)
        assert fetching.due_at_seconds is None
        assert not leftovers(fetching, fetching.attempts, fetching.failed)
        assert not leftovers(offering_of(self.handover), offering_of(self.handover).kept)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_prefill_answers_with_its_queue_looked_up_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    usages = [BlockUsage(4, 2, 1 << 30, 7), BlockUsage(4, 2, 1 << 30, 9)]
    monkeypatch.setattr(engine.pool, "usage", lambda: usages.pop(0))
    for number, seconds, expected in ((0, 0.0, 7), (1, 0.2, 7), (2, 0.1, 9)):
        engine.clock.advance(seconds)
        _, params = engine.handover.finished(engine.sending(f"p{number}"), True, BLOCKS)
        assert params is not None and params["kvcached_nixl_headroom"] == {"queued_tokens": expected}
