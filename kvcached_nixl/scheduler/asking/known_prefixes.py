# SPDX-License-Identifier: Apache-2.0
"""Which prefill server was asked for a prompt's beginning before, so that it may have it cached. Used on the engine's
thread only.

vLLM's hash of a block stands for all tokens up to its end, the adapter, the media and the salt. The least recently used
are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcached_nixl.scheduler.asking.servers import Server

__all__ = ["KnownPrefixes"]

MOST_HASHES = 65_536
STRIDE = 4
"""Of every so many blocks one is remembered."""


class KnownPrefixes:
    """See the module."""

    def __init__(self) -> None:
        # With how often the server had failed then: one that was restarted has nothing cached.
        self._known: OrderedDict[bytes, tuple[Server, int]] = OrderedDict()

    def add(self, hashes: Sequence[bytes], server: Server) -> None:
        """A server is asked for a prompt with these block hashes."""
        for one in hashes[STRIDE - 1 :: STRIDE]:
            self._known[one] = server, server.num_outages
            self._known.move_to_end(one)
        while len(self._known) > MOST_HASHES:
            self._known.popitem(last=False)

    def find(self, hashes: Sequence[bytes]) -> tuple[Server, int] | None:
        """Returns the server that was asked for most of a prompt, and for how many of its blocks; None if none was."""
        for place in range(len(hashes) // STRIDE * STRIDE - 1, 0, -STRIDE):
            server, num_outages = self._known.get(hashes[place], (None, 0))
            if server is not None and server.num_outages == num_outages:
                return server, place + 1
        return None
