# SPDX-License-Identifier: Apache-2.0
"""Checksums depend on tokens and heads: equal for every layout, and different for any byte that differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.digest_fakes import areas_of, cell_at, laid_out

from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.worker.transfer import checksums as content
from kvcached_nixl.worker.transfer.checksums import Content

NUM_BLOCKS, CELL_BYTES, NUM_PLANES, HEADS, TOKENS = 24, 6, 3, 4, 40
CELLS = np.random.default_rng(5).integers(0, 256, (NUM_PLANES, TOKENS, HEADS, CELL_BYTES), dtype=np.uint8)


@dataclass
class Rank:
    """Some heads of the tokens' cells, in one arrangement; everything else is noise."""

    planes: Planes
    memory: torch.Tensor
    content: Content
    blocks: KernelBlockRange
    areas: list[tuple[int, torch.Tensor]]

    @property
    def group(self) -> GroupMemory:
        return GroupMemory((self.planes,))

    def cell(self, plane: int, token: int, head: int) -> torch.Tensor:
        block, rest = divmod(token - self.blocks.first_token, self.planes.block_size)
        begin = cell_at(
            self.planes,
            self.planes.bases[plane] - self.memory.data_ptr(),
            self.blocks.block_ids[block],
            rest,
            head - self.planes.first_head,
        )
        return self.memory[begin : begin + CELL_BYTES]


def rank(block_size: int = 4, heads: range = range(HEADS), *, first_token: int = 0, seed: int = 1, **how: bool) -> Rank:
    """Planes apart, each an area of its own; or side by side in every block, one area."""
    random = np.random.default_rng(seed)
    size = block_size * len(heads) * CELL_BYTES * NUM_PLANES * NUM_BLOCKS
    memory = torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))
    begin = memory.data_ptr()
    planes = laid_out(NUM_PLANES, NUM_BLOCKS, block_size, heads, CELL_BYTES, begin=begin, **how)
    areas = areas_of(planes, memory)
    first_token -= first_token % block_size
    ids = random.permutation(NUM_BLOCKS)[: -(-(TOKENS - first_token) // block_size)].tolist()
    made = Rank(planes, memory, Content((GroupMemory((planes,)),), areas), KernelBlockRange(first_token, ids), areas)
    for token in range(first_token, TOKENS):
        for plane in range(NUM_PLANES):
            for head in heads:
                made.cell(plane, token, head).copy_(torch.from_numpy(CELLS[plane, token, head]))
    return made


def digest(here: Rank, there: Rank, first: int = 0, end: int = TOKENS) -> str:
    return here.content.digest([(here.blocks, first)], end, (there.group,), is_prefill=True)


ARRANGEMENTS = st.builds(
    rank,
    block_size=st.sampled_from([2, 4, 8]),
    contiguous=st.booleans(),
    head_major=st.booleans(),
    heads=st.sampled_from([range(HEADS), range(2), range(2, 4)]),
    seed=st.integers(0, 99),
)


@given(one=ARRANGEMENTS, other=ARRANGEMENTS, first=st.integers(0, TOKENS - 1), length=st.integers(1, TOKENS))
def test_the_same_tokens_and_heads_are_equal_wherever_they_lie(one: Rank, other: Rank, first: int, length: int) -> None:
    end = min(TOKENS, first + length)
    if set(range(one.planes.first_head, one.planes.last_head)).isdisjoint(
        range(other.planes.first_head, other.planes.last_head)
    ):
        with pytest.raises(ValueError, match="heads"):
            digest(one, other, first, end)
        return
    assert digest(one, other, first, end) == digest(other, one, first, end)


@given(
    here=ARRANGEMENTS,
    plane=st.integers(0, NUM_PLANES - 1),
    token=st.integers(0, TOKENS - 1),
    head=st.integers(0, HEADS - 1),
    byte=st.integers(0, CELL_BYTES - 1),
)
def test_every_byte_that_is_meant_counts_and_no_other(here: Rank, plane: int, token: int, head: int, byte: int) -> None:
    """Meant are the tokens 10 to 29 of the heads that both sides have."""
    there = rank(heads=range(1, 3))
    head = min(max(head, here.planes.first_head), here.planes.last_head - 1)
    before = digest(here, there, 10, 30)
    here.cell(plane, token, head)[byte] ^= 1
    is_meant = 10 <= token < 30 and head in (1, 2)
    assert (digest(here, there, 10, 30) != before) is is_meant


def test_groups_are_told_apart_and_those_that_begin_later_are_left_out() -> None:
    """As where a sliding window is past the range."""
    here = rank()
    groups = (here.group, here.group)
    both = Content(groups, here.areas)
    whole = both.digest([(here.blocks, 0), (here.blocks, 8)], TOKENS, groups, is_prefill=True)
    assert whole != both.digest([(here.blocks, 8), (here.blocks, 0)], TOKENS, groups, is_prefill=True)
    alone = here.content.digest([(here.blocks, 0)], 8, groups[:1], is_prefill=True)
    assert alone == both.digest([(here.blocks, 0), (here.blocks, 8)], 8, groups, is_prefill=True)


def test_planes_that_change_places_are_seen() -> None:
    """K for V."""
    here = rank()
    before = digest(here, here)
    cells = [here.cell(plane, 5, 1).clone() for plane in range(2)]
    for plane, cell in zip((1, 0), cells, strict=True):
        here.cell(plane, 5, 1).copy_(cell)
    assert digest(here, here) != before


@pytest.mark.parametrize("contiguous", [False, True])
def test_pieces_make_no_difference(contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here = rank(contiguous=contiguous)
    whole = digest(here, here, 3, 37)
    monkeypatch.setattr(content, "_PIECE_BYTES", 1)
    assert digest(here, here, 3, 37) == whole


def test_tokens_that_are_not_in_the_blocks_are_refused() -> None:
    here = rank(first_token=8)
    with pytest.raises(ValueError, match="expected them to hold the tokens 0 to 39"):
        digest(here, here, 0)
    with pytest.raises(ValueError, match="expected them to hold the tokens 8 to 40"):
        digest(here, here, 8, TOKENS + 1)


def test_a_plane_outside_the_areas_is_refused() -> None:
    here = rank()
    with pytest.raises(ValueError, match="in the first block of a region"):
        Content((here.group,), [(here.planes.bases[0], here.memory.view(NUM_BLOCKS * NUM_PLANES, -1)[:1])])
