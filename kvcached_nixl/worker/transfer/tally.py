# SPDX-License-Identifier: Apache-2.0
"""What the transfers of one hand-over have moved, for vLLM's metrics, which count each hand-over once.

Owned by the transfer thread.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TransferTally"]


@dataclass
class TransferTally:
    """Bytes and descriptors of the transfers of one hand-over that have succeeded.

    Attributes:
        seconds: time in which at least one of them was in flight.
    """

    num_bytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    _in_flight: int = 0
    _since_seconds: float = 0.0

    def posted(self, now_seconds: float) -> None:
        if not self._in_flight:
            self._since_seconds = now_seconds
        self._in_flight += 1

    def succeeded(self, num_bytes: int, descriptors: int) -> None:
        self.num_bytes += num_bytes
        self.descriptors += descriptors

    def ended(self, now_seconds: float) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self.seconds += now_seconds - self._since_seconds
