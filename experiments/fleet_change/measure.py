# SPDX-License-Identifier: Apache-2.0
"""What does it cost clients to restart, update or lose servers?

Two prefill and two decode servers with vLLM 0.26.0 over kvcached, pull and push. Each decode server asks both prefill
servers, and nginx is before decode. While clients ask, every server is restarted, then replaced by one with the other
vLLM; ten processes beside the servers compute for a minute; and a prefill server is killed, then both, then a decode
server. Nobody is told of any of this. Each answer is compared with one stock instance's.

Targets: no wrong answer; none without an end; no error, unless a decode server is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.table import Table

from experiments.common.counted import count
from experiments.common.report import Run, make_table
from experiments.common.report import Verdict as Target
from experiments.common.servers import REPOSITORY, Asking, Running, ServerError, ServerSpec
from experiments.stacks import measure as stacks
from experiments.stacks import traffic
from experiments.stacks.routers import Say, Servers, nginx
from experiments.stacks.traffic import Answer, Request, Verdict

BEFORE = "0.26.0"
KINDS = ("completion", "completion, streamed", "completion, streamed")
"""Of requests, each as often."""
PROMPTS = 12
AT_ONCE = 6
SHUTDOWN_SECONDS = 30
"""``--shutdown-timeout``."""
BUSY_LOOPS, BUSY_SECONDS = 10, 60.0
GONE_SECONDS = 10.0
PREFILLS, DECODES = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
AFTER = ServerSpec.executable
KILL_DECODE = "kill a decode"
CHANGES = ("restart", "version", "busy", "kill a prefill", "kill all prefills", KILL_DECODE)


@dataclass(frozen=True)
class Phase:
    """What clients got during one change.

    Attributes:
        outcomes: of the official client's requests, by `traffic.Verdict`.
        failed_hand_overs: requests that got no KV, as decode servers have counted; those of servers that were stopped
            are lost with them.
    """

    mode: str
    change: str
    seconds: float
    outcomes: dict[str, int]
    failed_hand_overs: int


def main(run: Run) -> int:
    changes = run.chosen(CHANGES)
    made = subprocess.run(["bash", "experiments/env.sh", BEFORE], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise ServerError(f"found no environment with vLLM {BEFORE}; experiments/env.sh says above what is missing")
    before = Path(made.stdout.splitlines()[-1]) / "bin" / "vllm"
    expected = expected_of(before, run.logs, run.say)
    found = [measure(mode, before, expected, changes, run.logs / mode, run.say) for mode in run.modes]
    phases = sum(found, [])
    content = {"before": BEFORE, "phases": [dataclasses.asdict(one) for one in phases]}
    return run.conclude([table_of(phases)], judge(phases), content)


def spec(name: str, mode: str | None, executable: Path = AFTER) -> ServerSpec:
    """Return the configuration of a server; without ``mode``, of the stock instance."""
    made = stacks.spec(name, mode)
    transfer = {**made.kv_transfer, "kv_load_failure_policy": "recompute"} if made.kv_transfer else None
    timeout = ("--shutdown-timeout", str(SHUTDOWN_SECONDS))
    return dataclasses.replace(
        made, kv_transfer=transfer, arguments=timeout, http_arguments=(), executable=executable, forks=False
    )


def expected_of(before: Path, logs: Path, say: Say) -> dict[Request, Answer]:
    """Return the answer to each request, of one stock instance.

    Requests are left out to which the two versions say something else: they compute in another order.
    """
    say("one stock instance of each version")
    asked = [(kind, number) for number in range(PROMPTS) for kind in dict.fromkeys(KINDS)]
    with Running([spec("alone-before", None, before), spec("alone-after", None)], logs) as launched:
        old, new = (asyncio.run(traffic.answers(one.base_url, asked)) for one in launched.ready())
    agreed = {one: answer for one, answer in old.items() if traffic.judged(new[one], answer) is Verdict.RIGHT}
    if len(agreed) < len(asked) // 2:
        raise ServerError(f"found that the versions agree on {len(agreed)} of {len(asked)} answers; expected most")
    return agreed


def measure(
    mode: str, before: Path, expected: dict[Request, Answer], changes: Sequence[str], logs: Path, say: Say
) -> list[Phase]:
    specs = [spec(name, mode, before) for name in (*PREFILLS, *DECODES)]
    with Asking(specs, logs) as launched, nginx(launched.ready()[len(PREFILLS) :], logs / "nginx", say) as url:
        fleet = Servers(launched, url)
        # A prefill and a decode in turn: of two each, there is always a pair that fits.
        in_turn = [name for pair in zip(PREFILLS, DECODES, strict=True) for name in pair]
        acts: dict[str, Callable[[], None]] = {
            "restart": lambda: stacks.restart_each(fleet, in_turn),
            "version": lambda: stacks.restart_each(fleet, in_turn, executable=AFTER),
            "busy": starve,
            "kill a prefill": lambda: stacks.kill(fleet, PREFILLS[0], seconds=GONE_SECONDS),
            "kill all prefills": lambda: stacks.kill(fleet, *PREFILLS, seconds=GONE_SECONDS),
            KILL_DECODE: lambda: stacks.kill(fleet, DECODES[0], seconds=GONE_SECONDS),
        }
        asyncio.run(traffic.answers(url, list(expected)))
        numbers = dict.fromkeys(number for _, number in expected)
        asked = [(kind, number) for number in numbers for kind in KINDS if (kind, number) in expected]
        phases = []
        for change in changes:
            begun, failed_before = time.monotonic(), failed_hand_overs(launched)
            pairs = [(each, expected[each]) for each in asked]
            found = traffic.counted(asyncio.run(traffic.meanwhile(url, pairs, acts[change], AT_ONCE)))
            failed = max(0, failed_hand_overs(launched) - failed_before)
            phases.append(Phase(mode, change, round(time.monotonic() - begun, 1), found, failed))
            say(f"{mode}, {change}: {found}")
        return phases


def starve() -> None:
    """Run ten processes beside the servers that do nothing but compute."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(BUSY_LOOPS)]
    try:
        time.sleep(BUSY_SECONDS)
    finally:
        for one in busy:
            one.kill()
            one.wait()


def failed_hand_overs(launched: Running) -> int:
    """Return how many hand-overs have failed, as decode servers that run now have counted."""
    found = 0
    for one in launched.servers[len(PREFILLS) :]:
        # Its counts have ended with a server that is away.
        with contextlib.suppress(httpx.TransportError):
            found += count([one], "kvcached_nixl:handover_failures_total")
    return found


def table_of(phases: Sequence[Phase]) -> Table:
    kinds = [kind.value for kind in Verdict]
    rows = []
    for one in phases:
        counts = (*(one.outcomes.get(kind, 0) for kind in kinds), one.failed_hand_overs)
        rows.append([one.mode, one.change, *map(str, counts)])
    return make_table("what clients got while the fleet changed", ("mode", "change", *kinds, "without KV"), rows)


def judge(phases: Sequence[Phase]) -> list[Target]:
    def total(some: Sequence[Phase], *kinds: Verdict) -> int:
        return sum(one.outcomes.get(kind.value, 0) for one in some for kind in kinds)

    right, bad = total(phases, Verdict.RIGHT), total(phases, Verdict.WRONG, Verdict.CUT_SHORT, Verdict.NO_END)
    # Those of a decode server that is killed break off.
    others = [one for one in phases if one.change != KILL_DECODE]
    errors = total(others, Verdict.ERROR, Verdict.BROKEN)
    return [
        Target("wrong answers, and answers without an end (0)", f"{bad}, beside {right} right", bad == 0 < right),
        Target("errors, unless a decode server is killed (0)", f"{errors}", errors == 0),
    ]
