# SPDX-License-Identifier: Apache-2.0
"""Ownership tokens: which manifests a rank of prefill still keeps blocks for, in memory that decode reads (R3, R7).

Neither side's clock nor a notification can tell decode that the blocks it has read still belonged to the request: an
idle prefill reads no notifications, a busy one answers late, and parameters may be delayed anywhere for any time. So
each rank of prefill keeps a table of 64-bit tokens, one per manifest, and removes a manifest's token before its blocks
are freed. Decode reads the token after the blocks: if it is there, the blocks held what the manifest says during the
whole READ. The token is a hash of the whole manifest, so a manifest with a changed block id has a token that is in no
table.

The token determines its bucket in the table; the table's address is part of the handshake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from kvcached_nixl.transport.agent import Ranges

BUCKETS = 1024
TOKENS_PER_BUCKET = 64
BUCKET_BYTES = TOKENS_PER_BUCKET * 8
"""Decode reads a whole bucket. A bucket is full only if some sixty thousand hand-overs are kept at once."""
BUFFERS = 1024
"""Buckets that decode can read at the same time; further READs wait."""

TokenArray = npt.NDArray[np.uint64]
"""(rows, TOKENS_PER_BUCKET); 0 marks an empty entry."""


def bucket_of(ownership_token: int) -> int:
    return ownership_token % BUCKETS


class TokenTable:
    """Prefill's tokens. A token is in the table from `publish` until `remove`; while it is there, its blocks are kept.

    Args:
        tokens: (BUCKETS, TOKENS_PER_BUCKET), all 0; decode's ranks read it at any time, one aligned 64-bit token at a
            time.

    Threads: any.
    """

    def __init__(self, tokens: TokenArray) -> None:
        if tokens.shape != (BUCKETS, TOKENS_PER_BUCKET) or tokens.any():
            raise ValueError(f"found a table of {tokens.shape}; expected {(BUCKETS, TOKENS_PER_BUCKET)}, all 0")
        self._tokens = tokens
        self._token_of: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def publish(self, owner: Hashable, ownership_token: int) -> bool:
        """Replace ``owner``'s token by this one. Returns whether the bucket had room; else ``owner`` has no token."""
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
        """Remove ``owner``'s token, if it has one. Idempotent."""
        with self._lock:
            self._remove(owner)

    def clear(self) -> None:
        with self._lock:
            self._token_of.clear()
            self._tokens[:] = 0

    def _remove(self, owner: Hashable) -> None:
        ownership_token = self._token_of.pop(owner, None)
        if ownership_token is not None:
            row = self._tokens[bucket_of(ownership_token)]
            # Two owners may have equal tokens (one manifest); each has an entry, so remove only one of them.
            row[np.flatnonzero(row == np.uint64(ownership_token))[:1]] = 0


class TokenBuffers:
    """Decode's buffers, into which it reads buckets of peers. ``tokens``: (BUFFERS, TOKENS_PER_BUCKET). Owned by the
    transfer thread."""

    def __init__(self, tokens: TokenArray) -> None:
        self._tokens = tokens
        self._free = list(range(len(tokens)))
        self._waiting: list[Callable[[], None]] = []

    def take(self, retry: Callable[[], None]) -> int | None:
        """Returns a buffer; None if there is none now: ``retry`` is called when one is free."""
        if self._free:
            return self._free.pop()
        self._waiting.append(retry)
        return None

    def give_back(self, buffer: int) -> None:
        """Return a buffer that no READ in flight writes into any more."""
        self._tokens[buffer] = 0
        self._free.append(buffer)
        # A loop: one that waited may need no buffer any more.
        while self._waiting and self._free:
            self._waiting.pop(0)()

    def ranges(self, buffer: int, table_address: int, ownership_token: int) -> tuple[Ranges, Ranges]:
        """Returns the local and the remote range of a READ of the bucket that would hold ``ownership_token``."""
        here = self._tokens[buffer].ctypes.data
        there = table_address + bucket_of(ownership_token) * BUCKET_BYTES
        return np.array([[here, BUCKET_BYTES]], np.int64), np.array([[there, BUCKET_BYTES]], np.int64)

    def holds(self, buffer: int, ownership_token: int) -> bool:
        """Whether the token was in the bucket that was read into this buffer."""
        return bool((self._tokens[buffer] == np.uint64(ownership_token)).any())
