# SPDX-License-Identifier: Apache-2.0
"""What is pushed, from where and to whom. Once per engine, on the engine's thread; no torch, no NIXL.

It follows each request through vLLM's scheduler and tells the workers once a step (`PushStep`). Blocks are given back
to vLLM only when every rank has said that nothing touches them any more (rule R2): a request of prefill that ended or
was preempted, and a request of decode that was aborted while it waited.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvcached_nixl.clock import MonotonicClock
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.idle import SHORTEST_IDLE_STEP_SECONDS
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.scheduler.lease import Renewals
from kvcached_nixl.settings import SERVER_LOGGER, Settings, TransferMode
from kvcached_nixl.wire.params import RemotePrefill, name_of_lease, prefill_params, remote_prefill, transfer_of
from kvcached_nixl.wire.push_step import BlockIds, Computed, PushStep, Unusable, Wanted, hold_of

__all__ = ["Progress", "PushScheduler", "pace", "start"]

logger = logging.getLogger(SERVER_LOGGER)


def pace() -> None:
    """Between two steps with nothing to compute, as later versions of vLLM do: other threads need the interpreter."""
    time.sleep(SHORTEST_IDLE_STEP_SECONDS)


class Request(Protocol):
    """What is asked of vLLM's request."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None


class Progress(NamedTuple):
    """A request in a step: its blocks beside (or instead of) the earlier ones, its tokens when the step has ended."""

    request_id: str
    block_ids: BlockIds
    replaces: bool
    num_computed_tokens: int


class StockScheduler(Protocol):
    """What is asked of vLLM's NIXL scheduler; ``compat.connector.SchedulerView`` answers."""

    @property
    def engine_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_kv_cache_groups(self) -> int: ...
    @property
    def extra_config(self) -> Mapping[str, Any]: ...


def start(stock: StockScheduler) -> PushScheduler | None:
    """The push of an engine whose ``transfer_mode`` asks for it.

    Raises:
        SettingsError: the model's KV cache has several groups.
    """
    settings = Settings.from_extra_config(stock.extra_config)
    if settings.transfer_mode is not TransferMode.PUSH:
        return None
    if stock.num_kv_cache_groups != 1:
        raise SettingsError(
            found=f'"transfer_mode": "push" with a model of {stock.num_kv_cache_groups} KV-cache groups',
            expected="one group: every layer keeps all tokens (no sliding window beside full attention)",
            consequence="Blocks that leave a window are given back while prefill still computes; none of them may be "
            "pushed. The engine stops.",
            remedy='Use "transfer_mode": "pull" for this model.',
        )
    return PushScheduler(
        engine_id=EngineId(stock.engine_id),
        host=stock.host,
        port=stock.port,
        tp_size=stock.tp_size,
        block_size=stock.block_size,
        renewals=Renewals(MonotonicClock(), lease_seconds=settings.kv_lease_duration_seconds),
    )


@dataclass
class _Sending:
    """A request of prefill whose blocks are not free. ``ready_tokens``: how many the workers were told of."""

    transfer: str
    num_prompt_tokens: int
    block_ids: BlockIds = ()
    ready_tokens: int = 0
    ended: bool = False


class PushScheduler:
    """See the module.

    Args:
        engine_id, host, port, tp_size: what a peer needs to find this engine's ranks.
        block_size: tokens in a logical block.
        renewals: nothing of them yet.
    """

    def __init__(
        self, *, engine_id: EngineId, host: str, port: int, tp_size: int, block_size: int, renewals: Renewals
    ) -> None:
        self._own = RemotePrefill(engine_id, host, port, tp_size)
        self._block_size = block_size
        self._renewals = renewals
        self._step = PushStep(host, port)
        self._sending: dict[PrefillRequestId, _Sending] = {}
        self._receiving: set[DecodeRequestId] = set()
        self._held: dict[int, Any] = {}
        # Several connectors of an engine hear of each other's holds: vLLM reports them in one set.
        self._numbers = itertools.count(secrets.randbits(62))

    @property
    def pending(self) -> bool:
        """Whether blocks wait for the workers, so that the engine has to go on stepping even with nothing to compute.

        vllm#45168: an engine that sleeps hears nothing and frees nothing.
        """
        return bool(self._receiving or self._held) or any(sending.ended for sending in self._sending.values())

    # ------------------------------------------------------------------------------------------------- what vLLM asks

    def arrived(self, request: Request) -> None:
        """A request has entered the engine; before it is allocated, prefill may wait longer for it than a lease."""
        params = request.kv_transfer_params or {}
        with contextlib.suppress(ValueError):
            name = name_of_lease(params, request.request_id)
            self._renewals.begin(DecodeRequestId(request.request_id), params, name)

    def matched(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that prefill will write beyond those decode has, and whether that happens between steps."""
        params = request.kv_transfer_params
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if params and params.get("do_remote_prefill") and missing > 0 else (0, False)

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        """A request was given blocks: all of its prompt's for decode, those of the next chunk for prefill."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._start_sending(request, params)
        elif params.get("do_remote_prefill"):
            # Once per request: after a preemption decode computes by itself.
            params["do_remote_prefill"] = False
            self._start_receiving(request, params, block_ids, num_external_tokens)

    def scheduled(self, step: Iterable[Progress]) -> None:
        """What is computed in the step that is being built."""
        for one in step:
            self._step.is_idle = False
            sending = self._sending.get(PrefillRequestId(one.request_id))
            if sending is None or sending.ready_tokens == sending.num_prompt_tokens:
                continue
            if one.replaces or not sending.block_ids:
                sending.block_ids = one.block_ids
            elif one.block_ids:
                sending.block_ids = tuple(
                    [*old, *new] for old, new in zip(sending.block_ids, one.block_ids, strict=True)
                )
            sending.ready_tokens = min(one.num_computed_tokens, sending.num_prompt_tokens)
            self._step.computed.append(
                Computed(PrefillRequestId(one.request_id), sending.transfer, sending.block_ids, sending.ready_tokens)
            )

    def take_step(self) -> PushStep:
        """What the workers have to know, once."""
        step, self._step = self._step, PushStep(self._own.host, self._own.port)
        step.beats = self._renewals.take_beats()
        return step

    def is_sending(self, request_id: str) -> bool:
        """Whether the workers may be reading the request's blocks."""
        sending = self._sending.get(PrefillRequestId(request_id))
        return sending is not None and bool(sending.block_ids)

    def preempted(self, request_id: str, blocks: Any) -> None:
        """A request of prefill loses ``blocks``; they stay held until `ended` returns them."""
        sending = self._sending[PrefillRequestId(request_id)]
        sending.block_ids, sending.ready_tokens = (), 0
        hold = next(self._numbers)
        self._held[hold] = blocks
        self._step.preempted.append((PrefillRequestId(request_id), hold))

    def finished(self, request: Request, is_whole: bool, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its prompt was computed to the end.

        Returns: whether its blocks must be kept until `ended` names it, and the parameters for decode's request.
        """
        params = request.kv_transfer_params
        if not params:
            return False, None
        self._renewals.end(DecodeRequestId(request.request_id))
        if DecodeRequestId(request.request_id) in self._receiving:
            self._step.withdrawn[DecodeRequestId(request.request_id)] = "the request is gone"
        elif params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            self._start_receiving(request, params, (), 0)
        elif params.get("do_remote_decode"):
            return self._finished_sending(request, params, is_whole, block_ids)
        return False, None

    def ended(self, sent: set[str] | None, received: set[str] | None) -> list[Any]:
        """What all ranks have reported. Removes from ``sent`` what vLLM does not know; returns the freed holds."""
        for request_id in received or ():
            self._receiving.discard(DecodeRequestId(request_id))
            self._renewals.end(DecodeRequestId(request_id))
        freed = []
        for request_id in list(sent or ()):
            hold = hold_of(request_id)
            if hold is None:
                self._sending.pop(PrefillRequestId(request_id), None)
            elif sent is not None and hold in self._held:
                sent.remove(request_id)
                freed.append(self._held.pop(hold))
        return freed

    # -------------------------------------------------------------------------------------------------------- inside

    def _start_sending(self, request: Request, params: dict[str, Any]) -> None:
        request_id = PrefillRequestId(request.request_id)
        if request_id in self._sending:
            return
        try:
            transfer = transfer_of(params, request.request_id)
        except ValueError as cause:
            logger.warning("Request %s is not offered to decode: %s", request_id, cause)
            return
        self._sending[request_id] = _Sending(transfer, request.num_prompt_tokens)

    def _start_receiving(
        self, request: Request, params: dict[str, Any], block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        request_id = DecodeRequestId(request.request_id)
        first_token = request.num_prompt_tokens - num_external_tokens
        try:
            transfer, prefill = transfer_of(params, request.request_id), remote_prefill(params)
            if num_external_tokens and first_token % self._block_size:
                raise ValueError(f"its first {first_token} tokens end inside a block of {self._block_size}")
        except ValueError as cause:
            if num_external_tokens:
                self._receiving.add(request_id)
                self._step.unusable.append(Unusable(request_id, str(cause), self._missing(block_ids, first_token)))
            return
        if not num_external_tokens:
            self._renewals.end(request_id)
            self._step.unneeded.append((transfer, prefill))
            return
        self._receiving.add(request_id)
        missing = self._missing(block_ids, first_token)
        self._step.wanted.append(Wanted(request_id, transfer, prefill, first_token, request.num_prompt_tokens, missing))

    def _missing(self, block_ids: BlockIds, first_token: int) -> BlockIds:
        return tuple(list(group[first_token // self._block_size :]) for group in block_ids)

    def _finished_sending(
        self, request: Request, params: dict[str, Any], is_whole: bool, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = PrefillRequestId(request.request_id)
        sending = self._sending.get(request_id)
        if sending is None:
            try:
                self._step.refused[transfer_of(params, request_id)] = "prefill's request ended before it was computed"
            except ValueError as cause:
                logger.warning("Request %s was not offered to decode: %s", request_id, cause)
            return False, None
        sending.ended = True
        if not is_whole:
            self._step.stopped[request_id] = "prefill's request was aborted"
            return True, None
        self._step.finished.append(request_id)
        return True, prefill_params(self._own, request_id, params.get("transfer_id"), block_ids)
