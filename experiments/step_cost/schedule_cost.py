# SPDX-License-Identifier: Apache-2.0
"""Times the scheduler's part of vLLM's step while requests wait: without a connector, with stock, with this package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from experiments.bench.samples import Samples
from experiments.common.command_line import MODES
from experiments.step_cost.measure import OURS, percentiles

if TYPE_CHECKING:
    from experiments.step_cost.real_scheduler import Making

__all__ = ["measure_schedule"]

ARRIVALS = 10
ALONE, STOCK = "no connector", "stock connector"


def measure_schedule(samples: Samples, waiting: int, repetitions: int, say: Callable[[str], None]) -> None:
    """Measure every engine, with room for more running requests and without."""
    # Imported here, not at the top: results are also judged where vLLM is not installed.
    from experiments.step_cost.real_scheduler import Kind, patched

    for engine, making in _makings(waiting):
        for has_room in (True, False) if making.kind is not Kind.QUEUED else (False,):
            say(f"{engine}, {making.kind.value}, {waiting:,} waiting")
            with patched() if making.is_ours else contextlib.nullcontext():
                found = _measure(making, has_room, repetitions)
            samples.add((making.kind.value, "yes" if has_room else "no", waiting), engine, **found)


def _makings(waiting: int) -> Iterator[tuple[str, Making]]:
    from experiments.step_cost.real_scheduler import Kind, Making

    yield ALONE, Making(Kind.QUEUED, None, False, waiting)
    for kind in (Kind.DECODE, Kind.PREFILL):
        yield STOCK, Making(kind, "pull", False, waiting)
        for mode in MODES:
            yield f"{OURS}, {mode}", Making(kind, mode, True, waiting)


def _measure(making: Making, has_room: bool, repetitions: int) -> dict[str, float]:
    """Return the times of a step; of its parts: ``schedule()``, ``build_connector_meta()``, which is part of that, and
    ``update_from_output()``; and of a step that admits one more request, where one is admitted. CPU milliseconds of the
    engine's thread."""
    from experiments.step_cost.real_scheduler import RealScheduler, Spent

    side = RealScheduler(making, has_room=has_room)
    try:
        spent = [side.step() for _ in range(repetitions)]
        if side.num_waiting != making.waiting:
            raise RuntimeError(f"found {side.num_waiting} waiting after {repetitions} steps; expected {making.waiting}")
        arrivals = [side.arrival() for _ in range(ARRIVALS)] if has_room else []
    finally:
        side.close()
    found = percentiles("arrival", [one.step for one in arrivals])
    for part in Spent._fields:
        found |= percentiles(part, [getattr(one, part) for one in spent])
    return found
