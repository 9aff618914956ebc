# SPDX-License-Identifier: Apache-2.0
"""Times how much an engine's thread is delayed by hand-overs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PIECE_SECONDS = 0.002
"""Time of a piece of Python work, and of the pause after it: similar to an engine between two layers of device work."""
LEAST_GAP_SECONDS = 0.00003
"""Shorter gaps do not count as waiting for the interpreter."""


class Computing:
    """A thread that uses the interpreter as an engine's does: a piece of Python work, then a pause as long."""

    def __init__(self) -> None:
        self._count = 1000
        # Calibrated in CPU time: other load on the machine must not make the pieces smaller.
        while (spent := _seconds(self._count)) < PIECE_SECONDS:
            self._count = int(self._count * min(2.0, 1.1 * PIECE_SECONDS / max(spent, 1e-6))) + 1
        self._pieces: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._pieces = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float, ...]:
        """Stop the thread; returns the seconds that each piece took from when it was due, without those that the thread
        waited for a core."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return tuple(self._pieces)

    def _run(self) -> None:
        with waits_for_a_core() as waited:
            while True:
                due, before = time.perf_counter() + PIECE_SECONDS, waited()
                if self._stop.wait(PIECE_SECONDS):
                    return
                worked = _seconds(self._count)
                # A piece that waits for the interpreter before it begins is as late as one that loses it. A wait for a
                # core before it was due must not make it shorter.
                self._pieces.append(max(worked, time.perf_counter() - due - (waited() - before)))


@contextmanager
def waits_for_a_core() -> Iterator[Callable[[], float]]:
    """Yields a function that returns how many seconds this thread has waited for a core, as the kernel counts them."""
    with open("/proc/thread-self/schedstat", "rb", buffering=0) as counts:
        yield lambda: int(os.pread(counts.fileno(), 100, 0).split()[1]) / 1e9


def longest_hold(action: Callable[[], object]) -> float:
    """Return the longest time, in seconds, that another thread waited for the interpreter during ``action``.

    Its waiting time for a core is subtracted as far as the kernel has counted it; take the median of several even so.
    """
    longest, stop, is_running = 0.0, False, threading.Event()

    def spin() -> None:
        nonlocal longest
        with waits_for_a_core() as for_a_core:
            before, last = for_a_core(), time.perf_counter()
            is_running.set()
            is_over = False
            while not is_over:
                is_over = stop
                now = time.perf_counter()
                gap, last = now - last, now
                if gap > LEAST_GAP_SECONDS:
                    waited = for_a_core()
                    longest, before = max(longest, gap - (waited - before)), waited

    switch_interval = sys.getswitchinterval()
    # A thread that waits for the interpreter gets it at the next chance, so only uninterrupted holding is measured.
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        is_running.wait()
        action()
    finally:
        stop = True
        thread.join()
        sys.setswitchinterval(switch_interval)
    return longest


def _seconds(count: int) -> float:
    """Return the CPU time of some Python work."""
    begun = time.thread_time()
    total = 0
    for number in range(count):
        total += number
    return time.thread_time() - begun
