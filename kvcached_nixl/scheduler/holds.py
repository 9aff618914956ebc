# SPDX-License-Identifier: Apache-2.0
"""Blocks taken from their requests, held while transfers may use them (rules R2 and R9). One per engine.

vLLM does not know of these blocks.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.wire.step import report_numbers

__all__ = ["Holds"]


class Holds:
    """Held blocks, by the number of the hold. Used on the engine's thread only."""

    def __init__(self) -> None:
        self._held: dict[int, list[Any]] = {}
        self._numbers = report_numbers()
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def take(self, blocks: BlockPool, request_id: str, number: int | None = None) -> int:
        """Takes all blocks from a request and holds them. Returns the number of the hold."""
        number = next(self._numbers) if number is None else number
        self._held[number] = blocks.take(request_id)
        self._num_blocks += len(self._held[number])
        return number

    def give_back(self, blocks: BlockPool, number: int) -> bool:
        """Frees the blocks of a hold: no transfer uses them any more. Returns whether there was such a hold."""
        held = self._held.pop(number, None)
        if held is None:
            return False
        self._num_blocks -= len(held)
        blocks.give_back(held)
        return True
