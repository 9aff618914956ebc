# SPDX-License-Identifier: Apache-2.0
"""scheduler/facade.py: prefill's and decode's half between vLLM's scheduler and the workers, in any order of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.clocks import ManualClock
from support.engine_fakes import (
    BLOCK_SIZE,
    TOKENS,
    Asked,
    Pool,
    at_once,
    context,
    of_decode,
    of_prefill,
    prompt,
    reports,
    stock,
    with_states,
)

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.scheduler.context import Progress
from kvcached_nixl.scheduler.facade import SchedulerFacade, build_scheduler
from kvcached_nixl.scheduler.giving_way import UNHEARD_SECONDS, GivingWay
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.side_channel_address import Endpoint, SideChannelAddress
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.headroom import BlockUsage, read_headroom
from kvcached_nixl.wire.manifest import Keeps, KVGroup, KVGroups
from kvcached_nixl.wire.step import FetchSpec, OfferUpdate, Revoke

BLOCKS = ([7, 3, 9],)


class Engine:
    def __init__(self, **changed: Any) -> None:
        self.clock = ManualClock()
        self.pool = Pool()
        self.handover = SchedulerFacade(context(self.pool, self.clock, **changed), AskSettings())

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
    assert told.sent == {"p1"} and not engine.handover.offering.kept.num_kept


def test_a_request_that_is_aborted_while_another_connector_keeps_it_is_told_by_that_one(engine: Engine) -> None:
    """vLLM frees a request at the first report and fails at a second one, so only the other connector reports it."""
    attempt = engine.waiting()
    engine.handover.finished(of_decode(), False, BLOCKS)
    engine.handover.kept("d1")
    told = reports(attempt)
    engine.handover.collect(told)
    assert not told.received and not engine.pool.freed
    engine.handover.collect(reports(sent={"d1"}))
    assert len(engine.pool.freed) == 3


def test_ids_and_blocks_of_others_pass_untouched(engine: Engine) -> None:
    """Ids and blocks of vLLM and of other connectors are passed on; those of another of our connectors are removed."""
    attempt = engine.waiting()
    others = Engine()
    other_attempt = others.waiting("d2")
    told = reports(other_attempt, sent={"s1", "p9"}, received={"r1"}, invalid={4, 0})
    engine.handover.collect(told)
    # Ours of no meaning here are taken out: vLLM ends at an id that it does not know.
    assert (told.sent, told.received, told.invalid) == ({"s1", "p9"}, {"r1"}, {4, 0})
    told = reports(attempt, received={"r2"}, invalid={4})
    engine.handover.collect(told)
    assert (told.sent, told.received, told.invalid) == (set(), {"d1", "r2"}, {4})


# ------------------------------------------------------------------------------------------------------- when it sleeps


def test_a_workers_report_ends_the_sleep(engine: Engine) -> None:
    woken: list[int] = []
    engine.handover.engine.woken()
    assert engine.handover.pending, "even before anyone can be woken"
    engine.handover.take_step([])
    assert not engine.handover.pending
    engine.handover.engine.bind_wake(lambda: woken.append(1))
    engine.handover.engine.woken()
    assert woken == [1] and engine.handover.pending


def test_news_of_another_thread_are_not_lost_while_memory_is_looked_at(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GivingWay, "turn", lambda _: bool(engine.handover.engine.woken()))
    assert engine.handover.relieve()


def test_an_engine_that_rests_goes_on_when_it_yields_no_longer() -> None:
    """What waits for blocks would wait for ever."""
    engine = Engine(mode=TransferMode.PUSH)
    engine.pool.has_reserve, engine.pool.wanted = True, (4, True)
    assert not engine.handover.relieve()
    engine.pool.wanted = 0, False
    engine.clock.advance(UNHEARD_SECONDS)
    assert engine.handover.relieve()
    engine.handover.take_step([])
    engine.clock.advance(UNHEARD_SECONDS)
    assert not engine.handover.relieve()


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


def test_its_blocks_are_bound_once(engine: Engine) -> None:
    engine.handover.engine.bind(Pool())
    attempt = engine.waiting()
    engine.handover.finished(of_decode(), False, BLOCKS)
    engine.handover.collect(reports(attempt))
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
    assert engine.handover.side_channel.in_answer() == {"queued_tokens": 7}


def test_an_engine_says_nothing_before_its_first_step() -> None:
    unbound = SchedulerFacade(context(None, ManualClock()), AskSettings())
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


# ------------------------------------------------------------------------------------------------ what it is built from


ADDRESS = SideChannelAddress(Endpoint("0.0.0.0", 5601), ("0.0.0.0",), Endpoint("10.0.0.1", 5600), "a test")


def started(extra_config: Mapping[str, Any], clock: ManualClock | None = None, **changed: Any) -> SchedulerFacade:
    taken = stock(extra_config=extra_config, **changed)
    made = build_scheduler(taken, ADDRESS, ManualClock() if clock is None else clock)
    made.engine.bind(Pool())
    return made


def test_an_engine_knows_itself() -> None:
    made = started({"kv_lease_duration": 12})
    made.arrived(of_prefill())
    (offered,) = made.take_step([Progress("p1", BLOCKS, True, 10)]).of(OfferUpdate)
    _, params = made.finished(of_prefill(), True, BLOCKS)
    assert params is not None
    expected = {"remote_engine_id": "own", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2}
    assert params.items() >= (expected | {"transfer_mode": "pull"}).items()
    assert offered.manifest is not None
    assert (offered.manifest.lease_seconds, offered.manifest.block_sizes) == (12.0, (BLOCK_SIZE,))
    assert offered.manifest.incarnation == made.engine.incarnation


def test_every_start_is_another_one() -> None:
    """A restarted engine is another one even under the same id; and nobody guesses its workers' key."""
    steps = [started({}).take_step([]) for _ in range(3)]
    assert len({step.incarnation for step in steps}) == len({step.wake_address for step in steps}) == 3
    assert all(len(step.incarnation) == 16 and len(step.wake_address.key) == 32 for step in steps)
    assert (steps[0].host, steps[0].port) == ("10.0.0.1", 5600)
    wake_address = steps[0].wake_address
    assert (wake_address.host, wake_address.port) == ("127.0.0.1", 5601), "workers go no way round"


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_vllm_may_refuse_is_not_pushed_early(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    made = started({"transfer_mode": mode}, output_checks=["--all2all-backend nixl_ep"])
    assert ("--all2all-backend nixl_ep" in caplog.text) is (mode == "push"), "that it is not streamed is said"
    assert made.offers_cached is (mode == "pull"), "a peer that pulls is told of it when the output was taken"
    made.arrived(of_prefill())
    step = made.take_step([Progress("p1", BLOCKS, True, TOKENS)])
    assert any(one.manifest for one in step.of(OfferUpdate)) is (mode == "pull")
    assert made.finished(of_prefill(), True, BLOCKS)[0]
    assert any(one.manifest for one in made.take_step([]).of(OfferUpdate)) is (mode == "push")


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_model_that_drops_blocks_computes_the_last_token_here(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """B5: told by what its groups are, however many."""
    windows = KVGroups((KVGroup(BLOCK_SIZE, Keeps.WINDOW),))
    made = started({"transfer_mode": mode}, window_kinds=["SlidingWindowSpec"] * 2, groups=windows)
    assert ("SlidingWindowSpec" in caplog.text) is (mode == "push"), "that it is not streamed is said"
    request = of_decode()
    made.arrived(request)
    assert made.matched(request, 0) == (9, True), "the last token is computed here"


def test_the_deadline_is_a_setting() -> None:
    clock = ManualClock()
    made = started({"handover_timeout": 3}, clock)
    request = of_decode()
    made.arrived(request)
    made.allocated(request, BLOCKS, made.matched(request, 0)[0])
    clock.advance(2.9)
    told = reports()
    made.collect(told)
    assert told.received == set()
    clock.advance(0.1)
    made.collect(told)
    assert told.received == {"d1"}


def test_settings_that_cannot_be_used_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="bidirectional_kv_xfer"):
        build_scheduler(stock(extra_config={"bidirectional_kv_xfer": True}), ADDRESS, ManualClock())


def test_a_timeout_of_vllms_that_decides_nothing_here_is_said_to_do_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Finding D3."""
    started({})
    assert not caplog.records
    monkeypatch.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "480")
    started({"kv_lease_duration": 12})
    (record,) = caplog.records
    assert "VLLM_NIXL_ABORT_REQUEST_TIMEOUT has no effect" in record.message and "12 s" in record.message
