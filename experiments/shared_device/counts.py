# SPDX-License-Identifier: Apache-2.0
"""What servers have computed and moved, from vLLM's own metrics; and how much of the device each has, over time."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hostvmm.device import NAME_VARIABLE, SIZE_VARIABLE, device_info

from experiments.common.counted import samples, settled
from experiments.common.pages import Sampler
from experiments.common.servers import Server
from experiments.shared_device.arms import DEVICE_GIB, KV_BYTES_PER_TOKEN

Engines = Mapping[tuple[str, str], Server]
"""By model and side."""
_COMPUTED, _MOVED = "vllm:prompt_tokens_total", "vllm:nixl_bytes_transferred_sum"
_PREEMPTED, _REVOKED = "vllm:num_preemptions_total", "kvcached_nixl:revoked_offers_total"


@dataclass(frozen=True)
class Counts:
    """Since the servers' start, or between two looks.

    Attributes:
        prefilled_tokens: of prompts that prefill servers have computed to their end.
        moved_tokens: whose KV decode has received.
        preempted: requests that lost their blocks at any server and were computed again.
        revoked: offers that prefill took back for want of memory, or for another cause.
    """

    prefilled_tokens: float = 0.0
    moved_tokens: float = 0.0
    preempted: float = 0.0
    revoked: float = 0.0

    def since(self, earlier: Counts) -> Counts:
        """Return what was added since ``earlier``."""
        return Counts(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(Counts)))

    def plus(self, more: Counts) -> Counts:
        return Counts(*(getattr(self, one.name) + getattr(more, one.name) for one in fields(Counts)))

    @property
    def wasted_share(self) -> float | None:
        """Share of prefilled tokens whose KV no decode has received; None if nothing was prefilled."""
        if self.prefilled_tokens <= 0:
            return None
        return max(0.0, 1 - self.moved_tokens / self.prefilled_tokens)


def settled_counts(engines: Engines) -> Counts:
    """Read the metrics when nothing is added any more."""
    return settled(lambda: _read(engines))


def _read(engines: Engines) -> Counts:
    found: Counter[tuple[str, str]] = Counter()
    for (_, side), server in engines.items():
        for labels, value in samples(f"{server.base_url}/metrics").items():
            found[labels.partition("{")[0], side] += value  # type: ignore[assignment]

    def total(name: str) -> float:
        return sum(value for (of, _), value in found.items() if of == name)

    return Counts(
        prefilled_tokens=found[_COMPUTED, "prefill"],
        moved_tokens=total(_MOVED) / KV_BYTES_PER_TOKEN,
        preempted=total(_PREEMPTED),
        revoked=total(_REVOKED),
    )


# -------------------------------------------------------------------------------------------------- the emulated device


SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Sample:
    """Bytes of the device that each engine has at a time; ``at_seconds`` counts from the watch's creation."""

    at_seconds: float
    used_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.used_bytes.values())


class DeviceWatch(Sampler):
    """Samples a device during a ``with`` block.

    Args:
        name: of the emulated device.
        sessions: the engines' sessions (process ids of their leaders), by the engine's name.
    """

    def __init__(self, name: str, sessions: Mapping[str, int]) -> None:
        super().__init__(f"memory of {name}", SAMPLE_SECONDS)
        self._environment = {NAME_VARIABLE: name, SIZE_VARIABLE: str(DEVICE_GIB)}
        self._names = {session: name for name, session in sessions.items()}
        self._begun_seconds = time.monotonic()
        self.samples: list[Sample] = []

    def sample(self) -> None:
        """Read the device's account once."""
        used = dict.fromkeys(self._names.values(), 0)
        for process in device_info(environment=self._environment).processes:
            try:
                name = self._names.get(os.getsid(process.pid))
            except ProcessLookupError:
                continue
            if name is not None:
                used[name] += process.created_bytes
        self.samples.append(Sample(time.monotonic() - self._begun_seconds, used))
