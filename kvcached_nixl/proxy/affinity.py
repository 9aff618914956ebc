# SPDX-License-Identifier: Apache-2.0
"""Which servers have computed which prompt prefixes: a prefix tree over pieces of equal size, of bounded size."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator

__all__ = ["PIECE_BYTES", "PREFIX_BYTES", "PrefixTree"]

PIECE_BYTES = 256
"""About sixty tokens of text, or exactly 64 token ids (four bytes each): a few blocks of KV."""
MOST_PIECES = 64
"""Of one prompt. What follows them rarely helps to tell prompts apart, so it is ignored."""
PREFIX_BYTES = MOST_PIECES * PIECE_BYTES
MOST_SERVERS = 4
"""Of one node: the servers that computed it most recently."""


class PrefixTree:
    """The key of a node is a digest of all bytes up to its end, so nodes need no links to parents or children.

    Evicts the least recently used nodes. A node whose parent was evicted is no longer found, and is evicted later.

    Args:
        most_nodes: about 300 bytes each.
    """

    def __init__(self, most_nodes: int = 100_000) -> None:
        self._most_nodes = most_nodes
        self._nodes: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def servers(self, namespace: bytes, prefix: bytes) -> tuple[str, ...]:
        """Returns the servers that computed the longest known prefix, latest first; empty if no prefix is known."""
        longest = deque(self._found(namespace, prefix), maxlen=1)
        return longest[0] if longest else ()

    def pieces(self, namespace: bytes, prefix: bytes) -> dict[str, int]:
        """Returns server -> how many pieces of `PIECE_BYTES` of the prefix it has computed before."""
        longest: dict[str, int] = {}
        for number, servers in enumerate(self._found(namespace, prefix), 1):
            longest |= dict.fromkeys(servers, number)
        return longest

    def _found(self, namespace: bytes, prefix: bytes) -> Iterator[tuple[str, ...]]:
        for node in _path(namespace, prefix):
            here = self._nodes.get(node)
            if here is None:
                return
            yield here

    def add(self, namespace: bytes, prefix: bytes, server: str) -> None:
        """Record that ``server`` computes this prompt."""
        # The root last, so that it is the most recently used: shared prefixes must outlive their rarer continuations.
        for node in reversed(tuple(_path(namespace, prefix))):
            here = self._nodes.get(node, ())
            if not here or here[0] != server:
                here = (server, *(one for one in here if one != server))[:MOST_SERVERS]
            self._nodes[node] = here
            self._nodes.move_to_end(node)
        while len(self._nodes) > self._most_nodes:
            self._nodes.popitem(last=False)


def _path(namespace: bytes, prefix: bytes) -> Iterator[bytes]:
    """Yields the node keys of the whole pieces of ``prefix``, from the root on."""
    whole = hashlib.blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
    for begin in range(0, min(len(prefix) // PIECE_BYTES, MOST_PIECES) * PIECE_BYTES, PIECE_BYTES):
        whole.update(prefix[begin : begin + PIECE_BYTES])
        yield whole.digest()
