# SPDX-License-Identifier: Apache-2.0
"""Finds all tables in objects of this package: entries by the name of the attribute, and the total size in bytes."""

from __future__ import annotations

import collections
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from experiments.common.memory_transport import MemoryGate, MemoryTransport, Network
from kvcached_nixl.deadlines import Deadlines, ManualClock
from kvcached_nixl.worker.transfer.context import RecentSet

_TABLES = (dict, set, list, collections.deque)
STALE = ", stale"
_SHARED = (ManualClock, MemoryGate, MemoryTransport, Network)
"""Not counted: these are shared, and their content belongs to the mesh, not to an engine."""
_NOT_COUNTED = (type, types.ModuleType, types.FunctionType, np.ndarray, *_SHARED)


def sizes(roots: Iterable[object]) -> Counter[str]:
    """Return ``Class.attribute`` -> entries, summed over all objects of this package reachable from the roots.

    An object that is itself a table has the name of the attribute that refers to it. Entries of `Deadlines` that were
    moved or dropped are counted separately, with the suffix `STALE`.
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
    """Return the bytes of all objects of this package reachable from the roots, with their tables and contents."""
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
    """Yield each reachable object of this package once, with the name of the attribute that refers to it."""
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
