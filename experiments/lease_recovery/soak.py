# SPDX-License-Identifier: Apache-2.0
"""Hand-overs without a pause between two servers, while one of them is restarted again and again on the same address.

First decode is restarted and prefill lives on, then the other way around. The one that lives on must not grow. It is
read between hand-overs, when all of them have ended: what it holds then does not depend on what is under way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil

from experiments.common.client import Client, answers_of, http_client
from experiments.common.command_line import MODES
from experiments.common.counted import HAND_OVERS, count
from experiments.common.model import make_model
from experiments.common.report import Narrator, Verdict, begin, conclude, write_json
from experiments.common.servers import Running, Server, ServerSpec, running
from experiments.lease_recovery.arms import MODEL, Arm
from experiments.lease_recovery.growth import Reading, grown, held_by, table_of
from experiments.lease_recovery.memory import mapped_bytes
from experiments.lease_recovery.traffic import Ended, Traffic, salt_of

RESULTS = Path(__file__).resolve().parent / "results"
CLIENTS = 8
TOKENS = 4
SHARING = 150
MOST_ROWS = 64
TIE_NATS = 1e-3
QUIET_SECONDS = 1.0
"""After the last answer, until decode has told prefill, and what ended is forgotten."""
CACHED = {"KVCACHED_MAX_CACHED_TOKENS": "4096"}
"""Fewer than the pool has, so that pages come and go."""
LEASE = {"kv_lease_duration": 15}
"""Seconds: longer than a server waits for a core while others start."""
ARMS = tuple(Arm(f"soak {mode}", mode, extra=LEASE, environment=CACHED, num_blocks=224) for mode in MODES)
SIDES = ("prefill", "decode")
MOST: Mapping[str, float] = {"memory (MiB)": 4.0, "open files": 2.0, "threads": 2.0, "mappings": 10.0}
"""By which what lives on may rise with 1,000 hand-overs and 5 restarts, beyond a stock server with 1,000 requests.
Something that is kept of each restart is above it; of files, those that clients are closing when they are counted are
not."""
MOST_OF_ENGINE = {**MOST, "allocated (MiB)": 4.0, "NIXL peers": 2.0, "NIXL agents": 2.0, "kvcached (MiB)": 10.0}


class Size(NamedTuple):
    """Hand-overs of each direction, restarts of each direction, and hand-overs between two readings."""

    hand_overs: int
    restarts: int
    between: int


FULL, QUICK = Size(5000, 25, 50), Size(150, 2, 10)


class Known(NamedTuple):
    """A prompt, and what one stock server answers."""

    prompt: list[int]
    answer: list[int]


def prompts(number: int, seed: int = 7) -> list[list[int]]:
    """Return prompts of 4 to 640 tokens; half of them begin like others."""
    draw = random.Random(seed)

    def some(length: int) -> list[int]:
        return [draw.randrange(3, 500) for _ in range(length)]

    beginnings = [some(400) for _ in range(8)]
    lengths = [int(4 * 160 ** draw.random()) for _ in range(number)]
    return [
        (beginnings[place % 8][: draw.randrange(400)] if place % 2 else []) + some(length)
        if length <= 240
        else some(length)
        for place, length in enumerate(lengths)
    ]


def reference() -> ServerSpec:
    """One stock server, without kvcached and without a connector."""
    return _few_shapes(ServerSpec("alone", make_model(MODEL), "float32", max_model_len=1024, forks=True))


def _few_shapes(spec: ServerSpec) -> ServerSpec:
    """On a CPU, torch keeps what it has made for each number of rows: so steps have few rows."""
    return replace(spec, max_num_batched_tokens=MOST_ROWS, max_num_seqs=16)


async def fill_shapes(server: Server) -> None:
    """Has a server compute steps of each number of rows, so that what torch keeps of them is there before it is
    watched."""
    async with http_client(1) as http:
        client = Client(server.base_url, http)
        for rows in range(1, MOST_ROWS + 1):
            name = f"rows-{rows}"
            await client.complete([7] * rows, max_tokens=1, salt=name, request_id=name)


async def learn(server: Server, asked: Sequence[list[int]]) -> list[Known]:
    """Return what a stock server answers; without prompts that have two best tokens somewhere."""
    answers = await answers_of(server.base_url, asked, TOKENS, "alone")
    pairs = zip(asked, answers, strict=True)
    return [Known(prompt, said.token_ids) for prompt, said in pairs if said.lead > TIE_NATS]


async def alone(server: Server, known: Sequence[Known], size: Size) -> dict[str, list[Reading]]:
    """Return readings of a stock server that answers as many requests as one side of a pair lives through."""
    series: dict[str, list[Reading]] = {}
    numbers = itertools.count()
    async with http_client(CLIENTS) as http:
        client = Client(server.base_url, http)

        async def ask(until: int) -> None:
            while (number := next(numbers)) < until:
                name, prompt = f"r-{number}", known[number % len(known)].prompt
                await client.answer(prompt, max_tokens=TOKENS, salt=salt_of(name, SHARING), request_id=name)

        for done in range(size.between, size.hand_overs // 2 + 1, size.between):
            await asyncio.gather(*(ask(done) for _ in range(CLIENTS)))
            await asyncio.sleep(QUIET_SECONDS)
            for process, held in await _held(server):
                series.setdefault(f"stock: {process}", []).append(Reading(done, 0, held))
    return series


@dataclass(frozen=True)
class Soaked:
    """What became of a pair.

    Attributes:
        failed: requests without an answer that no restart explains.
        series: readings, by the process that lived through them.
        hits: tokens that each side found in its prefix cache.
    """

    mode: str
    hand_overs: int
    restarts: int
    ended: Sequence[Ended]
    failed: Sequence[Ended]
    series: Mapping[str, Sequence[Reading]]
    hits: Sequence[int]


class Soak:
    """See the module.

    Args:
        running: the pair, P and D.
        say: is told about the progress now and then.
    """

    def __init__(self, running: Running, mode: str, known: Sequence[Known], size: Size, say: Callable[[str], None]):
        prompts, expected = map(list, zip(*known, strict=True))
        self.traffic = Traffic(running.servers, mode, prompts, expected, tokens=TOKENS, sharing=SHARING)
        self._running = running
        self._size = size
        self._say = say
        self._draw = random.Random(mode)
        self._of_dead = 0
        self._down: list[tuple[float, float]] = []
        self._series: dict[str, list[Reading]] = {}
        self._hits = [0, 0]

    async def run(self) -> Soaked:
        size, traffic = self._size, self.traffic
        due = sorted(self._draw.uniform(0.0, 0.98) * size.hand_overs for _ in range(size.restarts))
        done = 0
        for server in self._running.servers:
            await fill_shapes(server)
        async with traffic.clients(CLIENTS):
            while done < size.hand_overs or due:
                lives = 0 if len(self._down) < (size.restarts + 1) // 2 else 1
                await self._serve(size.between)
                await traffic.rest()
                await asyncio.sleep(QUIET_SECONDS)
                done = await self._read(lives)
                said = ", ".join(f"{number} {verdict}" for verdict, number in traffic.verdicts.items())
                self._say(f"{traffic.mode}: {done} hand-overs, {len(self._down)} restarts; {said}")
                if due and done >= due[0]:
                    del due[0]
                    await self._restart(1 - lives)
        failed = [
            one
            for one in traffic.ended
            if one.verdict in ("error", "no connection")
            and not any(one.began_seconds <= up and one.ended_seconds >= down for down, up in self._down)
        ]
        return Soaked(traffic.mode, done, len(self._down), traffic.ended, failed, self._series, self._hits)

    async def _serve(self, number: int) -> None:
        enough = len(self.traffic.ended) + number
        self.traffic.asking.set()
        while len(self.traffic.ended) < enough:
            await asyncio.sleep(0.05)

    async def _restart(self, side: int) -> None:
        """Kill a server, or ask it to stop, with requests under way; wait for its successor."""
        self._of_dead += await asyncio.to_thread(count, [self._running.servers[side]], HAND_OVERS)
        self.traffic.asking.set()
        await asyncio.sleep(self._draw.uniform(0.2, 1.5))
        began = time.monotonic()
        if self._draw.random() < 0.5:
            self._running.servers[side].kill()
        self.traffic.asking.clear()
        await asyncio.to_thread(self._running.replace, side)
        await asyncio.to_thread(self._running.ready)
        await fill_shapes(self._running.servers[side])
        await self.traffic.rest()
        self._down.append((began, time.monotonic()))

    async def _read(self, lives: int) -> int:
        """Read the server that lives on; returns the hand-overs so far."""
        servers, server = self._running.servers, self._running.servers[lives]
        done = self._of_dead + await asyncio.to_thread(count, servers, HAND_OVERS)
        self._hits[lives] = await asyncio.to_thread(count, [server], "vllm:prefix_cache_hits_total")
        for process, held in await _held(server):
            if process == "engine":
                held |= {"kvcached (MiB)": mapped_bytes(server) / 2**20}
            name = f"{self.traffic.mode}: {SIDES[lives]}'s {process}"
            self._series.setdefault(name, []).append(Reading(done, len(self._down), held))
        return done


async def _held(server: Server) -> list[tuple[str, dict[str, float]]]:
    """Return what a server and its engine hold for longer than a moment."""
    first = await _held_now(server)
    await asyncio.sleep(QUIET_SECONDS / 2)
    pairs = zip(first, await _held_now(server), strict=True)
    return [(name, {key: min(held[key], after[key]) for key in held}) for (name, held), (_, after) in pairs]


async def _held_now(server: Server) -> list[tuple[str, dict[str, float]]]:
    async with http_client(1) as http:
        nixl = await Client(server.base_url, http).probe("held")
    process = psutil.Process(server.process.pid)
    (engine,) = (one for one in process.children(recursive=True) if "Engine" in one.name())
    return [("server", held_by(process.pid)), ("engine", {**held_by(engine.pid), **nixl})]


def judge(soaked: Soaked, size: Size, stock: Mapping[str, Sequence[Reading]] | None) -> list[Verdict]:
    """Return the targets of one direction.

    Args:
        stock: readings of the stock server; None if growth is not judged, because the run is too short.
    """
    wrong = sum(one.verdict == "wrong" for one in soaked.ended)
    hangs = sum(one.verdict == "hangs" for one in soaked.ended)
    mode = soaked.mode
    verdicts = [
        Verdict(
            f"{mode}: {size.hand_overs:,} hand-overs", f"{soaked.hand_overs:,}", soaked.hand_overs >= size.hand_overs
        ),
        Verdict(f"{mode}: {size.restarts} restarts", f"{soaked.restarts}", soaked.restarts >= size.restarts),
        Verdict(f"{mode}: no wrong token with HTTP 200", f"{wrong} of {len(soaked.ended):,}", not wrong),
        Verdict(f"{mode}: no request hangs", f"{hangs}", not hangs),
        Verdict(f"{mode}: no error but around a restart", f"{len(soaked.failed)}", not soaked.failed),
        Verdict(f"{mode}: tokens found in both prefix caches", " and ".join(map(str, soaked.hits)), all(soaked.hits)),
    ]
    for name, readings in soaked.series.items() if stock is not None else ():
        process = name.rpartition(" ")[2]
        more = grown(readings, stock[f"stock: {process}"], MOST_OF_ENGINE if process == "engine" else MOST)
        verdicts.append(Verdict(f"{name} does not grow", "; ".join(more) or "flat", not more))
    return verdicts


def specs() -> list[list[ServerSpec]]:
    """Return the configurations of the pair of each direction. A failed hand-over is an error that its client sees."""
    return [[_few_shapes(one) for one in arm.specs("fail")] for arm in ARMS]


def main(options: argparse.Namespace) -> int:
    """Run the soak and return the exit status."""
    size, name = (QUICK, f"quick-soak-{options.vllm}") if options.quick else (FULL, f"soak-{options.vllm}")
    began, stamp = begin(options.vllm)
    logs = RESULTS / stamp

    async def all_at_once(pairs: Sequence[Running]) -> list[Soaked]:
        soaks = [Soak(pair, mode, known, size, narrator.say) for pair, mode in zip(pairs, MODES, strict=True)]
        return await asyncio.gather(*(one.run() for one in soaks))

    with Narrator(f"a soak, vLLM {options.vllm}") as narrator:
        with running([reference()], logs, narrator.update) as servers:
            known = asyncio.run(learn(servers[0], prompts(240)))
            narrator.say(f"{len(known)} answers of one stock server")
            stock = asyncio.run(alone(servers[0], known, size))
        pull, push = (Running(pair, logs, narrator.update) for pair in specs())
        with pull, push:
            for pair in (pull, push):
                pair.ready()
            soaked = asyncio.run(all_at_once([pull, push]))

    series = {**{name: some for one in soaked for name, some in one.series.items()}, **stock}
    content = {
        "began": began,
        "verdicts": {one.mode: Counter(ended.verdict for ended in one.ended) for one in soaked},
        "unlike a right answer": [e.detail for one in soaked for e in one.ended if e.verdict in ("wrong", "hangs")]
        + [e.detail for one in soaked for e in one.failed],
        "readings": {process: [asdict(one) for one in some] for process, some in series.items()},
    }
    path = RESULTS / f"{name}.json"
    # At once: what took so long is not to be lost if judging it fails.
    write_json(path, content)
    verdicts = [verdict for one in soaked for verdict in judge(one, size, None if options.quick else stock)]
    return conclude([table_of(series, f"a soak, vLLM {options.vllm}")], verdicts, path, content)
