# SPDX-License-Identifier: Apache-2.0
"""Counts how much memory kvcached maps and gives back. Once per engine, on the side channel's thread.

kvcached 0.1.6 says how much is mapped, but has no counters (``operation_counters`` in its ``observability.py``). So the
amount is looked at again and again, and its rises and falls are added up. What is mapped and given back between two
looks is not counted: both sums are lower bounds, and their difference is exact.
"""

from __future__ import annotations

__all__ = ["MappedMemory"]


class MappedMemory:
    """See the module.

    Attributes:
        num_bytes: mapped at the last look.
        risen_bytes, fallen_bytes: sums of all rises and falls; the first look is a rise from 0.
    """

    def __init__(self) -> None:
        self.num_bytes = self.risen_bytes = self.fallen_bytes = 0

    def look(self, num_bytes: int) -> None:
        """Take note of how much is mapped now."""
        change, self.num_bytes = num_bytes - self.num_bytes, num_bytes
        self.risen_bytes += max(0, change)
        self.fallen_bytes += max(0, -change)
