# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/router_overhead/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from experiments.common.command_line import add_quick, make_parser, run_main

RESULTS = Path(__file__).resolve().parent / "results"
STREAMS, QUICK_STREAMS = (1, 64, 512), (1, 64)
SECONDS, QUICK_SECONDS = 20.0, 2.0
PACED_PER_SECOND = 100.0
MEMORY_REQUESTS, QUICK_MEMORY_REQUESTS = 100_000, 0
MEMORY_STREAMS = 64

DESCRIPTION = """\
What does the router add to a request, and how many does it serve on one core?

Stub servers answer at once: prefill with its parameters, decode with 16 events in one write. Arms: the client calls
both servers itself (direct); the router; a simple proxy like the usual demo, with FastAPI and httpx, which also calls
both servers (pass-through); vllm-router, which is written in Rust; and, if it is installed, nginx as a plain reverse
proxy in front of decode alone. The measured process has a core for itself; servers and clients use the others.
Two kinds of load. As fast as possible: each stream sends its next request when it has the answer, which gives the
requests a second; times then are mostly queueing. Paced: all streams together send 100 requests a second, so times are
the cost of a request. All arms are measured in one run."""

EPILOG = """\
targets:
  paced, 64 streams: the router adds less than 3 ms to the time to first token (p50)
  as fast as possible: at least 1.5 times the pass-through's requests a second, with every number of streams
  memory and open files after 100,000 requests at most 1.1 times those after 10,000; no request fails

exit status: 0 all targets reached; 1 a target was missed
Results: a table; results/last-VERSION.json with versions and hardware; results/last-VERSION.png."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "seconds, without the memory target; too short for conclusions")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, conclude, last_name
    from experiments.router_overhead.report import judge, plot, table_of

    with Narrator("what the router costs") as narrator:
        rows, memory, skipped = measure(options.quick, narrator.say)
    left_out = [f"{arm} was left out: {why}" for arm, why in skipped.items()]
    name = last_name(options.vllm, quick=options.quick)
    content = {"rows": rows, "memory": memory, "left_out": skipped}
    status = conclude([table_of(rows), *left_out], judge(rows, memory), RESULTS / f"{name}.json", content)
    plot(rows, RESULTS / f"{name}.png")
    return status


def measure(quick: bool, say: Any) -> tuple[list[dict[str, Any]], dict[str, float] | None, dict[str, str]]:
    """Measure all arms. Returns rows of figures, the router's memory, and the arms left out with the reason."""
    from experiments.router_overhead import arms
    from experiments.router_overhead.load import load

    measured, rest = arms.cores()
    os.sched_setaffinity(0, rest)
    prefill, decode, *own = arms.ports(7)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    memory = None
    with (
        tempfile.TemporaryDirectory() as folder,
        arms.process(arms.module("experiments.router_overhead.stub", prefill, decode), decode, rest),
    ):
        commands = {
            "router": (arms.router_command(own[0], prefill, decode), [own[0]]),
            "pass-through": (arms.passthrough_command(own[1], prefill, decode), [own[1]]),
            "vllm-router": (arms.vllm_router_command(own[3], prefill, decode, own[4], say), [own[3]]),
            "nginx, decode only": (arms.nginx_command(own[2], decode, Path(folder)), [own[2]]),
            "direct": ((), [prefill, decode]),
        }
        for arm, (command, ports) in commands.items():
            if command is None:
                skipped[arm] = "nginx is not installed"
                continue
            with arms.process(command, ports[0], measured) if command else _nothing() as pid:
                asyncio.run(_warm(ports))
                for streams in QUICK_STREAMS if quick else STREAMS:
                    for per_second in (0.0, PACED_PER_SECOND):
                        say(f"{arm}: {streams} streams{', paced' if per_second else ''}")
                        cpu = arms.cpu_seconds(pid) if pid else 0.0
                        seen = asyncio.run(load(ports, streams, QUICK_SECONDS if quick else SECONDS, per_second))
                        cpu = arms.cpu_seconds(pid) - cpu if pid else 0.0
                        row = {"arm": arm, "streams": streams, "paced": bool(per_second), **seen.summary()}
                        rows.append({**row, "cpu_ms": 1000 * cpu / max(1, len(seen.whole))})
                if arm == "router" and not quick:
                    memory = _memory(ports, pid, say)
    return rows, memory, skipped


def _memory(ports: list[int], pid: int, say: Any) -> dict[str, float]:
    from experiments.router_overhead.arms import open_files, resident_bytes
    from experiments.router_overhead.load import load

    done, begin, begin_files = 0, 0, 0
    while done < MEMORY_REQUESTS:
        say(f"router's memory: {done:,} of {MEMORY_REQUESTS:,} requests")
        done += len(asyncio.run(load(ports, MEMORY_STREAMS, 5.0)).whole)
        if not begin and done >= MEMORY_REQUESTS / 10:
            begin, begin_files = resident_bytes(pid), open_files(pid)
    files = {"begin_files": begin_files, "end_files": open_files(pid)}
    return {"requests": done, "begin_bytes": begin, "end_bytes": resident_bytes(pid), **files}


async def _warm(ports: list[int]) -> None:
    """Wait until the arm answers: a router first checks whether its servers do."""
    from experiments.router_overhead.load import load

    for _ in range(100):
        if (await load(ports, 1, 0.1)).whole:
            return
    raise RuntimeError(f"found no answer with HTTP 200 on the ports {ports} within 10 s")


class _nothing:
    def __enter__(self) -> int:
        return 0

    def __exit__(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    run_main(main, parse())
