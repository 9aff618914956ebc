# SPDX-License-Identifier: Apache-2.0
"""Decode: the gates that prefill writes through, and how a rank that does not answer is fenced. Once per worker.

All ranks of prefill write through one gate (`transport.base.WriteGate`). To fence one of them, a second gate is opened
for all later registrations. The first is closed when no other rank writes through it any more, or after DRAIN_SECONDS.
After that no registration that was made through it can be written.

    present ─► retired ─► closing ─► closed        its parts are told that they are fenced
                             └──► again after AGAIN_SECONDS, if it was not closed

Gates are opened and closed on a background thread, because NIXL may take long. All else is the transfer thread's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import WriteGate
from kvcached_nixl.worker.background import Background, Work
from kvcached_nixl.worker.decode.attempt import Part

__all__ = ["WriteGates", "GateUse"]

logger = logging.getLogger(SERVER_LOGGER)

DRAIN_SECONDS = 60.0
"""How long registrations through a retired gate may still be written; then they fail and the gate is closed."""
AGAIN_SECONDS = 10.0
"""Time between opening two gates, so that only a few are open; and before a failed open or close is retried."""


@dataclass(eq=False)
class GateUse:
    """A gate, and the parts that are registered through it.

    Attributes:
        fenced: parts whose writers do not answer.
        closes_at_seconds: when the gate is closed at the latest, or closing is retried; None for the present gate.
        is_closing: its notifications are not read any more.
        is_tried: the background thread is closing it now.
    """

    gate: WriteGate
    metadata: bytes
    parts: dict[Part, None] = field(default_factory=dict)
    fenced: set[Part] = field(default_factory=set)
    closes_at_seconds: float | None = None
    is_closing: bool = False
    is_tried: bool = False

    @property
    def has_fenced(self) -> bool:
        return any(not part.is_idle for part in self.fenced)

    @property
    def is_used(self) -> bool:
        """Whether a writer that is not fenced may still write through it."""
        return any(not part.is_idle for part in self.parts if part not in self.fenced)


class WriteGates:
    """See the module.

    Args:
        make: opens a gate; called on the background thread, except for the first gate.
    """

    def __init__(self, make: Callable[[], WriteGate], works: Background, clock: Clock) -> None:
        self._make = make
        self._works = works
        self._clock = clock
        self._present: GateUse | None = None
        self._retired: list[GateUse] = []
        self._is_opening = False
        self._opens_at_seconds = 0.0

    def __len__(self) -> int:
        """Number of gates that are not closed."""
        return (self._present is not None) + len(self._retired)

    def __iter__(self) -> Iterator[WriteGate]:
        """Gates whose notifications have to be read."""
        if self._present is not None:
            yield self._present.gate
        yield from (one.gate for one in self._retired if not one.is_closing)

    def begin(self) -> GateUse:
        """Return the present gate; opens the first one. Called at start where ranks of prefill will write for certain;
        else the first registration has to wait for it.

        Raises:
            TransportError: the gate cannot be opened.
        """
        if self._present is None:
            gate = self._make()
            self._present = GateUse(gate, gate.metadata())
        return self._present

    def join(self, part: Part) -> GateUse:
        """Return the gate for a part that is about to be registered. Raises `TransportError` as `begin`."""
        use = self.begin()
        use.parts[part] = None
        return use

    @staticmethod
    def leave(part: Part, use: GateUse) -> None:
        """The part's attempt is finished, or the part was not registered after all."""
        use.parts.pop(part, None)
        use.fenced.discard(part)

    @staticmethod
    def fence(part: Part, use: GateUse) -> None:
        """Fence a part whose writer does not answer; calls `Part.fenced` once that cannot write any more."""
        if part in use.parts:
            use.fenced.add(part)

    def close(self) -> None:
        """Close all gates, on the calling thread: the engine ends. `turn` must not be called afterwards."""
        for one in self._retired if self._present is None else [self._present, *self._retired]:
            one.gate.close()

    def turn(self) -> float | None:
        """Open and close gates that are due; returns when to call again, in the clock's seconds, None if never."""
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
                    "%s. Blocks that a peer without an answer may still write stay in quarantine; trying again every "
                    "%g s",
                    failed,
                    AGAIN_SECONDS,
                )
                return
            before, self._present = self._present, found[0]
            assert before is not None
            before.closes_at_seconds = self._clock.now_seconds() + DRAIN_SECONDS
            self._retired.append(before)

        self._works.submit(Work("opening another write gate", make, made))

    @staticmethod
    def _cut_off(use: GateUse) -> None:
        for part in [one for one in use.parts if not one.is_idle and one not in use.fenced]:
            use.fenced.add(part)
            part.cut_off()

    def _close(self, use: GateUse) -> None:
        use.is_closing = use.is_tried = True
        gate = use.gate
        self._works.submit(Work("closing a write gate", gate.close, partial(self._closed, use)))

    def _closed(self, use: GateUse, is_closed: bool | None, failed: str) -> None:
        use.is_tried = False
        if not is_closed:
            use.closes_at_seconds = self._clock.now_seconds() + AGAIN_SECONDS
            logger.error(
                "A write gate could not be closed%s. Blocks that a peer without an answer may still write stay in "
                "quarantine; trying again every %g s",
                failed and f" ({failed})",
                AGAIN_SECONDS,
            )
            return
        self._retired.remove(use)
        for part in list(use.parts):
            if not part.is_idle:
                part.fenced()
            self.leave(part, use)
