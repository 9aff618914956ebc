# SPDX-License-Identifier: Apache-2.0
"""Which results of the proof forbid registering kvcached's pages, and which do not."""

from __future__ import annotations

import msgspec

from kvcached_nixl.proof.result import SLOW, LaneFound, Proof, Question, Rates
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
