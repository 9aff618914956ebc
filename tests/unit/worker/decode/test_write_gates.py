# SPDX-License-Identifier: Apache-2.0
"""worker/decode/fencing.py: when a gate is opened and closed, and which parts are told that it is."""

from __future__ import annotations

import pytest
from support.digest_fakes import InTurn
from support.internals import num_open
from support.worker_fakes import Local

from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.worker.decode.fencing import GateUse


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
