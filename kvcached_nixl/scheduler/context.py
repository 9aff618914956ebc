# SPDX-License-Identifier: Apache-2.0
"""What the parts of this folder share of their engine: its settings, its blocks, the step that is being built for its
workers, and how to wake it. One per engine, used on its thread only, except `EngineContext.woken`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.timelines import Failures, Spans, Timelines
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.kv_groups import KVGroups
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import Step, WakeAddress, report_numbers

__all__ = ["ANY_ADAPTER", "AllRanks", "EngineContext", "Holds", "Terms", "is_meant"]

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


class Holds:
    """Blocks taken from their requests, held while transfers may use them (rules R2 and R9), by the number of the hold.
    vLLM does not know of these blocks."""

    def __init__(self) -> None:
        self._held: dict[int, list[Any]] = {}
        self._numbers = report_numbers()
        self.num_blocks = 0

    def take(self, blocks: BlockPool, request_id: str, number: int | None = None) -> int:
        """Takes all blocks from a request and holds them. Returns the number of the hold."""
        number = next(self._numbers) if number is None else number
        self._held[number] = blocks.take(request_id)
        self.num_blocks += len(self._held[number])
        return number

    def give_back(self, blocks: BlockPool, number: int) -> None:
        """Frees the blocks of a hold, if there is such a hold: no transfer uses them any more."""
        held = self._held.pop(number, None)
        if held is not None:
            self.num_blocks -= len(held)
            blocks.give_back(held)


class AllRanks:
    """Numbers that not every rank has reported yet. What frees blocks counts when every one has."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: dict[int, set[int]] = {}

    def take(self, reported: Iterable[tuple[int, int]]) -> list[int]:
        """Takes (number, rank) pairs, and returns the numbers that every rank has reported now."""
        found = []
        for number, rank in reported:
            ranks = self._ranks.setdefault(number, set())
            ranks.add(rank)
            if len(ranks) == self._num_ranks:
                del self._ranks[number]
                found.append(number)
        return found


class EngineContext:
    """See the module.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: 16 hexadecimal digits, drawn when this engine starts.
        spans: makes spans of hand-overs; None if nothing is traced.

    Attributes:
        step: being built. It is told to the workers with the next step of the engine.
        has_news: the engine has to step soon, whatever ``step`` holds.
        incarnation: as above; drawn again when its weights change.
        wake_address: where the side channel listens for this engine's own workers, and the key that they send.
    """

    def __init__(
        self,
        own: RemotePrefill,
        incarnation: str,
        wake_address: WakeAddress,
        terms: Terms,
        clock: Clock,
        spans: Spans | None = None,
    ) -> None:
        self.own, self.incarnation, self.wake_address = own, incarnation, wake_address
        self.terms, self.clock = terms, clock
        self.holds = Holds()
        self.timelines = Timelines(clock, spans, is_push=terms.mode.is_push)
        self.failures = Failures(self.timelines)
        self.has_news = False
        self.step = self._new_step()
        self._blocks: BlockPool | None = None
        self._wake: Callable[[], None] | None = None

    @property
    def is_bound(self) -> bool:
        """Whether it has ``blocks``: a request has entered the engine."""
        return self._blocks is not None

    @property
    def blocks(self) -> BlockPool:
        assert self._blocks is not None, "no request has entered the engine"
        return self._blocks

    def bind(self, blocks: BlockPool) -> None:
        """Sets the engine's KV-cache blocks; called before the first request. Idempotent: the first call counts."""
        if self._blocks is None:
            self._blocks = blocks

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Sets the function that wakes the engine; it may be called from any thread."""
        self._wake = wake

    def woken(self) -> None:
        """A worker has something to report: makes the engine step. May be called from any thread."""
        self.has_news = True
        if self._wake is not None:
            self._wake()

    def take_step(self) -> Step:
        self.has_news = False
        step, self.step = self.step, self._new_step()
        return step

    def _new_step(self) -> Step:
        return Step(self.own.host, self.own.port, self.wake_address, self.incarnation)
