# SPDX-License-Identifier: Apache-2.0
"""How much decode asks for at a time: prompts that will find room when their KV can be fetched.

Prompts are asked for as long as those that have no blocks yet fit into what is free, and half of all blocks more: while
prefill computes them, others end here. With what is free alone, prefill stands still in the meantime. At least one
prompt is always asked for.
"""

from __future__ import annotations

__all__ = ["Window"]

AHEAD = 0.5
"""Fraction of all blocks that prefill computes ahead of what is free."""


class Window:
    """See the module. Used on the engine's thread only.

    Attributes:
        num_promised: blocks that those need which were asked for and have none yet.
    """

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}
        self.num_promised = 0

    def has_room(self, num_blocks: int, num_free: int, num_used: int, most_requests: int) -> bool:
        """Whether a prompt of so many blocks may be asked for.

        Args:
            num_free, num_used: blocks.
            most_requests: of those that were asked for and have no blocks yet.
        """
        if not self._promised:
            return True
        room = num_free + AHEAD * (num_free + num_used)
        return len(self._promised) < most_requests and self.num_promised + num_blocks <= room

    def promise(self, request_id: str, num_blocks: int) -> None:
        """A request is asked for that will need so many blocks."""
        self.settle(request_id)
        self._promised[request_id] = num_blocks
        self.num_promised += num_blocks

    def settle(self, request_id: str) -> None:
        """A request has its blocks, or will not get what was asked for."""
        self.num_promised -= self._promised.pop(request_id, 0)
