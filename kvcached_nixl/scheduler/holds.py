# SPDX-License-Identifier: Apache-2.0
"""Blocks that vLLM does not know of, kept for what may still be in flight (rules R2 and R9). Once per engine."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

from kvcached_nixl.scheduler.engine import Blocks

__all__ = ["Holds"]


class Holds:
    """Numbered lots of blocks. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._held: dict[int, list[Any]] = {}
        # Several connectors of an engine hear of each other's holds: vLLM reports them in one set.
        self._numbers = itertools.count(secrets.randbits(60))
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def take(self, blocks: Blocks, request_id: str, number: int | None = None) -> int:
        """Hold all blocks of a request; returns their number."""
        number = next(self._numbers) if number is None else number
        self._held[number] = blocks.take(request_id)
        self._num_blocks += len(self._held[number])
        return number

    def give_back(self, blocks: Blocks, number: int) -> bool:
        """Nothing touches them any more. Returns whether there was such a hold."""
        held = self._held.pop(number, None)
        if held is None:
            return False
        self._num_blocks -= len(held)
        blocks.give_back(held)
        return True
