# SPDX-License-Identifier: Apache-2.0
"""Starts a pair of servers, loads it, and makes requests fail in known ways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from experiments.common.asking import Asking
from experiments.common.client import Client, Pair, http_client
from experiments.common.device import FOLLOWS
from experiments.common.model import GQA, make_model
from experiments.common.pages import own_names
from experiments.common.servers import GIVES_BACK, Server, ServerError, ServerSpec
from experiments.common.transfer_config import role
from experiments.dashboard.prometheus import Prometheus

Say = Callable[[str], None]

PAIRS = ("pull", "push", "staged")
STAGED = "staged"
SLAB_GIB = 0.005
"""40 slots of 32 tokens, so that long prompts wait for some."""
AT_ONCE = 4
TOKENS = 16
LENGTHS = (64, 200, 450, 900)
LOAD_SECONDS = 25.0
UNFETCHED = 6
FAULTS = 3
IDLE_SECONDS = 60.0
LEASE_SECONDS = 20.0
OK = "ok"


@dataclass
class Load:
    """What a pair was asked, and what came of it.

    Attributes:
        outcomes: what came of requests to decode -> how many.
        began_seconds: since Prometheus was started.
        is_idle_again: whether no token of KV is in use any more when nothing is asked.
    """

    pair: str
    began_seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    is_idle_again: bool = False


def specs_of(pair: str) -> list[ServerSpec]:
    """Return prefill, and decode, which asks it and also takes parameters that clients bring."""
    extra: dict[str, object] = {"num_threads": 0, "kv_lease_duration": LEASE_SECONDS, "give_way_after": 1.0}
    extra["transfer_mode"] = "push" if pair == "push" else "pull"
    if pair == STAGED:
        extra |= {"memory_path": "host", "staging_gib": SLAB_GIB}
    # kvcached looks at its limit on the thread that allocates pages in advance.
    environment = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "1", **GIVES_BACK, **FOLLOWS}
    environment["KVCACHED_PAGE_PREALLOC_ENABLED"] = "true"

    def spec(name: str) -> ServerSpec:
        transfer = {"kv_connector": "NixlConnector", "kv_role": role(name), "kv_load_failure_policy": "recompute"}
        return ServerSpec(
            name=f"{name}-{pair}",
            model=make_model(GQA),
            dtype="float32",
            kv_transfer={**transfer, "kv_connector_extra_config": {**extra, "accept_kv_transfer_params": True}},
            environment=environment,
            forks=True,
        )

    return [spec(name) for name in ("prefill", "decode")]


def load_pair(pair: str, prometheus: Prometheus, logs: Path, say: Say) -> Load:
    """Start a pair, load it, make it fail, and stop it.

    Raises:
        ServerError: a server does not start, or the fault did not have its effect.
    """
    say(f"{pair}: starting the servers")
    load = Load(pair, round(time.time() - prometheus.began_at, 1))
    with Asking(specs_of(pair), logs) as launched:
        prefill, decode = launched.ready()
        for server in (prefill, decode):
            prometheus.scrape(server.spec.name, server.base_url, "vllm")
        driver = _Driver(Pair(Client(prefill.base_url, None), Client(decode.base_url, None)), load, say)  # type: ignore[arg-type]
        asyncio.run(driver.under_load())
        _await_idle(prometheus, [prefill.spec.name, decode.spec.name], load)
        if pair == "pull":
            asyncio.run(driver.with_faults(prefill, decode))
        prometheus.forget()
    return load


def _await_idle(prometheus: Prometheus, names: list[str], load: Load) -> None:
    # The prefix cache does not count as used, and what is kept ends with its lease.
    used = f"sum(kvcached_nixl:used_tokens{{instance=~'{'|'.join(names)}'}})"
    deadline = time.monotonic() + IDLE_SECONDS
    while not load.is_idle_again and time.monotonic() < deadline:
        time.sleep(1.0)
        load.is_idle_again = prometheus.now(used) == 0.0


class _Driver:
    def __init__(self, pair: Pair, load: Load, say: Say) -> None:
        self._pair, self._load, self._say = pair, load, say
        self._numbers = itertools.count()
        self._random = random.Random(5)

    async def under_load(self) -> None:
        async with self._connected():
            self._say(f"{self._load.pair}: load for {LOAD_SECONDS:.0f} s")
            await self._ask_for(LOAD_SECONDS)

    async def with_faults(self, prefill: Server, decode: Server) -> None:
        """Everything that an operator's dashboard is there to show."""
        async with self._connected():
            loading = asyncio.create_task(self._ask_for(LOAD_SECONDS))
            self._say("pull: parameters that were used before, or are another prompt's")
            for _ in range(FAULTS):
                await self._stale()
            await loading
            self._say("pull: a lower memory limit takes back what nobody fetches")
            await self._short_of_memory(prefill)
            self._say("pull: prefill is killed, then decode")
            await asyncio.gather(self._ask_for(8.0), self._kill(prefill, 1.0))
            await asyncio.gather(self._ask_for(8.0), self._kill(decode, 1.0))

    @contextlib.asynccontextmanager
    async def _connected(self) -> Any:
        async with http_client(2 * AT_ONCE) as http:
            self._pair.prefill.http = self._pair.decode.http = self._http = http
            yield

    def _prompt(self) -> list[int]:
        return self._random.choices(range(3, 500), k=self._random.choice(LENGTHS))

    async def _ask_for(self, seconds: float) -> None:
        """Ask decode, `AT_ONCE` requests at a time."""
        until = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < until:
                await self._ask()

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    async def _ask(self) -> None:
        url = self._pair.decode.base_url
        body = {"model": "model", "prompt": self._prompt(), "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        try:
            async with self._http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                is_right = answer.status_code == httpx.codes.OK and b'"error"' not in await answer.aread()
                outcome = OK if is_right else f"status {answer.status_code} and an error"
        except httpx.TransportError as error:
            outcome = type(error).__name__
        outcomes = Counter(self._load.outcomes)
        outcomes[outcome] += 1
        self._load.outcomes = dict(outcomes)
        if outcome != OK:
            # Refusals come at once; without a pause they would be most of the load.
            await asyncio.sleep(0.2)

    async def _offer(self, prompt: list[int]) -> tuple[str, dict[str, Any]]:
        name = f"offer-{next(self._numbers)}"
        answer = await self._pair.prefill.complete(
            prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params={"do_remote_decode": True}
        )
        return name, answer["kv_transfer_params"]

    async def _stale(self) -> None:
        """Fetch an offer twice, and another one with another prompt. All are answered: decode computes the prompts."""
        prompt, other = self._prompt(), self._prompt()
        name, params = await self._offer(prompt)
        for turn, asked in enumerate((prompt, prompt, other)):
            used = (name, params) if turn < 2 else await self._offer(prompt)
            await self._pair.decode.complete(
                asked, max_tokens=1, salt=used[0], request_id=f"{used[0]}-{turn}", kv_transfer_params=used[1]
            )

    async def _short_of_memory(self, prefill: Server) -> None:
        from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit

        for _ in range(UNFETCHED):
            await self._offer(self._random.choices(range(3, 500), k=LENGTHS[-1]))
        (name,) = own_names(prefill.identity)
        found = get_kv_cache_limit(name)
        # kvctl's own call.
        update_kv_cache_limit(name, found.used_size // 3)
        deadline = time.monotonic() + LEASE_SECONDS / 2
        while get_kv_cache_limit(name).used_size > found.used_size // 3:
            if time.monotonic() > deadline:
                raise ServerError(f"found that prefill still uses {get_kv_cache_limit(name).used_size} bytes")
            await asyncio.sleep(0.1)
        update_kv_cache_limit(name, found.total_size)

    async def _kill(self, server: Server, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        await asyncio.to_thread(server.kill)
