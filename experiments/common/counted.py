# SPDX-License-Identifier: Apache-2.0
"""Reads counters of running servers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx

from experiments.common.servers import Server

HAND_OVERS = "vllm:nixl_xfer_time_seconds_count"
"""vLLM's own counter; one for each request whose KV was moved."""
COUNT_SECONDS = 20.0
COUNTED_SECONDS = 1.0


def count(servers: Sequence[Server], name: str) -> int:
    """Return the sum of a metric's series on all ``servers``."""
    pages = [httpx.get(f"{one.base_url}/metrics", trust_env=False).text for one in servers]
    lines = [line.rpartition(" ") for page in pages for line in page.splitlines() if line.startswith(name)]
    return int(sum(float(value) for _, _, value in lines))


def hand_overs(servers: Sequence[Server], least: int) -> int:
    """Engines report what they have counted with their next step: wait for ``least``, then until nothing is added."""
    deadline, found = time.monotonic() + COUNT_SECONDS, -1
    while True:
        before, found = found, count(servers, HAND_OVERS)
        if (found >= least and found == before) or time.monotonic() > deadline:
            return found
        time.sleep(COUNTED_SECONDS)
