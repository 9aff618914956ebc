# SPDX-License-Identifier: Apache-2.0
"""Beside vLLM's scheduler of a connector that pulls. Once per engine, on the engine's thread; no torch, no NIXL.

Two things that it does not do: an engine with nothing to compute sleeps, and gives back nothing that its workers have
let go of, a lease that has ended among it; and up to 0.21 it renews no leases.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from kvcached_nixl.clock import MonotonicClock
from kvcached_nixl.idle import idle_step_seconds
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.scheduler.lease import Renewals
from kvcached_nixl.settings import Settings
from kvcached_nixl.wire.lease import Beats

__all__ = ["PullScheduler", "start"]


class Request(Protocol):
    """What is asked of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None


def start(extra_config: Mapping[str, Any], *, renews: bool) -> PullScheduler:
    """For a connector that pulls; ``renews`` if leases are renewed here, and not by vLLM."""
    lease_seconds = Settings.from_extra_config(extra_config).kv_lease_duration_seconds
    return PullScheduler(Renewals(MonotonicClock(), lease_seconds=lease_seconds) if renews else None)


class PullScheduler:
    """See the module.

    Args:
        renewals: None where vLLM renews leases itself.
    """

    def __init__(self, renewals: Renewals | None) -> None:
        self._renewals = renewals
        self._kept: set[PrefillRequestId] = set()
        self._receiving: set[DecodeRequestId] = set()
        self._idle_steps = 0

    @property
    def pending(self) -> bool:
        """Whether blocks wait for the workers, so that the engine has to go on stepping with nothing to compute."""
        return bool(self._kept or self._receiving)

    def arrived(self, request: Request) -> None:
        """A request has entered the engine."""
        params = request.kv_transfer_params
        if self._renewals is not None and params:
            self._renewals.begin(DecodeRequestId(request.request_id), params, params.get("remote_request_id"))

    def allocated(self, request: Request, num_external_tokens: int) -> None:
        """A request was given blocks; the stock scheduler has not marked its parameters as used yet."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            if num_external_tokens:
                self._receiving.add(DecodeRequestId(request.request_id))
            else:
                self._end(DecodeRequestId(request.request_id))

    def take_beats(self, *, is_idle: bool) -> Beats:
        """What the workers are to renew in the step that is being built; ``is_idle`` if it computes nothing.

        A prefill that only waits for its leases' ends is held up for some milliseconds, not to repeat such steps a
        thousand times a second. Decode is not: a READ that has ended is seen in the next step.
        """
        self._idle_steps = self._idle_steps + 1 if is_idle and self._kept and not self._receiving else 0
        if self._idle_steps:
            time.sleep(idle_step_seconds(self._idle_steps))
        return [] if self._renewals is None else self._renewals.take_beats()

    def finished(self, request_id: str, is_kept: bool) -> None:
        """A request ended; ``is_kept`` if the stock scheduler keeps its blocks until `ended` names it."""
        if is_kept:
            self._kept.add(PrefillRequestId(request_id))
        if request_id not in self._receiving:
            self._end(DecodeRequestId(request_id))

    def is_sending(self, request_id: str) -> bool:
        """Whether the workers may be reading the blocks of a request that can be preempted: decode reads later."""
        return False

    def ended(self, sent: set[str] | None, received: set[str] | None) -> list[Any]:
        """What all ranks have reported. Returns the blocks to give back beyond vLLM's own: none."""
        for request_id in received or ():
            self._receiving.discard(DecodeRequestId(request_id))
            self._end(DecodeRequestId(request_id))
        for request_id in sent or ():
            self._kept.discard(PrefillRequestId(request_id))
        return []

    def _end(self, request_id: DecodeRequestId) -> None:
        if self._renewals is not None:
            self._renewals.end(request_id)
