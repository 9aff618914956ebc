# SPDX-License-Identifier: Apache-2.0
"""What does staging cost, and how much memory does it free sooner? The direct path, and a slab in host memory:

memory       a server's resident memory besides kvcached's pages, with 1, 8 and 60 GiB reserved
first-token  time to first token over TCP and shared memory; also for a pull whose every hand-over is verified
pages        how long prefill's blocks stay in use after its last step, and their pages mapped; and how much of its
             pool is mapped under load, when decode gets a request half a second after prefill's answer
--only names parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from experiments.bench import push_vs_pull
from experiments.bench.comparison import KVCACHED, Arm, Column, Router, Samples, pair_specs
from experiments.bench.push_vs_pull import BLOCK_SIZE, KV_BYTES_PER_TOKEN, MODEL, SHARED_MEMORY, TCP, Load
from experiments.common.client import AnswerError, at_a_time, http_client
from experiments.common.counted import PageWatch
from experiments.common.report import Run, Verdict, finish, make_panels, save
from experiments.common.servers import GIVES_BACK, Server, ServerSpec, running

PARTS = ("memory", "first-token", "pages")
IDLE_BYTES = 2 * MODEL.layers * (2 << 20)
"""The least that kvcached maps at a time: a page of K and one of V in every layer. So much is mapped when idle, for
vLLM's null block."""
RESERVED_GIB = (1, 8, 60)
SLAB_GIB = 0.25
MOST_OF_SLAB, MOST_OF_DIRECT, MOST_OF_COPY = 1.05, 1.15, 1.2
TOKENS = 2
LENGTHS = (2048, 8192)
LOOK_SECONDS = 0.002
SETTLE_SECONDS = 30.0
LATE_SECONDS = 0.5
"""Under load, time between prefill's answer and decode's request, as with a router that waits for room on decode."""
CLIENTS = 4
MIB = 2**20
PAGES = (
    Column("blocks in use for", "occupied"),
    Column("pages mapped for", "mapped"),
    Column("copied for", "copied"),
    Column("first token after", "whole"),
)
LOADED = (
    Column("requests/s", "rate", 1, 1),
    Column("mapped, MiB", "mapped", 1 / MIB),
    Column("of the pool, %", "share", 100),
    Column("page groups free for a second model", "free", 1 / IDLE_BYTES, 1),
)


def staged(arm: Arm, **size: float) -> Arm:
    """Return ``arm`` staged through a slab in host memory; ``size``: its ``staging_gib``, if not the default."""
    return dataclasses.replace(arm, name=f"{arm.name}, staged", extra={**arm.extra, "memory_path": "host", **size})


PAIRS = tuple((arm, staged(arm)) for arm in (push_vs_pull.PULL, push_vs_pull.STREAMED))
ARMS = tuple(arm for pair in PAIRS for arm in pair)
VERIFIED = dataclasses.replace(push_vs_pull.PULL, name="pull, verified", extra={"verify_fraction": 1.0})
"""Every hand-over is verified; the cost is reported without a target."""


def main(run: Run) -> int:
    """Run the parts one after the other, so that no two pairs are measured at the same time."""
    memory, first = Samples(("{}", "{} GiB reserved")), Samples()
    pages, loaded = Samples(("{} tokens",)), Samples(())
    parts, tables, verdicts = run.chosen(PARTS), list[Table](), list[Verdict]()
    title = f"direct and staged, vLLM {run.vllm}"
    if "memory" in parts:
        for gib, arm in itertools.product(RESERVED_GIB, (PAIRS[0][0], staged(PAIRS[0][0], staging_gib=SLAB_GIB))):
            measure_memory(run, memory, arm, gib)
        verdicts += judge_memory(memory)
    if "first-token" in parts:
        load = Load(lengths=(512, 2048, 8192), at_a_time=(1, 4), most_rounds=5, tokens=16_384)
        if run.quick:
            load = Load(lengths=(512, 4096), at_a_time=(1,), most_rounds=5)
        for transport in (TCP, SHARED_MEMORY):
            push_vs_pull.comparison((*ARMS, VERIFIED), transport, load).measure(run, first, transport.name)
        tables.append(push_vs_pull.table_of(first, f"{title}; milliseconds"))
        limit = {"most": MOST_OF_DIRECT, "where": lambda setting: setting[0] == TCP.name}
        for direct, other in PAIRS:
            words = f"{direct.name}: first token, staged / direct"
            verdicts += first.compare(other.name, direct.name, "first_token", words, **limit)
    if "pages" in parts:
        for arm in ARMS:
            measure_pages(run, pages, loaded, arm)
        words = "under load, with late requests to decode: prefill's pool on average"
        tables += [pages.table(f"{title}: after prefill's last step, ms", PAGES), loaded.table(words, LOADED)]
        verdicts += judge_pages(pages)
        plot(pages, loaded, title, run.path.with_suffix(".png"))
    content = {"memory": memory, "first_token": first, "pages": pages, "under_load": loaded}
    return run.conclude(tables, verdicts, {name: samples.as_json() for name, samples in content.items()})


def specs(arm: Arm, gib: float, pool: Mapping[str, str], **sizes: Any) -> list[ServerSpec]:
    own = dataclasses.replace(arm, environment={**KVCACHED, "KVCACHED_HOSTVMM_GIB": f"{gib}", **pool})
    return pair_specs(own, f"{gib}", {}, **push_vs_pull.sizes_of(512, **sizes))


# ---------------------------------------------------------------------------------------------------- resident memory


def measure_memory(run: Run, samples: Samples, arm: Arm, gib: float) -> None:
    """Start a pair, hand over as much at a time as the slab holds, read its memory besides kvcached's pages."""
    # kvcached leaves 5 % of a device free.
    num_blocks = int(0.95 * gib * 2**30 // (BLOCK_SIZE * KV_BYTES_PER_TOKEN))
    # May exceed the machine's memory: only little is ever mapped.
    pool = {"KVCACHED_HOSTVMM_OVERCOMMIT": "1"}

    async def serve(prefill: Server, decode: Server) -> None:
        async with http_client(8) as http:
            router = Router(arm, prefill, decode, http)
            for _ in range(2):
                await asyncio.gather(*(router.hand_over(2048, TOKENS) for _ in range(8)))

    with running(specs(arm, gib, pool, num_blocks=num_blocks), run.logs, run.update) as servers:
        asyncio.run(serve(*servers))
        for side, server in zip(("prefill", "decode"), servers, strict=True):
            anonymous = 0
            for process in server.processes():
                # It may have ended meanwhile.
                with contextlib.suppress(psutil.Error):
                    anonymous += process.memory_info().rss - process.memory_info().shared
            buffer = num_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN
            samples.add((side, gib), arm.name, anonymous=anonymous, buffer=buffer)
    run.say(f"{arm.name}, {gib} GiB reserved: measured")


def judge_memory(samples: Samples, slab_gib: float = SLAB_GIB) -> list[Verdict]:
    direct, other = (one.name for one in PAIRS[0])
    slab, rows, more = slab_gib * 1024, list[Verdict](), dict[str, list[float]]()
    for side, gib in samples.settings:
        with_slab, without = (samples.median((side, gib), arm, "anonymous") for arm in (other, direct))
        mib, stock = (with_slab - without) / MIB, samples.median((side, gib), direct, "buffer") / MIB
        more.setdefault(side, []).append(mib)
        words = f"{side}, {gib:g} GiB reserved: resident beyond the direct path (<= {MOST_OF_SLAB} x the slab)"
        found = f"{mib:.0f} MiB, slab {slab:.0f} MiB; stock host buffer {stock:.0f} MiB"
        rows.append(Verdict(words, found, mib <= MOST_OF_SLAB * slab))
    for side, some in more.items():
        apart = max(some) - min(some)
        words = f"{side}: the same for all reserved sizes (within {MOST_OF_SLAB - 1:.0%} of the slab)"
        rows.append(Verdict(words, f"{apart:.0f} MiB apart", apart <= (MOST_OF_SLAB - 1) * slab))
    return rows


# --------------------------------------------------------------------------------------------------- blocks and pages


def measure_pages(run: Run, pages: Samples, loaded: Samples, arm: Arm) -> None:
    async def measured(prefill: Server, decode: Server) -> None:
        rounds, requests = (3, 12) if run.quick else (9, 48)
        async with http_client(CLIENTS) as http:
            with PageWatch(prefill.identity) as watch:
                router = Router(arm, prefill, decode, http)
                await router.prefill.probe("time_transfers")
                if (await router.prefill.probe("time_copies"))["staged"] is not ("memory_path" in arm.extra):
                    raise AnswerError(f"{arm.name}: prefill does not use its configured memory path; see its log.")
                for _ in range(2):
                    # Not measured: the handshake and the first touch of all memory.
                    await alone(router, watch, max(LENGTHS))
                for length, number in itertools.product(LENGTHS, range(rounds)):
                    run.update(f"{arm.name}: {length} tokens, {number + 1} of {rounds}")
                    pages.add((length,), arm.name, **await alone(router, watch, length))
                run.update(f"{arm.name}: {requests} requests, {CLIENTS} at a time")
                loaded.add((), arm.name, **await under_load(router, watch, requests, max(LENGTHS) // 4))

    with running(specs(arm, 2, GIVES_BACK), run.logs, run.update) as servers:
        asyncio.run(measured(*servers))
    run.say(f"{arm.name}: measured")


async def alone(router: Router, watch: PageWatch, length: int) -> dict[str, float]:
    """Hand one prompt over without other load; return the seconds from the end of prefill's last step until its blocks
    are free, their pages are unmapped and decode's first token came; and those that prefill spent on copying KV out of
    its blocks, 0 on the direct path. Returns when the pages are unmapped."""
    await router.prefill.probe("copied")
    handing = asyncio.create_task(router.hand_over(length, TOKENS))
    while watch.mapped_bytes() <= IDLE_BYTES and not handing.done():
        await asyncio.sleep(LOOK_SECONDS)
    deadline = None
    while watch.mapped_bytes() > IDLE_BYTES:
        if handing.done():
            deadline = deadline or time.monotonic() + SETTLE_SECONDS
            if time.monotonic() > deadline:
                raise AnswerError(
                    f"{router.arm.name}: found {watch.mapped_bytes()} bytes mapped {SETTLE_SECONDS:.0f} s after the "
                    f"answer; expected {IDLE_BYTES} at most."
                )
        await asyncio.sleep(LOOK_SECONDS)
    unmapped, first_token = time.monotonic(), (await handing).tokens[0]
    times = await router.prefill.probe("times")
    computed, freed = float(times["computed"]), float(times["freed"])
    if not computed < freed <= unmapped:
        raise AnswerError(
            f"{router.arm.name}: found blocks freed {freed - computed:.3f} s, and pages unmapped "
            f"{unmapped - computed:.3f} s after prefill's last step; expected 0 < first <= second."
        )
    copied = float((await router.prefill.probe("copied"))["seconds"])
    ends = {"occupied": freed, "mapped": unmapped, "whole": first_token}
    return {"copied": copied, **{name: at - computed for name, at in ends.items()}}


async def under_load(router: Router, watch: PageWatch, requests: int, length: int) -> dict[str, float]:
    """Hand prompts over, ``CLIENTS`` at a time, with late requests to decode; return the rate, and how much of
    prefill's pool is mapped on average, and free."""
    calls = (router.hand_over(length, TOKENS, late_seconds=LATE_SECONDS) for _ in range(requests))
    begun, area, last = time.monotonic(), 0.0, time.monotonic()
    asking = asyncio.create_task(at_a_time(CLIENTS, calls))
    while not asking.done():
        await asyncio.sleep(LOOK_SECONDS)
        now = time.monotonic()
        area, last = area + watch.mapped_bytes() * (now - last), now
    await asking
    mapped, pool = area / (last - begun), watch.count().limit_bytes
    return {"rate": requests / (last - begun), "mapped": mapped, "share": mapped / pool, "free": pool - mapped}


def judge_pages(samples: Samples) -> list[Verdict]:
    rows = []
    for arm, setting in itertools.product(samples.arms, samples.settings):
        if any(samples.values(setting, arm, "copied")):
            occupied, copy = (samples.median(setting, arm, one) for one in ("occupied", "copied"))
            words = f"{arm}, {samples.words(setting)}: prefill's blocks stay in use (<= {MOST_OF_COPY} x the copy)"
            found = f"{occupied * 1e3:.0f} ms, the copy {copy * 1e3:.0f} ms"
            rows.append(Verdict(words, found, occupied <= MOST_OF_COPY * copy))
    return rows


def plot(pages: Samples, loaded: Samples, title: str, path: Path) -> None:
    figure, (times, pool) = make_panels(2, 10.4, 4)
    lengths = [length for (length,) in pages.settings]
    for arm in pages.arms:
        values = [pages.median((length,), arm, "occupied") for length in lengths]
        times.plot(lengths, values, marker="o", markersize=3, label=arm)
    finish(times, xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="blocks in use after the last step, s")
    pool.bar(loaded.arms, [loaded.median((), arm, "mapped") / MIB for arm in loaded.arms])
    pool.set(ylabel="MiB of the pool mapped, under load")
    pool.tick_params(axis="x", labelrotation=20)
    save(figure, title, path)
