# SPDX-License-Identifier: Apache-2.0
"""Is a first token later when decode asks prefill than when a router asks both?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from experiments.bench.pairs import KVCACHED, Arm, Router, in_turn, pair_specs
from experiments.bench.samples import Answer, Column, Run, Samples, percentile
from experiments.common.client import http_client
from experiments.common.device import with_extra
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, Asking, Server, ServerSpec

ASKS, ROUTER = "decode asks", "a router asks"
ARMS = (
    Arm("pull", {**KVCACHED, **GIVES_BACK}, {"transfer_mode": "pull"}),
    Arm("push", {**KVCACHED, **GIVES_BACK}, {"transfer_mode": "push"}, is_streamed=True),
)
LENGTHS, QUICK_LENGTHS = (1024, 4096), (1024,)
AT_A_TIME = (1, 8)
ROUNDS, QUICK_ROUNDS = 20, 5


def answer(run: Run) -> Answer:
    """Send requests to the same servers in both ways, in turn."""
    samples = Samples(("{}", "{} tokens", "{} at a time"))
    rounds = QUICK_ROUNDS if run.quick else run.rounds or ROUNDS
    for arm in ARMS:
        if run.only in arm.name:
            with Asking(specs(arm), run.logs, run.show) as launched:
                asyncio.run(_take_turns(run, samples, arm, rounds, launched.ready()))
            run.tell(f"{arm.name}: done")
    columns = (
        Column("first token p50, ms", "first_token", digits=1),
        Column("p90", "first_token", digits=1, of=percentile(90)),
    )
    table = samples.table(f"who asks prefill, vLLM {run.vllm}, {rounds} rounds", columns)
    words = f"first token, {ASKS} / {ROUTER}"
    verdicts = samples.compare(ASKS, ROUTER, "first_token", words, most=1.0)
    return Answer([table], verdicts, {"rounds": rounds, "samples": samples.as_json()})


def specs(arm: Arm) -> list[ServerSpec]:
    """Return the configurations of P and D. D asks P, and takes what a router sends."""
    shape = ModelShape(max_positions=8192)
    prefill, decode = pair_specs(arm, "", {}, model=make_model(shape), dtype="float32", max_model_len=8192, forks=True)
    assert decode.kv_transfer is not None
    return [prefill, replace(decode, kv_transfer=with_extra(decode.kv_transfer, {"accept_kv_transfer_params": True}))]


async def _take_turns(run: Run, samples: Samples, arm: Arm, rounds: int, servers: Sequence[Server]) -> None:
    async with http_client(2 * max(AT_A_TIME)) as http:
        router = Router(arm, *servers, http)
        ways = {ASKS: router.ask_decode, ROUTER: router.hand_over}
        for turn in range(rounds + 1):
            run.show(f"{arm.name}: round {turn} of {rounds}")
            for length in QUICK_LENGTHS if run.quick else LENGTHS:
                for number in AT_A_TIME:
                    for name in in_turn(list(ways), turn):
                        handed = await asyncio.gather(*(ways[name](length) for _ in range(number)))
                        # Not measured: handshakes, and the first touch of memory.
                        for one in handed if turn else ():
                            samples.add((arm.name, length, number), name, first_token=one.first_token_seconds)
