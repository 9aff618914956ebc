# SPDX-License-Identifier: Apache-2.0
"""Decode's scheduler: whose lease is to be renewed, from the moment a request arrives until it has its KV.

A request waits in vLLM's queue before its blocks are allocated and the connector hears of it, and that may take longer
than a lease (vllm#38027); so renewal starts where the request enters the engine. Its first beat goes out with the next
step, because nobody knows how long it was under way; the others go together, once an interval.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

from kvcached_nixl.clock import Clock
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.lease import INTERVAL, is_nameable
from kvcached_nixl.wire.params import RemotePrefill, remote_prefill

__all__ = ["Renewals"]

logger = logging.getLogger(SERVER_LOGGER)

_Lease: TypeAlias = tuple[RemotePrefill, PrefillRequestId]


class Renewals:
    """See the module. Once per engine; on its thread.

    Args:
        lease_seconds: what prefill grants.
    """

    def __init__(self, clock: Clock, *, lease_seconds: float) -> None:
        self._clock = clock
        self._interval_seconds = INTERVAL * lease_seconds
        self._lease_of: dict[DecodeRequestId, _Lease] = {}
        self._wanted_by: dict[RemotePrefill, dict[PrefillRequestId, set[DecodeRequestId]]] = {}
        self._new: dict[_Lease, None] = {}
        self._due_seconds = clock.now_seconds()
        self._has_warned = False

    def __len__(self) -> int:
        """Requests whose leases are renewed."""
        return len(self._lease_of)

    def begin(self, request_id: DecodeRequestId, params: Mapping[str, Any] | None, theirs: object) -> None:
        """A request has arrived; ``theirs`` is what prefill calls it.

        One that names no KV of a prefill has no lease; again is harmless.
        """
        if not params or not params.get("do_remote_prefill") or request_id in self._lease_of:
            return
        if not isinstance(theirs, str) or not theirs:
            return
        if not is_nameable(theirs):
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "Request %s waits for the KV of %.80r, which a heartbeat cannot name: expected no comma, and at "
                    "most 4 KB. Leases of such requests last as long as prefill first granted. Send them with another "
                    "X-Request-Id.",
                    request_id,
                    theirs,
                )
            return
        try:
            prefill = remote_prefill(params)
        except ValueError:
            # Whoever fetches the KV refuses it, in words.
            return
        lease = prefill, PrefillRequestId(theirs)
        self._lease_of[request_id] = lease
        wanting = self._wanted_by.setdefault(prefill, {}).setdefault(lease[1], set())
        if not wanting:
            self._new[lease] = None
        wanting.add(request_id)

    def end(self, request_id: DecodeRequestId) -> None:
        """The request has its KV, or is gone. Again is harmless."""
        lease = self._lease_of.pop(request_id, None)
        if lease is None:
            return
        prefill, theirs = lease
        wanted = self._wanted_by[prefill]
        wanted[theirs].discard(request_id)
        if not wanted[theirs]:
            del wanted[theirs]
            self._new.pop(lease, None)
        if not wanted:
            del self._wanted_by[prefill]

    def take_beats(self) -> list[tuple[RemotePrefill, list[PrefillRequestId]]]:
        """What is to be renewed now, and where."""
        now = self._clock.now_seconds()
        new, self._new = self._new, {}
        if now >= self._due_seconds:
            self._due_seconds = now + self._interval_seconds
            return [(prefill, list(wanted)) for prefill, wanted in self._wanted_by.items()]
        first: dict[RemotePrefill, list[PrefillRequestId]] = {}
        for prefill, theirs in new:
            first.setdefault(prefill, []).append(theirs)
        return list(first.items())
