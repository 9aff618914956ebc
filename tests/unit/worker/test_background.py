# SPDX-License-Identifier: Apache-2.0
"""Work is done in order, its owner is told in its own thread, and what fails fails only its owner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcached_nixl.worker.background import Background, Work

CPU = torch.device("cpu")


@pytest.fixture
def woken() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def background(woken: threading.Semaphore) -> Iterator[Background]:
    one = Background("background", CPU, woken.release)
    yield one
    one.close()


def test_ends_are_told_in_order_on_the_thread_that_asks(background: Background, woken: threading.Semaphore) -> None:
    here, go_on = threading.current_thread().name, threading.Event()
    told: list[tuple[Any, str, str]] = []

    def ended(found: Any, failed: str) -> None:
        told.append((found, failed, threading.current_thread().name))

    def do() -> str:
        assert go_on.wait(10)
        return threading.current_thread().name

    background.submit(Work("first", do, ended))
    background.submit(Work("second", lambda: 2, ended))
    background.turn()
    assert told == []
    go_on.set()
    assert woken.acquire(timeout=10) and woken.acquire(timeout=10)
    background.turn()
    assert told == [("background", "", here), (2, "", here)]


def test_what_fails_is_told_and_the_next_one_is_done(background: Background, woken: threading.Semaphore) -> None:
    told: list[tuple[Any, str]] = []
    background.submit(Work("a copy", lambda: [][1], lambda *ended: told.append(ended)))
    background.submit(Work("another one", lambda: 1, lambda *ended: told.append(ended)))
    assert woken.acquire(timeout=10) and woken.acquire(timeout=10)
    background.turn()
    assert told == [(None, "a copy failed: IndexError: list index out of range"), (1, "")]


@pytest.mark.parametrize(("is_dropping", "done"), [(False, [1, 2]), (True, [1])])
def test_what_was_asked_for_is_done_or_dropped_before_it_stops(is_dropping: bool, done: list[int]) -> None:
    one, found = Background("background", CPU, lambda: None), list[int]()
    has_begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        has_begun.set()
        assert go_on.wait(10)
        found.append(1)

    works: list[Callable[[], None]] = [first, lambda: found.append(2)]
    for do in works:
        one.submit(Work("work", do, lambda *_: None))
    assert has_begun.wait(10)
    closing = threading.Thread(target=one.close, kwargs={"is_dropping": is_dropping})
    closing.start()
    while not one._is_dropping and is_dropping:
        pass
    go_on.set()
    closing.join()
    assert found == done
