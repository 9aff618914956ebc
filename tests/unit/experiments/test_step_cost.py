# SPDX-License-Identifier: Apache-2.0
"""The experiment's verdicts on both sides of their limits, and that it times waiting requests."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="a worker's half needs torch")

from experiments.bench.samples import Samples
from experiments.step_cost.hand_over import OURS, SIDES, DecodeSide, PrefillSide, Side, measure, percentiles
from experiments.step_cost.idle import EMPTY
from experiments.step_cost.report import (
    HAND_OVER_FORMS,
    IDLE_TURN_MS,
    MOST_WAITING,
    SCHEDULE_FORMS,
    STEP_MS,
    STOCK,
    judge,
    judge_idle,
    judge_schedule,
)
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.lease import MAX_HEARTBEAT_BYTES, read_heartbeat

USUAL = {"step_p50": 0.1, "idle_turn_p50": 0.01, "largest_beat_bytes": MAX_HEARTBEAT_BYTES}


def hand_overs(waiting: int = MOST_WAITING, **changes: float) -> Samples:
    samples = Samples(HAND_OVER_FORMS)
    samples.add(("pull", "decode", waiting), OURS, **(USUAL | changes))
    return samples


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"step_p50": STEP_MS}, [0]),
        ({"idle_turn_p50": IDLE_TURN_MS}, [1]),
        ({"largest_beat_bytes": MAX_HEARTBEAT_BYTES + 1}, [2]),
        ({"largest_beat_bytes": 0}, [2]),
    ],
    ids=str,
)
def test_each_target_can_be_missed(changes: dict[str, float], missed: list[int]) -> None:
    verdicts = judge(hand_overs(**changes))
    assert [number for number, (_, _, reached) in enumerate(verdicts) if not reached] == missed


def test_what_fewer_cost_is_not_judged() -> None:
    """But the size of their heartbeats is."""
    (verdict,) = judge(hand_overs(MOST_WAITING - 1, step_p50=9.0))
    assert verdict.reached


@pytest.mark.parametrize(("ours_ms", "reached"), [(20.0, True), (25.1, True), (25.3, False)])
def test_a_step_is_judged_beside_the_stock_one_with_as_many_waiting(ours_ms: float, reached: bool) -> None:
    samples = Samples(SCHEDULE_FORMS)
    for more, waiting, stock, ours in (
        ("yes", MOST_WAITING, 20.0, ours_ms),
        ("no", MOST_WAITING, 0.2, 0.3),
        ("yes", 0, 0.2, 9.0),
    ):
        for engine, milliseconds in ((STOCK, stock), (f"{OURS}, pull", ours), ("no connector", 99.0)):
            samples.add(("decode", more, waiting), engine, step_p50=milliseconds)
    assert [one.reached for one in judge_schedule(samples)] == [reached, True]


def test_an_idle_server_is_judged_beside_itself_without_requests() -> None:
    samples = Samples(("{}",))
    for server, state, cpu in (
        *(("a", EMPTY, 0.5), ("a", "waits", 0.54), ("a", "paused", 0.56)),
        *(("b", EMPTY, 0.01), ("b", "waits", 0.5)),
    ):
        samples.add((server,), state, cpu=cpu)
    assert [one.reached for one in judge_idle(samples)] == [True, False, False]


def test_times_are_the_middle_and_the_largest_of_few() -> None:
    assert percentiles("step", [0.003, 0.001, 0.002]) == {"step_p50": 2.0, "step_p99": 3.0}
    assert percentiles("step", []) == {}


def waiting_in(side: Side) -> int:
    """Hand-overs of which the transfer thread still has something."""
    thread = side.engine.side.thread
    return len(thread._receiver) + len(thread._registry)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("kind", SIDES)
def test_a_side_has_as_many_waiting_as_it_should_and_stays_so(kind: type[Side], mode: TransferMode) -> None:
    """Neither a step nor a turn ends one of them."""
    side = kind(mode, 30)
    per_hand_over = 2 if kind is PrefillSide and mode is TransferMode.PUSH else 1
    assert waiting_in(side) == 30 * per_hand_over
    side.step_and_turn()
    if kind is not DecodeSide:
        assert waiting_in(side) == 30 * per_hand_over
        return
    # What was posted or registered for it stays until it is known to be idle.
    assert side.engine.handover.num_waiting == 30
    assert len(side.engine.side.thread._receiver.renewals._lease_of) == 30


@pytest.mark.parametrize("mode", TransferMode)
def test_decodes_heartbeats_name_each_that_waits_once(mode: TransferMode) -> None:
    side = DecodeSide(mode, 300)
    named = [name for beat in side.heartbeats() for name in read_heartbeat(beat)]
    assert len(named) == len(set(named)) == 300


def test_a_small_measurement_has_every_side_and_mode() -> None:
    samples = Samples(HAND_OVER_FORMS)
    for waiting in (0, 5):
        measure(samples, waiting, 3, lambda words: None)
    assert set(samples.settings) == {
        (mode, side, waiting) for mode in ("pull", "push") for side in ("decode", "prefill") for waiting in (0, 5)
    }
    for (_, side, waiting), found in ((setting, samples.figures[setting, OURS]) for setting in samples.settings):
        assert found["step_p50"][0] > 0
        assert (found.get("largest_beat_bytes", [0])[0] > 0) == (side == "decode" and waiting > 0)
