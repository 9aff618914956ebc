# SPDX-License-Identifier: Apache-2.0
"""Arms whose servers run at the same time and take turns, and a client that does what a router does.

The machine's speed varies from minute to minute by more than arms differ. So the servers of all arms run throughout,
and the arms take turns request by request, with a different arm first each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx

from experiments.bench.samples import Run, Samples
from experiments.common.client import AnswerError, Client, http_client, offered_blocks
from experiments.common.device import nixl, with_extra
from experiments.common.servers import Asking, Running, Server, ServerSpec, prefill_and_decode

KVCACHED: Mapping[str, str] = {"ENABLE_KVCACHED": "true", "KVCACHED_CONTIGUOUS_LAYOUT": "true"}
APART: Mapping[str, str] = {**KVCACHED, "KVCACHED_CONTIGUOUS_LAYOUT": "false"}
"""kvcached's non-contiguous layout."""

One = TypeVar("One")


@dataclass(frozen=True)
class Arm:
    """One way of handing over.

    Attributes:
        environment: of both servers; empty for stock vLLM on its own memory.
        is_streamed: both servers get their requests at once, and blocks are transferred while prefill computes. Else
            decode gets the parameters of prefill's answer.
        asks: decode is asked, and asks prefill.
        takes_both: decode can do so, and takes what a router sends, too.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    connector: str = "NixlConnector"
    is_streamed: bool = False
    asks: bool = False
    takes_both: bool = False

    @property
    def servers(self) -> str:
        """A key for the configuration of its servers; arms with the same key share servers."""
        return f"{self.connector}{dict(self.extra)}{dict(self.environment)}"


def pair_specs(arm: Arm, place: str, environment: Mapping[str, str], **more: Any) -> list[ServerSpec]:
    """Return the configurations of P and D of an arm; ``place`` makes their names different."""
    config = {**nixl("", arm.extra), "kv_connector": arm.connector}
    if arm.takes_both:
        config = with_extra(config, {"accept_kv_transfer_params": True})
    return prefill_and_decode(f"{arm.name}-{place}", config, environment={**environment, **arm.environment}, **more)


def in_turn(items: Sequence[One], turn: int) -> Sequence[One]:
    """Return the items with a different one first in each turn."""
    first = turn % len(items)
    return (*items[first:], *items[:first])


FORMS = ("{}", "{} tokens", "{} at a time")
"""How settings are written."""


@dataclass(frozen=True)
class Comparison:
    """Arms that take turns with the same load.

    Attributes:
        specs: returns the configurations of P and D of an arm.
        ask: sends so many prompts of so many tokens at once, and returns the figures of each.
        rounds: how often, by prompt tokens and number at a time.
        prepare: is called with the first part of the settings before its load is sent.
    """

    arms: Sequence[Arm]
    specs: Callable[[Arm], list[ServerSpec]]
    ask: Callable[[Router, int, int], Awaitable[Sequence[Mapping[str, float]]]]
    rounds: Mapping[tuple[int, int], int]
    prepare: Callable[[str, Router], Awaitable[None]] | None = None

    def measure(self, run: Run, samples: Samples, *names: str) -> None:
        """Start all pairs, send the load to all arms in turn, once for each of ``names``, and stop the servers."""
        with contextlib.ExitStack() as stack:
            pairs: dict[str, list[Server]] = {}
            for arm in self.arms:
                # Started one after another: on few cores, all together would start too slowly.
                if arm.servers not in pairs:
                    start = Asking if arm.takes_both else Running
                    launched = stack.enter_context(start(self.specs(arm), run.logs, run.update))
                    pairs[arm.servers] = launched.ready()
            asyncio.run(self._send(run, samples, pairs, names))

    async def _send(
        self, run: Run, samples: Samples, pairs: Mapping[str, Sequence[Server]], names: Sequence[str]
    ) -> None:
        longest, most = (max(sizes) for sizes in zip(*self.rounds, strict=True))
        turns = itertools.count()
        async with http_client(most) as http:
            routers = [Router(arm, *pairs[arm.servers], http=http) for arm in self.arms]  # type: ignore[misc]
            for router in routers:
                # Not measured: the handshake, both sides' first steps and the first touch of their memory.
                run.update(f"{router.arm.name}: warming up")
                await self.ask(router, longest, most)
            for name in names:
                if self.prepare:
                    await self.prepare(name, routers[0])
                for (length, number), times in self.rounds.items():
                    run.update(f"{name}: {length} tokens, {number} at a time")
                    for router in itertools.chain(*(in_turn(routers, next(turns)) for _ in range(times))):
                        for figures in await self.ask(router, length, number):
                            samples.add((name, length, number), router.arm.name, **figures)


class Handed(NamedTuple):
    """When a client asked, and when each token of the answer came.

    In seconds of ``time.perf_counter``, which on Linux is the monotonic clock that all processes share.
    """

    asked: float
    tokens: list[float]

    @property
    def first_token_seconds(self) -> float:
        return self.tokens[0] - self.asked


class Router:
    """Hands prompts over from a prefill to a decode server, each a different prompt."""

    names = itertools.count()

    def __init__(self, arm: Arm, prefill: Server, decode: Server, http: httpx.AsyncClient) -> None:
        self.arm = arm
        self.coordinates = prefill.coordinates
        self.prefill, self.decode = Client(prefill.base_url, http), Client(decode.base_url, http)

    async def hand_over(self, length: int, tokens: int = 1, *, late_seconds: float | None = None) -> Handed:
        """Hand a prompt of ``length`` tokens over, and stream ``tokens`` tokens of its answer. ``late_seconds``: so
        long after prefill's answer decode gets its request, also where the arm streams."""
        name, prompt = self._next(length)
        asked = time.perf_counter()
        if self.arm.asks:
            return Handed(asked, await self.decode.token_times(prompt, tokens, name, None))
        if self.arm.is_streamed and late_seconds is None:
            params = {**self.coordinates, "do_remote_prefill": True, "transfer_id": name}
            decoding = asyncio.create_task(self.decode.token_times(prompt, tokens, name, params))
            await self.prefill.offer(prompt, salt=name, request_id=name, transfer_id=name)
            return Handed(asked, await decoding)
        params = await self.prefill.offer(prompt, salt=name, request_id=name)
        if not offered_blocks(params) and self.arm.connector == "NixlConnector":
            raise AnswerError(f"{name}: found no blocks in prefill's answer; expected a hand-over. See prefill's log.")
        await asyncio.sleep(late_seconds or 0.0)
        return Handed(asked, await self.decode.token_times(prompt, tokens, name, params))

    def _next(self, length: int) -> tuple[str, list[int]]:
        number = next(self.names)
        return f"request-{number}", [2 + (number * 131 + place * 7 + place * place) % 500 for place in range(length)]
