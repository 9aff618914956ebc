# SPDX-License-Identifier: Apache-2.0
"""wire/handshake.py, `Kind`: engines whose handshake succeeds have the numbers of a pair that fits; others have not."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import Answer, Kind, Process, RankHandshake, Tensors, Weights
from kvcached_nixl.wire.planes import GroupMemory, Planes

PLANES = Planes((0, 4096), 512, 128, 64, 64, 8, 4, 2, first_head=2)
GROUPS = (GroupMemory((PLANES,), 2),)
A, B, C = ("a" * 32, "b" * 32, "c" * 32)


def answer(weights: Weights, tag: str = "tag") -> tuple[str, bytes]:
    rank = RankHandshake(EngineId("e"), 2, 1, b"", 0, GROUPS, 0, "DRAM", False, weights, Process())
    return tag, msgspec.msgpack.encode(Answer("0" * 16, msgspec.msgpack.encode(rank)))


def known(layout: str, content: str, files: str) -> Weights:
    return Weights(Tensors(layout, content), files=files)


def fits(one: Kind, other: Kind) -> bool:
    """As docs/metrics.md says it."""
    is_same = 0 < one.weights == other.weights or 0 < one.checkpoint == other.checkpoint
    return one.compatibility == other.compatibility and is_same


def test_the_numbers_fit_where_a_handshake_would_succeed() -> None:
    """Every pair of weights of one rank, with memory or files known or not."""
    found = [known(*one) for one in product((A, B), ("", A, B), ("", B, C))]
    for ours, theirs in product(found, found):
        # With other memory of one layout, files are known only if kernels have rewritten what was loaded.
        if ours.memory.is_comparable(theirs.memory) and ours.memory != theirs.memory and ours.files:
            continue
        here, there = (Kind.of([answer(one)]) for one in (ours, theirs))
        assert fits(here, there) is (ours.misfit(theirs) == ""), (ours, theirs)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(Malformed):
        Kind.of([("tag", b"\xc1")])
