# SPDX-License-Identifier: Apache-2.0
"""Do other projects' stacks get right answers from a prefill and a decode server with kvcached, and errors when prefill
dies?

Starts one prefill and one decode engine in each stack's own way, with its own router, unchanged. Asks for completions
and chats, streamed and not, and for calls of a tool, eight at a time, through the official OpenAI client. Every answer
is compared with that of one stock instance, and vLLM's own counter says how many requests got their KV from prefill.
Then prefill is killed under load, comes back, and as many other prompts are asked.
Ray and Dynamo are run with vLLM 0.28.0. What they need is installed on first use: up to 470 MB.

Targets: for each stack and transfer mode:
  every answer is that of one stock instance; KV is handed over for each request
  no wrong answer and none without an end while prefill dies and comes back; errors are allowed, also on streams, but a
  stream does not just break off
  right answers again within 60 s of prefill's return.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.common.counted import settled, since
from experiments.common.device import layout, nixl
from experiments.common.model import ModelShape, make_model
from experiments.common.report import Run, make_table
from experiments.common.report import Verdict as Target
from experiments.common.servers import GIVES_BACK, Running, ServerError, ServerSpec
from experiments.stacks import traffic
from experiments.stacks.routers import Say
from experiments.stacks.stacks import STACKS, Deployment, Stack
from experiments.stacks.traffic import TEMPLATE, Answer, Judged, Request, Verdict

KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK}
RECOVERY_SECONDS = 60.0
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """What clients of a stack got.

    Attributes:
        engines_per_role: prefill engines, and as many decode engines.
        calm: verdicts while all engines were up; ``asked`` of them, each with a prompt of its own.
        hand_overs: requests whose KV was moved in that time.
        cached_tokens: that ``usage`` names then; prefill had none. None if decode may not get prefill's answer.
        troubled: verdicts while a prefill engine was killed and brought back.
        recovered_seconds: from the moment when the new prefill serves to the first right answer; None: none came.
        rolling: verdicts while every engine was restarted, one after another; empty with one engine per role.
        after: verdicts after that, of as many other prompts; ``hand_overs_after`` of them got their KV from prefill.
        wrong: each wrong answer, beside the one expected.
    """

    stack: str
    version: str
    mode: str
    engines_per_role: int
    asked: int
    calm: dict[str, int]
    hand_overs: int
    cached_tokens: int | None
    troubled: dict[str, int]
    recovered_seconds: float | None
    rolling: dict[str, int]
    after: dict[str, int]
    hand_overs_after: int
    wrong: list[dict[str, object]]

    @property
    def num_errors(self) -> int:
        return sum(number for verdict, number in self.troubled.items() if verdict.startswith("error"))


def spec(name: str, mode: str | None) -> ServerSpec:
    """Return the configuration of an engine; without ``mode``, of the stock instance that answers are compared with."""
    transfer = nixl(name, {"transfer_mode": mode, "kv_lease_duration": 10.0}, kv_load_failure_policy="fail")
    return ServerSpec(
        name=name,
        model=make_model(ModelShape(max_positions=4096)),
        dtype="float32",
        max_num_batched_tokens=256,
        kv_transfer=transfer if mode else None,
        environment={**KVCACHED, **layout()} if mode else {},
        # A tool's arguments by their schema would be spaces until they are cut off.
        arguments=("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        http_arguments=(
            *("--chat-template", TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            "--enable-prompt-tokens-details",
        ),
        forks=True,
    )


def expected_of(rounds: Sequence[int], logs: Path) -> dict[Request, Answer]:
    asked = [*traffic.requests(rounds), *((traffic.BY_SCHEMA, number) for number in rounds)]
    with Running([spec("alone", None)], logs) as launched:
        return asyncio.run(traffic.answers(launched.ready()[0].base_url, asked))


def measure(
    stack: Stack, mode: str, expected: dict[Request, Answer], logs: Path, say: Say, engines_per_role: int = 1
) -> Outcome:
    """Start a stack, ask, and stop it. ``expected``: from `expected_of`."""
    words = f"{stack.name}, {mode}"
    expected = traffic.expected_behind(expected, constrains_tools_itself=stack.constrains_tools_itself)
    # Prompts that neither server has seen before: decode's prefix cache outlives prefill.
    half = len(expected) // 2
    before, then = dict(list(expected.items())[:half]), dict(list(expected.items())[half:])
    numbers = range(engines_per_role) if engines_per_role > 1 else ("",)
    specs = [spec(f"{name}{number}", mode) for name in ("prefill", "decode") for number in numbers]
    with stack.deploy(specs, logs / words.replace(" ", "-"), say) as deployment:
        url = deployment.url

        def meanwhile(trouble: Callable[[], None], what: str) -> list[Judged]:
            found = asyncio.run(traffic.meanwhile(url, list(before.items()), trouble))
            say(f"{words}, {what}: {traffic.counted(found)}")
            return found

        known = deployment.hand_overs()
        answers = asyncio.run(traffic.many(url, before))
        calm = traffic.counted(answers)
        hand_overs = since(known, deployment.hand_overs, len(before))
        say(f"{words}: {calm.get(Verdict.RIGHT.value, 0)} of {len(before)} right, {hand_overs} hand-overs")
        prefill = next(one for one in deployment.engines if "prefill" in one)
        killed = meanwhile(partial(kill, deployment, prefill), "prefill killed")
        recovered_seconds = asyncio.run(_recovered(url, before))
        each = partial(restart_each, deployment, deployment.engines)
        restarted = meanwhile(each, "every engine restarted") if engines_per_role > 1 else []
        known = settled(deployment.hand_overs)
        others = asyncio.run(traffic.many(url, then))
        hand_overs_after = since(known, deployment.hand_overs, len(then))
    wrong = [one for one in (*answers, *killed, *restarted, *others) if one.verdict is Verdict.WRONG]
    cached = sum(one.found.cached_tokens for one in answers if one.found)
    return Outcome(
        stack=stack.name,
        version=stack.version,
        mode=mode,
        engines_per_role=engines_per_role,
        asked=len(before),
        calm=calm,
        hand_overs=hand_overs,
        cached_tokens=None if mode in stack.asks_both_at_once else cached,
        troubled=traffic.counted(killed),
        recovered_seconds=recovered_seconds,
        rolling=traffic.counted(restarted),
        after=traffic.counted(others),
        hand_overs_after=hand_overs_after,
        wrong=[{"request": one.request, "found": one.found, "expected": expected[one.request]} for one in wrong],
    )


def kill(deployment: Deployment, *engines: str, seconds: float = SETTLE_SECONDS) -> None:
    """Kill engines, and bring them back after some seconds, in which requests count in the figures, too."""
    time.sleep(SETTLE_SECONDS)
    for engine in engines:
        deployment.kill(engine)
    time.sleep(seconds)
    for engine in engines:
        deployment.restore(engine)


def restart_each(deployment: Deployment, engines: Sequence[str], **changed: Any) -> None:
    """Restart engines one after another, as an operator does; ``changed`` are fields of their configurations."""
    for engine in engines:
        time.sleep(SETTLE_SECONDS)
        deployment.restart(engine)
        deployment.restore(engine, **changed)
    time.sleep(SETTLE_SECONDS)


async def _recovered(url: str, expected: dict[Request, Answer]) -> float | None:
    begun = time.monotonic()
    request, answer = next(iter(expected.items()))
    async with traffic.client_of(url) as client:
        while time.monotonic() - begun < RECOVERY_SECONDS:
            if (await traffic.judge(client, request, answer)).verdict is Verdict.RIGHT:
                return time.monotonic() - begun
            await asyncio.sleep(0.2)
    return None


# ---------------------------------------------------------------------------------------------------------- a whole run


def main(run: Run) -> int:
    chosen, engines = run.chosen(STACKS), run.options.engines or 1
    reasons = {stack.name: stack.reason_to_skip(run.vllm, engines) for stack in chosen}
    skipped = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    asked = [(one, mode) for one in chosen if not reasons[one.name] for mode in run.modes if mode in one.modes]
    if not asked:
        raise ServerError(f"found nothing to run; {'; '.join(skipped) or 'no stack has that mode'}.")
    for one in skipped:
        run.say(f"not run: {one}")
    expected = expected_of(range(12 if run.quick else 36), run.logs)
    outcomes = [measure(stack, mode, expected, run.logs, run.say, engines) for stack, mode in asked]
    content = {"outcomes": [asdict(one) for one in outcomes], "not run": skipped}
    return run.conclude([table_of(outcomes)], [one for found in outcomes for one in targets(found)], content)


def table_of(outcomes: list[Outcome]) -> Table:
    rows = []
    for one in outcomes:
        recovered = "never" if one.recovered_seconds is None else f"after {one.recovered_seconds:.1f} s"
        counts = (_counts(one.calm), str(one.hand_overs), _counts(one.troubled))
        rows.append([f"{one.stack} {one.version}", one.mode, *counts, recovered, _counts(one.rolling) or "not run"])
    columns = ("stack", "mode", "all up", "hand-overs", "prefill killed", "right again", "each restarted")
    return make_table("what clients got", columns, rows)


def _counts(verdicts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in verdicts.items())


def targets(found: Outcome) -> list[Target]:
    recovered, asked = found.recovered_seconds, found.asked
    got = (found.calm, found.troubled, found.rolling, found.after)
    bad = sum(verdicts.get(kind.value, 0) for verdicts in got for kind in (Verdict.WRONG, Verdict.NO_END))
    cut_short = found.troubled.get(Verdict.CUT_SHORT.value, 0)
    right = found.calm.get(Verdict.RIGHT.value, 0)
    cached = "not told" if found.cached_tokens is None else f"{found.cached_tokens}"
    is_back = recovered is not None and found.after == {Verdict.RIGHT.value: asked} == {"right": found.hand_overs_after}
    again = f"right answers within {RECOVERY_SECONDS:.0f} s of prefill's return"
    rows = (
        ("every answer is that of one instance", f"{right} of {asked}", right == asked),
        ("KV is handed over for each", f"{found.hand_overs}", found.hand_overs == asked),
        ("usage names no cached tokens that prefill had not", cached, not found.cached_tokens),
        ("no wrong answer, and none without an end", f"{bad}", bad == 0),
        ("a stream whose hand-over fails ends with an error", f"{cut_short} did not", cut_short == 0),
        (again, "none" if recovered is None else f"{recovered:.1f} s", is_back),
    )
    return [Target(f"{found.stack}, {found.mode}: {words}", said, reached) for words, said, reached in rows]
