# SPDX-License-Identifier: Apache-2.0
"""What does vLLM's own load generator measure with prefill/decode, beside stock prefill/decode?

`vllm bench serve` with random prompts, against one prefill and one decode server, pull and push: decode that asks
prefill; the same behind vllm-router; vLLM's own connectors without kvcached, behind vllm-router; and one instance
with as many threads as both servers together. --only names transfer modes; --rounds is 3.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from experiments.bench.comparison import KVCACHED, Arm, Column, Samples, in_turn, pair_specs
from experiments.common.counted import since
from experiments.common.device import MODES
from experiments.common.model import ModelShape, make_model
from experiments.common.report import Run, Verdict
from experiments.common.servers import ENVIRONMENT, ServerSpec
from experiments.stacks.routers import Servers, alone, behind, vllm_router

MODEL = ModelShape(layers=8, kv_heads=8, max_positions=4096)
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 64
PROMPTS, QUICK_PROMPTS = {1: 6, 8: 16, 64: 64}, {8: 16}
"""Prompts of a run, by how many are in flight at a time."""


ONE = Arm("one instance")
MEMORY: Mapping[str, str] = {**KVCACHED, "KVCACHED_HOSTVMM_GIB": "2"}
PULL, PUSH = (Arm(f"decode asks, {mode}", MEMORY, {"transfer_mode": mode}, asks=True) for mode in MODES)
STOCK_PULL = Arm("vllm-router, stock pull")
STOCK_PUSH = Arm("vllm-router, stock push", connector="NixlPushConnector")
GROUPS: Mapping[str, tuple[Arm, ...]] = {
    "pull": (ONE, PULL, replace(PULL, name="vllm-router, pull", asks=False), STOCK_PULL),
    "push": (PUSH, replace(PUSH, name="vllm-router, push", asks=False), STOCK_PUSH),
}
"""Arms whose servers run at the same time and take turns, by transfer mode."""
PAIRS = ((PULL, STOCK_PULL), (PUSH, STOCK_PUSH))
COMPARED = {
    "requests_per_second": "requests/s",
    "first_token_p50_ms": "first token p50",
    "token_p50_ms": "further tokens p50",
    "cpu_token_ms": "CPU a token",
}
"""What is compared with targets, of which arms."""
FIGURES = {
    "requests_per_second": "request_throughput",
    "tokens_per_second": "output_throughput",
    "first_token_p50_ms": "median_ttft_ms",
    "first_token_p99_ms": "p99_ttft_ms",
    "token_p50_ms": "median_tpot_ms",
    "token_p99_ms": "p99_tpot_ms",
}
"""As the load generator names them."""
COLUMNS = (
    Column("requests/s", "requests_per_second", 1, 2),
    Column("tokens/s", "tokens_per_second", 1),
    Column("TTFT, ms: p50", "first_token_p50_ms", 1),
    Column("p99", "first_token_p99_ms", 1),
    Column("TPOT, ms: p50", "token_p50_ms", 1, 1),
    Column("CPU, ms a token", "cpu_token_ms", 1, 1),
)


def main(run: Run) -> int:
    samples = Samples(("{} at a time",))
    handed: dict[str, tuple[int, int]] = {}
    for mode in run.chosen(MODES):
        handed |= measure(run, samples, GROUPS[mode])
    table = samples.table("vllm bench serve; medians over the rounds", COLUMNS)
    moved = {arm: {"asked": asked, "moved": found} for arm, (asked, found) in handed.items()}
    return run.conclude([table], judge(samples, handed), {"handed": moved, "runs": samples.as_json()})


@dataclass(frozen=True)
class _Deployed:
    """An arm that runs; ``sessions`` are those of all its processes."""

    arm: Arm
    servers: Servers
    sessions: frozenset[int]

    def cpu_seconds(self) -> float:
        found = 0.0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in self.sessions:
                    found += sum(process.cpu_times()[:2])
        return found


def measure(run: Run, samples: Samples, arms: Sequence[Arm]) -> dict[str, tuple[int, int]]:
    """Start all servers and routers of ``arms``, run all rounds, stop everything. Returns how many requests each arm
    was asked, and how many of them decode got KV for."""
    os.environ.update(ENVIRONMENT)
    prompts = QUICK_PROMPTS if run.quick else PROMPTS
    rounds = run.times(3, 1)
    model = make_model(MODEL)
    with contextlib.ExitStack() as stack:
        deployed = []
        for arm in arms:
            known, logs = _children(), run.logs / arm.name
            specs = pair_specs(arm, "", {}, model=model, dtype="float32", forks=True)
            if arm is ONE:
                # As many threads as the two servers of another arm have together.
                threads = {"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))}
                specs = [ServerSpec("one-instance", model, dtype="float32", environment=threads, forks=True)]
            is_alone = arm.asks or arm is ONE
            start = alone(specs, logs, run.update) if is_alone else behind(vllm_router, specs, logs, run.update)
            deployed.append(_Deployed(arm, stack.enter_context(start), _children() - known))
        warm = max(prompts.values())
        # Stock's memory is there from the start; kvcached's pages come with the first requests that need them, and the
        # kernel clears them for an emulated device.
        for one in deployed:
            run.update(f"{one.arm.name}: warming up")
            _bench(run, one, model, at_a_time=max(prompts), prompts=warm, seed=0)
        for seed, (number, at_a_time) in enumerate(itertools.product(range(rounds), prompts), start=1):
            for one in in_turn(deployed, seed):
                run.update(f"{one.arm.name}: {at_a_time} at a time, {number + 1} of {rounds}")
                found = _bench(run, one, model, at_a_time=at_a_time, prompts=prompts[at_a_time], seed=seed)
                samples.add((at_a_time,), one.arm.name, **found)
        asked = warm + rounds * sum(prompts.values())
        return {
            one.arm.name: (asked, since({}, one.servers.hand_overs, asked)) for one in deployed if one.arm is not ONE
        }


def _children() -> frozenset[int]:
    """Servers and routers are children of this process, and leaders of sessions."""
    return frozenset(one.pid for one in psutil.Process().children())


def _bench(run: Run, one: _Deployed, model: Path, *, at_a_time: int, prompts: int, seed: int) -> dict[str, float]:
    """Run vLLM's load generator once, with prompts that it draws itself, from ``seed``. Returns the figures that it
    reports, and the CPU time of all processes of the arm for each token of an answer."""
    # In this process: its import takes half a minute.
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    add_cli_args(parser := FlexibleArgumentParser())
    options = [
        *("--backend", "openai", "--base-url", one.servers.url, "--endpoint", "/v1/completions"),
        *("--model", str(model), "--served-model-name", "model", "--ignore-eos", "--temperature", "0"),
        *("--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--random-range-ratio", "0.5"),
        *("--random-output-len", str(OUTPUT_TOKENS), "--seed", str(seed), "--num-prompts", str(prompts)),
        *("--max-concurrency", str(at_a_time), "--disable-tqdm"),
        # Of the model's few tokens, many random prompts begin as earlier ones did.
        *("--extra-body", json.dumps({"cache_salt": f"{at_a_time} {seed}"})),
    ]
    before = one.cpu_seconds()
    with (run.logs / f"{one.arm.name}-bench.log").open("a") as log, contextlib.redirect_stdout(log):
        said = main(parser.parse_args(options))
    used_seconds = one.cpu_seconds() - before
    cpu_token_ms = used_seconds / said["total_output_tokens"] * 1e3
    figures = {ours: float(said[theirs]) for ours, theirs in FIGURES.items()}
    return {"failed": prompts - said["completed"], **figures, "cpu_token_ms": cpu_token_ms}


def judge(samples: Samples, handed: Mapping[str, tuple[int, int]]) -> list[Verdict]:
    failed = sum(sum(figures["failed"]) for figures in samples.figures.values())
    verdicts = [Verdict("requests without an answer (0)", f"{failed:.0f}", failed == 0)]
    for arm, (asked, moved) in handed.items():
        verdicts.append(Verdict(f"{arm}: requests with KV from prefill (all)", f"{moved} of {asked}", moved >= asked))
    for arm, other in ((ours.name, stock.name) for ours, stock in PAIRS):
        for figure, words in COMPARED.items():
            limit = {"least" if figure == "requests_per_second" else "most": 1.0}
            verdicts += samples.compare(arm, other, figure, f"{arm} / {other}, {words}", by_round=True, **limit)
    return verdicts
