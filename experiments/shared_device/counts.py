# SPDX-License-Identifier: Apache-2.0
"""What servers have computed and moved, from vLLM's own metrics; and how much of the device each has, over time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hostvmm.device import NAME_VARIABLE, SIZE_VARIABLE, device_info

from experiments.common.counted import HAND_OVERS, samples, settled
from experiments.common.pages import Sampler
from experiments.common.servers import Server
from experiments.shared_device.arms import Device, Served

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

    @property
    def wasted_share(self) -> float | None:
        """Share of prefilled tokens whose KV no decode has received; None if nothing was prefilled."""
        if self.prefilled_tokens <= 0:
            return None
        return max(0.0, 1 - self.moved_tokens / self.prefilled_tokens)


def read_counts(device: Device, engines: Engines) -> Counts:
    """Read the metrics of servers once."""
    pages = {place: _totals(one) for place, one in engines.items()}

    def total(name: str, model: str | None = None, side: str | None = None) -> float:
        return sum(
            page.get(name, 0.0)
            for (of_model, of_side), page in pages.items()
            if model in (None, of_model) and side in (None, of_side)
        )

    is_stock = not any("ENABLE_KVCACHED" in one.spec.environment for one in engines.values())
    return Counts(
        prefilled_tokens=total(_COMPUTED, side="prefill"),
        moved_tokens=sum(
            moved_tokens(device.models[model], total(_MOVED, model), total(HAND_OVERS, model), is_stock=is_stock)
            for model in dict.fromkeys(model for model, _ in engines)
        ),
        preempted=total(_PREEMPTED),
        revoked=total(_REVOKED),
    )


def moved_tokens(served: Served, moved_bytes: float, hand_overs: float, *, is_stock: bool) -> float:
    """Return how many tokens' keys and values are among bytes that were moved, beside the states of each hand-over.

    Args:
        is_stock: states move without their padding.
    """
    state_bytes = served.state_bytes if is_stock or not served.state_bytes else served.block_bytes
    return max(0.0, moved_bytes - hand_overs * state_bytes) / served.kv_bytes_per_token


def settled_counts(device: Device, engines: Engines) -> Counts:
    """Read the metrics when nothing is added any more."""
    return settled(lambda: read_counts(device, engines))


def _totals(server: Server) -> dict[str, float]:
    """Return the sum of each metric's series."""
    found: dict[str, float] = {}
    for labels, value in samples(f"{server.base_url}/metrics").items():
        name = labels.partition("{")[0]
        found[name] = found.get(name, 0.0) + value
    return found


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
        name: of the emulated device, which is a ``device``.
        sessions: the engines' sessions (process ids of their leaders), by the engine's name.
    """

    def __init__(self, device: Device, name: str, sessions: Mapping[str, int]) -> None:
        super().__init__(f"memory of {name}", SAMPLE_SECONDS)
        self._environment = {NAME_VARIABLE: name, SIZE_VARIABLE: str(device.gib)}
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
