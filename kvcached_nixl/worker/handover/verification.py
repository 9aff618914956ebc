# SPDX-License-Identifier: Apache-2.0
"""Which hand-overs a rank of prefill still keeps KV for, in memory that decode reads (rules R3 and R7).

Neither side's clock and no notice can tell decode that blocks it has read were still the request's: an idle prefill
reads no notices, a busy one answers late, and parameters may have waited anywhere for any time. So each rank of prefill
keeps a table of words, one per manifest, and removes a manifest's before its blocks are given back. Decode reads the
word after the blocks: if it is there, they were what the manifest says for as long as they were read. The word stands
for all of the manifest, so whoever changes one of its block ids on the way names a word that nobody keeps.

A word's place follows from the word itself; the table's address travels with the handshake.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvcached_nixl.transport.base import Ranges

__all__ = ["BUCKETS", "LANDINGS", "WORDS_PER_BUCKET", "Landings", "WordTable", "Words", "bucket_of"]

BUCKETS = 1024
WORDS_PER_BUCKET = 64
BUCKET_BYTES = WORDS_PER_BUCKET * 8
"""A bucket is what decode reads; it is full only where some sixty thousand hand-overs are kept at once."""
LANDINGS = 1024
"""Buckets that decode can look at at the same time; further READs wait."""

Words = npt.NDArray[np.uint64]
"""(rows, WORDS_PER_BUCKET); 0 is no word."""


def bucket_of(word: int) -> int:
    return word % BUCKETS


class WordTable:
    """Prefill's words. A word is there from `publish` on until `remove`; as long as it is there, its blocks are.

    Args:
        words: (BUCKETS, WORDS_PER_BUCKET), all 0; decode's ranks read it at any time, one aligned word after the other.

    Threads: any.
    """

    def __init__(self, words: Words) -> None:
        if words.shape != (BUCKETS, WORDS_PER_BUCKET) or words.any():
            raise ValueError(f"found a table of {words.shape}; expected {(BUCKETS, WORDS_PER_BUCKET)}, all 0")
        self._words = words
        self._word_of: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._word_of)

    def publish(self, owner: Hashable, word: int) -> bool:
        """From now on ``owner`` has this word, and no other one. Returns whether there was room for it."""
        with self._lock:
            self._remove(owner)
            row = self._words[bucket_of(word)]
            free = np.flatnonzero(row == 0)
            if not len(free):
                return False
            row[free[0]] = word
            self._word_of[owner] = word
            return True

    def remove(self, owner: Hashable) -> None:
        """It has none any more; harmless if it has none."""
        with self._lock:
            self._remove(owner)

    def clear(self) -> None:
        """Nobody has one any more."""
        with self._lock:
            self._word_of.clear()
            self._words[:] = 0

    def _remove(self, owner: Hashable) -> None:
        word = self._word_of.pop(owner, None)
        if word is not None:
            row = self._words[bucket_of(word)]
            # Two owners of one word would be two of one manifest: their words are two entries.
            row[np.flatnonzero(row == np.uint64(word))[:1]] = 0


class Landings:
    """Decode's rows, into which buckets of peers are read. Owned by the transfer thread.

    Args:
        words: (LANDINGS, WORDS_PER_BUCKET).
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._free = list(range(len(words)))

    @property
    def has_room(self) -> bool:
        """Whether there is a row that nothing is read into."""
        return bool(self._free)

    def take(self) -> int | None:
        """A row that nothing is read into; None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, landing: int) -> None:
        """Nothing is in flight into it any more."""
        self._words[landing] = 0
        self._free.append(landing)

    def ranges(self, landing: int, table_address: int, word: int) -> tuple[Ranges, Ranges]:
        """Here and there, for a READ of the bucket that would hold ``word``."""
        here = self._words[landing].ctypes.data
        there = table_address + bucket_of(word) * BUCKET_BYTES
        return np.array([[here, BUCKET_BYTES]], np.int64), np.array([[there, BUCKET_BYTES]], np.int64)

    def holds(self, landing: int, word: int) -> bool:
        """Whether the word was in the bucket that has been read."""
        return bool((self._words[landing] == np.uint64(word)).any())
