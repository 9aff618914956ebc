# SPDX-License-Identifier: Apache-2.0
"""Times a step, a turn of the transfer thread, an arrival and a heartbeat turn while hand-overs wait."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

from experiments.bench.samples import Samples, percentile
from experiments.common.engines import Ended
from experiments.step_cost.sides import ARRIVING_BLOCKS, SIDES, Side
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.step import Report, Reports

RUNNING = 32
"""Requests that each step computes; none of them is handed over."""
ARRIVALS, BEAT_INTERVALS = 50, 10
OURS = "this package"


def measure(samples: Samples, waiting: int, repetitions: int, say: Callable[[str], None]) -> None:
    """Measure both transfer modes and both sides."""
    for mode in TransferMode:
        for kind in SIDES:
            say(f"{mode.value}, {kind.name}, {waiting:,} waiting")
            found = _measure(kind(mode, waiting), waiting, repetitions)
            samples.add((mode.value, kind.name, waiting), OURS, **found)


def _measure(side: Side, waiting: int, repetitions: int) -> dict[str, float]:
    """Return the figures of one side:

    step: time of a step on the engine's thread: the scheduler's half, pickling and unpickling as vLLM's multiprocess
        executor does it, and the worker's half; these three parts separately, too.
    idle_turn: a turn of the transfer thread in which nothing has arrived, ended or is due.
    arrival: of a request of a thousand tokens, until it waits for KV or is computed.
    beat_turn: a turn of the transfer thread that sends or reads heartbeats; none without heartbeats.
    most_beats: most heartbeats in one turn; largest_beat_bytes: size of the largest one; 0 without heartbeats.
    """
    parts = [_step(side) for _ in range(repetitions)]
    idle = [_seconds(side.turn) for _ in range(repetitions)]
    arrivals = [_arrival(side) for _ in range(ARRIVALS)]
    side.sent()
    beaten: list[float] = []
    notifications: list[list[bytes]] = []
    for _ in range(BEAT_INTERVALS if waiting else 0):
        for found in side.beat_turns():
            seconds = _seconds(side.turn)
            found = found or side.heartbeats()
            # After the last heartbeat, decode's iterator yields once more; that turn sends nothing.
            if found:
                beaten.append(seconds)
                notifications.append(found)
    # Raises if leases have ended, which is the case if a heartbeat was not read.
    _step(side)
    return {
        **percentiles("step", [sum(one) for one in parts]),
        **percentiles("scheduler", [one[0] for one in parts]),
        **percentiles("pickled", [one[1] for one in parts]),
        **percentiles("worker", [one[2] for one in parts]),
        **percentiles("idle_turn", idle),
        **percentiles("arrival", arrivals),
        **percentiles("beat_turn", beaten),
        "most_beats": max(map(len, notifications), default=0),
        "largest_beat_bytes": max((len(one) for found in notifications for one in found), default=0),
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds, without interpolation; nothing of no times."""
    return {f"{name}_p{share}": percentile(share)(seconds) * 1e3 for share in (50, 99)} if seconds else {}


def _step(side: Side) -> tuple[float, float, float]:
    """Return the seconds of the scheduler, of pickling, and of the worker in one step."""
    handover, worker = side.engine.handover, side.engine.side
    progress = [Progress(f"running-{number}", (), False, 100) for number in range(RUNNING)]
    begun = time.perf_counter()
    _ = handover.pending
    step = handover.take_step(progress)
    made = time.perf_counter()
    step = pickle.loads(pickle.dumps(step, protocol=pickle.HIGHEST_PROTOCOL))
    read = time.perf_counter()
    worker.begin_step(step)
    worker.end_step()
    reports = Reports(worker.take_sent(), timelines=worker.take_counted().timelines)
    report = worker.take_report()
    told = time.perf_counter()
    reports.report.add(report or Report())
    handover.collect(reports)
    found = Ended(reports.sent, reports.received, handover.take_failed())
    over = time.perf_counter()
    if any(found):
        raise RuntimeError(f"found {found} in a step; expected nothing to end while hand-overs wait")
    return made - begun + over - told, read - made, told - read


def _arrival(side: Side) -> float:
    request = side.arriving()
    blocks = side.engine.pool.allocate(request.request_id, ARRIVING_BLOCKS)
    assert blocks is not None
    seconds = _seconds(lambda: side.take_in(request, blocks))
    side.go(request)
    return seconds


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
