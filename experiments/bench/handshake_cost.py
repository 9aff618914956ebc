# SPDX-License-Identifier: Apache-2.0
"""What does the first hand-over of a pair cost, and does the cost grow with the memory that kvcached reserves?"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from experiments.bench.pairs import APART, KVCACHED, Arm, Router, in_turn, pair_specs
from experiments.bench.samples import Answer, Column, Run, Samples, Setting
from experiments.common.client import AnswerError, Client, http_client
from experiments.common.model import make_model
from experiments.common.report import Verdict
from experiments.common.servers import Server, ServerSpec, running

SIZES_GIB = (1, 8, 60)
ROUNDS = 2
PROMPT_TOKENS = 512
PROMPT = [2 + place % 500 for place in range(PROMPT_TOKENS)]
DECODE_TOKENS = 64
COLD_AGAIN = 20
"""Further hand-overs, each after decode was made to forget its peer: a single one depends on other load."""
TIMED_CALLS = 2000
MIB = 2**20

STOCK = Arm("stock vLLM")
OURS = (Arm("this package, contiguous", KVCACHED), Arm("this package, non-contiguous", APART))
KVCACHED_OWN = Arm("kvcached's own patch", {**APART, "KVCACHED_NIXL": "0"})
ARMS = (*OURS, KVCACHED_OWN)


def reserving(arm: Arm, gib: int) -> Arm:
    """Return the arm with a device of that size, which kvcached reserves; only little of it is ever mapped."""
    reserves = {"KVCACHED_HOSTVMM_GIB": str(gib), "KVCACHED_HOSTVMM_OVERCOMMIT": "1"}
    return replace(arm, name=f"{gib} GiB", environment={**arm.environment, **reserves})


def specs(arm: Arm, beside: Arm) -> list[ServerSpec]:
    return pair_specs(arm, beside.name, {}, model=make_model(), max_num_batched_tokens=1024)


def answer(run: Run) -> Answer:
    """Measure fresh pairs of every arm, of all reserved sizes and stock at the same time."""
    samples = Samples(("{}",))
    rounds = 1 if run.quick else run.rounds or ROUNDS
    sizes = (SIZES_GIB[0], SIZES_GIB[-1]) if run.quick else SIZES_GIB
    for turn, arm in itertools.product(range(rounds), ARMS):
        if run.only in arm.name and not (run.quick and arm is KVCACHED_OWN):
            arms = [STOCK, *(reserving(arm, gib) for gib in sizes)]
            with contextlib.ExitStack() as stack:
                logs = run.logs / str(turn)
                pairs = [stack.enter_context(running(specs(one, arm), logs, run.show)) for one in arms]
                run.tell(f"{arm.name}: {len(pairs)} pairs run")
                asyncio.run(_measure(samples, (arm.name,), arms, pairs))
    columns = (
        Column("first, ms", "first"),
        Column("cold, ms", "cold"),
        Column("cold q1", "cold", of=first_quartile),
        Column("MiB", "resident", 1 / MIB),
        Column("descriptors", "descriptors", 1),
        Column("per block", "a_block", 1),
        Column("step, ms", "step", digits=2),
        Column("idle, µs", "idle", 1e6, 1),
    )
    table = samples.table(f"cost of a cold pair, vLLM {run.vllm}, {rounds} round(s)", columns)
    return Answer([table], judge(samples), {"rounds": rounds, "samples": samples.as_json()})


def first_quartile(values: Sequence[float]) -> float:
    """Other load on the machine only adds time."""
    return statistics.quantiles(values)[0]


async def _measure(samples: Samples, setting: Setting, arms: Sequence[Arm], pairs: Sequence[Sequence[Server]]) -> None:
    """Measure pairs that run at the same time; they take turns."""
    async with http_client(1) as http:
        routers = {arm.name: Router(arm, *pair, http) for arm, pair in zip(arms, pairs, strict=True)}
        for name, router in routers.items():
            for side in (router.prefill, router.decode):
                # Both sides compute once before, so that only the hand-over happens for the first time.
                await side.answer(PROMPT, max_tokens=2, salt="warm", request_id="warm")
            first = await _first_token_seconds(router)
            samples.add(setting, name, first=first, cold=first)
        held = {arm.name: _resident_bytes(decode) for arm, (_, decode) in zip(arms, pairs, strict=True)}
        for turn in range(COLD_AGAIN):
            for name, router in in_turn(list(routers.items()), turn):
                if (await router.decode.probe("forget_peers"))["forgotten"] != 1:
                    raise AnswerError("found decode with no peer or several to forget; expected one, prefill's engine.")
                samples.add(setting, name, cold=await _first_token_seconds(router))
        for name, router in routers.items():
            samples.add(setting, name, resident=held[name], step=await _step_seconds(router.decode))
            for method, *more in (("registration",), ("idle_seconds", TIMED_CALLS)):
                samples.add(setting, name, **await router.decode.probe(method, *more))


async def _first_token_seconds(router: Router) -> float:
    """From the request to decode until its first token."""
    handed = await router.hand_over(PROMPT_TOKENS)
    return handed.tokens[0] - handed.offered


async def _step_seconds(decode: Client) -> float:
    """Return the time of a decode step: the difference per token between a long and a short answer to a cached
    prompt."""
    spent = []
    for tokens in (1, 1 + DECODE_TOKENS, 1, 1 + DECODE_TOKENS, 1, 1 + DECODE_TOKENS):
        begun = time.perf_counter()
        await decode.answer(PROMPT, max_tokens=tokens, salt="steps", request_id=f"steps-{len(spent)}")
        spent.append(time.perf_counter() - begun)
    return (statistics.median(spent[3::2]) - statistics.median(spent[2::2])) / DECODE_TOKENS


def _resident_bytes(server: Server) -> int:
    """Return the resident memory of the server's largest engine or worker process."""
    processes = server.processes()
    engines = [process for process in processes if any(word in process.name() for word in ("Engine", "Worker"))]
    if not engines:
        names = ", ".join(process.name() for process in processes)
        raise AnswerError(f"found the processes {names}; expected one named after vLLM's engine core or worker.")
    return max(process.memory_info().rss for process in engines)


def judge(samples: Samples) -> list[Verdict]:
    """Return the targets of this package's arms that were measured."""
    small, large, stock = f"{SIZES_GIB[0]} GiB", f"{SIZES_GIB[-1]} GiB", STOCK.name
    rows = []
    for setting in samples.settings:
        if setting[0] == KVCACHED_OWN.name:
            continue
        rows += samples.compare(
            *(large, small, "cold", f"cold, {large} / {small}"), most=1.3, of=first_quartile, where=setting.__eq__
        )
        rows += samples.compare(
            *(large, stock, "cold", f"cold, {large} / stock"), most=1.2, of=first_quartile, where=setting.__eq__
        )
        more = (samples.median(setting, large, "resident") - samples.median(setting, small, "resident")) / MIB
        words = f"{samples.words(setting)}: memory, {large} - {small} (<= 64 MiB)"
        rows.append(Verdict(words, f"{more:+.0f} MiB", more <= 64))
        beside = samples.median(setting, stock, "idle")
        share = max(
            max(0.0, idle - beside) / step
            for name in samples.arms
            if name != stock
            for idle, step in zip(*(samples.values(setting, name, what) for what in ("idle", "step")), strict=True)
        )
        words = f"{samples.words(setting)}: share of a decode step that wrappers add to stock (< 1 %)"
        rows.append(Verdict(words, f"{share:.2%}", share < 0.01))
    return rows
