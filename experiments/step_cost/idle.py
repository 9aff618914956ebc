# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of an idle engine: real servers whose requests wait, are kept, paused or queued.

The figure is the CPU time that the kernel charged to all processes of a server, in CPU seconds per second, over some
seconds in which no request arrives or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from experiments.bench.samples import Column, Samples
from experiments.common import model as models
from experiments.common.servers import GIVES_BACK, Server, ServerSpec, running
from experiments.common.targets import Verdict
from experiments.common.transfer_config import nixl

__all__ = ["EMPTY", "IDLE_COLUMNS", "MOST_MORE", "judge_idle", "measure_idle"]

MOST_MORE = 0.05
"""CPU seconds per second that a server may use beyond one without requests."""
EMPTY = "no requests"
SETTLE_SECONDS = 2.0
BLOCKS, BLOCK_SIZE = 96, 32
WAITING = 4
# Four waiting requests take less than half of the pool; the queued one needs more blocks than they leave.
WAITING_TOKENS, QUEUED_TOKENS = 300, 1900
# Longer than all measurements of one server, so that no lease ends meanwhile.
LEASE_SECONDS = 240
TIMEOUT_SECONDS = 300.0
ENGINES = ("EngineCore", "Worker")
IDLE_COLUMNS = (Column("all processes", "cpu", 1, 3), Column("engines", "engines", 1, 3))


@dataclass(frozen=True)
class Subject:
    """A server under test."""

    name: str
    arguments: tuple[str, ...] = ()
    is_below_multi: bool = False
    has_ranks: bool = False

    def spec(self) -> ServerSpec:
        config = nixl("", {"transfer_mode": "push", "kv_lease_duration": LEASE_SECONDS}, kv_load_failure_policy="fail")
        if self.is_below_multi:
            below = {"connectors": [config]}
            config = {**config, "kv_connector": "MultiConnector", "kv_connector_extra_config": below}
        return ServerSpec(
            name=self.name.replace(" ", "-"),
            model=models.make_model(models.ModelShape(max_positions=4096)),
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=2048,
            kv_transfer=config,
            environment={"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK},
            arguments=("--num-gpu-blocks-override", str(BLOCKS), *self.arguments),
            forks=True,
        )


SUBJECTS = (
    Subject("alone"),
    Subject("data parallel", ("--data-parallel-size", "2"), has_ranks=True),
    Subject("below MultiConnector", is_below_multi=True),
)


def measure_idle(samples: Samples, seconds: float, logs: Path, say: Callable[[str], None]) -> None:
    """Measure every server in every state, each together with a peer that its hand-overs wait for.

    CPU seconds per second of all processes of a server, and of its engine and worker processes only.
    """
    for subject in SUBJECTS:
        say(f"{subject.name}: starting")
        with running([Subject("peer").spec(), subject.spec()], logs) as (peer, server):
            asyncio.run(_measure(samples, subject, server, peer, seconds, say))


def judge_idle(samples: Samples) -> list[Verdict]:
    """Return the targets: each state compared with the same server without requests."""
    found = []
    for setting, state in samples.figures:
        if state != EMPTY:
            more = samples.median(setting, state, "cpu") - samples.median(setting, EMPTY, "cpu")
            words = f"{samples.words(setting)}, {state}: CPU seconds per second beyond {EMPTY} (< {MOST_MORE:g})"
            found.append(Verdict(words, f"{more:.3f}", more < MOST_MORE))
    return found


async def _measure(
    samples: Samples, subject: Subject, server: Server, peer: Server, seconds: float, say: Callable[[str], None]
) -> None:
    async def look(state: str) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        found = await _cost(server, seconds)
        say(f"{subject.name}, {state}: {found['cpu']:.3f} CPU seconds per second")
        samples.add((subject.name,), state, **found)

    async with httpx.AsyncClient(
        timeout=TIMEOUT_SECONDS, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as http:
        asking = Asking(server, peer, http, rank=0 if subject.has_ranks else None)
        await asking.warm()
        await look(EMPTY)
        async with asking.waits():
            await look(f"{WAITING} hand-overs wait")
            async with asking.queued():
                await look(f"{WAITING} hand-overs wait, one queued for blocks")
        # A pause ends waiting hand-overs, so they may get an answer.
        async with asking.waits(until_paused=True), asking.paused():
            await look(f"{WAITING} hand-overs waited, paused")
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await asking.kept()
            await look("2 requests kept for decode")
            await stack.enter_async_context(asking.paused())
            await look("2 requests kept for decode, paused")


class Asking:
    """Brings a server into a state for the duration of a ``with`` block.

    Args:
        rank: the data-parallel rank that gets all requests, None if the server has only one.
    """

    def __init__(self, server: Server, peer: Server, http: httpx.AsyncClient, rank: int | None) -> None:
        self._server = server
        self._peer = peer
        self._http = http
        self._headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        self._count = 0

    async def warm(self) -> None:
        """Compute one request, so that first-time costs are not measured."""
        (await self._complete(100, None)).raise_for_status()

    async def kept(self) -> None:
        """Send one more prefill request, whose KV is kept until its lease ends."""
        answer = await self._complete(200, {"do_remote_decode": True, "do_remote_prefill": False})
        answer.raise_for_status()
        if not answer.json().get("kv_transfer_params"):
            raise RuntimeError(f"found {answer.text[:300]}; expected kv_transfer_params. Nothing is kept.")

    @asynccontextmanager
    async def waits(self, *, until_paused: bool = False) -> AsyncIterator[None]:
        """Let hand-overs wait for a peer that is alive but never gets their prefill requests."""
        async with AsyncExitStack() as stack:
            for _ in range(WAITING):
                self._count += 1
                names = {"transfer_id": f"never-{self._count}", "do_remote_prefill": True}
                params = {**self._peer.coordinates, **names}
                await stack.enter_async_context(self._pending(WAITING_TOKENS, params, until_paused))
            yield

    @asynccontextmanager
    async def queued(self) -> AsyncIterator[None]:
        """Queue an ordinary request for which there are not enough blocks."""
        async with self._pending(QUEUED_TOKENS, None):
            yield

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause the server as an operator does; does not wait for the pause to return."""
        pausing = asyncio.create_task(self._http.post(f"{self._server.base_url}/pause?mode=keep"))
        try:
            yield
        finally:
            (await self._http.post(f"{self._server.base_url}/resume")).raise_for_status()
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)

    @asynccontextmanager
    async def _pending(self, tokens: int, params: dict[str, Any] | None, may_end: bool = False) -> AsyncIterator[None]:
        task = asyncio.create_task(self._complete(tokens, params))
        try:
            yield
            if task.done() and not may_end:
                raise RuntimeError(f"found an answer, {task.result().text[:300]}; expected the request to wait")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _complete(self, tokens: int, params: dict[str, Any] | None) -> httpx.Response:
        self._count += 1
        prompt = [3 + (7 * place + self._count) % 500 for place in range(tokens)]
        body: dict[str, Any] = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if params is not None:
            body["kv_transfer_params"] = params
        return await self._http.post(f"{self._server.base_url}/v1/completions", json=body, headers=self._headers)


async def _cost(server: Server, seconds: float) -> dict[str, float]:
    before, begun = _spent(server), time.monotonic()
    await asyncio.sleep(seconds)
    after, wall = _spent(server), time.monotonic() - begun
    more = {pid: (found[0], found[1] - before.get(pid, found)[1]) for pid, found in after.items()}
    engines = sum(spent for words, spent in more.values() if any(one in words for one in ENGINES))
    return {"cpu": sum(spent for _, spent in more.values()) / wall, "engines": engines / wall}


def _spent(server: Server) -> dict[int, tuple[str, float]]:
    """Return pid -> (name, CPU seconds) of each process of a server."""
    root = psutil.Process(server.process.pid)
    found = {}
    for one in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            found[one.pid] = (one.name(), times.user + times.system)
    return found
