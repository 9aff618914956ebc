# SPDX-License-Identifier: Apache-2.0
"""One stack with one transfer mode: everything asked once, then engines are ended and brought back under load; and the
same stack twice at the same time, with kvcached and this package, and with vLLM's stock connector."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common.client import at_a_time
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
PROMPT_TOKENS = 512
ROUNDS = 40
BATCHES = 10
BATCH_REQUESTS = 24


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
        """Requests that ended with an error while a prefill engine was killed and brought back."""
        return sum(number for verdict, number in self.troubled.items() if verdict.startswith("error"))


def spec(name: str, mode: str | None, *, is_stock: bool = False) -> ServerSpec:
    """Return the configuration of an engine; without ``mode``, of the stock instance that answers are compared with.

    Args:
        is_stock: vLLM's own connector, and no kvcached.
    """
    extra = {} if is_stock else {"transfer_mode": mode, "kv_lease_duration": 10.0}
    connector = {"kv_connector": "NixlPushConnector"} if is_stock and mode == "push" else {}
    transfer = nixl(name, extra, kv_load_failure_policy="fail", **connector)
    return ServerSpec(
        name=name,
        model=make_model(ModelShape(max_positions=4096)),
        dtype="float32",
        max_num_batched_tokens=256,
        kv_transfer=transfer if mode else None,
        environment={**KVCACHED, **layout()} if mode and not is_stock else {},
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
    """Return what one stock instance says to every request."""
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
        calm = _verdicts(answers)
        hand_overs = since(known, deployment.hand_overs, len(before))
        say(f"{words}: {calm[Verdict.RIGHT]} of {len(before)} right, {hand_overs} hand-overs")
        killed = asyncio.run(
            traffic.meanwhile(deployment.url, list(before.items()), lambda: _kill_and_replace(deployment))
        )
        troubled = _verdicts(killed)
        say(f"{words}, prefill killed: {_shown(troubled)}")
        recovered_seconds = asyncio.run(_recovered(deployment.url, before))
        restarted: list[Judged] = []
        if engines_per_role > 1:
            restarted = asyncio.run(
                traffic.meanwhile(deployment.url, list(before.items()), lambda: _restart_each(deployment))
            )
            say(f"{words}, every engine restarted: {_shown(_verdicts(restarted))}")
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
        _shown(calm),
        hand_overs,
        None if mode in stack.asks_both_at_once else sum(one.found.cached_tokens for one in answers if one.found),
        _shown(troubled),
        recovered_seconds,
        _shown(_verdicts(restarted)),
        _shown(_verdicts(others)),
        hand_overs_after,
        [_compared(one, expected[one.request]) for one in wrong],
    )


def _verdicts(answers: Sequence[Judged]) -> Counter[Verdict]:
    return Counter(one.verdict for one in answers)


def _compared(wrong: Judged, expected: Answer) -> dict[str, object]:
    found = None if wrong.found is None else asdict(wrong.found)
    return {"request": wrong.request, "found": found, "expected": asdict(expected)}


def _shown(verdicts: Counter[Verdict]) -> dict[str, int]:
    return {kind.value: verdicts[kind] for kind in Verdict if verdicts[kind]}


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


# --------------------------------------------------------------------------------- beside the stock connector


@dataclass(frozen=True)
class Overhead:
    """Times of this package and of the stock connector, taken by turns; medians, in milliseconds.

    Attributes:
        first_token_ms: of a streamed completion of `PROMPT_TOKENS`, one at a time.
        batch_ms: until `BATCH_REQUESTS` completions of 16 tokens have ended, 8 at a time.
    """

    stack: str
    mode: str
    first_token_ms: float
    stock_first_token_ms: float
    batch_ms: float
    stock_batch_ms: float

    @property
    def first_token_ratio(self) -> float:
        return self.first_token_ms / self.stock_first_token_ms

    @property
    def batch_ratio(self) -> float:
        return self.batch_ms / self.stock_batch_ms


def measure_overhead(stack: Stack, mode: str, logs: Path, say: Say) -> Overhead:
    """Start both deployments, ask them by turns, and stop them."""
    words = f"{stack.name}, {mode}, overhead"
    folder = logs / words.replace(" ", "-")
    specs, stock_specs = (
        [spec(role, mode, is_stock=is_stock) for role in ("prefill", "decode")] for is_stock in (False, True)
    )
    with (
        stack.deploy(specs, folder / "kvcached", say) as ours,
        stack.deploy(stock_specs, folder / "stock", say) as stock,
    ):
        first = asyncio.run(_by_turns(ours, stock, ROUNDS, _first_token))
        batch = asyncio.run(_by_turns(ours, stock, BATCHES, _batch))
    found = Overhead(stack.name, mode, *first, *batch)
    say(f"{words}: first token {found.first_token_ratio:.2f} x stock, batch {found.batch_ratio:.2f} x")
    return found


async def _by_turns(
    ours: Deployment, stock: Deployment, rounds: int, ask: Callable[[Any, int], Awaitable[float]]
) -> tuple[float, float]:
    """Return the medians of both, in milliseconds. The first round is for connections and handshakes."""
    times: tuple[list[float], list[float]] = ([], [])
    async with traffic.client_of(ours.url) as one, traffic.client_of(stock.url) as other:
        for number in range(rounds + 1):
            order = ((one, 0), (other, 1)) if number % 2 else ((other, 1), (one, 0))
            for client, place in order:
                times[place].append(await ask(client, number) * 1e3)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


async def _first_token(client: Any, number: int) -> float:
    """Returns seconds."""
    prompt = [3 + (11 * place + 17 * number) % 500 for place in range(PROMPT_TOKENS)]
    prompt[0] = 3 + number
    begun = time.monotonic()
    answer = await client.completions.create(model="model", prompt=prompt, max_tokens=2, temperature=0, stream=True)
    parts = aiter(answer)
    await anext(parts)
    seconds = time.monotonic() - begun
    # To its end: an aborted request would be cleared away while the next one is timed.
    async for _ in parts:
        pass
    return seconds


async def _batch(client: Any, number: int) -> float:
    """Returns seconds."""
    asked = {"model": "model", "max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}}
    prompts = (
        [3 + number, 3 + place, *(3 + (7 * each + 31 * place) % 500 for each in range(200))]
        for place in range(BATCH_REQUESTS)
    )
    begun = time.monotonic()
    await at_a_time(traffic.AT_ONCE, (client.completions.create(**asked, prompt=prompt) for prompt in prompts))
    return time.monotonic() - begun
