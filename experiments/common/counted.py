# SPDX-License-Identifier: Apache-2.0
"""Reads counters of running servers: on their pages of metrics, and kvcached's in shared memory."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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


# -------------------------------------------------------------------------------------------------- kvcached's counters
# kvcached keeps three 64-bit integers per engine in shared memory: the pool's limit, the bytes in use, the bytes mapped
# in reserve. Each engine has its own name there, which begins with ``KVCACHED_IPC_NAME`` (`own_names`). Its page
# allocator updates them after every map and unmap (``csrc/page_allocator.cpp``, ``update_memory_usage``; ``kvtop``
# shows the same figures), in the process that the engine runs in. Sampling can miss a change but never invent one, so
# the counts here are lower bounds.


class Sampler:
    """Calls `sample` on a thread of this name during a ``with`` block, and once more when that ends, so that what
    happens last is not missed."""

    def __init__(self, name: str, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def sample(self) -> None:
        """Read once. Called on the sampler's thread."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self._done.wait(self._pause_seconds):
            self.sample()
        self.sample()


SHARED_MEMORY = Path("/dev/shm")
SAMPLE_SECONDS = 0.002
_LAYOUT = struct.Struct("=qqq")


@dataclass(frozen=True)
class PageCount:
    """Lower bounds of the bytes mapped, unmapped, and mapped after an unmap; and the range of the pool's size."""

    samples: int = 0
    limit_bytes: int = 0
    lowest_bytes: int = 0
    highest_bytes: int = 0
    mapped_bytes: int = 0
    unmapped_bytes: int = 0
    remapped_bytes: int = 0


def count_pages(samples: list[tuple[int, int]]) -> PageCount:
    """Sum rises and falls in ``samples`` of (limit, mapped bytes); ``remapped`` sums the rises after the first fall."""
    if not samples:
        return PageCount()
    levels = [level for _, level in samples]
    mapped = unmapped = remapped = 0
    for before, after in itertools.pairwise(levels):
        mapped += max(0, after - before)
        remapped += max(0, after - before) if unmapped else 0
        unmapped += max(0, before - after)
    return PageCount(len(samples), samples[-1][0], min(levels), max(levels), mapped, unmapped, remapped)


def own_names(wish: str, folder: Path = SHARED_MEMORY) -> list[str]:
    """Return the names used by engines started with ``KVCACHED_IPC_NAME=wish``. kvcached without this package uses
    ``wish`` itself."""
    return sorted(path.name for path in (folder / wish, *folder.glob(f"{wish}-*")) if path.exists())


class PageWatch(Sampler):
    """Samples one engine's counters during a ``with`` block. ``ipc_name``: its name, or its ``KVCACHED_IPC_NAME`` if no
    other engine was started with the same."""

    def __init__(self, ipc_name: str, folder: Path = SHARED_MEMORY) -> None:
        super().__init__(f"pages of {ipc_name}", SAMPLE_SECONDS)
        self._ipc_name = ipc_name
        self._folder = folder
        self._path: Path | None = None
        self._samples: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def sample(self) -> None:
        """Read the counters once; consecutive equal readings are kept as one. May be called on any thread."""
        if self._path is None:
            names = own_names(self._ipc_name, self._folder)
            if len(names) > 1:
                raise ValueError(f"found the engines {names}; expected one. Watch each of them by its own name.")
            self._path = self._folder / names[0] if names else None
        try:
            content = self._path.read_bytes() if self._path else b""
        except FileNotFoundError:
            return
        if len(content) < _LAYOUT.size:
            return
        limit, used, reserved = _LAYOUT.unpack_from(content)
        reading = (limit, used + reserved)
        with self._lock:
            if not self._samples or self._samples[-1] != reading:
                self._samples.append(reading)

    def mapped_bytes(self) -> int:
        """Return the bytes mapped now, 0 if the engine has no counters."""
        self.sample()
        return self._samples[-1][1] if self._samples else 0

    def count(self) -> PageCount:
        return count_pages(self._samples)
