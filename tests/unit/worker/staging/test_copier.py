# SPDX-License-Identifier: Apache-2.0
"""Copies finish in order, each owner is told in its own thread, and a failed copy fails only its owner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcached_nixl.worker.staging.staging import Copier, Copy

CPU = torch.device("cpu")


class Slab:
    """Notes what is copied, on which thread; a copy of block 9 fails, and one of block 7 waits."""

    def __init__(self) -> None:
        self.done: list[tuple[str, Any, Any, str]] = []
        self.go_on = threading.Event()

    def gather(self, blocks: Any, slots: Any) -> None:
        if 7 in blocks:
            assert self.go_on.wait(10)
        if 9 in blocks:
            raise RuntimeError("no such block")
        self.done.append(("gather", blocks, slots, threading.current_thread().name))

    def scatter(self, slots: Any, blocks: Any) -> None:
        self.done.append(("scatter", blocks, slots, threading.current_thread().name))


@pytest.fixture
def slab() -> Slab:
    return Slab()


@pytest.fixture
def woken() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def copier(slab: Slab, woken: threading.Semaphore) -> Iterator[Copier]:
    one = Copier(slab, CPU, woken.release)  # type: ignore[arg-type]
    yield one
    slab.go_on.set()
    one.close()


def test_ends_are_told_in_order_on_the_thread_that_asks(copier: Copier, slab: Slab, woken: threading.Semaphore) -> None:
    ended: list[tuple[int, str, str]] = []

    def tell(number: int) -> Any:
        return lambda failed: ended.append((number, failed, threading.current_thread().name))

    copier.submit(Copy(True, [7], [0], tell(0)))
    copier.submit(Copy(False, [2, 3], [1, 2], tell(1)))
    copier.turn()
    assert ended == [] and len(copier) == 2
    slab.go_on.set()
    assert woken.acquire(timeout=10) and woken.acquire(timeout=10)
    copier.turn()
    here = threading.current_thread().name
    assert ended == [(0, "", here), (1, "", here)] and len(copier) == 0
    assert [one[:3] for one in slab.done] == [("gather", [7], [0]), ("scatter", [2, 3], [1, 2])]
    assert {one[3] for one in slab.done} == {"kvcached-nixl-copies"}


def test_a_copy_that_fails_is_told_and_the_next_one_is_done(
    copier: Copier, slab: Slab, woken: threading.Semaphore
) -> None:
    ended: list[str] = []
    copier.submit(Copy(True, [9], [0], ended.append))
    copier.submit(Copy(True, [1], [0], ended.append))
    assert woken.acquire(timeout=10) and woken.acquire(timeout=10)
    copier.turn()
    assert "no such block" in ended[0] and ended[1] == ""


def test_what_was_asked_for_is_done_before_it_stops(slab: Slab) -> None:
    one = Copier(slab, CPU, lambda: None)  # type: ignore[arg-type]
    one.submit(Copy(True, [1], [0], lambda _: None))
    one.close()
    assert len(slab.done) == 1
