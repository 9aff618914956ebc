# SPDX-License-Identifier: Apache-2.0
"""Which servers have computed which beginnings of prompts. A tree of equal pieces, of bounded size."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

__all__ = ["PrefixTree"]

PIECE_BYTES = 256
"""Of text some sixty tokens, of ids exactly 64: a few blocks of KV."""
MOST_PIECES = 64
"""Of one prompt; what lies behind them does not help to tell prompts apart."""
MOST_SERVERS = 4
"""Of one node: the last that computed it."""


class PrefixTree:
    """A node is named by a digest of all bytes up to its end, so that it knows its way from the root by itself.

    The nodes that were used the longest ago go first. One whose parent has gone is found no more, and goes in its turn.

    Args:
        most_nodes: about 300 bytes each.
    """

    def __init__(self, most_nodes: int = 100_000) -> None:
        self._most_nodes = most_nodes
        self._nodes: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def servers(self, namespace: bytes, prefix: bytes) -> tuple[str, ...]:
        """Who has computed the longest known beginning, the latest first; empty if nobody has computed any."""
        found: tuple[str, ...] = ()
        for node in _path(namespace, prefix):
            here = self._nodes.get(node)
            if here is None:
                break
            found = here
        return found

    def add(self, namespace: bytes, prefix: bytes, server: str) -> None:
        """A server computes this."""
        # The root last: what many prompts begin with goes after what only some of them go on with.
        for node in reversed(tuple(_path(namespace, prefix))):
            here = self._nodes.get(node, ())
            if not here or here[0] != server:
                here = (server, *(one for one in here if one != server))[:MOST_SERVERS]
            self._nodes[node] = here
            self._nodes.move_to_end(node)
        while len(self._nodes) > self._most_nodes:
            self._nodes.popitem(last=False)


def _path(namespace: bytes, prefix: bytes) -> Iterator[bytes]:
    """The nodes of whole pieces, from the root on."""
    whole = hashlib.blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
    for begin in range(0, min(len(prefix) // PIECE_BYTES, MOST_PIECES) * PIECE_BYTES, PIECE_BYTES):
        whole.update(prefix[begin : begin + PIECE_BYTES])
        yield whole.digest()
