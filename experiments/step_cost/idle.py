# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of an idle engine: real servers whose requests wait, are kept, paused or queued.

The figure is the CPU time that the kernel charged to all processes of a server, in CPU seconds per second, over some
seconds in which no request arrives or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from experiments.bench.samples import Samples
from experiments.common import model as models
from experiments.common.device import nixl
from experiments.common.servers import GIVES_BACK, Server, ServerSpec, running

EMPTY = "no requests"
SETTLE_SECONDS = 2.0
BLOCKS, BLOCK_SIZE = 96, 32
WAITING = 4
# Four waiting requests take less than half of the pool; the queued one needs more blocks than they leave.
WAITING_TOKENS, QUEUED_TOKENS = 300, 1900
# Longer than all measurements of one server, so that no lease ends meanwhile.
LEASE_SECONDS = 240
TIMEOUT_SECONDS = 300.0
MULTI, RANKS = "below MultiConnector", "data parallel"
SUBJECTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"alone": (), RANKS: ("--data-parallel-size", "2"), MULTI: ()}
)
"""The servers under test, and more arguments of ``vllm serve``."""


def _spec(name: str) -> ServerSpec:
    config = nixl("", {"transfer_mode": "push", "kv_lease_duration": LEASE_SECONDS}, kv_load_failure_policy="fail")
    if name == MULTI:
        below = {"connectors": [config]}
        config = {**config, "kv_connector": "MultiConnector", "kv_connector_extra_config": below}
    return ServerSpec(
        name=name.replace(" ", "-"),
        model=models.make_model(models.ModelShape(max_positions=4096)),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_transfer=config,
        environment={"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK},
        arguments=("--num-gpu-blocks-override", str(BLOCKS), *SUBJECTS.get(name, ())),
        forks=True,
    )


def measure(samples: Samples, seconds: float, logs: Path, say: Callable[[str], None]) -> None:
    """Measure every server in every state, each together with a peer that its hand-overs wait for."""
    for name in SUBJECTS:
        say(f"{name}: starting")
        with running([_spec("peer"), _spec(name)], logs) as (peer, server):
            asyncio.run(_measure(samples, name, server, peer, seconds, say))


async def _measure(
    samples: Samples, name: str, server: Server, peer: Server, seconds: float, say: Callable[[str], None]
) -> None:
    async def look(state: str) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        before, begun = _spent(server), time.monotonic()
        await asyncio.sleep(seconds)
        after, wall = _spent(server), time.monotonic() - begun
        cpu = sum(spent - before.get(pid, spent) for pid, spent in after.items()) / wall
        say(f"{name}, {state}: {cpu:.3f} CPU seconds per second")
        samples.add((name,), state, cpu=cpu)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, limits=limits) as http:
        states = States(server, peer, http, "0" if name == RANKS else None)
        await states.warm()
        await look(EMPTY)
        async with states.waits():
            await look(f"{WAITING} hand-overs wait")
            async with states.pending(QUEUED_TOKENS, None):
                await look(f"{WAITING} hand-overs wait, one queued for blocks")
        # A pause ends waiting hand-overs, so they may get an answer.
        async with states.waits(until_paused=True), states.paused():
            await look(f"{WAITING} hand-overs waited, paused")
        for _ in range(2):
            await states.kept()
        await look("2 requests kept for decode")
        async with states.paused():
            await look("2 requests kept for decode, paused")


class States:
    """Brings a server into a state for the duration of a ``with`` block.

    Args:
        rank: the data-parallel rank that gets all requests, None if the server has only one.
    """

    def __init__(self, server: Server, peer: Server, http: httpx.AsyncClient, rank: str | None) -> None:
        self._server = server
        self._peer = peer
        self._http = http
        self._headers = {} if rank is None else {"X-data-parallel-rank": rank}
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
                await stack.enter_async_context(self.pending(WAITING_TOKENS, params, until_paused))
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
    async def pending(self, tokens: int, params: dict[str, Any] | None, may_end: bool = False) -> AsyncIterator[None]:
        """Ask for what gets no answer meanwhile; raises if it does."""
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


def _spent(server: Server) -> dict[int, float]:
    """Return the CPU seconds of each process of a server."""
    found = {}
    for one in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[one.pid] = sum(one.cpu_times()[:2])
    return found
