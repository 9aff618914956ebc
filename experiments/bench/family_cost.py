# SPDX-License-Identifier: Apache-2.0
"""What does it cost to hand over a model that keeps KV in several KV-cache groups?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from experiments.bench.pairs import APART, KVCACHED, Arm, Router, in_turn, pair_specs, running_pairs
from experiments.bench.samples import Answer, Column, Run, Samples
from experiments.common.client import AnswerError, http_client
from experiments.common.counted import counters
from experiments.common.families import FAMILIES, make_family
from experiments.common.model import GQA, make_model
from experiments.common.report import Verdict
from experiments.common.servers import Server, ServerSpec

ONE_GROUP = "one group"
"""A model with grouped-query attention in all layers, to compare with."""
MODELS = (ONE_GROUP, "gemma4", "nemotron-h")
LENGTHS = (512, 1900)
ROUNDS, QUICK_ROUNDS = 10, 5
SLOWEST = 1.15
"""Pull's time to first token, as a multiple of stock's."""
COUNTERS = {"descriptors": "vllm:nixl_num_descriptors_sum", "bytes": "vllm:nixl_bytes_transferred_sum"}
_KEPT: Mapping[str, str] = {
    "KVCACHED_HOSTVMM_GIB": "2",
    # Pages stay mapped, as stock memory is: the kernel clears those of the emulation when they are first touched, which
    # a device does not do.
    "KVCACHED_MIN_RESERVED_PAGES": "0",
    "KVCACHED_MAX_RESERVED_PAGES": "4096",
}
STOCK = Arm("stock, pull", {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})
PULL = Arm("pull, contiguous", {**KVCACHED, **_KEPT})
PULL_APART = Arm("pull, non-contiguous", {**APART, **_KEPT})
ARMS = (
    STOCK,
    PULL,
    PULL_APART,
    Arm("push, contiguous", PULL.environment, {"transfer_mode": "push"}, is_streamed=True),
)


def answer(run: Run) -> Answer:
    """Measure every model."""
    samples = Samples(("{}", "{} tokens"))
    rounds = QUICK_ROUNDS if run.quick else run.rounds or ROUNDS
    for model in run.chosen(MODELS):
        with running_pairs(ARMS, lambda arm, model=model: specs(arm, model), run.logs, run.show) as pairs:  # type: ignore[misc]
            asyncio.run(_take_turns(run, samples, model, rounds, pairs))
        run.tell(f"{model}: done")
    columns = (
        Column("first token, ms", "first_token", digits=1),
        Column("descriptors", "descriptors", 1),
        Column("KiB", "bytes", 1 / 1024),
    )
    table = samples.table(f"hand-overs by family, vLLM {run.vllm}, {rounds} rounds; medians", columns)
    return Answer([table], judge(samples), {"rounds": rounds, "samples": samples.as_json()})


def specs(arm: Arm, model: str) -> list[ServerSpec]:
    """Return the configurations of P and D of an arm."""
    if model == ONE_GROUP:
        return pair_specs(arm, model, {}, model=make_model(GQA), dtype="float32", forks=True)
    family = FAMILIES[model]
    return pair_specs(
        arm,
        model,
        family.environment,
        model=make_family(model),
        dtype="float32",
        block_size=family.block_size,
        arguments=("--no-disable-hybrid-kv-cache-manager", *family.arguments),
        forks=True,
    )


async def _take_turns(run: Run, samples: Samples, model: str, rounds: int, pairs: Sequence[Sequence[Server]]) -> None:
    async with http_client(2) as http:
        routers = [Router(arm, *pair, http) for arm, pair in zip(ARMS, pairs, strict=True)]
        for turn in range(rounds + 1):
            for length in LENGTHS:
                run.show(f"{model}: {length} tokens, round {turn} of {rounds}")
                for router in in_turn(routers, turn):
                    found = await _hand_over(router, length)
                    # Not measured: handshakes, and the first touch of memory.
                    if turn:
                        samples.add((model, length), router.arm.name, **found)


async def _hand_over(router: Router, length: int) -> dict[str, float]:
    """Return the seconds until decode's first token, and what both servers have counted meanwhile."""
    before = await _counted(router)
    seconds = (await router.hand_over(length)).first_token_seconds
    for attempt in range(20):
        # The counts arrive with a later step.
        for side in (router.prefill, router.decode):
            await side.complete([3, 4, 5, 6], max_tokens=2, salt="other", request_id=f"other-{attempt}")
        after = await _counted(router)
        moved = {what: after[what] - before[what] for what in COUNTERS}
        if moved["bytes"]:
            return {"first_token": seconds, **moved}
        await asyncio.sleep(0.05)
    raise AnswerError(f"found no bytes moved by {router.arm.name}; expected a hand-over. See the logs.")


async def _counted(router: Router) -> dict[str, float]:
    """What both servers have counted: a READ is decode's, a WRITE is prefill's."""
    pages = [f"{side.base_url}/metrics" for side in (router.prefill, router.decode)]
    found = {what: await asyncio.to_thread(counters, pages, name) for what, name in COUNTERS.items()}
    return {what: sum(values.values()) for what, values in found.items()}


def judge(samples: Samples) -> list[Verdict]:
    """Return the targets of each model and prompt length."""
    figures = (
        (STOCK, "first_token", "first token, pull / stock", SLOWEST),
        (PULL_APART, "descriptors", "descriptors, contiguous / non-contiguous", 0.5),
    )
    return [
        verdict
        for other, figure, words, most in figures
        for verdict in samples.compare(PULL.name, other.name, figure, words, most=most)
    ]
