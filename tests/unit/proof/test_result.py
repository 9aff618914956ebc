# SPDX-License-Identifier: Apache-2.0
"""What a proof forbids, how UCX's output is read, how one transport is used alone, and a prover whose lanes hang."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvcached_nixl.proof import __main__ as prover
from kvcached_nixl.proof.__main__ import LANES_SECONDS, prove_lanes
from kvcached_nixl.proof.result import (
    AS_CONFIGURED,
    SLOW,
    LaneFound,
    Proof,
    Question,
    Rates,
    Ucx,
    _resources,
    carriers,
    is_never_chosen,
    transports_of,
)
from kvcached_nixl.settings import MemoryPath

FAST = Rates(8e9, 8e9, 1e6)
GOOD = LaneFound("cma", "cma,tcp", rates={"elastic": FAST, "ordinary": FAST})


def proof(*lanes: LaneFound) -> Proof:
    return Proof(Question("cpu", 0, "DRAM", ("UCX",)), {}, lanes, None, 1.0)


def on_a_gpu(*lanes: LaneFound) -> Proof:
    return Proof(Question("cuda", 0, "VRAM", ("UCX",)), {}, lanes, None, 1.0)


def lane(
    name: str, *, elastic: tuple[float, float], ordinary: tuple[float, float], host: tuple[float, float]
) -> LaneFound:
    """A lane with (READ, WRITE) in GB/s."""
    rates = {"elastic": elastic, "ordinary": ordinary, "host": host}
    return LaneFound(
        name,
        name,
        rates={place: Rates(read * 1e9, write * 1e9, 5e4) for place, (read, write) in rates.items()},  # type: ignore[misc]
    )


H200_TCP = lane("tcp", elastic=(0.42, 0.36), ordinary=(0.39, 0.45), host=(1.5, 3.5))
H200_IPC = lane("cuda_ipc", elastic=(0.46, 0.41), ordinary=(0.46, 33.2), host=(1.4, 4.4))
"""As measured on an H200 with UCX 1.21: docs/measurements.md."""


def with_elastic(**rates: float) -> LaneFound:
    elastic = msgspec.structs.replace(FAST, **rates)
    return msgspec.structs.replace(GOOD, rates={"elastic": elastic, "ordinary": FAST})


def test_nothing_keeps_them_where_every_lane_follows() -> None:
    assert proof(GOOD, GOOD).why_not == ()


def test_one_lane_is_enough_to_keep_them() -> None:
    """UCX may choose it for any pair of hosts."""
    wrong = msgspec.structs.replace(GOOD, name="rc_mlx5", wrong=("a peer's READ of a page that was mapped again",))
    (words,) = proof(GOOD, wrong).why_not
    assert "rc_mlx5" in words and "a peer's READ" in words


def test_what_is_not_known_keeps_them() -> None:
    (words,) = proof(GOOD, LaneFound("gdr_copy", "gdr_copy,tcp", unusable="no endpoint")).why_not
    assert "gdr_copy" in words and "no endpoint" in words


def test_a_copy_path_is_told_from_noise() -> None:
    """cuda_ipc over pages without a shareable handle is right, and slower by hundreds (nixl#1754)."""
    for direction in ("read", "write"):
        slow = proof(with_elastic(**{direction: 8e9 / 600}))
        (words,) = slow.why_slow
        assert "0.0133 GB/s" in words and "8 GB/s" in words and slow.why_not == ()
        assert proof(with_elastic(**{direction: 8e9 / SLOW})).why_slow == ()
        assert proof(with_elastic(**{direction: 7.9e9 / SLOW})).why_slow != ()


def test_a_slab_is_where_every_lane_writes_it_faster() -> None:
    """A slab's KV is always written, so reading does not count."""
    both = on_a_gpu(H200_TCP, H200_IPC)
    assert both.memory_path is both.slab is MemoryPath.DEVICE
    (words,) = both.why_slow
    assert "cuda_ipc moves kvcached's pages at 0.46 GB/s (READ) and 0.41 GB/s (WRITE)" in words
    assert "33.2 GB/s (WRITE)" in words
    tcp = on_a_gpu(H200_TCP, LaneFound("posix", "posix", never="it does not notice the end of a peer"))
    assert tcp.memory_path is tcp.slab is MemoryPath.HOST
    (words,) = tcp.why_slow
    assert "a slab at 1.5 GB/s (READ) and 3.5 GB/s (WRITE)" in words
    wrong = msgspec.structs.replace(H200_TCP, wrong=("mapped again (a peer READ)",))
    assert on_a_gpu(wrong).memory_path is MemoryPath.HOST, "bytes of a slab do not depend on the pages"
    assert on_a_gpu(LaneFound("tcp", "tcp", unusable="no endpoint")).memory_path is MemoryPath.DEVICE


def test_gpu_memory_that_a_transport_reaches_by_itself_needs_no_slab_on_the_host() -> None:
    fast = lane("rc_mlx5", elastic=(40, 40), ordinary=(45, 45), host=(48, 48))
    assert on_a_gpu(fast).memory_path is MemoryPath.DIRECT
    copied = lane("rc_mlx5", elastic=(3, 3), ordinary=(45, 45), host=(48, 48))
    assert on_a_gpu(copied).memory_path is MemoryPath.DEVICE


def test_a_faster_taking_counts() -> None:
    slow, other = Rates(1.0, 5.0, 3.0), Rates(2.0, 4.0, 3.0)
    assert slow.best_of(other) == other.best_of(slow) == Rates(2.0, 5.0, 3.0)
    assert slow.best_of(None) == slow


# ----------------------------------------------------------------------------------------------------------- transports


PRINTED = """\
#            md 0  :  component 0  self
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 3  :  md 4  dev 0  flags -- cma/memory
#      resource 4  :  md 5  dev 3  flags -- rc_mlx5/mlx5_0:1
#      resource 5  :  md 6  dev 4  flags -- cuda_ipc/cuda
"""


def test_each_transport_is_named_once_and_what_has_one_end_is_none() -> None:
    assert Ucx("1.19.0", _resources(PRINTED)).lanes == ("tcp", "cma", "rc_mlx5", "cuda_ipc")
    assert Ucx("1.19.0", _resources("#\n# UCP context\n#\n")).lanes == ()


@pytest.mark.parametrize(
    ("lane", "device", "alone"),
    [
        ("tcp", "cpu", "tcp"),
        ("cma", "cpu", "cma,tcp"),
        ("tcp", "cuda", "tcp,cuda_copy"),
        ("cuda_ipc", "cuda", "cuda_ipc,cuda_copy,tcp"),
        ("rc_mlx5", "cuda", "rc_mlx5,ud_verbs:aux,ud_mlx5:aux,cuda_copy"),
        ("what comes next", "cpu", "what comes next"),
    ],
)
def test_a_transport_is_used_alone_with_what_it_needs(lane: str, device: str, alone: str) -> None:
    first, second = transports_of(lane, device)
    assert first == alone
    assert second.split(",").count("tcp") == 1 and set(alone.split(",")) <= set(second.split(","))


CHOSEN = """\
2026-11-23 17:00:18 NIXL INFO    _api.py:405 Backend UCX was instantiated
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453218.9] [host:22880:0]   | 155a60af46ad45aeb0649326c83c6c9 self cfg#0               |
[1795453218.9] [host:22880:0]   | remote memory write by ucp_put* from host memory to host |
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453218.9] [host:22880:0]   | Range  | Description |              Config               |
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453218.9] [host:22880:0]   | 0..inf | zero-copy   | rc_mlx5/mlx5_0:1                  |
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453219.0] [host:22880:0]   | 155a60af46ad45aeb0649326c83c6c9 intra-node cfg#1         |
[1795453219.0] [host:22880:0]   | remote memory write by ucp_put* from host memory to host |
[1795453219.0] [host:22880:0]   | Range  | Description |              Config               |
[1795453219.0] [host:22880:0]   | 0..512 | short       | cma/memory                        |
[1795453219.0] [host:22880:0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1795453219.1] [host:22880:0]   | 155a60af46ad45aeb0649326c83c6c9 intra-node cfg#1         |
[1795453219.1] [host:22880:0]   | active message by ucp_am_send* from host memory          |
[1795453219.1] [host:22880:0]   | Range  | Description |              Config               |
[1795453219.1] [host:22880:0]   |   0    | short       | posix/memory                      |
"""


CHOSEN_BEFORE = """\
[1795454485.2] [host:28313:0] | ucp_context_0 self cfg#0 | remote memory write by ucp_put* from host memory to host |
[1795454485.2] [host:28313:0] |                   0..inf | zero-copy                         | rc_mlx5/mlx5_0:1      |
[1795454485.2] [host:28313:0] | ucp_context_0 intra-node cfg#1 | remote memory read by ucp_get*(multi) into host |
[1795454485.2] [host:28313:0] |                         0..inf | zero-copy                    | cma/memory      |
[1795454485.2] [host:28313:0] | ucp_context_0 intra-node cfg#1 | active message by ucp_am_send* from host memory |
[1795454485.2] [host:28313:0] |                        1..8184 | zero-copy                    | tcp/eth0        |
"""


def test_what_has_carried_a_peers_bytes_is_read_off_what_ucx_says() -> None:
    """Not what it would use to itself, nor for its messages; as UCX 1.20 says it, and 1.18."""
    assert carriers(CHOSEN) == {"cma", "tcp"}
    assert carriers(CHOSEN_BEFORE) == {"cma"}
    assert carriers("") == frozenset()


def test_a_transport_that_ucx_rules_out_is_told_from_one_that_only_failed() -> None:
    said = "UCX  ERROR   no active messages transport to <no debug data>: posix/memory - no peer failure handler"
    assert is_never_chosen("posix", said)
    assert not is_never_chosen("rc_mlx5", said) and not is_never_chosen("posi", said)
    assert not is_never_chosen(
        "rc_mlx5", "no active messages transport to x: rc_mlx5/mlx5_0:1 - Destination is unreachable"
    )


# ------------------------------------------------------------------------------------------------------------- a prover


QUESTION = Question("cuda", 0, "VRAM", ("UCX",))
RATES = Rates(1e9, 1e9, 1e5)


class Remote:
    def __init__(self, question: Question, transports: str, *, has_memory: bool) -> None:
        assert not has_memory, "a full device would keep it from answering"

    def begun(self) -> None:
        pass

    def call(self, name: str) -> Ucx:
        return Ucx("1.19.0", ("self/memory", "rc_mlx5/mlx5_0:1", "cuda_ipc/cuda", "tcp/eth0"))

    def end(self) -> None:
        pass


def test_lanes_that_hang_leave_the_others_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has not timed out by then, and keeps the answer."""
    now = 1000.0

    def prove_one(question: Question, name: str, transports: Sequence[str]) -> LaneFound:
        nonlocal now
        now += LANES_SECONDS / 2 + 1
        return LaneFound(name, transports[0], rates={"elastic": RATES, "ordinary": RATES})

    monkeypatch.setattr(prover, "Remote", Remote)
    monkeypatch.setattr(prover, "prove_one", prove_one)
    monkeypatch.setattr(prover.time, "monotonic", lambda: now)
    said = prove_lanes(QUESTION)
    assert [lane.name for lane in said.lanes] == ["rc_mlx5", "cuda_ipc", "tcp", AS_CONFIGURED]
    assert [lane.name for lane in said.lanes if lane.unusable] == ["tcp", AS_CONFIGURED]
    assert "took 150 s" in said.lanes[-1].why_not
