# SPDX-License-Identifier: Apache-2.0
"""Names of prefill servers, whose addresses come and go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvcached_nixl.scheduler.asking import resolver as module
from kvcached_nixl.scheduler.asking.resolver import Resolver, is_name

URL = "http://prefill:8000"


class Names:
    """The host's resolver: each look-up waits for what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Any = []
        self.asked, self.woken, self.goes_on = threading.Event(), threading.Event(), threading.Semaphore(0)
        monkeypatch.setattr(module.socket, "getaddrinfo", self._look_up)
        monkeypatch.setattr(module, "EVERY_SECONDS", 0.0)

    def _look_up(self, host: str, *_: Any, **__: Any) -> Any:
        assert host == "prefill"
        self.asked.set()
        self.goes_on.acquire()
        if isinstance(self.found, Exception):
            raise self.found
        return [(family, None, None, "", (address, 0)) for family, address in self.found]

    def say(self, *found: tuple[int, str]) -> None:
        self.found = found
        self.goes_on.release()

    def fail(self) -> None:
        self.found = socket.gaierror("no such name")
        self.goes_on.release()

    def wait(self) -> None:
        assert self.woken.wait(10)
        self.woken.clear()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
def resolver(names: Names) -> Iterator[Resolver]:
    made = Resolver([URL, "http://10.0.0.9:8000"], names.woken.set)
    yield made
    made.close()
    names.say()


V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize(("url", "expected"), [(URL, True), ("http://10.0.0.1:1", False), ("http://[::1]:1", False)])
def test_what_has_to_be_looked_up(url: str, expected: bool) -> None:
    assert is_name(url) is expected


def test_addresses_come_and_go(names: Names, resolver: Resolver) -> None:
    assert resolver.take() == {}
    names.say((V4, "10.0.0.2"), (V6, "fd::1"), (V4, "10.0.0.1"))
    names.wait()
    assert resolver.take() == {URL: ("10.0.0.1", "10.0.0.2")}
    assert resolver.take() == {}
    names.say((V6, "fd::1"))
    names.wait()
    assert resolver.take() == {URL: ("fd::1",)}


def test_the_last_addresses_count_for_a_while(
    names: Names, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.say((V4, "10.0.0.1"))
    names.wait()
    resolver.take()
    names.fail()
    names.asked.clear()
    assert names.asked.wait(10)
    assert resolver.take() == {}
    monkeypatch.setattr(module, "KEPT_SECONDS", 0.0)
    names.fail()
    names.wait()
    assert resolver.take() == {URL: ()}


def test_a_look_up_that_hangs_holds_up_nothing(names: Names, resolver: Resolver) -> None:
    assert names.asked.wait(10)
    assert resolver.take() == {}
    resolver.close()
