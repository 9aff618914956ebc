# SPDX-License-Identifier: Apache-2.0
"""Times the scheduler's part of vLLM's step while requests wait: without a connector, with stock, with this package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.step_cost.measure import Times, times
from experiments.step_cost.report import OURS, STOCK

if TYPE_CHECKING:
    from experiments.step_cost.real_scheduler import Making, Spent

__all__ = ["ScheduleCost", "measure_schedule"]

ARRIVALS = 10
ALONE = "no connector"


@dataclass(frozen=True)
class ScheduleCost:
    """Times for one engine, kind and number of waiting requests; CPU milliseconds of the engine's thread.

    Attributes:
        has_room: whether more requests may run than do, so that vLLM looks at all waiting ones.
        schedule, connector, update: parts of a step: ``schedule()``; ``build_connector_meta()``, which is part of
            ``schedule()``; and ``update_from_output()``.
        arrival: a step that admits one more request; None where none is admitted.
    """

    engine: str
    mode: str
    kind: str
    has_room: bool
    waiting: int
    step: Times
    schedule: Times
    connector: Times
    update: Times
    arrival: Times | None


def measure_schedule(waiting: int, repetitions: int, say: Callable[[str], None]) -> list[ScheduleCost]:
    """Measure every engine, with room for more running requests and without."""
    # Imported here, not at the top: results are also read and judged where vLLM is not installed.
    from experiments.step_cost.real_scheduler import Kind, patched

    found = []
    for engine, making in _makings(waiting):
        for has_room in (True, False) if making.kind is not Kind.QUEUED else (False,):
            say(f"{engine}, {making.mode or 'queued'}, {making.kind.value}, {waiting:,} waiting")
            with patched() if making.is_ours else contextlib.nullcontext():
                found.append(_measure(engine, making, has_room, repetitions))
    return found


def _makings(waiting: int) -> Iterator[tuple[str, Making]]:
    from experiments.step_cost.real_scheduler import Kind, Making

    yield ALONE, Making(Kind.QUEUED, None, False, waiting)
    for kind in (Kind.DECODE, Kind.PREFILL):
        yield STOCK, Making(kind, "pull", False, waiting)
        for mode in ("pull", "push"):
            yield OURS, Making(kind, mode, True, waiting)


def _measure(engine: str, making: Making, has_room: bool, repetitions: int) -> ScheduleCost:
    from experiments.step_cost.real_scheduler import RealScheduler, Spent

    side = RealScheduler(making, has_room=has_room)
    try:
        spent = [side.step() for _ in range(repetitions)]
        if side.num_waiting != making.waiting:
            raise RuntimeError(f"found {side.num_waiting} waiting after {repetitions} steps; expected {making.waiting}")
        arrivals = [side.arrival() for _ in range(ARRIVALS)] if has_room else []
    finally:
        side.close()

    def of(part: str, steps: list[Spent]) -> Times:
        return times([getattr(one, part) for one in steps])

    return ScheduleCost(
        engine,
        making.mode or "",
        making.kind.value,
        has_room,
        making.waiting,
        **{part: of(part, spent) for part in Spent._fields},
        arrival=of("step", arrivals) if arrivals else None,
    )
