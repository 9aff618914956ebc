# SPDX-License-Identifier: Apache-2.0
"""worker/pull.py: leases where vLLM's worker has none."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.worker.lease import Leases
from kvcached_nixl.worker.pull import PullWorker

PREFILL = RemotePrefill("p", "10.0.0.2", 5601, 2)
P1, P2 = PrefillRequestId("p1"), PrefillRequestId("p2")
LEASE, STOCK = 30.0, 480.0


class Stock:
    """vLLM's worker and its agent, as far as they are asked."""

    def __init__(self) -> None:
        self.agents: dict[str, list[str]] = {}
        self.connecting: set[str] = set()
        self.asked: list[tuple[Any, ...]] = []
        self.sent: list[tuple[str, bytes]] = []
        self.unreachable: set[str] = set()
        self.lost: set[str] = set()
        self.receives = False

    @property
    def agent(self) -> Stock:
        return self

    @property
    def backends(self) -> list[str]:
        return ["UCX"]

    def use(self, *replacements: Any) -> None:
        raise AssertionError

    @property
    def is_receiving(self) -> bool:
        return self.receives

    @property
    def engines(self) -> list[str]:
        return list(self.agents)

    def forget_engine(self, engine_id: str) -> None:
        del self.agents[engine_id]

    def take_lost(self) -> set[str]:
        lost, self.lost = self.lost, set()
        return lost

    def agents_of(self, engine_id: str) -> list[str]:
        return self.agents.get(engine_id, [])

    def is_connecting(self, engine_id: str) -> bool:
        return engine_id in self.connecting

    def connect(self, *asked: Any) -> None:
        self.asked.append(asked)
        self.connecting.add(asked[0])

    def send_notif(self, agent: str, notification: bytes) -> None:
        if agent in self.unreachable:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.sent.append((agent, notification))


@pytest.fixture
def stock() -> Stock:
    return Stock()


@pytest.fixture
def leases() -> Leases:
    return Leases(ManualClock(), lease_seconds=LEASE)


@pytest.fixture
def pull(leases: Leases) -> PullWorker:
    return PullWorker(leases)


def test_a_request_that_has_ended_is_granted_a_lease_in_place_of_vllms_own(
    pull: PullWorker, stock: Stock, leases: Leases
) -> None:
    """One that decode has read by then has none."""
    leases[P1] = STOCK
    pull.begin_step(stock, [P1, P2], [])
    assert dict(leases) == {P1: LEASE}


def test_the_first_beat_waits_for_the_handshake_and_goes_to_every_rank(pull: PullWorker, stock: Stock) -> None:
    pull.begin_step(stock, [], [(PREFILL, [P1])])
    assert stock.asked == [("p", "10.0.0.2", 5601, 2)]
    pull.begin_step(stock, [], [(PREFILL, [P2])])
    assert stock.sent == []
    stock.connecting.clear()
    stock.agents["p"] = ["rank 0", "rank 1"]
    pull.begin_step(stock, [], [])
    pull.begin_step(stock, [], [])
    assert stock.sent == [("rank 0", b"HB:p1,p2"), ("rank 1", b"HB:p1,p2")]
    pull.begin_step(stock, [], [(PREFILL, [P1])])
    assert stock.sent[2:] == [("rank 0", b"HB:p1"), ("rank 1", b"HB:p1")]


def test_a_handshake_that_failed_is_begun_again_with_the_next_beat(pull: PullWorker, stock: Stock) -> None:
    """And not with every step."""
    for _ in range(2):
        pull.begin_step(stock, [], [(PREFILL, [P1])])
        stock.connecting.clear()
        pull.begin_step(stock, [], [])
        pull.begin_step(stock, [], [])
    assert len(stock.asked) == 2 and stock.sent == []


def test_a_rank_that_cannot_be_reached_keeps_no_beat_from_the_others(
    pull: PullWorker, stock: Stock, caplog: pytest.LogCaptureFixture
) -> None:
    stock.agents["p"] = ["rank 0", "rank 1"]
    stock.unreachable.add("rank 0")
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        pull.begin_step(stock, [], [(PREFILL, [P1])])
    assert stock.sent == [("rank 1", b"HB:p1")]
    assert "rank 0" in caplog.text


def test_who_was_lost_is_forgotten_when_nothing_is_in_flight(stock: Stock, caplog: pytest.LogCaptureFixture) -> None:
    """And nobody else; also where vLLM has leases."""
    pull = PullWorker(None)
    stock.agents = {"p": ["rank 0", "rank 1"], "q": ["rank 2"]}
    pull.forget_lost_peers(stock)
    stock.lost, stock.receives = {"rank 1"}, True
    pull.forget_lost_peers(stock)
    assert list(stock.agents) == ["p", "q"]
    stock.receives = False
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        pull.forget_lost_peers(stock)
        pull.begin_step(stock, ["p1"], [])
        pull.forget_lost_peers(stock)
    assert list(stock.agents) == ["q"]
    assert len(caplog.messages) == 1 and "engine p" in caplog.text
    # It is met anew, under the names that it had.
    stock.agents["p"] = ["rank 0", "rank 1"]
    pull.forget_lost_peers(stock)
    assert "p" in stock.agents
