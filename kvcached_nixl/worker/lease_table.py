# SPDX-License-Identifier: Apache-2.0
"""Prefill's table of the requests that it keeps KV for (see `wire.lease_word`), in place of its worker's own set.

Once per worker, on the engine's thread; decode's ranks read the table at any time, one aligned word after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableSet

import numpy as np
import numpy.typing as npt

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.lease_word import BUCKETS, WORDS_PER_BUCKET, place_of

__all__ = ["KeptRequests", "Words"]

logger = logging.getLogger(SERVER_LOGGER)

Words = npt.NDArray[np.uint64]
"""(buckets, WORDS_PER_BUCKET); 0 is no word."""


class KeptRequests(MutableSet[PrefillRequestId]):
    """In place of the stock worker's set of requests that decode may read: who is in it has a word, and nobody else.

    A request leaves that set before the worker reports it as sent, so before its blocks can be given back.

    Args:
        words: the table, BUCKETS rows, all 0.

    Attributes:
        refused: requests that got no word, because their bucket was full; what decode reads of them is refused.
    """

    def __init__(self, words: Words) -> None:
        if words.shape != (BUCKETS, WORDS_PER_BUCKET) or words.any():
            raise ValueError(f"found a table of {words.shape}; expected {(BUCKETS, WORDS_PER_BUCKET)}, all 0")
        self._words = words
        self._kept: set[PrefillRequestId] = set()
        self.refused = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._kept

    def __iter__(self) -> Iterator[PrefillRequestId]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, value: PrefillRequestId) -> None:
        """Keep a request; again changes nothing."""
        if value in self._kept:
            return
        self._kept.add(value)
        bucket, word = place_of(value)
        free = np.flatnonzero(self._words[bucket] == 0)
        if len(free):
            self._words[bucket, free[0]] = word
            return
        self.refused += 1
        logger.warning("No room for the lease of request %s; decode will not use its KV", value)

    def discard(self, value: PrefillRequestId) -> None:
        """Keep a request no more; harmless if it is not kept."""
        if value in self._kept:
            self._kept.remove(value)
            bucket, word = place_of(value)
            row = self._words[bucket]
            row[row == word] = 0
