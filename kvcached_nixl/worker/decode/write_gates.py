# SPDX-License-Identifier: Apache-2.0
"""Decode: what it is written through, and how one that is not heard of is kept from writing. Once per worker.

All ranks of prefill write through one gate (`transport.base.Gate`). To fence one of them a second gate is opened, for
whatever is registered from then on; the first is closed when nothing else goes through it any more, or after
DRAIN_SECONDS. Then nothing that was ever registered through it can be written.

    present ─► retired ─► closing ─► closed        its shares are told that they are fenced
                             └──► again after AGAIN_SECONDS, if it is still there

A gate is opened and closed in the background, as NIXL takes its time. All else is the transfer thread's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvcached_nixl.clock import Clock
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Gate
from kvcached_nixl.worker.background import Work

__all__ = ["WriteGates", "GateUse", "Written"]

logger = logging.getLogger(SERVER_LOGGER)

DRAIN_SECONDS = 60.0
"""What is still registered through a gate that is to be closed may be written for so long; then it fails."""
AGAIN_SECONDS = 10.0
"""Between two gates, so that no more than a few are open; and before what did not open or close is tried again."""


class Written(Protocol):
    """What is registered through a gate; `registering.WritePart`."""

    @property
    def is_idle(self) -> bool: ...
    def fenced(self) -> None:
        """Nothing can be written any more."""
        ...

    def cut_off(self) -> None:
        """It has taken too long: its gate is about to be closed."""
        ...


class Works(Protocol):
    """What opens and closes in the background; `background.Background`."""

    def submit(self, work: Work[bool]) -> None: ...


@dataclass(eq=False)
class GateUse:
    """A gate, and what is registered through it.

    Attributes:
        fenced: shares whose writers are not heard of.
        closes_at_seconds: when it is closed at the latest, or tried again; None of the present one.
        is_closing: it is not listened to any more; ``is_tried``: and is being closed now.
    """

    gate: Gate
    metadata: bytes
    parts: dict[Written, None] = field(default_factory=dict)
    fenced: set[Written] = field(default_factory=set)
    closes_at_seconds: float | None = None
    is_closing: bool = False
    is_tried: bool = False

    @property
    def has_fenced(self) -> bool:
        return any(not part.is_idle for part in self.fenced)

    @property
    def is_used(self) -> bool:
        """Whether somebody may write through it who is not fenced."""
        return any(not part.is_idle for part in self.parts if part not in self.fenced)


class WriteGates:
    """See the module.

    Args:
        make: opens one more gate; on the background's thread, but for the first one.
    """

    def __init__(self, make: Callable[[], Gate], works: Works, clock: Clock) -> None:
        self._make = make
        self._works = works
        self._clock = clock
        self._present: GateUse | None = None
        self._retired: list[GateUse] = []
        self._is_opening = False
        self._opens_at_seconds = 0.0

    def __len__(self) -> int:
        """Gates that are not closed."""
        return (self._present is not None) + len(self._retired)

    def __iter__(self) -> Iterator[Gate]:
        """Gates through which something may come."""
        if self._present is not None:
            yield self._present.gate
        yield from (one.gate for one in self._retired if not one.is_closing)

    def begin(self) -> GateUse:
        """Open the first one, where somebody will be written for certain; else who is written first waits for it.

        Raises:
            TransportError: it cannot be opened.
        """
        if self._present is None:
            gate = self._make()
            self._present = GateUse(gate, gate.metadata())
        return self._present

    def join(self, part: Written) -> GateUse:
        """It is about to be registered. Raises `TransportError`."""
        passage = self.begin()
        passage.parts[part] = None
        return passage

    @staticmethod
    def leave(part: Written, passage: GateUse) -> None:
        """It is over, or was not registered."""
        passage.parts.pop(part, None)
        passage.fenced.discard(part)

    @staticmethod
    def fence(part: Written, passage: GateUse) -> None:
        """Its writer is not heard of; `Written.fenced` is called once it cannot write any more."""
        if part in passage.parts:
            passage.fenced.add(part)

    def close(self) -> None:
        """The engine ends: nobody is written any more. After the last turn; none may follow."""
        for one in self._retired if self._present is None else [self._present, *self._retired]:
            one.gate.close()

    def turn(self) -> float | None:
        """Open and close what is due; returns when to call again, in the clock's seconds, None if nothing will be."""
        now = self._clock.now_seconds()
        due: list[float] = []
        if self._present is not None and self._present.has_fenced and not self._is_opening:
            if now >= self._opens_at_seconds:
                self._open()
            else:
                due.append(self._opens_at_seconds)
        for one in list(self._retired):
            assert one.closes_at_seconds is not None
            is_due = now >= one.closes_at_seconds
            if one.is_used and not one.is_closing and is_due:
                self._cut_off(one)
            if one.is_tried:
                continue
            if is_due or not (one.is_used or one.is_closing):
                self._close(one)
            else:
                due.append(one.closes_at_seconds)
        return min(due, default=None)

    def _open(self) -> None:
        self._is_opening = True
        self._opens_at_seconds = self._clock.now_seconds() + AGAIN_SECONDS
        found: list[GateUse] = []

        def make() -> bool:
            gate = self._make()
            found.append(GateUse(gate, gate.metadata()))
            return True

        def made(_: bool | None, failed: str) -> None:
            self._is_opening = False
            if failed:
                logger.error(
                    "%s. Blocks that a peer which is not heard of may still write stay in quarantine; it is tried "
                    "again every %g s",
                    failed,
                    AGAIN_SECONDS,
                )
                return
            before, self._present = self._present, found[0]
            assert before is not None
            before.closes_at_seconds = self._clock.now_seconds() + DRAIN_SECONDS
            self._retired.append(before)

        self._works.submit(Work("opening another gate to be written through", make, made))

    @staticmethod
    def _cut_off(passage: GateUse) -> None:
        for part in [one for one in passage.parts if not one.is_idle and one not in passage.fenced]:
            passage.fenced.add(part)
            part.cut_off()

    def _close(self, passage: GateUse) -> None:
        passage.is_closing = passage.is_tried = True
        gate = passage.gate
        self._works.submit(Work("closing a gate", gate.close, partial(self._closed, passage)))

    def _closed(self, passage: GateUse, is_closed: bool | None, failed: str) -> None:
        passage.is_tried = False
        if not is_closed:
            passage.closes_at_seconds = self._clock.now_seconds() + AGAIN_SECONDS
            logger.error(
                "What prefill has written through is not closed%s. Blocks that a peer which is not heard of may still "
                "write stay in quarantine; it is tried again every %g s",
                failed and f" ({failed})",
                AGAIN_SECONDS,
            )
            return
        self._retired.remove(passage)
        for part in list(passage.parts):
            if not part.is_idle:
                part.fenced()
            self.leave(part, passage)
