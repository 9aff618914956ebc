# SPDX-License-Identifier: Apache-2.0
"""Measures one cold pair: starts it, makes its first hand-overs, and reads their cost."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from experiments.common.client import AnswerError, Client, Pair, http_client, offered_blocks
from experiments.common.servers import SERVER_SIDE, Server, ServerSpec, running
from experiments.common.transfer_config import role

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 512
DECODE_TOKENS = 64
WARM_HAND_OVERS = 7
COLD_AGAIN = 20
"""Further hand-overs, each after decode was made to forget its peer: a single one depends on other load."""
COLD_AGAIN_SECONDS = 30.0
"""No further cold hand-over begins after this time."""
TIMED_CALLS = 2000
CONNECTOR: Mapping[str, object] = {
    "kv_connector": "NixlConnector",
    "kv_connector_extra_config": {"num_threads": 0},
}


@dataclass(frozen=True)
class Arm:
    """A connector over one kind of memory; ``reserves``: whether kvcached reserves addresses for a whole device."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def reserves(self) -> bool:
        return bool(self.environment)

    @property
    def ours(self) -> bool:
        return self.reserves and "KVCACHED_NIXL" not in self.environment


STOCK = Arm("stock vLLM")
OURS_CONTIGUOUS = Arm("this package, contiguous", {"ENABLE_KVCACHED": "true", "KVCACHED_CONTIGUOUS_LAYOUT": "true"})
OURS_APART = Arm("this package, non-contiguous", {"ENABLE_KVCACHED": "true", "KVCACHED_CONTIGUOUS_LAYOUT": "false"})
KVCACHED_OWN = Arm(
    "kvcached's own patch",
    {"ENABLE_KVCACHED": "true", "KVCACHED_CONTIGUOUS_LAYOUT": "false", "KVCACHED_NIXL": "0"},
)
ARMS = (STOCK, OURS_CONTIGUOUS, OURS_APART, KVCACHED_OWN)


@dataclass(frozen=True)
class Sample:
    """Cost of one cold pair.

    Attributes:
        first_seconds: the pair's very first hand-over, from the request to decode until its first token.
        cold_seconds: that hand-over, and each further one after decode was made to forget its peer.
        warm_seconds: median of hand-overs without a handshake.
        resident_bytes, peak_resident_bytes: decode's worker process after the warm hand-overs, and at its peak.
        step_seconds: one decode step of one request.
        idle_seconds: time of the connector in the worker during a step in which no hand-over has changed.
    """

    arm: str
    reserved_gib: int
    first_seconds: float
    cold_seconds: list[float]
    warm_seconds: float
    resident_bytes: int
    peak_resident_bytes: int
    descriptors: int
    descriptors_per_block: int
    step_seconds: float
    idle_seconds: float


def specs(arm: Arm, reserved_gib: int, model: Path) -> list[ServerSpec]:
    """Return the configurations of P and D; ``reserved_gib`` is the device size that kvcached assumes."""
    search = (SERVER_SIDE, HERE / "server_side")
    environment = {**arm.environment, "PYTHONPATH": ":".join(map(str, search))}
    if arm.reserves:
        environment["KVCACHED_HOSTVMM_GIB"] = str(reserved_gib)
        # The cost of reserving is measured; only little of the reserved memory is ever mapped.
        environment["KVCACHED_HOSTVMM_OVERCOMMIT"] = "1"
    tag = "".join(letter if letter.isalnum() else "-" for letter in arm.name)
    return [
        ServerSpec(
            name=f"{tag}-{reserved_gib}-{side}",
            model=model,
            kv_transfer={**CONNECTOR, "kv_role": role(side)},
            environment=environment,
            max_num_batched_tokens=1024,
            arguments=("--worker-extension-cls", "cost_probe.CostProbe"),
        )
        for side in ("prefill", "decode")
    ]


def measure(arm: Arm, reserved_gib: int, model: Path, logs: Path, on_wait: Callable[[str], None]) -> Sample:
    """Start a fresh pair, measure, stop it."""
    with running(specs(arm, reserved_gib, model), logs, on_wait) as (prefill, decode):
        return asyncio.run(_measure(arm, reserved_gib, prefill, decode))


async def _measure(arm: Arm, reserved_gib: int, prefill: Server, decode: Server) -> Sample:
    async with http_client(1) as http:
        pair = Pair(Client(prefill.base_url, http), Client(decode.base_url, http))
        prompts = [
            [2 + (turn * 131 + place * 7) % 500 for place in range(PROMPT_TOKENS)]
            for turn in range(1 + WARM_HAND_OVERS + COLD_AGAIN + 1)
        ]
        for side in (pair.prefill, pair.decode):
            # Both sides compute once before, so that only the hand-over happens for the first time.
            await side.answer(prompts[-1], max_tokens=2, salt="warm", request_id="warm")
        seconds = [await _first_token_seconds(pair, prompts[turn], turn) for turn in range(1 + WARM_HAND_OVERS)]
        first_seconds, warm = seconds[0], seconds[1:]
        resident, peak = _resident_bytes(decode)
        cold = [first_seconds]
        begun = time.monotonic()
        for turn in range(len(seconds), len(seconds) + COLD_AGAIN):
            if time.monotonic() - begun > COLD_AGAIN_SECONDS:
                break
            if (await pair.decode.probe("forget_peers"))["forgotten"] != 1:
                raise AnswerError(
                    "found decode with no peer or several peers to forget; expected one, prefill's engine."
                )
            cold.append(await _first_token_seconds(pair, prompts[turn], turn))
        step_seconds = await _step_seconds(pair.decode, prompts[0])
        registration = await pair.decode.probe("registration")
        per_call = await pair.decode.probe("idle_seconds", TIMED_CALLS)
    return Sample(
        arm=arm.name,
        reserved_gib=reserved_gib if arm.reserves else 0,
        first_seconds=first_seconds,
        cold_seconds=cold,
        warm_seconds=statistics.median(warm),
        resident_bytes=resident,
        peak_resident_bytes=peak,
        descriptors=registration["descriptors"],
        descriptors_per_block=registration["a_block"],
        step_seconds=step_seconds,
        idle_seconds=per_call["idle"],
    )


async def _first_token_seconds(pair: Pair, prompt: list[int], turn: int) -> float:
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    name = f"turn-{turn}"
    prefilled = await pair.prefill.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=asked)
    offered = prefilled.get("kv_transfer_params")
    if not offered or not offered_blocks(offered):
        raise AnswerError(f"{name}: found no blocks in prefill's answer; expected a hand-over. See prefill's log.")
    begun = time.perf_counter()
    await pair.decode.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=offered)
    return time.perf_counter() - begun


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
