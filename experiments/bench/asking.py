# SPDX-License-Identifier: Apache-2.0
"""Is a first token later when decode asks prefill than when a router does?

The same servers and requests in turn: to decode, which asks prefill; and as a router sends them, to prefill and with
its answer to decode (pull), or to both at once (push). --only names the transfer mode; --rounds is 20.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from experiments.bench.comparison import KVCACHED, Arm, Column, Comparison, Router, Samples, pair_specs, percentile
from experiments.common.device import MODES
from experiments.common.model import ModelShape, make_model
from experiments.common.report import Run
from experiments.common.servers import GIVES_BACK, ServerSpec

ROUTER = Arm("a router asks", {**KVCACHED, **GIVES_BACK})
ASKS = replace(ROUTER, name="decode asks", asks=True)
SETTINGS, QUICK_SETTINGS = ((1024, 1), (1024, 8), (4096, 1), (4096, 8)), ((1024, 1), (1024, 8))
COLUMNS = (
    Column("first token p50, ms", "first_token", digits=1),
    Column("p90", "first_token", digits=1, of=percentile(90)),
)


def main(run: Run) -> int:
    """Send requests to the same servers in both ways, in turn."""
    samples = Samples()
    rounds = dict.fromkeys(QUICK_SETTINGS if run.quick else SETTINGS, run.times(20, 5))
    for mode in run.chosen(MODES):
        extra = {"transfer_mode": mode, "accept_kv_transfer_params": True}
        arms = [replace(arm, extra=extra, is_streamed=mode == "push") for arm in (ASKS, ROUTER)]
        Comparison(arms, specs, ask, rounds).measure(run, samples, mode)
        run.say(f"{mode}: done")
    words = f"first token, {ASKS.name} / {ROUTER.name}"
    verdicts = samples.compare(ASKS.name, ROUTER.name, "first_token", words, most=1.0)
    table = samples.table(f"who asks prefill, vLLM {run.vllm}", COLUMNS)
    return run.conclude([table], verdicts, {"samples": samples.as_json()})


def specs(arm: Arm) -> list[ServerSpec]:
    model = make_model(ModelShape(max_positions=8192))
    place = str(arm.extra["transfer_mode"])
    return pair_specs(arm, place, {}, model=model, dtype="float32", max_model_len=8192, forks=True)


async def ask(router: Router, length: int, number: int) -> list[dict[str, float]]:
    handed = await asyncio.gather(*(router.hand_over(length) for _ in range(number)))
    return [{"first_token": one.first_token_seconds} for one in handed]
