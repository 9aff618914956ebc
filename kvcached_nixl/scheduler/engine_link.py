# SPDX-License-Identifier: Apache-2.0
"""What the parts of this folder share of their engine: its blocks, the step that is being built for its workers, and
how to wake it. One per engine, used on its thread only, except `EngineLink.woken`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import Step, WakeAddress

__all__ = ["EngineLink"]


class EngineLink:
    """See the module.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: 16 hexadecimal digits, drawn when this engine starts.

    Attributes:
        blocks: None before its first request.
        step: being built. It is told to the workers with the next step of the engine.
        has_news: the engine has to step soon, whatever ``step`` holds.
        incarnation: as above; drawn again when its weights change.
        wake_address: where the side channel listens for this engine's own workers, and the key that they send.
    """

    def __init__(self, own: RemotePrefill, incarnation: str, wake_address: WakeAddress) -> None:
        self._own = own
        self.incarnation = incarnation
        self.wake_address = wake_address
        self.blocks: BlockPool | None = None
        self.has_news = False
        self.step = self._new_step()
        self._wake: Callable[[], None] | None = None

    def bind(self, blocks: BlockPool) -> None:
        """Sets the engine's KV-cache blocks; called before the first request. Idempotent: the first call counts."""
        if self.blocks is None:
            self.blocks = blocks

    def bound(self) -> BlockPool:
        """The engine's blocks, where there has been a request."""
        assert self.blocks is not None, "no request has entered the engine"
        return self.blocks

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Sets the function that wakes the engine; it may be called from any thread."""
        self._wake = wake

    def woken(self) -> None:
        """A worker has something to report: makes the engine step. May be called from any thread."""
        self.has_news = True
        if self._wake is not None:
            self._wake()

    def draw_incarnation(self) -> str:
        """Returns another incarnation, which counts from the step being built on."""
        self.incarnation = self.step.incarnation = secrets.token_hex(8)
        return self.incarnation

    def take_step(self) -> Step:
        """Returns the step, and begins the next one."""
        self.has_news = False
        step, self.step = self.step, self._new_step()
        return step

    def _new_step(self) -> Step:
        return Step(self._own.host, self._own.port, self.wake_address, self.incarnation)
