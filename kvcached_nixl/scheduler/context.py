# SPDX-License-Identifier: Apache-2.0
"""What the parts of this folder share of their engine: its settings, its blocks, the step that is being built for its
workers, and how to wake it. One per engine, used on its thread only, except `EngineContext.woken`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.engine import BlockPool, Reader
from kvcached_nixl.scheduler.timelines import Failures, Spans, Timelines
from kvcached_nixl.settings import Settings
from kvcached_nixl.wire.manifest import KVGroups
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import Step, WakeAddress, report_numbers

ANY_ADAPTER = -1
"""In place of a LoRA adapter's number: any adapter."""


def is_meant(adapter: int | None, used: int) -> bool:
    """Whether a selection covers what was computed with the adapter ``used`` (0 for none). ``adapter`` selects one
    adapter by its number, any adapter (``ANY_ADAPTER``), or everything (None)."""
    return adapter is None or (bool(used) and adapter in (used, ANY_ADAPTER))


@dataclass(frozen=True, kw_only=True)
class StockScheduler:
    """What this package takes from vLLM for the scheduler half of a NIXL connector.

    Attributes:
        window_kinds: KV-cache groups whose blocks leave a window while a request is computed, by the class names of
            their specs.
        zeroes_blocks: vLLM zeroes new blocks on the device at the beginning of a step, because what is behind a
            request's last token is read, too.
        recomputes: a request that received no KV is recomputed instead of failing (``kv_load_failure_policy``).
        max_num_batched_tokens: also how much prefill keeps of what decode leaves waiting, before it begins prompts that
            decode has not registered for (push), or offers what is cached.
        is_consumer, is_producer: whether the engine may fetch KV, and others from it (``kv_role``).
        spans: makes spans of hand-overs; None where nothing is traced.
        extra_config: ``kv_connector_extra_config``.
    """

    engine_id: str
    tp_size: int
    pp_size: int
    groups: KVGroups
    window_kinds: list[str]
    zeroes_blocks: bool
    recomputes: bool
    max_num_batched_tokens: int
    is_consumer: bool
    is_producer: bool
    reader: Reader
    spans: Spans | None
    extra_config: Mapping[str, Any]


class Holds:
    """Blocks taken from their requests, unknown to vLLM, held while transfers may use them (rules R2 and R9)."""

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self._held: dict[int, list[Any]] = {}
        self._numbers = report_numbers()
        self.num_blocks = 0

    def take(self, request_id: str, number: int | None = None) -> int:
        """Takes all blocks from a request and holds them. Returns the number of the hold."""
        number = next(self._numbers) if number is None else number
        self._held[number] = self._engine.blocks.take(request_id)
        self.num_blocks += len(self._held[number])
        return number

    def give_back(self, number: int) -> None:
        """Frees the blocks of a hold, if there is such a hold: no transfer uses them any more."""
        held = self._held.pop(number, None)
        if held is not None:
            self.num_blocks -= len(held)
            self._engine.blocks.give_back(held)


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
        incarnation: 16 hexadecimal digits, drawn when this engine starts, and again when its weights change.
        wake_address: where the side channel listens for this engine's own workers, and the key that they send.

    Attributes:
        allocation_seconds: how long a request waits for blocks while nothing is under way that frees some.
        step: being built. It is told to the workers with the next step of the engine.
        has_news: the engine has to step soon, whatever ``step`` holds.
        refused: as in `Reports`: their clients are told with the next step.
        blocks: the engine's KV-cache blocks, once it ``is_bound``: a request has entered the engine.
    """

    blocks: BlockPool

    def __init__(
        self,
        stock: StockScheduler,
        settings: Settings,
        own: RemotePrefill,
        incarnation: str,
        wake_address: WakeAddress,
        clock: Clock,
    ) -> None:
        self.stock, self.settings, self.clock = stock, settings, clock
        self.own, self.incarnation, self.wake_address = own, incarnation, wake_address
        self.groups, self.is_push = stock.groups, settings.transfer_mode.is_push
        self.allocation_seconds = settings.allocation_timeout_seconds or settings.handover_timeout_seconds / 2
        self.holds = Holds(self)
        self.timelines = Timelines(clock, stock.spans, is_push=self.is_push)
        self.failures = Failures(self.timelines)
        self.has_news = self.is_bound = False
        self.refused: list[tuple[str, int]] = []
        self.step = self._new_step()
        self._wake: Callable[[], None] | None = None

    def bind(self, blocks: BlockPool) -> None:
        """Sets ``blocks``; called before the first request. Idempotent: the first call counts."""
        if not self.is_bound:
            self.blocks, self.is_bound = blocks, True

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
