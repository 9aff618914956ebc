# SPDX-License-Identifier: Apache-2.0
"""The same stack twice at the same time: with kvcached and this package, and with vLLM's stock connector."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.targets import Verdict as Target
from experiments.stacks import traffic
from experiments.stacks.deployment import Deployment, Say
from experiments.stacks.measure import spec
from experiments.stacks.stacks import Stack

PROMPT_TOKENS = 512
ROUNDS = 40
BATCHES = 10
BATCH_REQUESTS = 24
MOST_RATIO = 1.1
"""Of a median, beside stock; kvcached without P/D has some of it (docs/measurements.md, bench_serve)."""


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


def targets_of_overhead(found: Overhead) -> list[Target]:
    words = f"{found.stack}, {found.mode}"
    return [
        Target(f"{words}: {what} / stock (<= {MOST_RATIO})", f"{ratio:.2f} x", ratio <= MOST_RATIO)
        for what, ratio in (("first token", found.first_token_ratio), ("batch", found.batch_ratio))
    ]


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
    free = asyncio.Semaphore(traffic.AT_ONCE)

    async def one(place: int) -> None:
        async with free:
            prompt = [3 + number, 3 + place, *(3 + (7 * each + 31 * place) % 500 for each in range(200))]
            await client.completions.create(
                model="model", prompt=prompt, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
            )

    begun = time.monotonic()
    await asyncio.gather(*(one(place) for place in range(BATCH_REQUESTS)))
    return time.monotonic() - begun
