# SPDX-License-Identifier: Apache-2.0
"""worker/decode/fencing.py: when a gate is opened and closed, and which parts are told that it is."""

from __future__ import annotations

import pytest
from support.digest_fakes import InTurn
from support.internals import num_open
from support.worker_fakes import Local

from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.worker.decode.fencing import AGAIN_SECONDS, DRAIN_SECONDS, GateUse


class Part:
    """Stands in for a `WritePart`. ``told``: what its gate has called."""

    def __init__(self) -> None:
        self.is_idle = False
        self.told: list[str] = []

    def fenced(self) -> None:
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


def test_all_parts_share_one_gate_that_is_opened_once(gates: Gates) -> None:
    assert num_open(gates.gates) == 0 and list(gates.gates) == [] and gates.gates.turn() is None
    begun = gates.gates.begin()
    _, first = gates.join()
    _, second = gates.join()
    assert begun is first is second and begun.metadata == b"local#1" and gates.network.num_opened == 1
    assert num_open(gates.gates) == 1 and list(gates.gates) == [begun.gate]
    assert gates.gates.turn() is None, "nobody is fenced"


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


def test_a_gate_with_a_fenced_part_alone_is_closed_as_soon_as_another_is_open(gates: Gates) -> None:
    """The part is told once it is closed, and never again."""
    part, passage = gates.join()
    passage.fence(part)
    gates.gates.turn()
    assert gates.gates.turn() is None and gates.network.num_opened == 1, "one is being opened"
    gates.runs.run()
    gates.runs.turn()
    assert list(gates.network.gates) == ["local#1", "local#2"] and num_open(gates.gates) == 2
    assert [gate.metadata() for gate in gates.gates] == [b"local#2", b"local#1"] and part.told == []
    gates.gates.turn()
    assert [gate.metadata() for gate in gates.gates] == [b"local#2"], "what it still receives is not read"
    assert gates.run() is None
    assert part.told == ["fenced"] and list(gates.network.gates) == ["local#2"] and num_open(gates.gates) == 1
    assert passage.parts == {} and passage.fenced == set()


def test_parts_that_still_write_have_their_time(gates: Gates) -> None:
    """A gate is closed when they are done, or after DRAIN_SECONDS; then they are cut off, and fenced when it is."""
    silent, passage = gates.join()
    slow, _ = gates.join()
    quick, _ = gates.join()
    passage.fence(silent)
    gates.run()
    due = gates.clock.now_seconds() + DRAIN_SECONDS
    assert gates.run() == due
    gates.clock.advance(DRAIN_SECONDS - 0.1)
    quick.is_idle = True
    assert gates.run() == due and slow.told == []
    gates.clock.advance(0.1)
    gates.gates.turn()
    assert (silent.told, slow.told, quick.told) == ([], ["cut off"], [])
    gates.run()
    assert (silent.told, slow.told, quick.told) == (["fenced"], ["cut off", "fenced"], [])


def test_a_gate_is_closed_when_its_last_part_is_done(gates: Gates) -> None:
    silent, passage = gates.join()
    slow, _ = gates.join()
    passage.fence(silent)
    gates.run()
    gates.run()
    assert silent.told == [] and num_open(gates.gates) == 2
    slow.is_idle = True
    gates.run()
    assert silent.told == ["fenced"] and slow.told == [] and num_open(gates.gates) == 1


def test_a_gate_that_could_not_be_closed_is_tried_again_later(gates: Gates, caplog: pytest.LogCaptureFixture) -> None:
    """Not at once, and not while it is being tried; its parts are not told before it is closed."""
    part, passage = gates.join()
    passage.fence(part)
    gates.network.gates["local#1"].is_held = True
    gates.run()
    gates.runs.held = True
    assert gates.gates.turn() is None, "it is being tried"
    assert len(gates.runs.asked) == 1
    gates.runs.held = False
    gates.runs.turn()
    gates.network.gates["local#1"].is_held = False
    due = gates.clock.now_seconds() + AGAIN_SECONDS
    assert gates.run() == due and "could not be closed" in caplog.text
    gates.clock.advance(AGAIN_SECONDS - 0.1)
    assert gates.run() == due and part.told == []
    gates.clock.advance(0.1)
    assert gates.run() is None and part.told == ["fenced"]


def test_a_gate_that_could_not_be_opened_is_tried_again_later(gates: Gates, caplog: pytest.LogCaptureFixture) -> None:
    """The present one is kept meanwhile, and says when it wants to be asked again."""
    part, passage = gates.join()
    passage.fence(part)
    gates.runs.fails = 1
    due = gates.clock.now_seconds() + AGAIN_SECONDS
    assert gates.run() == due and num_open(gates.gates) == 1
    assert "stay in quarantine; trying again" in caplog.text
    gates.clock.advance(AGAIN_SECONDS - 0.1)
    assert gates.run() == due and gates.network.num_opened == 1
    gates.clock.advance(0.1)
    gates.run()
    assert gates.network.num_opened == 2 and num_open(gates.gates) == 2


def test_gates_are_opened_one_after_the_other(gates: Gates) -> None:
    """Not more than one in AGAIN_SECONDS, so that only a few are open."""
    first, passage = gates.join()
    passage.fence(first)
    gates.run()
    second, passage = gates.join()
    assert passage.metadata == b"local#2"
    passage.fence(second)
    assert gates.run() == gates.clock.now_seconds() + AGAIN_SECONDS and gates.network.num_opened == 2
    gates.clock.advance(AGAIN_SECONDS)
    gates.run()
    assert gates.network.num_opened == 3


def test_a_gate_that_is_being_closed_keeps_no_other_from_being_closed(gates: Gates) -> None:
    """Closing one may take NIXL long."""
    parts = []
    for _ in range(2):
        user, passage = gates.join()
        silent, _ = gates.join()
        passage.fence(silent)
        gates.clock.advance(AGAIN_SECONDS)
        gates.run()
        parts.append((user, silent))
    gates.join()
    assert num_open(gates.gates) == 3
    gates.runs.held = True
    for user, _ in parts:
        user.is_idle = True
        gates.gates.turn()
    assert len(gates.runs.asked) == 2, "both are being closed"
    gates.runs.held = False
    gates.runs.turn()
    assert [silent.told for _, silent in parts] == [["fenced"]] * 2 and num_open(gates.gates) == 1


def test_the_first_gate_that_cannot_be_opened_is_said(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(owner: str) -> None:
        raise TransportError("no device")

    monkeypatch.setattr(gates.network, "open_gate", refuse)
    with pytest.raises(TransportError, match="no device"):
        gates.join()
    assert num_open(gates.gates) == 0
    monkeypatch.undo()
    assert gates.join()[1].metadata == b"local#1"


@pytest.mark.parametrize("retired", [0, 1])
def test_the_end_of_the_engine_closes_all_gates(retired: int, gates: Gates) -> None:
    gates.gates.close()
    silent, passage = gates.join()
    gates.join()
    if retired:
        passage.fence(silent)
        gates.run()
    assert len(gates.network.gates) == 1 + retired
    gates.gates.close()
    assert not gates.network.gates


def test_a_part_that_leaves_is_not_told_any_more() -> None:
    gates = Gates()
    silent, passage = gates.join()
    left, _ = gates.join()
    passage.fence(left)
    passage.fence(silent)
    passage.leave(left)
    passage.leave(left)
    gates.run()
    gates.run()
    assert (silent.told, left.told) == (["fenced"], [])
