# SPDX-License-Identifier: Apache-2.0
"""When offers that no decode fetches have to give way, because memory is short (rule R12). One per engine, on its
thread.

Memory is short if the next request waits for blocks, if the engine uses more than kvcached's limit allows, or if
another engine on the device waits for memory. As long as decode fetches offers, memory comes back by itself: offers are
taken back only when none was fetched for a while. So two full engines that prefill for each other do not wait for each
other, and a prefill that is only faster than its decode keeps what it has computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcached_nixl.clock import Clock
from kvcached_nixl.wire.causes import RevocationCause

__all__ = ["UNHEARD_SECONDS", "MemoryPressure"]

UNHEARD_SECONDS = 3.0
"""A neighbour that waits for memory repeats that every second. One that has not for this long no longer waits."""


class MemoryPressure:
    """See the module's docstring.

    Args:
        patience_seconds: how long memory is short, without an offer being fetched, before offers are taken back.
    """

    def __init__(self, clock: Clock, patience_seconds: float) -> None:
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._since_seconds: float | None = None
        self._last_seconds = 0.0

    def eased(self) -> None:
        """Decode has fetched an offer, or none is kept."""
        self._since_seconds = None

    def turn(self, missing_blocks: Mapping[RevocationCause, int]) -> dict[RevocationCause, int]:
        """Returns how many blocks have to be given back now, by cause.

        Args:
            missing_blocks: how many are missing at this moment.
        """
        now = self._clock.now_seconds()
        missing = {cause: count for cause, count in missing_blocks.items() if count > 0}
        if missing:
            # An engine that had nothing to give has not looked for a while.
            is_new = now >= self._last_seconds + self._patience_seconds + UNHEARD_SECONDS
            self._last_seconds = now
            if self._since_seconds is None or is_new:
                self._since_seconds = now
        elif now >= self._last_seconds + self._patience_seconds:
            # Not at once: else each request in a queue would wait anew.
            self._since_seconds = None
        is_due = self._since_seconds is not None and now >= self._since_seconds + self._patience_seconds
        return missing if is_due else {}
