# SPDX-License-Identifier: Apache-2.0
"""Which of a request's blocks a hand-over needs of each KV-cache group. One per engine, the same for every request.

    EVERYTHING   full attention: a block for each stretch of tokens
    WINDOW       sliding windows and chunks: blocks are freed when the window has left them
    STATE        Mamba, linear attention: the last block, which holds the state behind the last computed token

A state is overwritten by each step, and cannot be taken back by a token. To peers its block is one that holds one
token, the last one: so it is moved as any other block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvcached_nixl.ids import LogicalBlock
from kvcached_nixl.wire.manifest import BlockRange

FEWEST_TOKENS = 3
"""Of a prompt whose states are handed over. Prefill computes one token less, and vLLM takes a request of one token for
one that goes on: gated delta nets and linear attention then read the state that another request has left in its block
(vllm#51562)."""

NULL_BLOCK_ID = 0
"""vLLM's placeholder block: it holds no token's KV. Every request with a sliding window has it in its block table."""


class Keeps(Enum):
    EVERYTHING = "everything"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class KVGroup:
    """One KV-cache group.

    Attributes:
        table_block_size: tokens in a block of vLLM's block table.
    """

    table_block_size: int
    keeps: Keeps = Keeps.EVERYTHING

    @property
    def block_size(self) -> int:
        """Tokens in a block, as peers count them."""
        return 1 if self.keeps is Keeps.STATE else self.table_block_size

    def range(self, blocks: list[LogicalBlock], first_token: int, end_token: int) -> BlockRange:
        """The blocks that hold the tokens from ``first_token`` on, which starts a block; of a state the last one. If
        ``blocks``, vLLM's block table of the request, is too short, so is the range."""
        size = self.table_block_size
        if self.keeps is Keeps.STATE:
            place = (end_token - 1) // size
            return BlockRange(end_token - 1, tuple(blocks[place : place + 1]))
        return BlockRange(first_token, tuple(blocks[first_token // size : -(-end_token // size)]))


@dataclass(frozen=True)
class KVGroups:
    """In vLLM's order."""

    all: tuple[KVGroup, ...]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Per group, tokens in a block, as peers count them."""
        return tuple(group.block_size for group in self.all)

    @property
    def step_tokens(self) -> int:
        """A hand-over begins at a multiple of this many tokens: where blocks of all groups begin."""
        return math.lcm(*self.block_sizes)

    @property
    def tokens_per_block(self) -> float:
        """Tokens whose KV fits into one block of the pool, on average over the groups: each has blocks of its own.

        Groups that keep only a window or a state count where no other keeps everything.
        """
        whole = [group for group in self.all if group.keeps is Keeps.EVERYTHING] or self.all
        return 1 / sum(1 / group.block_size for group in whole)

    @property
    def drop_blocks(self) -> bool:
        """Whether vLLM frees blocks of some group while a request is computed."""
        return any(group.keeps is not Keeps.EVERYTHING for group in self.all)

    @property
    def have_windows(self) -> bool:
        return any(group.keeps is Keeps.WINDOW for group in self.all)

    @property
    def have_states(self) -> bool:
        return any(group.keeps is Keeps.STATE for group in self.all)

    def ranges(
        self, block_ids: tuple[list[LogicalBlock], ...], first_tokens: tuple[int, ...], end_token: int
    ) -> tuple[BlockRange, ...]:
        """Per group `KVGroup.range`. Raises ValueError: there are not as many lists as groups."""
        pairs = zip(self.all, block_ids, first_tokens, strict=True)
        return tuple(group.range(blocks, first, end_token) for group, blocks, first in pairs)

    def growing(self, block_ids: tuple[list[LogicalBlock], ...], num_tokens: int) -> tuple[BlockRange, ...]:
        """Per group the blocks of a prompt of ``num_tokens`` tokens while it is computed; no state is ready yet."""
        return tuple(
            BlockRange(num_tokens - 1, ()) if group.keeps is Keeps.STATE else BlockRange(0, tuple(blocks))
            for group, blocks in zip(self.all, block_ids, strict=True)
        )
