# SPDX-License-Identifier: Apache-2.0
"""Builds the scheduler side of the hand-over. Called once per process, where vLLM constructs its connector."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.scheduler.context import EngineContext, Terms
from kvcached_nixl.scheduler.engine import Reader
from kvcached_nixl.scheduler.facade import SchedulerFacade
from kvcached_nixl.scheduler.timelines import Spans
from kvcached_nixl.settings import SERVER_LOGGER, Settings
from kvcached_nixl.side_channel_address import SideChannelAddress
from kvcached_nixl.wire.kv_groups import KVGroup, KVGroups
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import WakeAddress

__all__ = ["StockScheduler", "build_scheduler"]

logger = logging.getLogger(SERVER_LOGGER)

STOCK_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
"""How long vLLM's own connector keeps a request's blocks."""


@dataclass(frozen=True, kw_only=True)
class StockScheduler:
    """What this package takes from vLLM for the scheduler half of a NIXL connector.

    Attributes:
        window_kinds: KV-cache groups whose blocks leave a window while a request is computed, by the class names of
            their specs.
        zeroes_blocks: vLLM zeroes new blocks on the device at the beginning of a step.
        recomputes: a request that received no KV is recomputed instead of failing.
        is_consumer, is_producer: whether the engine may fetch KV, and others from it (``kv_role``).
        spans: makes spans of hand-overs; None where nothing is traced.
        extra_config: ``kv_connector_extra_config``.
    """

    engine_id: str
    tp_size: int
    pp_size: int
    groups: tuple[KVGroup, ...]
    window_kinds: list[str]
    zeroes_blocks: bool
    recomputes: bool
    max_num_batched_tokens: int
    is_consumer: bool
    is_producer: bool
    reader: Reader
    spans: Spans | None
    extra_config: Mapping[str, Any]


def build_scheduler(stock: StockScheduler, address: SideChannelAddress, clock: Clock) -> SchedulerFacade:
    """Returns the object that the engine's thread calls for every hand-over from now on.

    Args:
        address: of this engine's side channel, which starts later.
    """
    settings = Settings.from_extra_config(stock.extra_config)
    if settings.transfer_mode.is_push and stock.window_kinds:
        logger.warning(
            "KV is pushed when a prompt has been computed, not while it is: blocks that leave the window of %s are "
            "freed while the prompt is computed.",
            ", ".join(stock.window_kinds),
        )
    if STOCK_TIMEOUT in os.environ:
        logger.warning(
            "%s has no effect: prefill keeps a request's blocks for kv_lease_duration, %g s, and decode renews it.",
            STOCK_TIMEOUT,
            settings.kv_lease_duration_seconds,
        )
    terms = Terms(
        groups=KVGroups(stock.groups),
        zeroes_blocks=stock.zeroes_blocks,
        mode=settings.transfer_mode,
        recomputes=stock.recomputes,
        lease_seconds=settings.kv_lease_duration_seconds,
        timeout_seconds=settings.handover_timeout_seconds,
        allocation_seconds=settings.allocation_timeout_seconds or settings.handover_timeout_seconds / 2,
        patience_seconds=settings.give_way_after_seconds,
        most_unclaimed_tokens=stock.max_num_batched_tokens,
    )
    own = RemotePrefill(stock.engine_id, *address.advertised, stock.tp_size, stock.pp_size)
    wake_address = WakeAddress(*address.local, secrets.token_hex(16))
    engine = EngineContext(own, secrets.token_hex(8), wake_address, terms, clock, stock.spans)
    roles = {"is_consumer": stock.is_consumer and stock.pp_size == 1, "is_producer": stock.is_producer}
    return SchedulerFacade(engine, stock.reader, AskSettings.from_extra_config(stock.extra_config, **roles))
