# SPDX-License-Identifier: Apache-2.0
"""An engine's own side channel: what it answers peers, and what its thread asks of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvcached_nixl.scheduler.engine_link import EngineLink
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.revocations import Revocations
from kvcached_nixl.scheduler.told_headroom import ToldHeadroom
from kvcached_nixl.wire.handshake import Answer, Weights, read_rank
from kvcached_nixl.wire.headroom import encode_headroom

__all__ = [
    "Answers",
    "Envelope",
    "HandshakeListener",
    "OwnSideChannel",
    "answers_of",
    "is_staged",
    "weights_of",
]

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


class OwnSideChannel:
    """See the module. One per engine.

    Threads: the side channel's thread calls `woken`, `headroom` and `watch_memory`; the engine's thread calls the
    others.
    """

    def __init__(
        self, link: EngineLink, offering: PrefillOffers, revocations: Revocations, headroom: ToldHeadroom
    ) -> None:
        self._link = link
        self._offering = offering
        self._revocations = revocations
        self._headroom = headroom
        self._listener: HandshakeListener | None = None

    def introduce(self, metadata: Mapping[Any, Envelope], listen: Callable[[Answers], HandshakeListener]) -> None:
        """Sets the handshakes of this engine's ranks. Called when the workers have registered their memory, and again
        when their weights may have changed. Peers are answered with them until `close`."""
        self._offering.is_read_early |= is_staged(metadata)
        self._revocations.identified(weights_of(metadata))
        answers = answers_of(metadata, self._link.incarnation)
        if self._listener is None:
            self._listener = listen(answers)
        else:
            self._listener.answer(answers)

    def hide(self) -> None:
        """Answers peers that this engine has no rank, until `introduce` is called again."""
        self._revocations.weights_changed()
        if self._listener is not None:
            self._listener.answer({})

    def close(self) -> None:
        """Stops listening; called when the engine shuts down."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def headroom(self) -> bytes:
        """Returns this engine's `Headroom`, encoded; empty before its first step."""
        self.watch_memory()
        if self._revocations.is_doubted:
            # An idle engine looks at its weights before its next step: now, since somebody asks.
            self._link.woken()
        blocks = self._link.blocks
        return b"" if blocks is None else encode_headroom(self._headroom.of(blocks))

    def watch_memory(self) -> None:
        """Counts what kvcached has mapped and unmapped since the last call."""
        if self._link.blocks is not None:
            self._headroom.watch(self._link.blocks)

    def woken(self) -> None:
        """A worker has something to report: makes the engine step. May be called from any thread."""
        self._link.woken()
