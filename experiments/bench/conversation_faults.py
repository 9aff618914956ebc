# SPDX-License-Identifier: Apache-2.0
"""Conversations whose servers are killed, shut down, given other weights and made short of memory: one fault a turn."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

import httpx

from experiments.bench.conversations import ARMS, STOCK, Serving, serving
from experiments.bench.samples import Answer, Column, Run, Samples
from experiments.bench.talks import OTHER_SEED, Got, Load, Turn, ask, learn
from experiments.common.client import REQUEST_TIMEOUT_SECONDS, Client, http_client
from experiments.common.report import Verdict
from experiments.common.servers import Running
from experiments.lease_recovery.memory import be_a_neighbour, change_limits

LATE_SECONDS = 2.0
"""Requests of a turn come within that time from the begin of a fault, which takes a random part of it to happen."""
VERDICTS = ("right", "wrong", "error", "its server died")


class Fault(NamedTuple):
    """What happens during a turn, and to which server: its number among those of the arm, -1 for all."""

    kind: str = "none"
    place: int = -1


KILLED, SHUT_DOWN, OTHER_WEIGHTS, SHORT = "killed", "shut down", "other weights", "short of memory"


def answer(run: Run) -> Answer:
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
    to_come = faults(served.launched)
    draw.shuffle(to_come)
    a_round = len(talks[0]) - 1
    for first in range(0, len(to_come), a_round):
        for turn, fault in enumerate((Fault(), *to_come[first : first + a_round])):
            name = name_of(fault, served.launched)
            run.show(f"{served.arm.name}: {name}, of {len(to_come)} faults")
            async with _during(fault, served.launched, draw), http_client(len(talks)) as http:
                late = [draw.uniform(0.0, LATE_SECONDS) for _ in talks]
                calls = (
                    _late(late[n], served, fault, http, n, turn, f"{first}-{n}", talks[n]) for n in range(len(talks))
                )
                for verdict, got in await asyncio.gather(*calls):
                    samples.add((name,), served.arm.name, **{one: float(one == verdict) for one in VERDICTS})
                    problems += [f"{served.arm.name}, {name}, {verdict}: {got.problem}"] * bool(got.problem)
    return problems


async def _late(
    seconds: float,
    served: Serving,
    fault: Fault,
    http: httpx.AsyncClient,
    number: int,
    place: int,
    salt: str,
    talk: Sequence[Turn],
) -> tuple[str, Got]:
    """Send a turn a little later. Returns one of `VERDICTS`, and what the client got."""
    url, turn = served.urls[served.place(number, place)], talk[place]
    is_hit = fault.place >= 0 and served.launched.servers[fault.place].base_url == url
    right = turn.other if is_hit and fault.kind == OTHER_WEIGHTS else turn.right
    assert right is not None
    await asyncio.sleep(seconds)
    got = await ask(Client(url, http), turn.prompt, right, salt, f"{salt}-{place}")
    is_excused = got.verdict == "error" and is_hit and fault.kind in (KILLED, SHUT_DOWN)
    return VERDICTS[3] if is_excused else got.verdict, got


def judge(samples: Samples) -> list[Verdict]:
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


def faults(launched: Running) -> list[Fault]:
    kinds = (KILLED, SHUT_DOWN, OTHER_WEIGHTS)
    return [Fault(SHORT), *(Fault(kind, place) for place in range(len(launched.servers)) for kind in kinds)]


def name_of(fault: Fault, launched: Running) -> str:
    side = launched.servers[fault.place].spec.name.rpartition("-")[2].partition("+")[0]
    return fault.kind if fault.place < 0 else f"{side}: {fault.kind}"


@contextlib.asynccontextmanager
async def _during(fault: Fault, launched: Running, draw: random.Random) -> AsyncIterator[None]:
    """A fault begins with the block, and everything is as before when the block ends."""
    servers = launched.servers
    if fault.kind == OTHER_WEIGHTS:
        await _set_weights(servers[fault.place].base_url, OTHER_SEED)
    async with asyncio.TaskGroup() as group:
        if fault.kind in (KILLED, SHUT_DOWN):
            group.create_task(_end_and_start(fault, launched, draw))
        elif fault.kind == SHORT:
            for call in (change_limits(servers, draw), *(be_a_neighbour(one, draw) for one in servers)):
                group.create_task(call)
        yield
    if fault.kind == OTHER_WEIGHTS:
        await _set_weights(servers[fault.place].base_url, "0")


async def _end_and_start(fault: Fault, launched: Running, draw: random.Random) -> None:
    await asyncio.sleep(draw.uniform(0.0, LATE_SECONDS / 2))
    server = launched.servers[fault.place]
    await asyncio.to_thread(server.kill if fault.kind == KILLED else server.shut_down)
    await asyncio.to_thread(launched.bring_back, fault.place)


async def _set_weights(url: str, seed: str) -> None:
    """As an operator does it who wants no answer computed with both weights."""
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False) as http:
        (await http.post(f"{url}/pause", params={"mode": "wait", "clear_cache": "true"})).raise_for_status()
        await Client(url, http).probe("other_weights", seed)
        (await http.post(f"{url}/resume")).raise_for_status()
