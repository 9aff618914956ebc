# SPDX-License-Identifier: Apache-2.0
"""What does it cost to hand over a model that keeps KV in several KV-cache groups?

Gemma 4 (full attention and windows), Nemotron-H (Mamba2 states and full attention), and a model with one group:
stock pull, pull in both layouts, and streamed push. --only names models; --rounds is 10.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

from experiments.bench.comparison import APART, KVCACHED, Arm, Column, Comparison, Router, Samples, pair_specs
from experiments.common.client import AnswerError
from experiments.common.counted import counters
from experiments.common.families import FAMILIES, make_family
from experiments.common.model import GQA, make_model
from experiments.common.report import Run
from experiments.common.servers import ServerSpec

ONE_GROUP = "one group"
"""A model with grouped-query attention in all layers, to compare with."""
MODELS = (ONE_GROUP, "gemma4", "nemotron-h")
LENGTHS = (512, 1900)
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
ARMS = (STOCK, PULL, PULL_APART, Arm("push, contiguous", PULL.environment, {"transfer_mode": "push"}, is_streamed=True))


def main(run: Run) -> int:
    samples = Samples()
    rounds = dict.fromkeys(((length, 1) for length in LENGTHS), run.times(10, 5))
    for model in run.chosen(MODELS):
        Comparison(ARMS, functools.partial(specs, model), ask, rounds).measure(run, samples, model)
        run.say(f"{model}: done")
    columns = (
        Column("first token, ms", "first_token", digits=1),
        Column("descriptors", "descriptors", 1),
        Column("KiB", "bytes", 1 / 1024),
    )
    table = samples.table(f"hand-overs by family, vLLM {run.vllm}; medians", columns)
    verdicts = samples.compare(PULL.name, STOCK.name, "first_token", "first token, pull / stock", most=1.15)
    words = "descriptors, contiguous / non-contiguous"
    verdicts += samples.compare(PULL.name, PULL_APART.name, "descriptors", words, most=0.5)
    return run.conclude([table], verdicts, {"samples": samples.as_json()})


def specs(model: str, arm: Arm) -> list[ServerSpec]:
    more: dict[str, Any] = {"dtype": "float32", "forks": True}
    if model == ONE_GROUP:
        return pair_specs(arm, model, {}, model=make_model(GQA), **more)
    family = FAMILIES[model]
    more["arguments"] = ("--no-disable-hybrid-kv-cache-manager", *family.arguments)
    return pair_specs(arm, model, family.environment, model=make_family(model), block_size=family.block_size, **more)


async def ask(router: Router, length: int, _: int) -> list[dict[str, float]]:
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
            return [{"first_token": seconds, **moved}]
        await asyncio.sleep(0.05)
    raise AnswerError(f"found no bytes moved by {router.arm.name}; expected a hand-over. See the logs.")


async def _counted(router: Router) -> dict[str, float]:
    """What both servers have counted: a READ is decode's, a WRITE is prefill's."""
    pages = [f"{side.base_url}/metrics" for side in (router.prefill, router.decode)]
    found = {what: await asyncio.to_thread(counters, pages, name) for what, name in COUNTERS.items()}
    return {what: sum(values.values()) for what, values in found.items()}
