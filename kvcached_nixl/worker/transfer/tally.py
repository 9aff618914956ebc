# SPDX-License-Identifier: Apache-2.0
"""What the transfers of one hand-over have moved, for vLLM's metrics, which count each hand-over once.

Owned by the transfer thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_nixl.wire.timeline import Timeline

__all__ = ["TransferTally"]


@dataclass
class TransferTally:
    """Bytes and descriptors of the transfers of one hand-over that have succeeded.

    Attributes:
        seconds: time in which at least one of them was in flight.
        timeline: is told of each transfer, as a chunk that was moved; None where nobody wants to know.
    """

    num_bytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    timeline: Timeline | None = None
    _in_flight: int = 0
    _since_seconds: float = 0.0

    def posted(self, now_seconds: float) -> None:
        if not self._in_flight:
            self._since_seconds = now_seconds
        self._in_flight += 1

    def succeeded(self, num_bytes: int, descriptors: int, now_seconds: float) -> None:
        self.num_bytes += num_bytes
        self.descriptors += descriptors
        if self.timeline is not None:
            self.timeline.moved(num_bytes, now_seconds)

    def ended(self, now_seconds: float) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self.seconds += now_seconds - self._since_seconds
