# SPDX-License-Identifier: Apache-2.0
"""Ownership tokens: which hand-overs a rank of prefill still keeps KV for, in memory that decode reads (R3, R7).

Neither side's clock and no notification can tell decode that blocks it has read were still the request's: an idle
prefill reads no notifications, a busy one answers late, and parameters may have waited anywhere for any time. So each
rank of prefill keeps a table of 64-bit tokens, one per manifest, and removes a manifest's token before its blocks are
given back. Decode reads the token after the blocks: if it is there, they were what the manifest says for as long as
they were read. The token is a hash of the whole manifest, so whoever changes a block id on the way names a token that
nobody keeps.

A token's bucket follows from the token itself; the table's address travels with the handshake.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvcached_nixl.transport.base import Ranges

__all__ = ["BUCKETS", "BUFFERS", "TOKENS_PER_BUCKET", "TokenArray", "TokenBuffers", "TokenTable", "bucket_of"]

BUCKETS = 1024
TOKENS_PER_BUCKET = 64
BUCKET_BYTES = TOKENS_PER_BUCKET * 8
"""A bucket is what decode reads; it is full only where some sixty thousand hand-overs are kept at once."""
BUFFERS = 1024
"""Buckets that decode can read at the same time; further READs wait."""

TokenArray = npt.NDArray[np.uint64]
"""(rows, TOKENS_PER_BUCKET); 0 is no token."""


def bucket_of(ownership_token: int) -> int:
    return ownership_token % BUCKETS


class TokenTable:
    """Prefill's tokens. A token is there from `publish` on until `remove`; as long as it is there, its blocks are.

    Args:
        tokens: (BUCKETS, TOKENS_PER_BUCKET), all 0; decode's ranks read it at any time, one aligned token after the
            other.

    Threads: any.
    """

    def __init__(self, tokens: TokenArray) -> None:
        if tokens.shape != (BUCKETS, TOKENS_PER_BUCKET) or tokens.any():
            raise ValueError(f"found a table of {tokens.shape}; expected {(BUCKETS, TOKENS_PER_BUCKET)}, all 0")
        self._tokens = tokens
        self._token_of: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._token_of)

    def publish(self, owner: Hashable, ownership_token: int) -> bool:
        """From now on ``owner`` has this token, and no other one. Returns whether there was room for it."""
        with self._lock:
            self._remove(owner)
            row = self._tokens[bucket_of(ownership_token)]
            free = np.flatnonzero(row == 0)
            if not len(free):
                return False
            row[free[0]] = ownership_token
            self._token_of[owner] = ownership_token
            return True

    def remove(self, owner: Hashable) -> None:
        """It has none any more; harmless if it has none."""
        with self._lock:
            self._remove(owner)

    def clear(self) -> None:
        """Nobody has one any more."""
        with self._lock:
            self._token_of.clear()
            self._tokens[:] = 0

    def _remove(self, owner: Hashable) -> None:
        ownership_token = self._token_of.pop(owner, None)
        if ownership_token is not None:
            row = self._tokens[bucket_of(ownership_token)]
            # Two owners of one token would be two of one manifest: their tokens are two entries.
            row[np.flatnonzero(row == np.uint64(ownership_token))[:1]] = 0


class TokenBuffers:
    """Decode's buffers, into which buckets of peers are read. Owned by the transfer thread.

    Args:
        tokens: (BUFFERS, TOKENS_PER_BUCKET).
    """

    def __init__(self, tokens: TokenArray) -> None:
        self._tokens = tokens
        self._free = list(range(len(tokens)))

    @property
    def has_room(self) -> bool:
        """Whether there is a buffer that nothing is read into."""
        return bool(self._free)

    def take(self) -> int | None:
        """A buffer that nothing is read into; None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, buffer: int) -> None:
        """Nothing is in flight into it any more."""
        self._tokens[buffer] = 0
        self._free.append(buffer)

    def ranges(self, buffer: int, table_address: int, ownership_token: int) -> tuple[Ranges, Ranges]:
        """Here and there, for a READ of the bucket that would hold ``ownership_token``."""
        here = self._tokens[buffer].ctypes.data
        there = table_address + bucket_of(ownership_token) * BUCKET_BYTES
        return np.array([[here, BUCKET_BYTES]], np.int64), np.array([[there, BUCKET_BYTES]], np.int64)

    def holds(self, buffer: int, ownership_token: int) -> bool:
        """Whether the token was in the bucket that has been read."""
        return bool((self._tokens[buffer] == np.uint64(ownership_token)).any())
