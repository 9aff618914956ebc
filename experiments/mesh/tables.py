# SPDX-License-Identifier: Apache-2.0
"""What an object of ours holds on to: every table in it, by the name of its place, and the bytes of all."""

from __future__ import annotations

import collections
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.transport.memory import MemoryGate, MemoryTransport, Network
from kvcached_nixl.worker.transfer.recent_set import RecentSet

_TABLES = (dict, set, list, collections.deque)
STALE = ", stale"
_SHARED = (ManualClock, MemoryGate, MemoryTransport, Network)
"""Not the engine's own: what they hold belongs to the mesh."""
_NOT_COUNTED = (type, types.ModuleType, types.FunctionType, np.ndarray, *_SHARED)


def sizes(roots: Iterable[object]) -> Counter[str]:
    """``Class.attribute`` -> entries, summed over all objects of this package that the roots lead to.

    What is itself a table goes by the name of where it is kept; what deadlines keep of those that were moved or dropped
    is counted apart, as `STALE`.
    """
    found: Counter[str] = Counter()
    for place, one in _objects(roots):
        if isinstance(one, Deadlines):
            found[place] += len(one)
            found[place + STALE] += len(one._heap) - len(one)
            continue
        for name, value in _attributes(one):
            if isinstance(value, _TABLES):
                found[place if isinstance(one, RecentSet) else f"{type(one).__name__}.{name}"] += len(value)
    return found


def num_bytes(roots: Iterable[object]) -> int:
    """Bytes of all objects of this package that the roots lead to, and of their tables and what is in these."""
    seen: set[int] = set()
    total = 0
    for _, one in _objects(roots):
        waiting: list[Any] = [one, *(value for _, value in _attributes(one))]
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, _NOT_COUNTED):
                continue
            seen.add(id(value))
            total += sys.getsizeof(value)
            waiting += _parts(value)
    return total


def _objects(roots: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Objects of this package, each once, and where each is kept."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root) for root in roots]
    while waiting:
        place, one = waiting.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        if isinstance(one, types.MethodType):
            waiting.append((place, one.__self__))
        elif isinstance(one, (*_TABLES, tuple)):
            waiting += ((place, part) for part in _parts(one))
        elif type(one).__module__.startswith("kvcached_nixl."):
            yield place, one
            waiting += ((f"{type(one).__name__}.{name}", value) for name, value in _attributes(one))


def _attributes(one: object) -> list[tuple[str, Any]]:
    fields = getattr(one, "__struct_fields__", ())
    return [*getattr(one, "__dict__", {}).items(), *((name, getattr(one, name)) for name in fields)]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (set, list, tuple, frozenset, collections.deque)):
        return list(value)
    return []
