# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/heartbeat_cost/run.sh``: time a step with and without a beat. ``--help`` explains."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.targets import Verdict, as_json, exit_status, table_of_targets

RESULTS = Path(__file__).resolve().parent / "results"
WAITING = (10, 100, 1_000, 10_000)
ROUNDS = 30
LEASE_SECONDS = 30.0
ARRIVAL_SECONDS = 20.0
MOST_MILLISECONDS, OF_REQUESTS = 1.0, 1_000

DESCRIPTION = """\
What do the heartbeats of many waiting requests cost a step?

Two real NIXL agents. Decode's scheduler gathers the requests that wait, its worker sends their beats, and prefill's
worker takes them in and renews their leases; each part is timed as the engine's thread calls it, with 10 to 10,000
requests waiting for one prefill. A beat is due every sixth of a lease; the step without one is timed, too. "vLLM's" is
what a worker of vLLM 0.22 and later sends: one notification with all names, which is split on its way."""

EPILOG = """\
targets:
  1,000 waiting requests: everything that a step of either side does for a beat takes < 1 ms (median)
  no notification is larger than 4,096 bytes

exit status: 0 all targets reached; 1 one was missed; 2 something could not be set up
Results: a table; results/last-VERSION.json with versions and hardware."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default="0.19.1", help="whose NIXL is used (%(default)s)")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Cost:
    """Medians for one number of waiting requests, in milliseconds of the engine's thread."""

    waiting: int
    gather_ms: float
    send_ms: float
    send_vllms_ms: float
    renew_ms: float
    step_without_beat_ms: float
    notifications: int
    largest_bytes: int


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    from rich.table import Table

    from experiments.common.report import stdout_console, write_json

    costs = [_measure(waiting) for waiting in WAITING]
    verdicts = judge(costs)
    console = stdout_console()
    table = Table(title=f"heartbeats, NIXL of vLLM {options.vllm}; medians of {ROUNDS}, milliseconds")
    for column in (
        *("waiting", "decode: gather", "send", "send, vLLM's", "prefill: renew"),
        *("step without", "notifications", "largest (bytes)"),
    ):
        table.add_column(column, justify="right")
    for one in costs:
        table.add_row(
            f"{one.waiting:,}",
            *(f"{value:.3f}" for value in (one.gather_ms, one.send_ms, one.send_vllms_ms, one.renew_ms)),
            f"{one.step_without_beat_ms:.4f}",
            str(one.notifications),
            str(one.largest_bytes),
        )
    console.print(table)
    console.print(table_of_targets(verdicts))
    write_json(
        RESULTS / f"last-{options.vllm}.json",
        {
            "targets": as_json(verdicts),
            "costs": [vars(one) for one in costs],
        },
    )
    return exit_status(verdicts)


def judge(costs: list[Cost]) -> list[Verdict]:
    """Of what was measured."""
    from kvcached_nixl.wire.lease import MOST_BEAT_BYTES

    largest = max(one.largest_bytes for one in costs)
    found = [Verdict("no notification is larger than is said", f"{largest} bytes", largest <= MOST_BEAT_BYTES)]
    for one in costs:
        if one.waiting == OF_REQUESTS:
            sides = {
                "decode": one.gather_ms + one.send_ms,
                "decode, vLLM's": one.gather_ms + one.send_vllms_ms,
                "prefill": one.renew_ms,
            }
            for side, spent_ms in sides.items():
                target = f"{side}: {one.waiting:,} waiting requests cost a step less than {MOST_MILLISECONDS:.0f} ms"
                found.append(Verdict(target, f"{spent_ms:.3f} ms", spent_ms < MOST_MILLISECONDS))
    return found


def _measure(waiting: int) -> Cost:
    from kvcached_nixl.clock import ManualClock
    from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
    from kvcached_nixl.scheduler.lease import Renewals
    from kvcached_nixl.wire.lease import EXTENSION, INTERVAL, beats
    from kvcached_nixl.worker.lease import Leases

    clock = ManualClock()
    leases, renewals = Leases(clock, lease_seconds=LEASE_SECONDS), Renewals(clock, lease_seconds=LEASE_SECONDS)
    renewed: list[PrefillRequestId] = []

    def renew(names: list[PrefillRequestId]) -> None:
        leases.renew(names)
        renewed.extend(names)

    prefill, decode = _agent(renew), _agent()
    to_prefill = decode.add_remote_agent(prefill.get_agent_metadata())
    for number in range(waiting):
        theirs = f"cmpl-{uuid.UUID(int=number)}-0-{number:08x}"
        params = {
            "do_remote_prefill": True,
            "remote_request_id": theirs,
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
        }
        renewals.begin(DecodeRequestId(f"d{number}"), params, theirs)
        leases.grant(PrefillRequestId(theirs))
    renewals.take_beats()
    clock.advance((1 - EXTENSION) * LEASE_SECONDS)
    spent: dict[str, list[float]] = {name: [] for name in ("gather", "send", "vllms", "renew", "without")}
    sent: list[bytes] = []
    for _ in range(ROUNDS):
        # As often as beats come, so that every one of them extends its lease.
        clock.advance(LEASE_SECONDS * INTERVAL)
        ((_, names),) = _timed(spent["gather"], renewals.take_beats)
        _timed(spent["without"], renewals.take_beats)
        sent = list(beats(names))

        def send(names: list[PrefillRequestId] = names) -> None:
            for beat in beats(names):
                decode.send_notif(to_prefill, beat)

        def send_as_vllm(names: list[PrefillRequestId] = names) -> None:
            decode.send_notif(to_prefill, ("HB:" + ",".join(names)).encode())

        for kind, call in (("send", send), ("vllms", send_as_vllm)):
            _timed(spent[kind], call)
            spent["renew"].append(_renewed_in_seconds(prefill, renewed, waiting))
        if leases.first_seconds != clock.now_seconds() + EXTENSION * LEASE_SECONDS:
            raise RuntimeError(f"found a lease that ends at {leases.first_seconds} s; expected all to be renewed")
    return Cost(
        waiting,
        *(1e3 * statistics.median(spent[name]) for name in ("gather", "send", "vllms", "renew", "without")),
        notifications=len(sent),
        largest_bytes=max(map(len, sent)),
    )


def _renewed_in_seconds(prefill: Any, renewed: list[Any], waiting: int) -> float:
    """How long prefill's thread takes for all beats, in however many steps they arrive."""
    spent, deadline = 0.0, time.monotonic() + ARRIVAL_SECONDS
    renewed.clear()
    while len(renewed) < waiting:
        if time.monotonic() > deadline:
            raise RuntimeError(f"found {len(renewed)} of {waiting} names after {ARRIVAL_SECONDS:.0f} s")
        before, took = len(renewed), list[float]()
        _timed(took, prefill.get_new_notifs)
        spent += took[0] if len(renewed) > before else 0.0
    return spent


def _agent(renew: Callable[[list[Any]], None] | None = None) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    from kvcached_nixl.worker.verified_reads import VerifiedReads

    return VerifiedReads(nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=["UCX"])), ["UCX"], renew)


def _timed(spent: list[float], call: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = call()
    spent.append(time.perf_counter() - began)
    return result


if __name__ == "__main__":
    sys.exit(main(parse()))
