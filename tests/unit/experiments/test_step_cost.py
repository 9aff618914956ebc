# SPDX-License-Identifier: Apache-2.0
"""The experiment's verdicts on both sides of their limits, and that it times waiting requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a worker's half needs torch")

from experiments.step_cost.idle import EMPTY, IdleCost, judge_idle
from experiments.step_cost.measure import Cost, Times, measure, times
from experiments.step_cost.report import (
    IDLE_TURN_MS,
    MOST_WAITING,
    OURS,
    STEP_MS,
    STOCK,
    judge,
    judge_schedule,
    plot,
    table_of,
    table_of_idle,
    table_of_schedule,
)
from experiments.step_cost.schedule_cost import ScheduleCost
from experiments.step_cost.sides import SIDES, DecodeSide, PrefillSide, Side
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.lease import MAX_HEARTBEAT_BYTES, read_heartbeat

USUAL = Cost(
    direction="pull",
    side="decode",
    waiting=MOST_WAITING,
    step=Times(0.1, 5.0),
    scheduler=Times(0.1, 5.0),
    pickled=Times(0.1, 5.0),
    worker=Times(0.1, 5.0),
    idle_turn=Times(0.01, 5.0),
    arrival=Times(5.0, 5.0),
    beat_turn=Times(5.0, 5.0),
    most_beats=4,
    largest_beat_bytes=MAX_HEARTBEAT_BYTES,
)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"step": Times(STEP_MS, STEP_MS)}, [0]),
        ({"idle_turn": Times(IDLE_TURN_MS, IDLE_TURN_MS)}, [1]),
        ({"largest_beat_bytes": MAX_HEARTBEAT_BYTES + 1}, [2]),
        ({"largest_beat_bytes": 0}, [2]),
    ],
    ids=str,
)
def test_each_target_can_be_missed(changes: dict[str, object], missed: list[int]) -> None:
    verdicts = judge([dataclasses.replace(USUAL, **changes)])  # type: ignore[arg-type]
    assert [number for number, (_, _, reached) in enumerate(verdicts) if not reached] == missed


def test_what_fewer_cost_is_not_judged() -> None:
    """But the size of their heartbeats is."""
    (verdict,) = judge([dataclasses.replace(USUAL, waiting=MOST_WAITING - 1, step=Times(9.0, 9.0))])
    assert verdict.reached


@pytest.mark.parametrize(("ours_ms", "reached"), [(20.0, True), (25.1, True), (25.3, False)])
def test_a_step_is_judged_beside_the_stock_one_with_as_many_waiting(ours_ms: float, reached: bool) -> None:
    def cost(engine: str, step_ms: float, waiting: int = MOST_WAITING, has_room: bool = True) -> ScheduleCost:
        spent = Times(step_ms, step_ms)
        return ScheduleCost(engine, "pull", "decode", has_room, waiting, spent, spent, spent, spent, None)

    costs = [
        *(cost(STOCK, 20.0), cost(STOCK, 0.2, has_room=False), cost(STOCK, 0.2, waiting=0)),
        *(cost(OURS, ours_ms), cost(OURS, 0.3, has_room=False), cost(OURS, 9.0, waiting=0), cost("none", 99.0)),
    ]
    assert [one.reached for one in judge_schedule(costs)] == [reached, True]
    assert table_of_schedule(costs, "").row_count == len(costs)


def test_an_idle_server_is_judged_beside_itself_without_requests() -> None:
    costs = [
        *(IdleCost("a", EMPTY, 0.5, 0.5), IdleCost("a", "waits", 0.54, 0.5), IdleCost("a", "paused", 0.56, 0.5)),
        *(IdleCost("b", EMPTY, 0.01, 0.0), IdleCost("b", "waits", 0.5, 0.5)),
    ]
    assert [one.reached for one in judge_idle(costs)] == [True, False, False]
    assert table_of_idle(costs, "").row_count == len(costs)


def test_times_are_the_middle_and_the_largest_of_few() -> None:
    assert times([0.003, 0.001, 0.002]) == Times(2.0, 3.0)


def waiting_in(side: Side) -> int:
    """Hand-overs of which the transfer thread still has something."""
    thread = side.engine.side.thread
    return len(thread._receiver) + len(thread._registry)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("kind", SIDES)
def test_a_side_has_as_many_waiting_as_it_should_and_stays_so(kind: type[Side], mode: TransferMode) -> None:
    """Neither a step, nor a turn, nor a request that comes and goes ends one of them."""
    side = kind(mode, 30)
    per_hand_over = 2 if kind is PrefillSide and mode is TransferMode.PUSH else 1
    assert waiting_in(side) == 30 * per_hand_over
    request = side.arriving()
    blocks = side.engine.pool.allocate(request.request_id, 64)
    assert blocks is not None
    side.take_in(request, blocks)
    side.go(request)
    side.step_and_turn()
    if kind is not DecodeSide:
        assert waiting_in(side) == 30 * per_hand_over
        return
    # What was posted or registered for it stays until it is known to be idle.
    assert side.engine.handover.num_waiting == 30
    assert len(side.engine.side.thread._dispatch.renewals) == 30


@pytest.mark.parametrize("mode", TransferMode)
def test_decodes_heartbeats_name_each_that_waits_once(mode: TransferMode) -> None:
    side = DecodeSide(mode, 300)
    named: list[str] = []
    for _ in side.beat_turns():
        side.turn()
        named += (name for beat in side.heartbeats() for name in read_heartbeat(beat))
    assert len(named) == len(set(named)) == 300


@pytest.mark.parametrize("mode", TransferMode)
def test_the_heartbeats_that_prefill_reads_keep_its_leases(mode: TransferMode) -> None:
    side = PrefillSide(mode, 300)
    before = waiting_in(side)
    for _ in range(10):
        for _ in side.beat_turns():
            side.turn()
    assert waiting_in(side) == before


def test_a_small_measurement_gives_a_table_and_a_plot(tmp_path: Path) -> None:
    costs = [cost for waiting in (0, 5) for cost in measure(waiting, 3, lambda words: None)]
    assert {(one.direction, one.side, one.waiting) for one in costs} == {
        (mode, side, waiting) for mode in ("pull", "push") for side in ("decode", "prefill") for waiting in (0, 5)
    }
    assert all((one.beat_turn is not None) == (one.waiting > 0) == (one.most_beats > 0) for one in costs)
    assert table_of(costs, "").row_count == len(costs)
    pytest.importorskip("matplotlib")
    plot(costs, "", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
