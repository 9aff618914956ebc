# SPDX-License-Identifier: Apache-2.0
"""Named access to vLLM's engine core around its scheduler. Source: ``v1/engine/core.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["core_of", "due_in_seconds", "has_call", "remember", "wait_for_input", "wake_of"]

_CORE = "_kvcached_nixl_core"


def remember(core: Any) -> None:
    """Remember the engine core of its scheduler, for `core_of`."""
    vars(core.scheduler)[_CORE] = core


def core_of(engine_scheduler: Any) -> Any:
    """The engine core around a scheduler; None if there is no core process (an engine in its client's own process)."""
    return vars(engine_scheduler).get(_CORE)


def due_in_seconds(found: Iterable[Any]) -> float:
    """Seconds until one of these facades has something to do by the clock; infinite if none has."""
    return min((due for side in found if (due := side.due_in_seconds) is not None), default=math.inf)


def has_call(core: Any, method: str) -> bool:
    """Whether such a call from outside waits in the engine's input queue."""
    from vllm.v1.engine import EngineCoreRequestType

    with core.input_queue.mutex:
        waiting = list(core.input_queue.queue)
    # A call is (client, number, method, arguments).
    return any(kind is EngineCoreRequestType.UTILITY and request[2] == method for kind, request in waiting)


def wait_for_input(core: Any, seconds: float) -> bool:
    """On the engine's thread, wait until something enters the engine's input queue, such as a worker's wake-up.

    Returns: whether something has.
    """
    queue = core.input_queue
    with queue.not_empty:
        if not queue._qsize():
            queue.not_empty.wait(None if math.isinf(seconds) else seconds)
        return bool(queue._qsize())


def wake_of(core: Any) -> Any:
    """A function that ends `wait_for_input` and vLLM's own wait for requests. Any thread may call it."""
    from vllm.v1.engine import EngineCoreRequestType

    return lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
