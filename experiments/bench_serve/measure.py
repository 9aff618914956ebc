# SPDX-License-Identifier: Apache-2.0
"""Measures a group of arms in turn, with all its servers running throughout: the machine's speed varies over time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from experiments.bench_serve.arms import INPUT_TOKENS, OUTPUT_TOKENS, OWN, Arm
from experiments.common import device
from experiments.common.counted import hand_overs
from experiments.common.router import routed
from experiments.common.servers import ENVIRONMENT, Server, ServerError, running
from experiments.stacks.routers import vllm_router

BENCH_SECONDS = 300.0
WARM_UPS = 2
"""Runs of the highest load before the first one that counts. Stock's memory is there from the start; kvcached's pages
come with the first requests that need them, and the kernel clears them for an emulated device."""


@dataclass(frozen=True)
class Run:
    """Figures that ``vllm bench serve`` reported for one run. Times in milliseconds; tokens are tokens of answers.

    ``seed``: of its prompts and lengths. Runs of several arms with one seed were made one after another.
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


@dataclass(frozen=True)
class Handed:
    """An arm's hand-overs by direction, and how often decode computed a prompt itself."""

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


@dataclass(frozen=True)
class _Deployed:
    """An arm that runs; ``url`` is where its requests go."""

    arm: Arm
    url: str
    servers: Sequence[Server]

    def handed(self, asked: int) -> Handed:
        """Return the counts since its start; ``asked`` is the number of requests since then."""
        if self.arm.router == OWN:
            return handed(self.arm, self.url)
        moved = hand_overs(self.servers, asked)
        return Handed(self.arm.name, moved, 0, asked - moved)


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
    with contextlib.ExitStack() as stack:
        deployed = []
        for arm in arms:
            servers = stack.enter_context(running(arm.specs(model), logs, say))
            url = servers[0].base_url
            if arm.mode:
                log = logs / f"{arm.tag}-router.log"
                before = (servers[:1], servers[1:], log)
                url = stack.enter_context(routed(*before) if arm.router == OWN else vllm_router(*before, say))
            deployed.append(_Deployed(arm, url, servers))
        warm = max(prompts.values())
        for one in deployed:
            for number in range(WARM_UPS):
                say(f"{one.arm.name}: warming up, {number + 1} of {WARM_UPS}")
                bench(one.arm, one.url, model, logs, at_a_time=max(prompts), prompts=warm, seed=1000 + number)
        learnt = {one.arm: one.handed(WARM_UPS * warm) for one in deployed if one.arm.mode}
        found = []
        # Each run has another seed: a prompt that an engine has seen would be in its prefix cache.
        for seed, (number, together) in enumerate(itertools.product(range(rounds), prompts), start=1):
            first = seed % len(arms)
            for one in (*deployed[first:], *deployed[:first]):
                say(f"{one.arm.name}: {together} at a time, {number + 1} of {rounds}")
                count = prompts[together]
                found.append(bench(one.arm, one.url, model, logs, at_a_time=together, prompts=count, seed=seed))
        asked = WARM_UPS * warm + rounds * sum(prompts.values())
        return found, [one.handed(asked).since(learnt[one.arm]) for one in deployed if one.arm.mode]


def bench(arm: Arm, url: str, model: Path, logs: Path, *, at_a_time: int, prompts: int, seed: int) -> Run:
    """Run vLLM's load generator once, with prompts that it draws itself.

    Raises:
        ServerError: the load generator failed.
    """
    result = logs / f"{arm.tag}-{at_a_time}-{seed}.json"
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
        seed,
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
    """Return the counts of all requests that this package's router has served."""
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
