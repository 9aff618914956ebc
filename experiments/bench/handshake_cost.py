# SPDX-License-Identifier: Apache-2.0
"""What does the first hand-over of a pair cost, and does the cost grow with the memory that kvcached reserves?"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from experiments.bench.pairs import APART, KVCACHED, Arm, Router, pair_specs
from experiments.bench.samples import Answer, Column, Run, Samples
from experiments.common.client import AnswerError, Client, http_client
from experiments.common.model import make_model
from experiments.common.servers import Server, running
from experiments.common.targets import Verdict

SIZES_GIB = (1, 8, 60)
ROUNDS = 2
PROMPT_TOKENS = 512
DECODE_TOKENS = 64
WARM_HAND_OVERS = 7
COLD_AGAIN = 20
"""Further hand-overs, each after decode was made to forget its peer: a single one depends on other load."""
COLD_AGAIN_SECONDS = 30.0
"""No further cold hand-over begins after this time."""
TIMED_CALLS = 2000
MIB = 2**20

STOCK = Arm("stock vLLM")
OURS = (Arm("this package, contiguous", KVCACHED), Arm("this package, non-contiguous", APART))
KVCACHED_OWN = Arm("kvcached's own patch", {**APART, "KVCACHED_NIXL": "0"})
ARMS = (STOCK, *OURS, KVCACHED_OWN)


def answer(run: Run) -> Answer:
    """Measure fresh pairs of every arm and reserved size."""
    samples = Samples(("{} GiB",))
    rounds = 1 if run.quick else run.rounds or ROUNDS
    arms = [arm for arm in ARMS if run.only in arm.name and not (run.quick and arm is KVCACHED_OWN)]
    sizes = (SIZES_GIB[0], SIZES_GIB[-1]) if run.quick else SIZES_GIB
    for turn in range(rounds):
        one = dataclasses.replace(run, logs=run.logs / str(turn))
        for arm in arms:
            for gib in sizes if arm.environment else (0,):
                measure(one, samples, arm, gib)
                cold = samples.median((gib,), arm.name, "cold")
                run.tell(f"{arm.name}, {gib} GiB: cold {cold * 1e3:.0f} ms")
    columns = (
        Column("first, ms", "first"),
        Column("cold, ms", "cold"),
        Column("cold q1", "cold", of=first_quartile),
        Column("warm, ms", "warm"),
        Column("MiB", "resident", 1 / MIB),
        Column("peak", "peak", 1 / MIB),
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


def measure(run: Run, samples: Samples, arm: Arm, reserved_gib: int) -> None:
    """Start a fresh pair, measure, stop it. ``reserved_gib`` is the device size that kvcached assumes."""
    # The cost of reserving is measured; only little of the reserved memory is ever mapped.
    reserves = {"KVCACHED_HOSTVMM_GIB": str(reserved_gib), "KVCACHED_HOSTVMM_OVERCOMMIT": "1"}
    environment = reserves if reserved_gib else {}
    specs = pair_specs(arm, f"{reserved_gib}", environment, model=make_model(), max_num_batched_tokens=1024)
    with running(specs, run.logs, run.show) as (prefill, decode):
        asyncio.run(_measure(samples, (reserved_gib,), arm, prefill, decode))


async def _measure(samples: Samples, setting: tuple[int], arm: Arm, prefill: Server, decode: Server) -> None:
    async with http_client(1) as http:
        router = Router(arm, prefill, decode, http)
        prompt = [2 + place % 500 for place in range(PROMPT_TOKENS)]
        for side in (router.prefill, router.decode):
            # Both sides compute once before, so that only the hand-over happens for the first time.
            await side.answer(prompt, max_tokens=2, salt="warm", request_id="warm")
        first = await _first_token_seconds(router)
        samples.add(setting, arm.name, first=first, cold=first)
        for _ in range(WARM_HAND_OVERS):
            samples.add(setting, arm.name, warm=await _first_token_seconds(router))
        resident, peak = _resident_bytes(decode)
        begun = time.monotonic()
        for _ in range(COLD_AGAIN):
            if time.monotonic() - begun > COLD_AGAIN_SECONDS:
                break
            if (await router.decode.probe("forget_peers"))["forgotten"] != 1:
                raise AnswerError("found decode with no peer or several to forget; expected one, prefill's engine.")
            samples.add(setting, arm.name, cold=await _first_token_seconds(router))
        step = await _step_seconds(router.decode, prompt)
        found = {**await router.decode.probe("registration"), **await router.decode.probe("idle_seconds", TIMED_CALLS)}
        samples.add(setting, arm.name, resident=resident, peak=peak, step=step, **found)


async def _first_token_seconds(router: Router) -> float:
    """From the request to decode until its first token."""
    handed = await router.hand_over(PROMPT_TOKENS)
    return handed.tokens[0] - handed.offered


async def _step_seconds(decode: Client, prompt: list[int]) -> float:
    """Return the time of a decode step: the difference per token between a long and a short answer to a cached
    prompt."""
    spent = []
    for tokens in (1, 1 + DECODE_TOKENS, 1, 1 + DECODE_TOKENS, 1, 1 + DECODE_TOKENS):
        begun = time.perf_counter()
        await decode.answer(prompt, max_tokens=tokens, salt="steps", request_id=f"steps-{len(spent)}")
        spent.append(time.perf_counter() - begun)
    return (statistics.median(spent[3::2]) - statistics.median(spent[2::2])) / DECODE_TOKENS


def _resident_bytes(server: Server) -> tuple[int, int]:
    """Return the current and the peak resident memory of the server's largest engine or worker process."""
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    engines = [process for process in processes if any(word in process.name() for word in ("Engine", "Worker"))]
    if not engines:
        names = ", ".join(process.name() for process in processes)
        raise AnswerError(f"found the processes {names}; expected one named after vLLM's engine core or worker.")
    largest = max(engines, key=lambda process: process.memory_info().rss)
    status = Path(f"/proc/{largest.pid}/status").read_text()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return largest.memory_info().rss, peak_kib * 1024


def judge(samples: Samples) -> list[Verdict]:
    """Return the targets of this package's arms; none for an arm or a size that was not measured."""
    small, large, stock = (SIZES_GIB[0],), (SIZES_GIB[-1],), (0,)
    rows = []
    for arm in (one.name for one in OURS):
        if not (samples.values(large, arm, "cold") and samples.values(stock, STOCK.name, "cold")):
            continue
        cold = first_quartile(samples.values(large, arm, "cold"))
        growth = cold / first_quartile(samples.values(small, arm, "cold"))
        against_stock = cold / first_quartile(samples.values(stock, STOCK.name, "cold"))
        more = (samples.median(large, arm, "resident") - samples.median(small, arm, "resident")) / MIB
        beside = samples.median(stock, STOCK.name, "idle")
        share = max(
            max(0.0, idle - beside) / step
            for setting in samples.settings
            for idle, step in zip(
                samples.values(setting, arm, "idle"), samples.values(setting, arm, "step"), strict=True
            )
        )
        rows += [
            Verdict(f"{arm}: cold, 60 GiB / 1 GiB (<= 1.3)", f"{growth:.2f} x", growth <= 1.3),
            Verdict(f"{arm}: cold, 60 GiB / stock (<= 1.2)", f"{against_stock:.2f} x", against_stock <= 1.2),
            Verdict(f"{arm}: memory, 60 GiB - 1 GiB (<= 64 MiB)", f"{more:+.0f} MiB", more <= 64),
            Verdict(f"{arm}: share of a decode step that wrappers add to stock (< 1 %)", f"{share:.2%}", share < 0.01),
        ]
    return rows
