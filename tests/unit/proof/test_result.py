# SPDX-License-Identifier: Apache-2.0
"""Which results of the proof forbid registering kvcached's pages, and which do not."""

from __future__ import annotations

import msgspec

from kvcached_nixl.proof.result import SLOW, LaneFound, Proof, Question, Rates

FAST = Rates(8e9, 8e9, 1e6)
GOOD = LaneFound("cma", "cma,tcp", rates={"elastic": FAST, "ordinary": FAST})


def proof(*lanes: LaneFound) -> Proof:
    return Proof(Question("cpu", 0, "DRAM", ("UCX",)), {}, lanes, None, 1.0)


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


def test_a_faster_taking_counts() -> None:
    slow, other = Rates(1.0, 5.0, 3.0), Rates(2.0, 4.0, 3.0)
    assert slow.best_of(other) == other.best_of(slow) == Rates(2.0, 5.0, 3.0)
    assert slow.best_of(None) == slow
