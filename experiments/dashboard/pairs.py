# SPDX-License-Identifier: Apache-2.0
"""Runs Prometheus on loopback; starts pairs of servers that it scrapes, loads them, and makes requests fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from experiments.common.client import AnswerError, Client, http_client
from experiments.common.counted import own_names
from experiments.common.device import FOLLOWS, nixl
from experiments.common.model import GQA, make_model
from experiments.common.servers import (
    GIVES_BACK,
    HOST,
    REPOSITORY,
    Asking,
    Server,
    ServerError,
    ServerSpec,
    free_ports,
    prefill_and_decode,
)
from experiments.stacks.routers import Say, running

FOLDER = REPOSITORY / "docs" / "deploy" / "prometheus"
PAIRS = ("pull", "push", "staged")
SLAB_GIB = 0.005
"""40 slots of 32 tokens, so that long prompts wait for some."""
AT_ONCE = 4
LENGTHS = (64, 200, 450, 900)
LOAD_SECONDS = 25.0
IDLE_SECONDS = 60.0
LEASE_SECONDS = 20.0
OK = "ok"
STEP_SECONDS = 2


class Prometheus:
    """A running Prometheus, since ``began_at`` (seconds since the epoch)."""

    def __init__(self, url: str, targets: Path) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=60.0)
        self._targets = targets
        self.began_at = time.time()

    def scrape(self, servers: Sequence[Server]) -> None:
        """Scrape these servers, and no other ones; their names are the label ``instance`` of their series."""
        labels = {one.port: {"instance": one.spec.name, "job": "vllm"} for one in servers}
        scraped = [{"targets": [f"{HOST}:{port}"], "labels": of_one} for port, of_one in labels.items()]
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps(scraped))
        partial.replace(self._targets)

    def over_time(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression from the start until now, each with ``metric`` and ``values``."""
        window = {"start": self.began_at, "end": time.time(), "step": STEP_SECONDS}
        return self._ask("query_range", query=expression, **window)

    def now(self, expression: str) -> float | None:
        """Return the only value of an expression now; None if it has none."""
        found = self._ask("query", query=expression)
        return float(found[0]["value"][1]) if found else None

    def version(self) -> str:
        return str(self._http.get("/api/v1/status/buildinfo").json()["data"]["version"])

    def _ask(self, what: str, **params: Any) -> list[dict[str, Any]]:
        content = self._http.post(f"/api/v1/{what}", data=params).json()
        if content["status"] != "success":
            raise ServerError(f"found that Prometheus refuses {params}: {content.get('error')}")
        found: list[dict[str, Any]] = content["data"]["result"]
        return found


@contextlib.contextmanager
def scraping(program: str, logs: Path) -> Iterator[Prometheus]:
    """Start Prometheus with the documented configuration and alert rules; it scrapes nothing yet, later each second.
    Raises ServerError if it does not start."""
    (port,) = free_ports(1)
    folder = (logs / "prometheus").resolve()
    folder.mkdir(parents=True)
    targets = folder / "targets.json"
    targets.write_text("[]")
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / one) for one in config["rule_files"]]
    del config["scrape_configs"][1:], config["scrape_configs"][0]["static_configs"]
    config["scrape_configs"][0]["file_sd_configs"] = [{"files": [str(targets)], "refresh_interval": "1s"}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={HOST}:{port}", "--log.level=warn"]
    with running(command, logs / "prometheus.log", port, "/-/ready") as url:
        yield Prometheus(url, targets)


@dataclass
class Load:
    """What a pair was asked, and what came of it.

    Attributes:
        began_seconds: since Prometheus was started.
        outcomes: what came of requests to decode -> how many.
        is_idle_again: whether no token of KV is in use any more when nothing is asked.
    """

    pair: str
    began_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    is_idle_again: bool = False


def specs_of(pair: str) -> list[ServerSpec]:
    """Return prefill, and decode, which asks it and also takes parameters that clients bring."""
    extra: dict[str, object] = {"kv_lease_duration": LEASE_SECONDS, "give_way_after": 1.0}
    extra |= {"transfer_mode": "push" if pair == "push" else "pull", "accept_kv_transfer_params": True}
    if pair == "staged":
        extra |= {"memory_path": "host", "staging_gib": SLAB_GIB}
    # kvcached looks at its limit on the thread that allocates pages in advance.
    environment = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "1", **GIVES_BACK, **FOLLOWS}
    environment["KVCACHED_PAGE_PREALLOC_ENABLED"] = "true"
    config = nixl("", extra, kv_load_failure_policy="recompute")
    return prefill_and_decode(pair, config, model=make_model(GQA), dtype="float32", environment=environment, forks=True)


def load_pair(pair: str, prometheus: Prometheus, logs: Path, say: Say) -> Load:
    say(f"{pair}: starting the servers")
    load = Load(pair, round(time.time() - prometheus.began_at, 1))

    async def drive(servers: list[Server]) -> None:
        async with http_client(2 * AT_ONCE) as http:
            driver = _Driver(load, servers, http)
            say(f"{pair}: load for {LOAD_SECONDS:.0f} s")
            await driver.ask_for(LOAD_SECONDS)
            # The prefix cache does not count as used, and what is kept ends with its lease.
            used = f"sum(kvcached_nixl:used_tokens{{instance=~'{'|'.join(server.spec.name for server in servers)}'}})"
            deadline = time.monotonic() + IDLE_SECONDS
            while not load.is_idle_again and time.monotonic() < deadline:
                await asyncio.sleep(1.0)
                load.is_idle_again = await asyncio.to_thread(prometheus.now, used) == 0.0
            if pair == "pull":
                await driver.with_faults(say)

    with Asking(specs_of(pair), logs) as launched:
        servers = launched.ready()
        prometheus.scrape(servers)
        asyncio.run(drive(servers))
        prometheus.scrape([])
    return load


class _Driver:
    def __init__(self, load: Load, servers: list[Server], http: httpx.AsyncClient) -> None:
        self._load, self._servers = load, servers
        self._prefill, self._decode = (Client(server.base_url, http) for server in servers)
        self._numbers = itertools.count()
        self._random = random.Random(5)

    def _prompt(self, length: int | None = None) -> list[int]:
        return self._random.choices(range(3, 500), k=length or self._random.choice(LENGTHS))

    async def ask_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < until:
                await self._ask()

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    async def _ask(self) -> None:
        name = f"load-{next(self._numbers)}"
        try:
            await self._decode.answer(self._prompt(), max_tokens=16, salt=name, request_id=name)
            outcome = OK
        except (AnswerError, httpx.TransportError) as error:
            outcome = f"{type(error).__name__} {getattr(error, 'status', '')}".strip()
            # Refusals come at once; without a pause they would be most of the load.
            await asyncio.sleep(0.2)
        self._load.outcomes[outcome] += 1

    async def with_faults(self, say: Say) -> None:
        """Everything that an operator's dashboard is there to show."""
        from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit

        async def offer(prompt: list[int]) -> tuple[str, dict[str, Any]]:
            name = f"offer-{next(self._numbers)}"
            return name, await self._prefill.offer(prompt, salt=name, request_id=name)

        say("pull: parameters that were used before, or are another prompt's")
        loading = asyncio.create_task(self.ask_for(LOAD_SECONDS))
        for _ in range(3):
            # Of two offers, the first is fetched twice, and the second with another prompt. All are answered: decode
            # computes the prompts.
            prompt, other = self._prompt(), self._prompt()
            first, second = await offer(prompt), await offer(prompt)
            for (name, params), asked in ((first, prompt), (first, prompt), (second, other)):
                more = {"request_id": f"{name}-{next(self._numbers)}", "kv_transfer_params": params}
                await self._decode.complete(asked, max_tokens=1, salt=name, **more)
        await loading
        say("pull: a lower memory limit takes back what nobody fetches")
        for _ in range(6):
            await offer(self._prompt(LENGTHS[-1]))
        (name,) = own_names(self._servers[0].identity)
        found = get_kv_cache_limit(name)
        # kvctl's own call.
        update_kv_cache_limit(name, found.used_size // 3)
        deadline = time.monotonic() + LEASE_SECONDS / 2
        while get_kv_cache_limit(name).used_size > found.used_size // 3:
            if time.monotonic() > deadline:
                raise ServerError(f"found that prefill still uses {get_kv_cache_limit(name).used_size} bytes")
            await asyncio.sleep(0.1)
        update_kv_cache_limit(name, found.total_size)
        say("pull: prefill is killed, then decode")
        for server in self._servers:
            asking = asyncio.create_task(self.ask_for(8.0))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(server.kill)
            await asking
