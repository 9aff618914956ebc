# SPDX-License-Identifier: Apache-2.0
"""Conversations whose servers are killed, shut down, given other weights and made short of memory: one fault a turn."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import partial

import httpx

from experiments.bench.conversations import ARMS, STOCK, Serving, serving
from experiments.bench.samples import Answer, Column, Run, Samples
from experiments.bench.talks import OTHER_SEED, Got, Load, Turn, ask, learn
from experiments.common.client import REQUEST_TIMEOUT_SECONDS, Client, http_client
from experiments.common.report import Verdict
from experiments.common.servers import Running, Server
from experiments.lease_recovery.memory import be_a_neighbour, change_limits

LATE_SECONDS = 2.0
"""Requests of a turn come within that time from the begin of a fault, which takes a random part of it to happen."""
ENDING_SECONDS = 60.0
VERDICTS = ("right", "wrong", "error", "its server died")


@dataclass(frozen=True)
class Fault:
    """A fault lasts as long as the block of ``during``, and until everything is as before.

    Attributes:
        ends: URL of the server that ends.
        changes: URL of the server that has other weights.
    """

    name: str
    during: Callable[[], AbstractAsyncContextManager[None]]
    ends: str = ""
    changes: str = ""


NONE = Fault("none", contextlib.nullcontext)


def answer(run: Run) -> Answer:
    """Put one arm after the other through all faults."""
    load, samples = Load.of(run), Samples(("{}",))
    messages = load.messages()
    with serving(run, STOCK, messages, "fail") as stock:
        talks = asyncio.run(learn(stock.urls[0], messages, is_changed=True))
    arms = [arm for arm in ARMS if not arm.is_stock and arm.name in run.chosen([one.name for one in ARMS])]
    problems: list[str] = []
    for arm in arms:
        with serving(run, arm, messages, "recompute") as served:
            problems += asyncio.run(go_through(run, served, talks, samples))
    columns = [Column(verdict, verdict, 1, of=sum) for verdict in VERDICTS]
    table = samples.table(f"conversations and faults, vLLM {run.vllm}", columns)
    content = {"load": asdict(load), "problems": problems, "answers": samples.as_json()}
    return Answer([table], judge(samples), content)


async def go_through(run: Run, served: Serving, talks: Sequence[Sequence[Turn]], samples: Samples) -> list[str]:
    """Begin the conversations anew, with a fault in each further turn, until every fault was there. Returns what was
    not right."""
    draw, problems = random.Random(23), list[str]()
    to_come = faults(served.launched, draw)
    draw.shuffle(to_come)
    a_round = len(talks[0]) - 1
    for first in range(0, len(to_come), a_round):
        for place, fault in enumerate((NONE, *to_come[first : first + a_round])):
            run.show(f"{served.arm.name}: {fault.name}, of {len(to_come)} faults")
            async with fault.during(), http_client(len(talks)) as http:
                calls = (
                    _late(
                        draw.uniform(0.0, LATE_SECONDS), served, fault, http, (number, place), f"{first}-{number}", one
                    )
                    for number, one in enumerate(talks)
                )
                for verdict, got in await asyncio.gather(*calls):
                    samples.add((fault.name,), served.arm.name, **{one: float(one == verdict) for one in VERDICTS})
                    problems += [f"{served.arm.name}, {fault.name}, {verdict}: {got.problem}"] * bool(got.problem)
    return problems


async def _late(
    seconds: float,
    served: Serving,
    fault: Fault,
    http: httpx.AsyncClient,
    of: tuple[int, int],
    salt: str,
    talk: Sequence[Turn],
) -> tuple[str, Got]:
    """Send a turn a little later. Returns one of `VERDICTS`, and what the client got."""
    url, turn = served.urls[served.place(*of)], talk[of[1]]
    right = turn.other if url == fault.changes else turn.right
    assert right is not None
    await asyncio.sleep(seconds)
    got = await ask(Client(url, http), turn.prompt, right, salt, f"{salt}-{of[1]}")
    is_excused = got.verdict == "error" and url == fault.ends
    return VERDICTS[3] if is_excused else got.verdict, got


def judge(samples: Samples) -> list[Verdict]:
    """Return the targets of each arm."""
    verdicts = []
    for arm in samples.arms:
        found = {one: sum(sum(samples.values(fault, arm, one)) for fault in samples.settings) for one in VERDICTS}
        words = f"{found['wrong']:.0f}, beside {found['right']:.0f} right"
        verdicts += [
            Verdict(f"{arm}: wrong answers (0)", words, not found["wrong"] and found["right"] > 0),
            Verdict(f"{arm}: errors, unless its server died (0)", f"{found['error']:.0f}", not found["error"]),
        ]
    return verdicts


# --------------------------------------------------------------------------------------------------------------- faults


def faults(launched: Running, draw: random.Random) -> list[Fault]:
    """Return every fault of these servers."""
    found = [Fault("short of memory", partial(_short_of_memory, launched, draw))]
    for place, server in enumerate(launched.servers):
        url, name = server.base_url, server.spec.name.rpartition("-")[2]
        found += [
            Fault(f"{name} is killed", partial(_ends, launched, place, Server.kill, draw), ends=url),
            Fault(f"{name} is shut down", partial(_ends, launched, place, _terminate, draw), ends=url),
            Fault(f"{name} has other weights", partial(_other_weights, url), changes=url),
        ]
    return found


def _terminate(server: Server) -> None:
    """As an orchestrator does it."""
    server.process.terminate()


@contextlib.asynccontextmanager
async def _ends(
    launched: Running, place: int, end: Callable[[Server], None], draw: random.Random
) -> AsyncIterator[None]:
    async def end_and_start() -> None:
        await asyncio.sleep(draw.uniform(0.0, LATE_SECONDS / 2))
        server = launched.servers[place]
        end(server)
        async with asyncio.timeout(ENDING_SECONDS):
            while server.process.poll() is None:
                await asyncio.sleep(0.1)
        launched.replace(place)
        await asyncio.to_thread(launched.ready)

    async with _meanwhile(end_and_start()):
        yield


@contextlib.asynccontextmanager
async def _short_of_memory(launched: Running, draw: random.Random) -> AsyncIterator[None]:
    servers = launched.servers
    async with _meanwhile(change_limits(servers, draw), *(be_a_neighbour(one, draw) for one in servers)):
        yield


@contextlib.asynccontextmanager
async def _meanwhile(*calls: Coroutine[None, None, None]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(call)
        yield


@contextlib.asynccontextmanager
async def _other_weights(url: str) -> AsyncIterator[None]:
    await _set_weights(url, OTHER_SEED)
    yield
    await _set_weights(url, "0")


async def _set_weights(url: str, seed: str) -> None:
    """As an operator does it who wants no answer computed with both weights."""
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False) as http:
        (await http.post(f"{url}/pause", params={"mode": "wait", "clear_cache": "true"})).raise_for_status()
        await Client(url, http).probe("other_weights", seed)
        (await http.post(f"{url}/resume")).raise_for_status()
