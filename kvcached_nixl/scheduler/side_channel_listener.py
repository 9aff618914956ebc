# SPDX-License-Identifier: Apache-2.0
"""Builds what an engine's side channel answers: the handshakes of its ranks, with the engine's incarnation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from kvcached_nixl.wire.handshake import Answer, Weights, read_rank

__all__ = ["Answers", "Envelope", "HandshakeListener", "answers_of", "is_staged", "weights_of"]

Answers = Mapping[int, tuple[str, bytes]]
"""Rank -> (compatibility string, metadata)."""


class HandshakeListener(Protocol):
    """The listening side of a side channel."""

    def answer(self, answers: Answers) -> None:
        """Replaces the answers."""
        ...

    def close(self) -> None: ...


class Envelope(Protocol):
    """vLLM's own container for a worker's handshake metadata."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


def answers_of(metadata: Mapping[Any, Envelope], incarnation: str) -> Answers:
    """Rank -> (compatibility string, metadata), from what vLLM has collected from the workers.

    Args:
        metadata: by (pipeline stage, rank); there is one stage.
        incarnation: drawn when this engine started, or when its weights were changed.
    """
    return {
        rank: (
            one.compatibility_hash,
            msgspec.msgpack.encode(Answer(incarnation, one.agent_metadata_bytes)),
        )
        for (_, rank), one in metadata.items()
    }


def is_staged(metadata: Mapping[Any, Envelope]) -> bool:
    """Whether a rank of this engine stages KV; ``metadata`` as for `answers_of`."""
    return any(read_rank(one.agent_metadata_bytes).is_staged for one in metadata.values())


def weights_of(metadata: Mapping[Any, Envelope]) -> dict[Any, Weights]:
    """Identity of each rank's weights; ``metadata`` as for `answers_of`."""
    return {key: read_rank(one.agent_metadata_bytes).weights for key, one in metadata.items()}
