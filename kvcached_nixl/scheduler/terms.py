# SPDX-License-Identifier: Apache-2.0
"""Settings that apply to every hand-over of an engine, and which hand-overs a change of weights applies to."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.kv_groups import KVGroups

__all__ = ["ANY_ADAPTER", "Terms", "is_meant"]

ANY_ADAPTER = -1
"""In place of a LoRA adapter's number: any adapter."""


def is_meant(adapter: int | None, used: int) -> bool:
    """Whether a selection covers what was computed with the adapter ``used`` (0 for none). ``adapter`` selects one
    adapter by its number, any adapter (``ANY_ADAPTER``), or everything (None)."""
    return adapter is None or (bool(used) and adapter in (used, ANY_ADAPTER))


@dataclass(frozen=True)
class Terms:
    """Settings that apply to every hand-over of an engine.

    Attributes:
        groups: the engine's KV-cache groups.
        zeroes_blocks: vLLM zeroes new blocks, because what is behind a request's last token is read, too.
        mode: who starts a transfer.
        recomputes: ``kv_load_failure_policy`` is "recompute".
        lease_seconds: the lease that prefill grants; decode assumes it where there is no manifest to say otherwise.
        timeout_seconds: how long a request with blocks waits for its KV.
        allocation_seconds: how long a request waits for blocks while nothing is under way that frees some.
        patience_seconds: how long memory is short before offers that nobody fetches are taken back.
        most_unclaimed_tokens: push: of prompts that prefill keeps while decode leaves them waiting, before it begins
            others that decode has not registered for.
    """

    groups: KVGroups
    zeroes_blocks: bool
    mode: TransferMode
    recomputes: bool
    lease_seconds: float
    timeout_seconds: float
    allocation_seconds: float
    patience_seconds: float
    most_unclaimed_tokens: int
