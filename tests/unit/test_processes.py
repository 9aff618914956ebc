# SPDX-License-Identifier: Apache-2.0
"""processes.py: real processes that live, are stopped, have ended, or belong to others; and who has started whom."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from kvcached_nixl import processes as host
from kvcached_nixl.processes import Host, own_process
from kvcached_nixl.wire.handshake import Process

CHILD = """
import sys, threading
from kvcached_nixl.processes import own_process
own = own_process()
print(own.boot_id, own.namespaces, own.pid, own.started, sep="|", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], Process]]:
    """Another process, and what it says of itself."""
    program = [sys.executable, "-c", CHILD]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        boot_id, namespaces, pid, started = one.stdout.readline().strip().split("|")
        yield one, Process(boot_id, namespaces, int(pid), int(started))
        one.kill()


@pytest.fixture
def here() -> Host:
    return Host.here("DRAM", {})


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["waited for", "a zombie"])
def test_one_that_has_ended_is_gone(
    is_waited_for: bool, here: Host, child: tuple[subprocess.Popen[str], Process]
) -> None:
    """Whether its parent has looked after it or not."""
    process, said = child
    process.kill()
    if is_waited_for:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists()
    assert here.is_dead(said) and not here.sees(said)


def test_a_zombie_one_of_whose_threads_lives_is_not_gone(here: Host) -> None:
    """Its first thread has ended, and another one may be writing."""
    program = (
        "import ctypes, sys, threading, time\n"
        "from kvcached_nixl.processes import own_process\n"
        "own = own_process()\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print(own.started, flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit(2) is another one")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = msgspec.structs.replace(here.own, pid=process.pid, started=int(process.stdout.readline()))
        stat = Path(f"/proc/{process.pid}/stat")
        while ") Z " not in stat.read_text():
            pass
        assert not here.is_dead(said)
        process.kill()
        process.wait()
        assert here.is_dead(said)


def test_another_process_of_the_same_number_is_not_the_one_that_was_meant(here: Host) -> None:
    before = msgspec.structs.replace(here.own, started=here.own.started - 1)
    assert not here.sees(before) and here.is_dead(before)


def test_one_that_is_hidden_is_not_gone(
    here: Host, child: tuple[subprocess.Popen[str], Process], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``hidepid``: its folder is not shown; but the kernel says that there is one."""
    _, said = child
    monkeypatch.setattr(host, "_PROC", tmp_path)
    assert not here.is_dead(said) and not here.sees(said)


@pytest.mark.parametrize(
    "changed", [{"boot_id": "another"}, {"namespaces": "pid:[1]"}, {"pid": 0}, {"boot_id": "", "namespaces": ""}]
)
def test_what_is_not_of_this_host_and_its_namespaces_is_not_seen(changed: dict[str, object], here: Host) -> None:
    """Its number is another one's here."""
    assert not here.sees(msgspec.structs.replace(here.own, **changed))


def test_where_proc_shows_another_namespace_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ns").mkdir()
    (tmp_path / "ns" / "pid").symlink_to("pid:[1]")
    (tmp_path / "self").symlink_to("12345678")
    (tmp_path / "12345678").symlink_to(".")
    monkeypatch.setattr(host, "_PROC", tmp_path)
    assert own_process() == Process()


OWN = Process("boot", "pid:[1]", 1, 1)
NEIGHBOUR = Process("boot", "pid:[2]", 1, 1)
ELSEWHERE = Process("another boot", "pid:[1]", 1, 1)


@pytest.mark.parametrize(
    ("process", "memory_type", "transports", "expected"),
    [
        (ELSEWHERE, "DRAM", "", True),
        (ELSEWHERE, "VRAM", "", True),
        (OWN, "DRAM", "", False),
        (OWN, "DRAM", "tcp", True),
        (OWN, "VRAM", "rc, tcp,self", True),
        (OWN, "DRAM", "tcp,cma", False),
        (OWN, "DRAM", "^cma", False),
        (OWN, "DRAM", "all", False),
        (OWN, "VRAM", "tcp,cuda_copy", False),
        # Another container of the same host: no process of another namespace can be named to the kernel.
        (NEIGHBOUR, "DRAM", "", True),
        (NEIGHBOUR, "VRAM", "", False),
        (Process(), "DRAM", "", False),
    ],
)
def test_who_has_no_way_but_a_network(
    process: Process, memory_type: host.MemoryType, transports: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_XPMEM", Path("/nowhere"))
    assert Host(OWN, memory_type, transports).is_behind_network(process) is expected


def test_one_that_does_not_know_its_own_host_trusts_nothing() -> None:
    assert not Host(Process(), "DRAM").is_behind_network(ELSEWHERE) and not Host(Process(), "DRAM").sees(Process())


def test_a_program_that_has_started_this_process_is_found_through_others() -> None:
    """`vllm-rs serve` starts Python, which starts the engine."""
    said = "from kvcached_nixl.processes import has_ancestor; import sys; print(has_ancestor(sys.argv[1]))"
    mine = psutil.Process().name()
    between = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', {said!r}, sys.argv[1]])"
    for program, is_found in ((mine, "True"), ("vllm-rs", "False")):
        found = subprocess.run([sys.executable, "-c", between, program], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == is_found
