# SPDX-License-Identifier: Apache-2.0
"""Decode: one request's attempt to get its KV, with a share for each rank of prefill that has a part of its bytes.

    share    connecting ─► moving ─► verifying ─► done
                 │            │          │
                 └────────────┴──────────┴──► stopping ─► quiet        (done is quiet, too)

    attempt  waiting ─► received     every share is done
             waiting ─► failed       one share has failed, or it was withdrawn; the client hears of it at once
                        ─► over      no share has anything in flight: only now are the blocks free (rules R2, R9)

The two directions differ in who moves the bytes and in what is verified: `reading.ReadPart` reads them, and then the
word; `registering.WritePart` registers blocks, and counts what arrives. Owned by the transfer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.step import FetchSpec
from kvcached_nixl.worker.decode.staging_window import StagingWindow
from kvcached_nixl.worker.geometry.descriptors import Blocks

__all__ = ["Attempt", "Part"]

logger = logging.getLogger(SERVER_LOGGER)


class Part(Protocol):
    """What one rank of prefill contributes to an attempt."""

    address: Peer
    agent: str | None
    """Who may still write; None before anybody was told, and of a READ."""
    is_idle: bool

    def begin(self) -> None:
        """The device has ended whatever could still write the blocks (rule R8)."""
        ...

    def stop(self) -> None:
        """Move nothing more; ``is_idle`` when nothing is in flight. Again asks again."""
        ...


class Attempt:
    """See the module.

    Args:
        blocks: per KV-cache group, the kernel blocks to fill.
        changed: called whenever the attempt has failed or is finished.

    Attributes:
        parts: one for each rank of prefill that has a part of the bytes.
        failed: why; None as long as it has not.
        staging_window: slots that its KV comes in; None as long as nobody was told of any.
    """

    def __init__(self, spec: FetchSpec, blocks: tuple[Blocks, ...], changed: Callable[[Attempt], None]) -> None:
        self.spec = spec
        self.blocks = blocks
        self.parts: list[Part] = []
        self.failed: HandOverFailed | None = None
        self.staging_window: StagingWindow | None = None
        self._changed = changed

    @property
    def number(self) -> int:
        return self.spec.attempt

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it is in flight any more, and nothing will be."""
        return all(part.is_idle for part in self.parts)

    def fail(self, cause: HandOverFailed) -> None:
        """It brings no KV; the first cause is the one that counts. Asks the shares to stop."""
        if self.failed is None:
            self.failed = cause
            for part in self.parts:
                if not part.is_idle:
                    part.stop()
        self.settle()

    def settle(self) -> None:
        """Something of it has ended."""
        self._changed(self)
