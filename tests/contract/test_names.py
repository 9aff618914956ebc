# SPDX-License-Identifier: Apache-2.0
"""Two engines with one ``KVCACHED_IPC_NAME`` on the real kvcached: which worker maps pages, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostvmm import is_hostvmm_build
from support import FOLDER

NODE = FOLDER / "names_node.py"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not on host memory")


class Process:
    """One process of an engine, in a process group of its own, as Ray's workers are."""

    def __init__(self, role: str, whose: str, wish: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ENABLE_KVCACHED": "true",
            "KVCACHED_IPC_NAME": wish,
            "KVCACHED_HOSTVMM_DEVICE": wish,
            "KVCACHED_HOSTVMM_GIB": "0.25",
            "KVCACHED_CONTIGUOUS_LAYOUT": "true",
            "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(NODE), role, whose],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def ask(self, *what: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self, number: signal.Signals | None = None) -> None:
        if number is not None:
            self.process.send_signal(number)
        with self.process:
            pass


class Engine:
    def __init__(self, whose: str, wish: str) -> None:
        self.core, self.worker = (Process(role, whose, wish) for role in ("core", "worker"))
        self.name = self.core.ask("name")

    def start(self) -> None:
        self.worker.ask("name", self.name)

    def kill(self) -> None:
        for process in (self.core, self.worker):
            process.end(signal.SIGKILL)


@pytest.fixture
def wish() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def engines(wish: str) -> Iterator[Callable[[str, str], Engine]]:
    made: list[Engine] = []

    def make(whose: str, name: str = wish) -> Engine:
        made.append(Engine(whose, name))
        return made[-1]

    yield make
    for one in made:
        one.kill()
    subprocess.run(["rm", "-rf", *left(wish)], check=True)


def left(wish: str) -> list[str]:
    return sorted(str(path) for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob(f"*{wish}*"))


@pytest.mark.parametrize(("whose", "right"), [("ours", True), pytest.param("stock", False, marks=pytest.mark.long)])
def test_pages_are_mapped_in_the_own_worker(engines: Callable[..., Engine], whose: str, right: bool) -> None:
    """kvcached alone maps those of the first engine in the second one's worker, and says that all is well."""
    first, second = engines(whose), engines(whose)
    for engine in (first, second):
        engine.start()
    for engine in (first, second):
        assert engine.core.ask("manage")
    before = [engine.worker.ask("maps") for engine in (first, second)]
    assert first.core.ask("take", 200) == 200
    after = [engine.worker.ask("maps") for engine in (first, second)]
    grown = [now > then for now, then in zip(after, before, strict=True)]
    assert grown == [right, not right]
    assert (first.name != second.name) is right


@pytest.mark.long
def test_each_owner_has_an_account_and_leaves_nothing(engines: Callable[..., Engine], wish: str) -> None:
    """kvctl sees two; the first one's end takes the first one's, although both leave by os._exit."""
    first, second = engines("ours"), engines("ours")
    for engine in (first, second):
        engine.start()
        engine.core.ask("manage")
    assert all(Path("/dev/shm", engine.name).stat().st_size == 24 for engine in (first, second))
    assert first.core.ask("end")
    assert not [one for one in left(wish) if first.name in one]
    assert len([one for one in left(wish) if second.name in one]) == 2
    assert second.core.ask("take", 100) == 100


@pytest.mark.long
def test_the_next_owner_clears_what_killed_ones_left(engines: Callable[..., Engine], wish: str) -> None:
    """Sockets, account, and the device's account once nobody uses that; a worker that lives keeps its engine's."""
    dead, living = engines("ours"), engines("ours")
    for engine in (dead, living):
        engine.start()
        engine.core.ask("manage")
    dead.core.end(signal.SIGKILL)
    engines("ours")
    assert [one for one in left(wish) if dead.name in one]
    dead.worker.end(signal.SIGKILL)
    engines("ours")
    assert not [one for one in left(wish) if dead.name in one]
    assert [one for one in left(wish) if living.name in one]


@pytest.mark.long
def test_a_worker_without_its_engine_is_refused(engines: Callable[..., Engine]) -> None:
    """The refusal says that its engine core is on another host, or has ended."""
    engine = engines("ours")
    engine.core.end(signal.SIGKILL)
    said = engine.worker.ask("name", engine.name)
    assert "no engine that owns the kvcached name" in said and "remedy" in said
