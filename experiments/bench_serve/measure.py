# SPDX-License-Identifier: Apache-2.0
"""Measures the arms in turn, with the servers of all arms running throughout: the machine's speed varies over time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from experiments.bench_serve.arms import ARMS, INPUT_TOKENS, OUTPUT_TOKENS, Arm
from experiments.common import device
from experiments.common.router import routed
from experiments.common.servers import ENVIRONMENT, ServerError, running

BENCH_SECONDS = 300.0


@dataclass(frozen=True)
class Run:
    """Figures that ``vllm bench serve`` reported for one run. Times in milliseconds; tokens are tokens of answers."""

    arm: str
    at_a_time: int
    completed: int
    failed: int
    requests_per_second: float
    tokens_per_second: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    token_p50_ms: float
    token_p99_ms: float


@dataclass(frozen=True)
class Handed:
    """A router's counters: hand-overs by direction, and how often decode computed a prompt itself."""

    arm: str
    in_its_direction: int
    others: int
    computed_by_decode: int

    def since(self, earlier: Handed) -> Handed:
        """Return the counts since ``earlier``."""
        return Handed(
            self.arm,
            self.in_its_direction - earlier.in_its_direction,
            self.others - earlier.others,
            self.computed_by_decode - earlier.computed_by_decode,
        )


def measure(
    at_a_time: tuple[int, ...], rounds: int, prompts: int, model: Path, logs: Path, say: Callable[[str], None]
) -> tuple[list[Run], list[Handed]]:
    """Start all servers and routers, run all rounds, stop everything."""
    with contextlib.ExitStack() as stack:
        urls: dict[Arm, str] = {}
        for arm in ARMS:
            servers = stack.enter_context(running(arm.specs(model), logs, say))
            urls[arm] = servers[0].base_url
            if arm.mode:
                urls[arm] = stack.enter_context(routed(servers[:1], servers[1:], logs / f"{arm.mode}-router.log"))
        for arm, url in urls.items():
            say(f"{arm.name}: warming up")
            bench(arm, url, model, logs, at_a_time=max(at_a_time), prompts=max(at_a_time), seed=0)
        routers = {arm: url for arm, url in urls.items() if arm.mode}
        learnt = {arm: handed(arm, url) for arm, url in routers.items()}
        found = []
        # Each run has another seed: a prompt that an engine has seen would be in its prefix cache.
        for seed, (number, together) in enumerate(itertools.product(range(rounds), at_a_time), start=1):
            first = number % len(ARMS)
            for arm in (*ARMS[first:], *ARMS[:first]):
                say(f"{arm.name}: {together} at a time, {number + 1} of {rounds}")
                found.append(bench(arm, urls[arm], model, logs, at_a_time=together, prompts=prompts, seed=seed))
        return found, [handed(arm, url).since(learnt[arm]) for arm, url in routers.items()]


def bench(arm: Arm, url: str, model: Path, logs: Path, *, at_a_time: int, prompts: int, seed: int) -> Run:
    """Run vLLM's load generator once, with prompts that it draws itself.

    Raises:
        ServerError: the load generator failed.
    """
    result = logs / f"{arm.mode or 'one'}-{at_a_time}-{seed}.json"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", str(model), "--served-model-name", "model", "--ignore-eos", "--temperature", "0"),
        *("--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--random-range-ratio", "0.5"),
        *("--random-output-len", str(OUTPUT_TOKENS), "--seed", str(seed), "--num-prompts", str(prompts)),
        *("--max-concurrency", str(at_a_time), "--disable-tqdm"),
        *("--save-result", "--result-dir", str(logs), "--result-filename", result.name),
    ]
    environment = {**os.environ, **ENVIRONMENT, **device.environment({}, 1, forks=False)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BENCH_SECONDS, check=False)
    if done.returncode:
        raise ServerError(f"vllm bench serve ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    said = json.loads(result.read_text())
    return Run(
        arm.name,
        at_a_time,
        said["completed"],
        prompts - said["completed"],
        said["request_throughput"],
        said["output_throughput"],
        said["median_ttft_ms"],
        said["p99_ttft_ms"],
        said["median_tpot_ms"],
        said["p99_tpot_ms"],
    )


def handed(arm: Arm, url: str) -> Handed:
    """Return the counts of all requests that the router has served."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False).text)
    samples = [one for family in families for one in family.samples]

    def total(name: str) -> dict[str, int]:
        of_name = [one for one in samples if one.name == f"kvcached_nixl_router_{name}_total"]
        return {one.labels.get("direction", str(number)): int(one.value) for number, one in enumerate(of_name)}

    directions = total("handovers")
    computed = ("prefills_without_parameters", "reported_handover_failures", "decode_alone")
    return Handed(
        arm.name,
        in_its_direction=directions.get(arm.mode, 0),
        others=sum(directions.values()) - directions.get(arm.mode, 0),
        computed_by_decode=sum(sum(total(name).values()) for name in computed),
    )
