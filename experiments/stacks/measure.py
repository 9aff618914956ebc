# SPDX-License-Identifier: Apache-2.0
"""One stack with one transfer mode: everything asked once, then engines are ended and brought back under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.counted import settled, since
from experiments.common.device import layout, nixl
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, Running, ServerSpec
from experiments.stacks import traffic
from experiments.stacks.environments import Say
from experiments.stacks.stacks import Deployment, Stack
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
            "--chat-template",
            TEMPLATE,
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
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
        known = deployment.hand_overs()
        answers = asyncio.run(traffic.many(deployment.url, before))
        calm = traffic.counted(answers)
        hand_overs = since(known, deployment.hand_overs, len(before))
        say(f"{words}: {calm.get(Verdict.RIGHT.value, 0)} of {len(before)} right, {hand_overs} hand-overs")
        killed = asyncio.run(
            traffic.meanwhile(deployment.url, list(before.items()), lambda: _kill_and_replace(deployment))
        )
        troubled = traffic.counted(killed)
        say(f"{words}, prefill killed: {troubled}")
        recovered_seconds = asyncio.run(_recovered(deployment.url, before))
        restarted: list[Judged] = []
        if engines_per_role > 1:
            restarted = asyncio.run(
                traffic.meanwhile(deployment.url, list(before.items()), lambda: _restart_each(deployment))
            )
            say(f"{words}, every engine restarted: {traffic.counted(restarted)}")
        known = settled(deployment.hand_overs)
        others = asyncio.run(traffic.many(deployment.url, then))
        hand_overs_after = since(known, deployment.hand_overs, len(then))
    wrong = [one for one in (*answers, *killed, *restarted, *others) if one.verdict is Verdict.WRONG]
    return Outcome(
        stack.name,
        stack.version,
        mode,
        engines_per_role,
        len(before),
        calm,
        hand_overs,
        None if mode in stack.asks_both_at_once else sum(one.found.cached_tokens for one in answers if one.found),
        troubled,
        recovered_seconds,
        traffic.counted(restarted),
        traffic.counted(others),
        hand_overs_after,
        [{"request": one.request, "found": one.found, "expected": expected[one.request]} for one in wrong],
    )


def _kill_and_replace(deployment: Deployment) -> None:
    time.sleep(SETTLE_SECONDS)
    prefill = next(one for one in deployment.engines if "prefill" in one)
    deployment.kill(prefill)
    # Requests of these seconds, without a prefill engine, count in the figures too.
    time.sleep(SETTLE_SECONDS)
    deployment.restore(prefill)


def _restart_each(deployment: Deployment) -> None:
    for engine in deployment.engines:
        time.sleep(SETTLE_SECONDS)
        deployment.restart(engine)
        deployment.restore(engine)


async def _recovered(url: str, expected: dict[Request, Answer]) -> float | None:
    begun = time.monotonic()
    request, answer = next(iter(expected.items()))
    async with traffic.client_of(url) as client:
        while time.monotonic() - begun < RECOVERY_SECONDS:
            if (await traffic.judge(client, request, answer)).verdict is Verdict.RIGHT:
                return time.monotonic() - begun
            await asyncio.sleep(0.2)
    return None
