# SPDX-License-Identifier: Apache-2.0
"""Named access to the queues of vLLM's engine: its input, the requests that wait for a turn, and those that are held.

Held requests are in vLLM's queue, but no step looks at them until they are released. A connector that answers "ask
again" costs a look at the prefix cache per request and step. Held requests cost nothing, and are counted and aborted as
all that wait.

Sources: ``v1/engine/core.py``, ``v1/core/sched/scheduler.py``, ``v1/core/sched/request_queue.py``.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvcached_nixl.vllm.adapter.attributes import optional, private, sides
from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS, installed_has

_AHEAD = "_kvcached_nixl_ahead"

# ------------------------------------------------------------------------------------------------------------ its input


def has_call(core: Any, method: str) -> bool:
    """Whether such a call from outside waits in the engine's input queue."""
    from vllm.v1.engine import EngineCoreRequestType

    with core.input_queue.mutex:
        waiting = list(core.input_queue.queue)
    # A call is (client, number, method, arguments).
    return any(kind is EngineCoreRequestType.UTILITY and request[2] == method for kind, request in waiting)


def wait_for_input(core: Any, seconds: float) -> bool:
    """On the engine's thread, wait until something enters the engine's input queue, such as a worker's wake-up. Returns
    whether something has."""
    queue = core.input_queue
    with queue.not_empty:
        if not queue._qsize():
            queue.not_empty.wait(None if math.isinf(seconds) else seconds)
        return bool(queue._qsize())


def wake_of(core: Any) -> Any:
    """A function that ends `wait_for_input` and vLLM's own wait for requests. Any thread may call it."""
    from vllm.v1.engine import EngineCoreRequestType

    return lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


# --------------------------------------------------------------------------------------------------- who waits for what


def queued(engine_scheduler: Any) -> Iterator[Any]:
    """The requests that do not run, in vLLM's order."""
    waiting = private(engine_scheduler, "waiting")
    # From 0.31 on vLLM has a queue of those that hold KV, before one of those it skipped, and schedules them first.
    holding = optional(engine_scheduler, "kv_holding_waiting")
    first = private(engine_scheduler, "skipped_waiting") if holding is None else holding
    if holding is not None or not goes_by_priority(engine_scheduler):
        # Copied in one piece: threads that look would fail where the engine's thread changes a queue.
        yield from tuple(first)
        yield from tuple(waiting)
    else:
        # By priority (``--scheduling-policy``).
        yield from heapq.merge(first, waiting)


def goes_by_priority(engine_scheduler: Any) -> bool:
    """Whether requests are started by priority (``--scheduling-policy``), and not as they arrived."""
    holding = optional(engine_scheduler, "kv_holding_waiting")
    return not isinstance(private(engine_scheduler, "skipped_waiting") if holding is None else holding, Sequence)


def bring_forward(engine_scheduler: Any, request_ids: Container[str]) -> None:
    """Put requests that no longer wait for KV before all others that do not run, as vLLM does from 0.31 on. Called
    after each step.

    Before, vLLM stops at the first one that lacks blocks. One behind it would keep its own blocks, which the first one
    may need, for ever: it gets no turn to use them, or to free them if its KV has not come.
    """
    if optional(engine_scheduler, "kv_holding_waiting") is not None:
        return
    skipped = private(engine_scheduler, "skipped_waiting")
    is_by_priority = goes_by_priority(engine_scheduler)
    # Requests that have another priority until their turn -> their own.
    ahead = vars(engine_scheduler).setdefault(_AHEAD, {})
    # Whoever waits for its turn with KV, or with blocks for KV that has not come, stays ahead.
    over = [one for one in ahead if not waits_for_kv(one) and not (wants_blocks(one) and one.num_computed_tokens > 0)]
    _set_priorities(engine_scheduler, {one: ahead.pop(one) for one in over})
    found = [one for one in skipped if one.request_id in request_ids] if request_ids else []
    if is_by_priority:
        for one in found:
            ahead.setdefault(one, one.priority)
        _set_priorities(engine_scheduler, dict.fromkeys(found, -math.inf))
    else:
        for request in found:
            skipped.remove(request)
            skipped.appendleft(request)


def _set_priorities(engine_scheduler: Any, priorities: Mapping[Any, float]) -> None:
    if not priorities:
        return
    for queue in (private(engine_scheduler, "waiting"), private(engine_scheduler, "skipped_waiting")):
        queued_here = [one for one in queue if one in priorities]
        queue.remove_requests(queued_here)
        for request in queued_here:
            request.priority = priorities[request]
            queue.add_request(request)
    for request, priority in priorities.items():
        request.priority = priority


def startable(engine_scheduler: Any) -> Iterator[Any]:
    """Those of `queued` that vLLM would run if there are blocks: all but those that a connector holds back; while it is
    paused, those that hold KV, or none.
    """
    state = private(engine_scheduler, "pause_state")
    if not state:
        found = list(sides(private(engine_scheduler, "connector")))
        for request in queued(engine_scheduler):
            if not any(side.holds_back(request.request_id) for side in found):
                yield request
    elif installed_has(COUNTS_EXTERNAL_WEIGHTS) and state != type(state).PAUSED_ALL:
        yield from private(engine_scheduler, "kv_holding_waiting")


def wants_blocks(request: Any) -> bool:
    """Whether a request that does not run waits only for its turn and for blocks."""
    return request.status.name in ("WAITING", "PREEMPTED")


def waits_for_kv(request: Any) -> bool:
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")


# ---------------------------------------------------------------------------------------------------------- who is held


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

    def __getattr__(self, name: str) -> Any:
        # What adds, shows and takes requests that are not held.
        return getattr(self._inner, name)

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
