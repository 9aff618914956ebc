# SPDX-License-Identifier: Apache-2.0
"""One stack with one transfer mode: everything asked once, then prefill is killed and brought back under load."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.counted import hand_overs
from experiments.common.device import layout
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, Running, ServerError, ServerSpec
from experiments.common.targets import Verdict as Target
from experiments.common.transfer_config import role
from experiments.stacks import traffic
from experiments.stacks.frontends import Say, Stack
from experiments.stacks.traffic import TEMPLATE, Answer, Request, Verdict

KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK}
RECOVERY_SECONDS = 60.0
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """What clients of a stack got.

    Attributes:
        calm: verdicts while all servers were up; ``asked`` of them, each with a prompt of its own.
        hand_overs: requests whose KV was moved in that time.
        cached_tokens: that ``usage`` names then; prefill had none. None if decode does not get prefill's answer.
        troubled: verdicts while prefill was killed and brought back.
        recovered_seconds: from the moment when the new prefill serves to the first right answer; None: none came.
        after: verdicts after that, of as many other prompts; ``hand_overs_after`` of them got their KV from prefill.
        first_token_ms: median time to the first token of a streamed completion, one at a time.
    """

    stack: str
    version: str
    mode: str
    asked: int
    calm: dict[str, int]
    hand_overs: int
    cached_tokens: int | None
    troubled: dict[str, int]
    recovered_seconds: float | None
    after: dict[str, int]
    hand_overs_after: int
    first_token_ms: float


def spec(name: str, mode: str | None) -> ServerSpec:
    """Return the configuration of a server; without ``mode``, of the stock instance that answers are compared with."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": role(name),
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"num_threads": 0, "transfer_mode": mode, "kv_lease_duration": 10.0},
    }
    return ServerSpec(
        name=name,
        model=make_model(ModelShape(max_positions=4096)),
        dtype="float32",
        max_num_batched_tokens=256,
        kv_transfer=transfer if mode else None,
        environment={**KVCACHED, **layout()} if mode else {},
        arguments=(
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
    with Running([spec("alone", None)], logs) as launched:
        return asyncio.run(traffic.answers(launched.ready()[0].base_url, traffic.requests(rounds)))


def measure(stack: Stack, mode: str, expected: dict[Request, Answer], logs: Path, say: Say) -> Outcome:
    """Start a pair and the stack before it, ask, and stop them."""
    words = f"{stack.name}, {mode}"
    # Prompts that neither server has seen before: decode's prefix cache outlives prefill.
    half = len(expected) // 2
    before, then = dict(list(expected.items())[:half]), dict(list(expected.items())[half:])
    with Running([spec("prefill", mode), spec("decode", mode)], logs / words.replace(" ", "-")) as launched:
        prefill, decode = launched.ready()
        with stack.launch([prefill], [decode], logs / words.replace(" ", "-") / "stack.log", say) as url:
            answers = asyncio.run(traffic.many(url, before))
            calm = Counter(one.verdict for one in answers)
            moved = hand_overs(launched.servers, len(before))
            say(f"{words}: {calm[Verdict.RIGHT]} of {len(before)} right, {moved} hand-overs")
            first_token_ms = asyncio.run(_first_token_ms(url))
            troubled = Counter(asyncio.run(traffic.meanwhile(url, before, lambda: _kill_and_replace(launched))))
            say(f"{words}, prefill killed: {_shown(troubled)}")
            recovered_seconds = asyncio.run(_recovered(url, before))
            known = hand_overs(launched.servers, 0)
            after = Counter(one.verdict for one in asyncio.run(traffic.many(url, then)))
            hand_overs_after = hand_overs(launched.servers, known + len(then)) - known
    return Outcome(
        stack.name,
        stack.version,
        mode,
        len(before),
        _shown(calm),
        moved,
        sum(one.cached_tokens for one in answers) if mode in stack.passes_answers_in else None,
        _shown(troubled),
        recovered_seconds,
        _shown(after),
        hand_overs_after,
        first_token_ms,
    )


def targets(found: Outcome) -> list[Target]:
    """What clients may rely on behind a stack."""
    words = f"{found.stack}, {found.mode}"
    recovered = found.recovered_seconds
    bad = sum(
        verdicts.get(kind.value, 0)
        for verdicts in (found.calm, found.troubled, found.after)
        for kind in (Verdict.WRONG, Verdict.NO_END)
    )
    right = found.calm.get(Verdict.RIGHT.value, 0)
    return [
        Target(f"{words}: every answer is that of one instance", f"{right} of {found.asked}", right == found.asked),
        Target(f"{words}: KV is handed over for each", f"{found.hand_overs}", found.hand_overs == found.asked),
        Target(
            f"{words}: usage names no cached tokens that prefill had not",
            "not told" if found.cached_tokens is None else f"{found.cached_tokens}",
            not found.cached_tokens,
        ),
        Target(f"{words}: no wrong answer, and none without an end", f"{bad}", bad == 0),
        Target(
            f"{words}: right answers within {RECOVERY_SECONDS:.0f} s of prefill's return",
            "none" if recovered is None else f"{recovered:.1f} s",
            recovered is not None
            and found.after == {Verdict.RIGHT.value: found.asked} == {"right": found.hand_overs_after},
        ),
    ]


def _shown(verdicts: Counter[Verdict]) -> dict[str, int]:
    return {kind.value: verdicts[kind] for kind in Verdict if verdicts[kind]}


async def _first_token_ms(url: str, count: int = 12) -> float:
    found = []
    async with traffic.client_of(url) as client:
        for number in range(count):
            begun = time.monotonic()
            prompt = [3 + (11 * place + 17 * number) % 500 for place in range(512)]
            answer = await client.completions.create(
                model="model", prompt=prompt, max_tokens=2, temperature=0, stream=True
            )
            await anext(aiter(answer))
            found.append((time.monotonic() - begun) * 1e3)
            await answer.close()
    return statistics.median(found)


def _kill_and_replace(launched: Running) -> None:
    time.sleep(SETTLE_SECONDS)
    launched.servers[0].kill()
    # Requests of these seconds, without a prefill server, count in the figures too.
    time.sleep(SETTLE_SECONDS)
    successor = launched.replace(0)
    while not successor.is_ready():
        if time.monotonic() - successor.started_at > RECOVERY_SECONDS * 3:
            raise ServerError(f"found {successor.spec.name} not ready; its log ends with:\n{successor.tail()}")
        time.sleep(0.1)


async def _recovered(url: str, expected: dict[Request, Answer]) -> float | None:
    begun = time.monotonic()
    request, answer = next(iter(expected.items()))
    async with traffic.client_of(url) as client:
        while time.monotonic() - begun < RECOVERY_SECONDS:
            if (await traffic.judge(client, request, answer)).verdict is Verdict.RIGHT:
                return time.monotonic() - begun
            await asyncio.sleep(0.2)
    return None
