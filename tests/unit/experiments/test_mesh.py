# SPDX-License-Identifier: Apache-2.0
"""The experiment's verdicts on both sides of their limits, and faults that a small mesh must detect."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="a worker's half needs torch")

from experiments.common.memory_transport import Network
from experiments.mesh import report as experiment
from experiments.mesh.members import End
from experiments.mesh.mesh import Mesh, NotAtRest
from experiments.mesh.report import (
    MOST_GROWTH,
    Run,
    Tenth,
    grown_tables,
    judge,
    left_over,
    num_bytes,
    sizes,
    table_of,
    table_of_ends,
)
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.worker.transfer import context
from kvcached_nixl.worker.transfer.context import GateConnections
from kvcached_nixl.worker.transfer.ownership_tokens import TokenTable

WRONG, FAILED = End.WRONG.value, End.FAILED.value


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The experiment sets how much is remembered."""
    monkeypatch.setattr(context, "CAPACITY", context.CAPACITY)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def tenth(microseconds: float = 100.0, per_peer: float = 1000.0, **tables: int) -> Tenth:
    return Tenth(10, microseconds, 5, per_peer, 50.0, tables)


def run(tenths: list[Tenth] | None = None, **changes: Any) -> Run:
    usual = Run("pull", 4, tenths or [tenth() for _ in range(10)], {End.RIGHT.value: 100}, {}, [])
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (run(), []),
        (run(ends={WRONG: 1}), [0]),
        (run(ends={FAILED: 1}), [0]),
        (run(ends={End.ABORTED.value: 9, End.DISTURBED.value: 9}), []),
        (run([tenth(), *[tenth(microseconds=100 * MOST_GROWTH)] * 9]), []),
        (run([tenth(), *[tenth(microseconds=101 * MOST_GROWTH)] * 9]), [1]),
        (run([tenth(), *[tenth(per_peer=1001 * MOST_GROWTH)] * 9]), [2]),
        (run([*[tenth(**{"A": 8})] * 9, tenth(**{"A": 15})]), [3]),
        (run(left=["1 blocks are not free"]), [4]),
    ],
)
def test_each_target_can_be_missed(found: Run, missed: list[int]) -> None:
    verdicts = judge(found)
    assert [number for number, (_, _, reached) in enumerate(verdicts) if not reached] == missed


def test_an_entry_per_engine_is_no_growth() -> None:
    """A table that was empty may have one in each engine, and no more."""
    before = [tenth()] * 7
    assert grown_tables(run([*before, *[tenth(A=4)] * 3])) == []
    assert grown_tables(run([*before, *[tenth(A=5)] * 3])) == ["A from 0 to 5"]


def test_deadlines_may_keep_a_few_that_were_moved() -> None:
    before = [tenth()] * 7
    assert grown_tables(run([*before, *[tenth(**{"A, stale": 64})] * 3])) == []
    assert grown_tables(run([*before, *[tenth(**{"A, stale": 65})] * 3])) == ["A, stale from 0 to 65"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"tables": {"TokenBuffers._free": 7, "Peers.dropped": 2, "Peers._links": 0}}, []),
        ({"tables": {"Peers._links": 1}}, ["Peers._links has 1"]),
        ({"tables": {"Writer._finished": 10}}, []),
        ({"tables": {"Writer._finished": 11}}, ["Writer._finished has 11"]),
        ({"blocks": 3}, ["3 blocks are not free"]),
        ({"words": 2}, ["2 engines keep ownership tokens"]),
    ],
)
def test_what_is_left_over_is_named(changes: dict[str, Any], words: list[str]) -> None:
    assert left_over(**{"tables": {}, "blocks": 0, "words": 0, "remembered": 10, **changes}) == words


def mesh(mode: TransferMode, events: int = 10) -> Mesh:
    return Mesh(mode, num=3, at_once=6, events=events)


@pytest.mark.parametrize("mode", TransferMode)
def test_a_small_mesh_hands_over_whatever_is_done_to_its_engines(mode: TransferMode) -> None:
    small = mesh(mode)
    small.run(120)
    small.settle()
    assert small.ends.total() == 120
    assert small.ends[End.RIGHT] > 60
    assert not small.ends[End.WRONG] and not small.ends[End.FAILED]
    # Nothing is done while only one engine of a role is left.
    assert 8 < small.done.total() <= 12


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("mode", TransferMode)
def test_engines_that_were_started_again_are_met_again_at_once(mode: TransferMode, role: str) -> None:
    """No hand-over is delayed by an engine that had the address earlier."""
    small = mesh(mode, events=0)
    small.run(30)
    small.settle()
    for member in list(small.roles[role]):
        small.restart(role, member)
    small.run(30)
    assert not small.ends[End.FAILED] and not small.ends[End.DISTURBED]


@pytest.mark.parametrize("mode", TransferMode)
def test_a_small_run_reaches_what_does_not_depend_on_the_machine(mode: TransferMode) -> None:
    found = experiment.measure(mode.value, 3, 200, 20, 1, lambda words: None)
    _, _, memory, tables, left = judge(found)
    assert tables.reached and left.reached, (tables, left)
    assert table_of([found], "").row_count == 10
    assert table_of_ends([found]).row_count >= 2


def test_bytes_that_do_not_arrive_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a transfer that moved half of its ranges and says that it is done."""
    monkeypatch.setattr(Network, "deliver", lambda self, posted: _deliver_half(self, posted))
    small = mesh(TransferMode.PULL, events=0)
    small.run(20)
    assert small.ends[End.WRONG] > 0


def _deliver_half(network: Network, posted: Any) -> None:
    network._end(posted, type(posted.state).DONE, 1.0 if posted.is_transfer is False or len(posted.local) == 1 else 0.5)
    if not posted.is_transfer:
        network.notify(posted)


def test_a_table_that_is_not_cleared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has gates of agents that do not exist any more."""
    monkeypatch.setattr(GateConnections, "disconnected", lambda self, agent: None)
    found = experiment.measure("push", 3, 200, 20, 1, lambda words: None)
    assert any(words.startswith("GateConnections._of_agent has") for words in found.left)


def test_a_token_that_is_not_removed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenTable, "remove", lambda self, owner: None)
    found = experiment.measure("pull", 3, 50, 0, 1, lambda words: None)
    assert any(words.endswith("engines keep ownership tokens") for words in found.left)


def test_blocks_that_nobody_gives_back_keep_the_mesh_from_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    small = mesh(TransferMode.PULL, events=0)
    small.run(10)
    small.members[0].engine.pool.allocate("nobody's", 1)
    monkeypatch.setattr("experiments.mesh.mesh.SETTLE_ROUNDS", 20)
    with pytest.raises(NotAtRest):
        small.settle()


def test_tables_are_found_however_deep_and_counted_in_bytes() -> None:
    small = mesh(TransferMode.PULL)
    empty, empty_bytes = sizes(small.roots), num_bytes(small.roots)
    side = small.members[0].engine.side
    side.thread._receiver._asked_again[object()] = 1.0  # type: ignore[index]
    side.thread._context.peers._places["somewhere", 1, 0] = "x" * 10_000  # type: ignore[assignment]
    found = sizes(small.roots)
    assert found - empty == {"Receiver._asked_again": 1, "Peers._places": 1}
    assert 10_000 < num_bytes(small.roots) - empty_bytes < 12_000
