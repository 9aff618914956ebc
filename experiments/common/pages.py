# SPDX-License-Identifier: Apache-2.0
"""Samples kvcached's memory counters from another process while servers run.

kvcached keeps three 64-bit integers per engine in shared memory: the pool's limit, the bytes in use, the bytes mapped
in reserve. Each engine has its own shared-memory name, which begins with ``KVCACHED_IPC_NAME`` (`own_names`). Its page
allocator updates them after every map and unmap (``csrc/page_allocator.cpp``, ``update_memory_usage``; ``kvtop`` shows
the same figures), in the process that the engine runs in. Sampling can miss a change but never invent one, so the
counts here are lower bounds.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


# -------------------------------------------------------------------------------------------------- kvcached's counters


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
    mapped = unmapped = remapped = 0
    for (_, before), (_, after) in zip(samples, samples[1:], strict=False):
        if after < before:
            unmapped += before - after
        elif after > before:
            mapped += after - before
            remapped += after - before if unmapped else 0
    levels = [level for _, level in samples]
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
        try:
            content = self._account().read_bytes()
        except FileNotFoundError:
            return
        if len(content) < _LAYOUT.size:
            return
        limit, used, reserved = _LAYOUT.unpack_from(content)
        reading = (limit, used + reserved)
        with self._lock:
            if not self._samples or self._samples[-1] != reading:
                self._samples.append(reading)

    def _account(self) -> Path:
        if self._path is None:
            names = own_names(self._ipc_name, self._folder)
            if len(names) > 1:
                raise ValueError(f"found the engines {names}; expected one. Watch each of them by its own name.")
            if not names:
                raise FileNotFoundError(self._ipc_name)
            self._path = self._folder / names[0]
        return self._path

    def mapped_bytes(self) -> int | None:
        """Return the bytes mapped now, None if the engine has no counters."""
        self.sample()
        return self._samples[-1][1] if self._samples else None

    @property
    def limit_bytes(self) -> int:
        """The pool's limit; 0 if the engine has no counters."""
        self.sample()
        return self._samples[-1][0] if self._samples else 0

    def count(self) -> PageCount:
        return count_pages(self._samples)
