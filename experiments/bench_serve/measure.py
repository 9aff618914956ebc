# SPDX-License-Identifier: Apache-2.0
"""Measures a group of arms in turn, with all its servers running throughout: the machine's speed varies over time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.bench_serve.arms import INPUT_TOKENS, OUTPUT_TOKENS, Arm
from experiments.common.asking import asking
from experiments.common.counted import hand_overs
from experiments.common.servers import ENVIRONMENT, Server, running
from experiments.stacks.routers import vllm_router


@dataclass(frozen=True)
class Run:
    """Figures that ``vllm bench serve`` reported for one run. Times in milliseconds; tokens are tokens of answers.

    Attributes:
        seed: of its prompts and lengths. Runs of several arms with one seed were made one after another.
        cpu_token_ms: CPU time of all servers of the arm, and of its router, for each token of an answer.
    """

    arm: str
    at_a_time: int
    seed: int
    completed: int
    failed: int
    requests_per_second: float
    tokens_per_second: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    token_p50_ms: float
    token_p99_ms: float
    cpu_token_ms: float


@dataclass(frozen=True)
class Handed:
    """How many of an arm's requests decode got KV for."""

    arm: str
    asked: int
    moved: int


@dataclass(frozen=True)
class _Deployed:
    """An arm that runs; ``url`` is where its requests go, ``sessions`` are those of all its processes."""

    arm: Arm
    url: str
    servers: Sequence[Server]
    sessions: frozenset[int]

    def cpu_seconds(self) -> float:
        found = 0.0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in self.sessions:
                    found += sum(process.cpu_times()[:2])
        return found


def measure(
    arms: Sequence[Arm],
    prompts: Mapping[int, int],
    rounds: int,
    model: Path,
    logs: Path,
    say: Callable[[str], None],
) -> tuple[list[Run], list[Handed]]:
    """Start all servers and routers of ``arms``, run all rounds, stop everything.

    Args:
        prompts: how many prompts a run has, by how many are in flight at a time.
    """
    os.environ.update(ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        deployed = []
        for arm in arms:
            known = _children()
            url, servers = stack.enter_context(_running(arm, model, logs, say))
            deployed.append(_Deployed(arm, url, servers, _children() - known))
        warm = max(prompts.values())
        # Stock's memory is there from the start; kvcached's pages come with the first requests that need them, and the
        # kernel clears them for an emulated device.
        for one in deployed:
            say(f"{one.arm.name}: warming up")
            _bench(one, model, logs, at_a_time=max(prompts), prompts=warm, seed=0)
        found = []
        for seed, (number, together) in enumerate(itertools.product(range(rounds), prompts), start=1):
            first = seed % len(arms)
            for one in (*deployed[first:], *deployed[:first]):
                say(f"{one.arm.name}: {together} at a time, {number + 1} of {rounds}")
                found.append(_bench(one, model, logs, at_a_time=together, prompts=prompts[together], seed=seed))
        asked = warm + rounds * sum(prompts.values())
        return found, [Handed(one.arm.name, asked, hand_overs(one.servers, asked)) for one in deployed if one.arm.mode]


def _children() -> frozenset[int]:
    """Servers and routers are children of this process, and leaders of sessions."""
    return frozenset(one.pid for one in psutil.Process().children())


@contextlib.contextmanager
def _running(arm: Arm, model: Path, logs: Path, say: Callable[[str], None]) -> Iterator[tuple[str, Sequence[Server]]]:
    """Yield where an arm's requests go, and its servers."""
    specs = arm.specs(model)
    if arm.mode and not arm.is_behind:
        with asking(specs[:1], specs[1], logs) as (prefills, decode):
            yield decode.base_url, [*prefills.servers, decode]
        return
    with running(specs, logs, say) as servers:
        if not arm.mode:
            yield servers[0].base_url, servers
            return
        with vllm_router(servers[:1], servers[1:], logs / f"{arm.tag}-router.log", say) as url:
            yield url, servers


def _bench(one: _Deployed, model: Path, logs: Path, *, at_a_time: int, prompts: int, seed: int) -> Run:
    """Run vLLM's load generator once, with prompts that it draws itself."""
    # In this process: its import takes half a minute.
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    add_cli_args(parser := FlexibleArgumentParser())
    options = [
        *("--backend", "openai", "--base-url", one.url, "--endpoint", "/v1/completions"),
        *("--model", str(model), "--served-model-name", "model", "--ignore-eos", "--temperature", "0"),
        *("--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--random-range-ratio", "0.5"),
        *("--random-output-len", str(OUTPUT_TOKENS), "--seed", str(seed), "--num-prompts", str(prompts)),
        *("--max-concurrency", str(at_a_time), "--disable-tqdm"),
        # Of the model's few tokens, many random prompts begin as earlier ones did.
        *("--extra-body", json.dumps({"cache_salt": f"{at_a_time} {seed}"})),
    ]
    before = one.cpu_seconds()
    with (logs / f"{one.arm.tag}-bench.log").open("a") as log, contextlib.redirect_stdout(log):
        said = main(parser.parse_args(options))
    used_seconds = one.cpu_seconds() - before
    return Run(
        one.arm.name,
        at_a_time,
        seed,
        said["completed"],
        prompts - said["completed"],
        float(said["request_throughput"]),
        float(said["output_throughput"]),
        float(said["median_ttft_ms"]),
        float(said["p99_ttft_ms"]),
        float(said["median_tpot_ms"]),
        float(said["p99_tpot_ms"]),
        used_seconds / said["total_output_tokens"] * 1e3,
    )
