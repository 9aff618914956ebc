# SPDX-License-Identifier: Apache-2.0
"""The proof at start, over real NIXL and real kvcached: it finds which transports follow kvcached's pages."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hostvmm import is_hostvmm_build
from support.waiting import until

from kvcached_nixl.proof.find import find
from kvcached_nixl.proof.result import AS_CONFIGURED, Proof, Question

pytestmark = [
    pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory"),
    pytest.mark.timeout(180),
]
QUESTION = Question("cpu", 0, "DRAM", ("UCX",))
STATES = ("mapped before registration", "mapped after registration", "mapped again")
WAYS = ("a peer READ", "a peer WRITE", "its own WRITE", "its own READ")


def prove(cache: Path, question: Question = QUESTION, **environ: str) -> Proof:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "KVCACHED_"))}
    return find(question, {**inherited, "XDG_CACHE_HOME": str(cache), **environ})


PREAMBLE = """
import kvcached.vmm_ops, nixl._api
from kvcached_nixl.proof.__main__ import Remote, prove_one
from kvcached_nixl.proof.result import Question, transports_of

QUESTION = Question("cpu", 0, "DRAM", ("UCX",))
"""


def private() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "KVCACHED_"))}
    own = f"test-{uuid.uuid4().hex[:16]}"
    own_device = {"KVCACHED_HOSTVMM_DEVICE": own, "KVCACHED_IPC_NAME": own, "KVCACHED_HOSTVMM_GIB": "0.125"}
    return {**inherited, **own_device, "ENABLE_KVCACHED": "true"}


def in_a_prover(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], env=private(), capture_output=True, text=True, timeout=170, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def prover_says(expression: str) -> str:
    return in_a_prover(f"print(); print({expression}, end='')").rpartition("\n")[2]


@pytest.mark.long
def test_every_lane_of_this_machine_follows_the_pages(tmp_path: Path) -> None:
    """TCP everywhere; what else there is, and what UCX chooses of it. The engine's device may be full: this one is."""
    proof = prove(tmp_path, KVCACHED_HOSTVMM_GIB="0.002")
    names = [lane.name for lane in proof.lanes]
    assert {"tcp", AS_CONFIGURED} <= set(names) and len(names) == len(set(names)) and "self" not in names
    assert proof.why_not == ()
    for lane in [one for one in proof.lanes if not one.never]:
        assert set(lane.rates) == {"elastic", "ordinary"}
        assert all(min(rates.read, rates.write, rates.descriptors) > 0 for rates in lane.rates.values())
    assert prove(tmp_path, KVCACHED_HOSTVMM_GIB="0.002") == proof


def test_a_registration_that_pins_is_caught_on_every_lane(tmp_path: Path) -> None:
    """What was mapped at registration is right even so: a proof that only looked at that would see nothing."""
    proof = prove(tmp_path, NIXL_HOSTVMM_REGISTRATION="pinned", UCX_TLS="tcp,cma")
    assert {lane.name for lane in proof.lanes} >= {"tcp", AS_CONFIGURED}
    for lane in proof.lanes:
        assert not lane.unusable
        found = " | ".join(lane.wrong)
        assert STATES[0] not in found
        for state, words in zip(STATES[1:], lane.wrong, strict=True):
            assert state in words and all(way in words for way in WAYS)
    assert len(proof.why_not) == len(proof.lanes)


@pytest.mark.long
@pytest.mark.parametrize("lane", ["rc_mlx5", "cuda_ipc", "srd"])
def test_what_did_not_carry_the_bytes_is_not_proved(lane: str) -> None:
    """UCX silently falls back to another transport, with right bytes; between two hosts it may not fall back."""
    found = prover_says(f"prove_one(QUESTION, {lane!r}, transports_of({lane!r}, 'cpu')).why_not")
    assert found.startswith(f"{lane} could not be tested: ") and "UCX moves bytes over tcp" in found


@pytest.mark.long
def test_what_carried_the_bytes_is_told_by_ucx() -> None:
    assert prover_says("prove_one(QUESTION, 'tcp', ('tcp',)).why_not") == ""
    assert "UCX moves bytes over tcp with UCX_TLS=tcp" in prover_says("prove_one(QUESTION, 'cma', ('tcp',)).why_not")


@pytest.mark.long
def test_nobody_outlives_a_prover_that_is_killed() -> None:
    code = (
        PREAMBLE
        + """
import os, signal
one, other = Remote(QUESTION, "tcp", is_elastic=True), Remote(QUESTION, "tcp")
one.begun(); other.begun()
print(one._process.pid, other._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    finished = subprocess.run([sys.executable, "-c", code], env=private(), capture_output=True, text=True, check=False)
    pids = [int(word) for word in finished.stdout.splitlines()[-1].split()]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they go on")


HAZARD = """
holder, peer = Remote(QUESTION, "tcp", is_elastic=True), Remote(QUESTION, "tcp")
begins, _ = holder.begun(), peer.begun()
peer.call("meet", holder.call("register"))
peer.call("register")
holder.call("map", [0])
holder.call("fill", "elastic", 0, 7)
for is_mapped, value in ((True, 7), (False, 0)):
    if not is_mapped:
        holder.call("unmap", [0])
    peer.call("fill", "ordinary", 0, 9)
    peer.call("move", "READ", "ordinary", begins["elastic"], [0])
    assert peer.call("holds", "ordinary", 0, value), (is_mapped, value)
holder.end()
peer.end()
"""


def test_what_is_not_backed_is_read_as_zeros() -> None:
    """The hazard behind the safety rules: it is no error."""
    in_a_prover(HAZARD)
