# SPDX-License-Identifier: Apache-2.0
"""Rules R2 and R13: a peer that was stopped during a transfer changes no byte of other requests when it continues.

Uses real NIXL and processes that are stopped by signals, over TCP and over the transport that UCX chooses on one host:
shared memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import FOLDER

pytest.importorskip("nixl", reason="needs an environment: bash experiments/env.sh")

import numpy as np
from support.fencing_rank import NUM_BLOCKS
from support.waiting import until

from kvcached_nixl.transport.agent import TransferState, Transport, WriteGate, make_agent, open_gate

SECONDS = 120.0
TRIES = 3
"""A busy machine may stop a writer too late: when it has written everything, or has handed it all to the kernel."""

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """What decode has found: (transports, ending, fault, operation)."""

    def once(folder: Path, transports: str, *arguments: str) -> dict[str, Any]:
        folder.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        if transports == "tcp":
            environ["UCX_TLS"] = "tcp"
        environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        program = [sys.executable, str(FOLDER / "fencing_rank.py")]
        with subprocess.Popen([*program, "prefill", str(folder)], env=environ, stdout=subprocess.DEVNULL) as prefill:
            try:
                (folder / "pid").write_text(str(prefill.pid))
                until(lambda: (folder / "prefill").exists() or prefill.poll() is not None)
                assert prefill.poll() is None
                done = subprocess.run(
                    [*program, "decode", str(folder), *arguments],
                    env=environ, capture_output=True, text=True, timeout=SECONDS, check=False,
                )  # fmt: skip
            finally:
                prefill.kill()
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, f"exit status {done.returncode}: " + done.stdout[-3000:] + done.stderr[-3000:]
        found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
        return found

    def tried(transports: str, ending: str, fault: str, operation: str = "WRITE") -> dict[str, Any]:
        for number in range(TRIES):
            found = once(tmp_path / str(number), transports, operation, ending, fault)
            if 0 < found["arrived"] < NUM_BLOCKS and (fault == "none" or found["changed"]):
                return found
        raise AssertionError(f"no peer was stopped in the middle and, with a planted fault, moved bytes later: {found}")

    return tried


def test_over_tcp_a_writer_that_stands_still_is_fenced(run: Run) -> None:
    """Within a bounded time, though nobody answers for it; when it wakes up it writes nothing."""
    found = run("tcp", "fenced", "none")
    assert found["freed_while_it_stood_still"] and found["seconds"] < 20
    assert found["changed"] == 0 and found["gates"] == 1


@pytest.mark.long
@pytest.mark.parametrize("ending", ["goes on", "killed"])
def test_over_shared_memory_a_writer_is_held_until_it_answers_or_has_ended(ending: str, run: Run) -> None:
    """Nothing that is closed here keeps it from writing: as long as it exists its blocks are nobody's."""
    found = run("", ending, "none")
    assert not found["freed_while_it_stood_still"] and found["freed_afterwards"]
    assert found["changed"] == 0


@pytest.mark.parametrize("ending", ["goes on", pytest.param("killed", marks=pytest.mark.long)])
def test_a_read_is_held_until_its_peer_goes_on_or_has_ended(ending: str, run: Run) -> None:
    """Its peer was removed meanwhile. NIXL calls such a READ failed, and UCX still moves its bytes."""
    found = run("tcp", ending, "none", "READ")
    assert not found["freed_while_it_stood_still"] and found["freed_afterwards"]
    assert found["changed"] == 0


@pytest.mark.long
def test_what_nixl_calls_failed_when_its_peer_is_removed_goes_on(run: Run) -> None:
    """A planted fault: if it changes nothing, the case above shows nothing."""
    assert run("tcp", "fenced", "taken down", "READ")["freed_while_it_stood_still"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("transports", "fault"), [("tcp", "reused"), ("tcp", "left open"), ("", "reused"), ("", "left open")]
)
def test_without_a_fence_it_writes_into_what_others_got(transports: str, fault: str, run: Run) -> None:
    """The same with a planted fault: if this finds nothing, the cases above show nothing."""
    assert run(transports, "fenced", fault)["freed_while_it_stood_still"]


def test_what_comes_through_a_gate_is_heard_there_and_nothing_comes_when_it_is_closed() -> None:
    """Another agent's name is told with it, though the gate has never met it."""
    source, target = (np.full(1 << 20, value, dtype=np.uint8) for value in (7, 1))
    agent = make_agent(["UCX"])
    agent.register_memory(agent.get_reg_descs([(source.ctypes.data, source.nbytes, 0, "")], "DRAM"), backends=["UCX"])
    transport = Transport(agent, "DRAM")
    gate = open_gate(["UCX"], [(target.ctypes.data, target.nbytes)], "DRAM")
    assert isinstance(gate, WriteGate)
    peer = transport.add_peer(gate.metadata())
    assert peer == gate.name
    here, there = (np.array([(one.ctypes.data, one.nbytes)], dtype=np.int64) for one in (source, target))
    handle = transport.post("WRITE", peer, here, there, b"written")
    heard: list[tuple[str, bytes]] = []

    def arrived() -> bool:
        transport.state(handle)
        heard.extend(gate.received())
        return bool(heard)

    until(arrived)
    assert heard == [(agent.name, b"written")] and bool((target == 7).all())
    until(lambda: transport.state(handle) is TransferState.DONE)
    transport.release(handle)
    assert gate.close() and gate.close()


def test_a_gate_that_somebody_still_holds_is_not_closed() -> None:
    memory = np.zeros(1 << 20, dtype=np.uint8)
    gate = open_gate(["UCX"], [(memory.ctypes.data, memory.nbytes)], "DRAM")
    held = gate._agent
    assert not gate.close() and not gate.close()
    del held
    assert gate.close()
