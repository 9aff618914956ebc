# SPDX-License-Identifier: Apache-2.0
"""What a handshake compares, as three numbers for metrics: they say which engines' handshakes would succeed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from kvcached_nixl.wire.handshake import read_answer, read_rank

__all__ = ["Kind"]


class Kind(NamedTuple):
    """Numbers of 52 bits, which a float keeps; 0 is not known. Equal texts have equal numbers in every process.

    Attributes:
        compatibility: of the tag: everything but the weights.
        checkpoint: of the content of the files that the weights were loaded from.
        weights: of the content of the weights in memory, and of their layout, of all ranks.
    """

    compatibility: int
    checkpoint: int
    weights: int

    @classmethod
    def of(cls, answers: Sequence[tuple[str, bytes]]) -> Kind:
        """Returns the kind of an engine.

        Args:
            answers: what its side channel answers for each of its ranks, in their order: (tag, metadata).

        Raises:
            Malformed: metadata cannot be read.
        """
        weights = [read_rank(read_answer(metadata).rank).weights for _, metadata in answers]
        checkpoints = {one.files for one in weights}
        is_whole = all(one.memory.content for one in weights)
        return cls(
            _number("\n".join(sorted({tag for tag, _ in answers}))),
            _number(checkpoints.pop()) if len(checkpoints) == 1 else 0,
            _number("\n".join(f"{one.memory.layout} {one.memory.content}" for one in weights)) if is_whole else 0,
        )


def _number(text: str) -> int:
    if not text:
        return 0
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 12 or 1
