# SPDX-License-Identifier: Apache-2.0
"""Reads counters of running servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import httpx

from experiments.common.servers import Server

HAND_OVERS = "vllm:nixl_xfer_time_seconds_count"
"""vLLM's own counter; one for each request whose KV was moved."""
COUNT_SECONDS = 20.0
COUNTED_SECONDS = 1.0
PAGE_SECONDS = 30.0
"""A server that waits for a core answers late."""

Counts = TypeVar("Counts")
Counters = Mapping[str, int]
"""Page and labels -> value."""


def samples(page: str, name: str = "") -> dict[str, float]:
    """Return the values on a page of metrics by name and labels, of those whose names begin with ``name``."""
    lines = httpx.get(page, trust_env=False, timeout=PAGE_SECONDS).text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(name) and not line.startswith("#"))
    return {labels: float(value) for labels, _, value in found if labels}


def counters(pages: Iterable[str], name: str = HAND_OVERS) -> Counters:
    return {f"{page} {labels}": int(value) for page in pages for labels, value in samples(page, name).items()}


def moved(before: Counters, after: Counters) -> int:
    """Return how much counters have grown. Those of engines that have ended may be missing."""
    return sum(max(0, value - before.get(name, 0)) for name, value in after.items())


def settled(read: Callable[[], Counts], is_enough: Callable[[Counts], bool] = lambda _: True) -> Counts:
    """Return counters when they are enough and nothing is added any more, or after `COUNT_SECONDS`.

    Engines report what they have counted with their next step.
    """
    deadline, found = time.monotonic() + COUNT_SECONDS, read()
    while True:
        time.sleep(COUNTED_SECONDS)
        before, found = found, read()
        if (is_enough(found) and found == before) or time.monotonic() > deadline:
            return found


def since(known: Counters, read: Callable[[], Counters], least: int) -> int:
    """Return how much counters have grown since ``known``, when they are `settled` and have grown by ``least``."""
    return moved(known, settled(read, lambda found: moved(known, found) >= least))


def count(servers: Sequence[Server], name: str) -> int:
    return sum(counters((f"{one.base_url}/metrics" for one in servers), name).values())


def hand_overs(servers: Sequence[Server], least: int) -> int:
    """Return how many requests' KV was moved by ``servers``: `since` they were started."""
    return since({}, lambda: counters(f"{one.base_url}/metrics" for one in servers), least)
