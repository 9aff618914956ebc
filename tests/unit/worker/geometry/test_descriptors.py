# SPDX-License-Identifier: Apache-2.0
"""Descriptors cover exactly the cells of the requested tokens and heads, for all pairs of geometries."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.digest_fakes import cell_at, laid_out

from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.geometry import descriptors
from kvcached_nixl.worker.geometry.descriptors import Descriptors, Route, misfit

CELL_BYTES = 2


def pair(local: Planes, remote: Planes, *arguments: Any, **more: Any) -> Descriptors:
    return Route(local, remote).descriptors(*arguments, **more)


class Side(NamedTuple):
    """A rank's memory: bytes, and the planes that describe them. Addresses are offsets into ``memory``."""

    planes: Planes
    memory: np.ndarray[Any, np.dtype[np.uint8]]

    def cell(self, plane: int, block: int, token: int, head: int) -> slice:
        at = cell_at(self.planes, self.planes.bases[plane], block, token, head - self.planes.first_head)
        return slice(at, at + CELL_BYTES)


def side(
    planes: int, num_blocks: int, block_size: int, num_heads: int, first_head: int, *, seed: int = 0, **how: bool
) -> Side:
    gap, heads = 6, range(first_head, first_head + num_heads)
    made = laid_out(planes, num_blocks, block_size, heads, CELL_BYTES, gap=gap, **how)
    total = planes * (num_blocks * block_size * num_heads * CELL_BYTES + gap)
    return Side(made, np.random.default_rng(seed).integers(0, 256, total, dtype=np.uint8))


@st.composite
def transfers(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.sampled_from([(4, 4), (4, 8), (8, 4), (2, 6)]))
    heads = draw(st.sampled_from([(4, 0, 4, 0), (4, 0, 2, 2), (2, 2, 4, 0), (1, 0, 4, 0), (1, 0, 1, 0)]))
    planes = draw(st.integers(1, 3))
    contiguous = draw(st.booleans())
    orders = draw(st.sampled_from([(False, False), (True, True), (False, True)]))
    skipped = draw(st.integers(0, 2)) * max(sizes)
    end = skipped + draw(st.integers(1, 30))
    needed = [-(-end // sizes[0]), -(-(end - skipped) // sizes[1])]
    # The other side's last block may be larger: it must hold as much as the smaller one's.
    ids = [draw(st.permutations(range(count + 3)))[: count + 1] for count in needed]
    return {
        "sides": [
            (planes, len(ids[0]) + 3, sizes[0], heads[0], heads[1], orders[0], contiguous),
            (planes, len(ids[1]) + 3, sizes[1], heads[2], heads[3], orders[1], contiguous),
        ],
        "ids": ids,
        "tokens": (skipped, end),
    }


@settings(max_examples=150, deadline=None)
@given(transfers())
def test_every_cell_arrives_and_no_other_byte_changes(case: dict[str, Any]) -> None:
    """Tokens and heads common to both sides, in any order, block size, share of heads and arrangement."""
    local, remote = (
        side(*shape[:5], head_major=shape[5], contiguous=shape[6], seed=place)
        for place, shape in enumerate(case["sides"])
    )
    first, end = case["tokens"]
    found = pair(
        local.planes,
        remote.planes,
        KernelBlockRange(0, case["ids"][0]),
        KernelBlockRange(first, case["ids"][1]),
        first,
        end,
    )

    expected = remote.memory.copy()
    # The rest of the smaller block comes along.
    step = int(np.gcd(local.planes.block_size, remote.planes.block_size))
    for plane in range(len(local.planes.bases)):
        for token in range(first, first + -(-(end - first) // step) * step):
            here, there = token, token - first
            for head in range(
                max(local.planes.first_head, remote.planes.first_head),
                min(local.planes.last_head, remote.planes.last_head),
            ):
                block = case["ids"][0][here // local.planes.block_size]
                other = case["ids"][1][there // remote.planes.block_size]
                source = local.cell(plane, block, here % local.planes.block_size, head)
                expected[remote.cell(plane, other, there % remote.planes.block_size, head)] = local.memory[source]

    for (at, length), (to, same) in zip(found.local, found.remote, strict=True):
        assert length == same
        remote.memory[to : to + length] = local.memory[at : at + length]
    assert np.array_equal(remote.memory, expected)


def test_equal_sides_take_a_descriptor_for_each_run_of_blocks() -> None:
    """Blocks that follow each other on both sides move as one, in all planes at once where layers are side by side."""
    apart, together = (side(3, 16, 4, 2, 0, contiguous=contiguous).planes for contiguous in (False, True))
    runs = KernelBlockRange(0, (3, 4, 5, 9, 10)), KernelBlockRange(0, (7, 8, 9, 2, 3))
    assert len(pair(apart, apart, *runs, 0, 20).local) == 3 * 2
    assert len(pair(together, together, *runs, 0, 20).local) == 2
    assert pair(together, together, *runs, 0, 20).local[:, 1].sum() == 3 * 5 * 4 * 2 * CELL_BYTES


def test_no_descriptor_is_longer_than_what_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of many blocks is cut; no byte is lost, doubled or moved elsewhere."""
    planes = side(1, 16, 4, 2, 0).planes
    runs = KernelBlockRange(0, (3, 4, 5, 6, 9)), KernelBlockRange(0, (7, 8, 9, 10, 2))
    whole = pair(planes, planes, *runs, 0, 20)
    assert whole.local[:, 1].tolist() == [64, 16]

    def cells(found: Descriptors) -> list[tuple[int, int]]:
        return [
            (int(here) + offset, int(there) + offset)
            for (here, length), (there, same) in zip(found.local, found.remote, strict=True)
            for offset in range(length if length == same else -1)
        ]

    for longest in (1, 5, 16, 24, 63, 64, 65):
        monkeypatch.setattr(descriptors, "MAX_RUN_BYTES", longest)
        cut = pair(planes, planes, *runs, 0, 20)
        assert cut.local[:, 1].max() <= longest
        assert len(cut.local) == -(-64 // longest) + -(-16 // longest)
        assert cells(cut) == cells(whole)


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"bases": (0,), "keys": (7,)}, "1 planes of cells of 2 bytes, 0 of them as here; expected 2 of 2"),
    ({"keys": (1, 2)}, "2 planes of cells of 2 bytes, 1 of them as here; expected 2 of 2"),
    (
        {"cell_bytes": 4},
        "2 planes of cells of 4 bytes, 2 of them as here; expected 2 of 2: the same model and data type",
    ),
    ({"first_head": 4}, "the heads 4 to 8; expected some of 0 to 4"),
    ({"block_size": 6}, "blocks of 6 tokens; expected a multiple or a divisor of 4"),
    ({"block_size": 3}, "blocks of 3 tokens"),
]


@pytest.mark.parametrize(("changed", "words"), MISFITS, ids=lambda one: str(one)[:30])
def test_ranks_that_do_not_fit_are_told_so_in_words(changed: dict[str, Any], words: str) -> None:
    planes = side(2, 16, 4, 4, 0).planes
    other = msgspec.structs.replace(planes, **changed)
    assert words in misfit((planes,), (other,))
    with pytest.raises(ValueError, match=words):
        Route(planes, other)
    assert misfit((planes,), (planes,)) == misfit((planes, other), (planes, other)) == ""
    assert "2 kinds of planes; expected 1" in misfit((planes,), (planes, planes))
    assert words in misfit((planes, planes), (planes, other))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"first_token": 2}, "block boundary"),
        ({"first_token": 8}, "block boundary"),
        ({"first_token": -4}, "block boundary"),
        ({"end_token": 9}, "hold the tokens"),
        ({"remote_blocks": KernelBlockRange(4, (1, 2))}, "hold the tokens"),
        ({"remote_blocks": KernelBlockRange(0, ())}, "hold the tokens"),
        ({"local_blocks": KernelBlockRange(0, (1, 16))}, "block ids 1 to 16; expected 0 to 15"),
        ({"local_blocks": KernelBlockRange(0, (-1, 3))}, "block ids -1 to 3"),
        ({"remote_blocks": KernelBlockRange(0, (2**31, 3))}, "block ids 3 to 2147483648"),
    ],
    ids=str,
)
def test_what_cannot_be_carried_is_refused(arguments: dict[str, Any], words: str) -> None:
    """Out of range or out of step: an error with numbers, never a descriptor."""
    planes = side(2, 16, 4, 4, 0).planes
    whole: dict[str, Any] = {
        "local_blocks": KernelBlockRange(0, (1, 2)),
        "remote_blocks": KernelBlockRange(0, (1, 2)),
        "first_token": 0,
        "end_token": 8,
    }
    with pytest.raises(ValueError, match=words):
        pair(planes, planes, **(whole | arguments))


def test_addresses_of_63_bits_are_carried() -> None:
    """B6: whatever `Planes` lets through is added up without leaving 64 bits."""
    low = side(1, 16, 4, 1, 0).planes
    high = msgspec.structs.replace(low, bases=(2**63 - 10_000,))
    found = pair(low, high, KernelBlockRange(0, (15,)), KernelBlockRange(0, (15,)), 0, 4)
    assert found.remote[0, 0] == 2**63 - 10_000 + 15 * 8
