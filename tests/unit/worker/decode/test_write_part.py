# SPDX-License-Identifier: Apache-2.0
"""worker/decode: what a written part waits for follows from one table; and when its gate is opened and closed."""

from __future__ import annotations

import itertools

import pytest
from support.digest_fakes import InTurn
from support.internals import num_open
from support.worker_fakes import Local

from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.worker.decode.fencing import GateUse
from kvcached_nixl.worker.decode.write_part import NEXT, Event, Stage, WritePart

CONNECTING, WRITING, WITHDRAWN, COMPARING, IN_VAIN, ENDED = Stage
TOLD, UNWANTED, STOPPED, IS_COMPARED, COMPARED = Event
MOVES = {
    CONNECTING: {TOLD: WRITING, UNWANTED: ENDED},
    WRITING: {UNWANTED: WITHDRAWN, STOPPED: ENDED, IS_COMPARED: COMPARING},
    WITHDRAWN: {STOPPED: ENDED},
    COMPARING: {UNWANTED: IN_VAIN, COMPARED: ENDED},
    IN_VAIN: {COMPARED: ENDED},
    ENDED: {},
}


def part_in(stage: Stage, *, is_read: bool = False) -> WritePart:
    made = WritePart.__new__(WritePart)
    made.stage, made._is_read, made._staging_window, made.agent = stage, is_read, None, None
    return made


@pytest.mark.parametrize(("stage", "event"), [*itertools.product(Stage, Event)], ids=lambda one: one.name)
def test_each_event_in_each_stage(stage: Stage, event: Event) -> None:
    part = part_in(stage)
    part._move(event)
    assert part.stage is MOVES[stage].get(event, stage)


@pytest.mark.parametrize("stage", Stage, ids=lambda one: one.name)
def test_what_a_stage_says(stage: Stage) -> None:
    """Rules R2, R13: a peer that may write, and a comparison that reads, keep the blocks."""
    part = part_in(stage)
    assert part.may_write == (stage in (WRITING, WITHDRAWN))
    assert part.is_idle == (stage is ENDED)
    assert not (part.may_write and part.is_idle)
    assert not part_in(stage, is_read=True).may_write


def test_every_part_ends_and_stays_so() -> None:
    reached = {stage: {stage} for stage in Stage}
    for _ in Stage:
        for (stage, _), following in NEXT.items():
            reached[stage] |= reached[following]
    assert all(ENDED in found for found in reached.values()) and reached[ENDED] == {ENDED}
    assert reached[WITHDRAWN] == {WITHDRAWN, ENDED} and WRITING not in reached[COMPARING]


@pytest.mark.parametrize(("stage", "is_read", "expected"), [
    (WRITING, False, WITHDRAWN), (WRITING, True, ENDED), (COMPARING, True, IN_VAIN), (IN_VAIN, False, IN_VAIN)
])  # fmt: skip
def test_a_part_that_is_stopped(stage: Stage, is_read: bool, expected: Stage) -> None:
    """A peer that was told of no block, because the KV was read already, has nothing to stop."""
    part = part_in(stage, is_read=is_read)
    part.stop()
    assert part.stage is expected


# ---------------------------------------------------------------------------------------------------------------- gates


class Part:
    """Stands in for a `WritePart`. ``told``: what its gate has called."""

    def __init__(self) -> None:
        self.is_idle = False
        self.told: list[str] = []

    def end_without(self, what: str) -> None:
        assert "is now fenced" in what
        self.told.append("fenced")
        self.is_idle = True

    def cut_off(self) -> None:
        self.told.append("cut off")


class Gates(Local):
    """`WriteGates` whose work is done when the test says so."""

    @property
    def runs(self) -> InTurn:
        return self.awaiting_checksum

    def join(self) -> tuple[Part, GateUse]:
        part = Part()
        return part, self.gates.join(part)

    def run(self) -> float | None:
        """Does the work that is due, and what becomes due with it."""
        self.gates.turn()
        self.runs.turn()
        return self.gates.turn()


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.mark.parametrize("why", ["idle", "left", "another gate's"])
def test_a_part_that_need_not_be_fenced_opens_no_gate(why: str, gates: Gates) -> None:
    part, passage = gates.join()
    if why == "another gate's":
        passage.fence(Part())
    else:
        passage.fence(part)
        part.is_idle = why == "idle"
        if why == "left":
            passage.leave(part)
    assert gates.run() is None and gates.network.num_opened == 1


def test_the_first_gate_that_cannot_be_opened_is_said(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(owner: str) -> None:
        raise TransportError("no device")

    monkeypatch.setattr(gates.network, "open_gate", refuse)
    with pytest.raises(TransportError, match="no device"):
        gates.join()
    assert num_open(gates.gates) == 0
    monkeypatch.undo()
    assert gates.join()[1].metadata == b"local#1"
