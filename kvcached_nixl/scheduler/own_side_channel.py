# SPDX-License-Identifier: Apache-2.0
"""An engine's own side channel: what it answers peers, and what its thread asks of the engine. One per engine.

Threads: the side channel's thread calls `woken`, `headroom` and `watch_memory`; the engine's thread calls the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcached_nixl.scheduler.engine_link import EngineLink
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.revocations import Revocations
from kvcached_nixl.scheduler.side_channel_listener import (
    Answers,
    Envelope,
    HandshakeListener,
    answers_of,
    is_staged,
    weights_of,
)
from kvcached_nixl.scheduler.told_headroom import ToldHeadroom
from kvcached_nixl.wire.headroom import encode_headroom

__all__ = ["OwnSideChannel"]


class OwnSideChannel:
    """See the module."""

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
