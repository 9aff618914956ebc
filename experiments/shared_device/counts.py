# SPDX-License-Identifier: Apache-2.0
"""What servers have computed and moved, from vLLM's own metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

from experiments.common.counted import HAND_OVERS, samples
from experiments.common.servers import Server
from experiments.shared_device.models import Device, Served

__all__ = ["Counts", "Engines", "moved_tokens", "read_counts", "settled_counts"]

SETTLE_SECONDS = 15.0
LOOK_SECONDS = 1.0
Engines = Mapping[tuple[str, str], Server]
"""By model and side."""
_COMPUTED, _MOVED = "vllm:prompt_tokens_total", "vllm:nixl_bytes_transferred_sum"
_PREEMPTED, _REVOKED = "vllm:num_preemptions_total", "kvcached_nixl:revoked_offers_total"
_FAILED, _EXPIRED = "kvcached_nixl:handover_failures_total", "vllm:nixl_num_kv_expired_reqs_total"


@dataclass(frozen=True)
class Counts:
    """Since the servers' start, or between two looks.

    Attributes:
        prefilled_tokens: of prompts that prefill servers have computed to their end.
        moved_tokens: whose KV decode has received.
        preempted: requests that lost their blocks at any server and were computed again.
        revoked: offers that prefill took back for want of memory, or for another cause.
        failed: hand-overs that decode servers did not receive.
        expired: offers whose lease ended.
    """

    prefilled_tokens: float = 0.0
    moved_tokens: float = 0.0
    preempted: float = 0.0
    revoked: float = 0.0
    failed: float = 0.0
    expired: float = 0.0

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
        failed=total(_FAILED),
        expired=total(_EXPIRED),
    )


def moved_tokens(served: Served, moved_bytes: float, hand_overs: float, *, is_stock: bool) -> float:
    """Return how many tokens' keys and values are among bytes that were moved, beside the states of each hand-over.

    Args:
        is_stock: states move without their padding.
    """
    state_bytes = served.state_bytes if is_stock or not served.state_bytes else served.block_bytes
    return max(0.0, moved_bytes - hand_overs * state_bytes) / served.kv_bytes_per_token


def settled_counts(device: Device, engines: Engines) -> Counts:
    """Read the metrics when nothing is added any more: engines report with a later step. Waits ``SETTLE_SECONDS``."""
    deadline, found = time.monotonic() + SETTLE_SECONDS, read_counts(device, engines)
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        before, found = found, read_counts(device, engines)
        if found == before:
            break
    return found


def _totals(server: Server) -> dict[str, float]:
    """Return the sum of each metric's series."""
    found: dict[str, float] = {}
    for labels, value in samples(f"{server.base_url}/metrics").items():
        name = labels.partition("{")[0]
        found[name] = found.get(name, 0.0) + value
    return found
