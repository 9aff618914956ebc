# SPDX-License-Identifier: Apache-2.0
"""Reads counters of running servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import httpx

from experiments.common.servers import Server

HAND_OVERS = "vllm:nixl_xfer_time_seconds_count"
"""vLLM's own counter; one for each request whose KV was moved."""
COUNT_SECONDS = 20.0
COUNTED_SECONDS = 1.0

Counters = Mapping[str, int]
"""Page and labels -> value."""


def counters(pages: Iterable[str], name: str = HAND_OVERS) -> Counters:
    """Return the series of a counter on pages of metrics."""
    texts = {page: httpx.get(page, trust_env=False).text for page in pages}
    lines = [(page, line.rpartition(" ")) for page, text in texts.items() for line in text.splitlines()]
    return {f"{page} {labels}": int(float(value)) for page, (labels, _, value) in lines if labels.startswith(name)}


def moved(before: Counters, after: Counters) -> int:
    """Return how much counters have grown. Those of engines that have ended may be missing."""
    return sum(max(0, value - before.get(name, 0)) for name, value in after.items())


def settled(read: Callable[[], Counters], is_enough: Callable[[Counters], bool] = lambda _: True) -> Counters:
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
    """Return the sum of a metric's series on all ``servers``."""
    return sum(counters((f"{one.base_url}/metrics" for one in servers), name).values())


def hand_overs(servers: Sequence[Server], least: int) -> int:
    """Return how many requests' KV was moved by ``servers``: `since` they were started."""
    return since({}, lambda: counters(f"{one.base_url}/metrics" for one in servers), least)
