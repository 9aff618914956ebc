# SPDX-License-Identifier: Apache-2.0
"""Measures hand-overs of one model by all arms, whose servers run at the same time and take turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from experiments.common.client import AnswerError, Client, http_client
from experiments.common.families import FAMILIES, make_family
from experiments.common.model import GQA, make_model
from experiments.common.servers import Server, ServerSpec, running
from experiments.common.transfer_config import role

ONE_GROUP = "one group"
"""A model with grouped-query attention in all layers, to compare with."""
MODELS = (ONE_GROUP, "gemma4", "nemotron-h")
LENGTHS = (512, 1900)
COUNTERS = {"descriptors": "vllm:nixl_num_descriptors_sum", "bytes": "vllm:nixl_bytes_transferred_sum"}
KVCACHED: Mapping[str, str] = {
    "ENABLE_KVCACHED": "true",
    "KVCACHED_HOSTVMM_GIB": "2",
    # Pages stay mapped, as stock memory is: the kernel clears those of the emulation when they are first touched, which
    # a device does not do.
    "KVCACHED_MIN_RESERVED_PAGES": "0",
    "KVCACHED_MAX_RESERVED_PAGES": "4096",
}


@dataclass(frozen=True)
class Arm:
    """A connector over one kind of memory. ``streams``: both servers get their requests at once, and prefill pushes."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    streams: bool = False

    @property
    def is_contiguous(self) -> bool:
        return self.environment.get("KVCACHED_CONTIGUOUS_LAYOUT") == "true"


STOCK = Arm("stock, pull", {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})
PULL = Arm("pull, contiguous", {**KVCACHED, "KVCACHED_CONTIGUOUS_LAYOUT": "true"})
ARMS = (
    STOCK,
    PULL,
    Arm("pull, non-contiguous", {**KVCACHED, "KVCACHED_CONTIGUOUS_LAYOUT": "false"}),
    Arm("push, contiguous", PULL.environment, streams=True),
)


@dataclass(frozen=True)
class Sample:
    """One hand-over. ``first_token_seconds``: from the client's request until decode's answer of one token."""

    model: str
    arm: str
    prompt_tokens: int
    first_token_seconds: float
    descriptors: float
    bytes: float


def specs(arm: Arm, model: str) -> list[ServerSpec]:
    """Return the configurations of P and D of an arm."""
    family = FAMILIES.get(model)
    extra = {"transfer_mode": "push"} if arm.streams else {}
    tag = "".join(letter if letter.isalnum() else "-" for letter in f"{model}-{arm.name}")
    return [
        ServerSpec(
            name=f"{tag}-{side}",
            model=make_family(model) if family else make_model(GQA),
            dtype="float32",
            block_size=family.block_size if family else 32,
            max_num_batched_tokens=512,
            kv_transfer={
                "kv_connector": "NixlConnector",
                "kv_role": role(side),
                "kv_connector_extra_config": {"num_threads": 0, **extra},
            },
            environment={**arm.environment, **(family.environment if family else {})},
            arguments=(*(("--no-disable-hybrid-kv-cache-manager", *family.arguments) if family else ()),),
            forks=True,
        )
        for side in ("prefill", "decode")
    ]


def measure(model: str, rounds: int, logs: Path, say: Callable[[str], None]) -> list[Sample]:
    """Start a pair of each arm, hand over prompts of all lengths by all arms in turn, stop the servers."""
    with contextlib.ExitStack() as stack:
        # Started one after another: on few cores, all together would start too slowly.
        pairs = [stack.enter_context(running(specs(arm, model), logs, say)) for arm in ARMS]
        return asyncio.run(_take_turns(model, rounds, pairs, say))


async def _take_turns(
    model: str, rounds: int, pairs: Sequence[Sequence[Server]], say: Callable[[str], None]
) -> list[Sample]:
    samples: list[Sample] = []
    async with http_client(2) as http:
        runs = [_Run(model, arm, *pair, http) for arm, pair in zip(ARMS, pairs, strict=True)]
        for turn in range(rounds + 1):
            for length in LENGTHS:
                say(f"{model}: {length} tokens, round {turn} of {rounds}")
                # Another arm is first each time.
                first = turn % len(runs)
                for run in (*runs[first:], *runs[:first]):
                    sample = await run.hand_over(length, turn)
                    # Not measured: handshakes, and the first touch of memory.
                    samples += [sample] if turn else []
    return samples


class _Run:
    """One arm's clients."""

    def __init__(self, model: str, arm: Arm, prefill: Server, decode: Server, http: httpx.AsyncClient) -> None:
        self.model, self.arm, self.http = model, arm, http
        self.coordinates = prefill.coordinates
        self.prefill, self.decode = Client(prefill.base_url, http), Client(decode.base_url, http)

    async def hand_over(self, length: int, turn: int) -> Sample:
        name = f"turn-{turn}-{length}"
        prompt = [2 + (turn * 131 + place * 7 + place * place) % 500 for place in range(length)]
        before = await self._counted()
        begun = time.perf_counter()
        if self.arm.streams:
            params: dict[str, Any] = {**self.coordinates, "do_remote_prefill": True, "transfer_id": name}
            decoding = asyncio.create_task(self._ask(self.decode, prompt, name, params))
            await self._ask(self.prefill, prompt, name, {"do_remote_decode": True, "transfer_id": name})
            await decoding
        else:
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            offered = (await self._ask(self.prefill, prompt, name, asked)).get("kv_transfer_params")
            if not offered:
                raise AnswerError(f"{name}: found no kv_transfer_params in prefill's answer; nothing was handed over.")
            await self._ask(self.decode, prompt, name, offered)
        seconds = time.perf_counter() - begun
        moved: dict[str, float] = {}
        for _ in range(20):
            # The counts arrive with a later step.
            for side in (self.prefill, self.decode):
                await side.complete(prompt[:4], max_tokens=2, salt="other", request_id=f"{name}-other")
            after = await self._counted()
            moved = {what: after[what] - before[what] for what in COUNTERS}
            if moved["bytes"]:
                return Sample(self.model, self.arm.name, length, seconds, **moved)
            await asyncio.sleep(0.05)
        raise AnswerError(f"{name}: found no bytes moved by {self.arm.name}; expected a hand-over. See the logs.")

    async def _ask(self, side: Client, prompt: list[int], name: str, params: dict[str, Any]) -> dict[str, Any]:
        return await side.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=params)

    async def _counted(self) -> dict[str, float]:
        """What both servers have counted: a READ is decode's, a WRITE is prefill's."""
        found = dict.fromkeys(COUNTERS, 0.0)
        for side in (self.prefill, self.decode):
            text = (await self.http.get(f"{side.base_url}/metrics")).text
            values = [one for family in text_string_to_metric_families(text) for one in family.samples]
            for what, name in COUNTERS.items():
                found[what] += sum(one.value for one in values if one.name == name)
        return found
