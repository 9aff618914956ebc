# SPDX-License-Identifier: Apache-2.0
"""Requests in vLLM's queue that no step looks at, until they are released. Source: ``v1/core/sched/request_queue.py``.

A connector that answers "ask again" costs a look at the prefix cache per request and step. Held requests cost nothing,
and are counted and aborted as all that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from kvcached_nixl.vllm.adapter.private import optional, private

__all__ = ["HoldingQueue", "hold"]


class HoldingQueue:
    """Stands in for the queue ``waiting`` of vLLM's scheduler: a ``RequestQueue`` whose length includes the held ones.

    Attributes:
        held: by request id.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.held: dict[str, Any] = {}

    def release(self, request_id: str) -> Any:
        """Puts a request back in the order of arrival, or of priority. Returns it."""
        request = self.held.pop(request_id)
        if isinstance(self._inner, deque):
            # From the end: those that were held arrived late.
            place = len(self._inner)
            while place and self._inner[place - 1].arrival_time > request.arrival_time:
                place -= 1
            self._inner.insert(place, request)
        else:
            self._inner.add_request(request)
        return request

    def add_request(self, request: Any) -> None:
        self._inner.add_request(request)

    def pop_request(self) -> Any:
        return self._inner.pop_request()

    def peek_request(self) -> Any:
        return self._inner.peek_request()

    def prepend_request(self, request: Any) -> None:
        self._inner.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        self._inner.prepend_requests(requests)

    def remove_request(self, request: Any) -> None:
        if self.held.pop(request.request_id, None) is None:
            self._inner.remove_request(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        others = [one for one in requests if self.held.pop(one.request_id, None) is None]
        if others:
            self._inner.remove_requests(others)

    def __bool__(self) -> bool:
        return bool(self._inner)

    def __len__(self) -> int:
        return len(self._inner) + len(self.held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)


def hold(engine_scheduler: Any, request: Any) -> None:
    """Takes a request that has just been added out of the order."""
    waiting = private(engine_scheduler, "waiting")
    if not isinstance(waiting, HoldingQueue):
        waiting = engine_scheduler.waiting = HoldingQueue(waiting)
    waiting.remove_requests([request])
    # Up to 0.30 vLLM has another queue for those that wait for a grammar.
    skipped = optional(engine_scheduler, "skipped_waiting")
    if skipped is not None:
        skipped.remove_requests([request])
    # vLLM has reserved blocks for it since its KV began to load, and loads nothing that would need them.
    private(engine_scheduler, "_inflight_prefills").discard(request)
    waiting.held[request.request_id] = request
