# SPDX-License-Identifier: Apache-2.0
"""Arms whose servers run at the same time and take turns, and a client that does what a router does.

The machine's speed varies from minute to minute by more than arms differ. So the servers of all arms run throughout,
and the arms take turns request by request, with a different arm first each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx

from experiments.common.client import AnswerError, Client, offered_blocks
from experiments.common.device import nixl
from experiments.common.servers import REPOSITORY, SERVER_SIDE, Server, ServerSpec, prefill_and_decode, running

PROBE = Path(__file__).resolve().parent / "server_side"
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
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    connector: str = "NixlConnector"
    is_streamed: bool = False

    @property
    def servers(self) -> str:
        """A key for the configuration of its servers; arms with the same key share servers."""
        return f"{self.connector}{dict(self.extra)}{dict(self.environment)}"


def pair_specs(arm: Arm, place: str, environment: Mapping[str, str], **more: Any) -> list[ServerSpec]:
    """Return the configurations of P and D of an arm, with the probe; ``place`` makes their names different."""
    search = os.pathsep.join(map(str, (SERVER_SIDE, PROBE, REPOSITORY)))
    arguments = ("--worker-extension-cls", "bench_probe.BenchProbe", *more.pop("arguments", ()))
    config = {**nixl("", arm.extra), "kv_connector": arm.connector}
    made = {"PYTHONPATH": search, **environment, **arm.environment}
    return prefill_and_decode(f"{arm.name}-{place}", config, environment=made, arguments=arguments, **more)


@contextlib.contextmanager
def running_pairs(
    arms: Sequence[Arm], specs: Callable[[Arm], list[ServerSpec]], logs: Path, show: Callable[[str], None]
) -> Iterator[list[list[Server]]]:
    """Start a pair for each configuration of servers, and yield each arm's."""
    with contextlib.ExitStack() as stack:
        pairs: dict[str, list[Server]] = {}
        for arm in arms:
            # Started one after another: on few cores, all together would start too slowly.
            if arm.servers not in pairs:
                pairs[arm.servers] = stack.enter_context(running(specs(arm), logs, show))
        yield [pairs[arm.servers] for arm in arms]


def in_turn(items: Sequence[One], turn: int) -> Sequence[One]:
    """Return the items with a different one first in each turn."""
    first = turn % len(items)
    return (*items[first:], *items[:first])


class Handed(NamedTuple):
    """When a client asked, when it had prefill's answer, and when each token of decode's answer came.

    In seconds of ``time.perf_counter``, which on Linux is the monotonic clock that all processes share.
    """

    asked: float
    offered: float
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
        """Hand a prompt of ``length`` tokens over, and stream ``tokens`` tokens of its answer.

        Args:
            late_seconds: so long after prefill's answer decode gets its request, also where the arm streams.
        """
        name, prompt = self._next(length)
        asked = time.perf_counter()
        if self.arm.is_streamed and late_seconds is None:
            params = {**self.coordinates, "do_remote_prefill": True, "transfer_id": name}
            decoding = asyncio.create_task(self.decode.token_times(prompt, tokens, name, params))
            await self.prefill.offer(prompt, salt=name, request_id=name, transfer_id=name)
            return Handed(asked, time.perf_counter(), await decoding)
        params = await self.prefill.offer(prompt, salt=name, request_id=name)
        if not offered_blocks(params) and self.arm.connector == "NixlConnector":
            raise AnswerError(f"{name}: found no blocks in prefill's answer; expected a hand-over. See prefill's log.")
        await asyncio.sleep(late_seconds or 0.0)
        offered = time.perf_counter()
        return Handed(asked, offered, await self.decode.token_times(prompt, tokens, name, params))

    async def ask_decode(self, length: int, tokens: int = 1) -> Handed:
        """Ask decode only, which asks prefill."""
        name, prompt = self._next(length)
        asked = time.perf_counter()
        return Handed(asked, asked, await self.decode.token_times(prompt, tokens, name, None))

    def _next(self, length: int) -> tuple[str, list[int]]:
        number = next(self.names)
        return f"request-{number}", [2 + (number * 131 + place * 7 + place * place) % 500 for place in range(length)]
