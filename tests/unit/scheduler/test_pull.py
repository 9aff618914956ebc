# SPDX-License-Identifier: Apache-2.0
"""scheduler/pull.py: until when an engine that pulls goes on stepping, and whose leases it renews."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.idle import LONGEST_IDLE_STEP_SECONDS, SHORTEST_IDLE_STEP_SECONDS
from kvcached_nixl.scheduler import pull
from kvcached_nixl.scheduler.lease import Renewals
from kvcached_nixl.scheduler.pull import PullScheduler
from kvcached_nixl.wire.params import RemotePrefill

PREFILL = RemotePrefill("p", "10.0.0.2", 5601, 1)
INTERVAL = 5.0


@dataclass
class Asked:
    request_id: str
    kv_transfer_params: dict[str, Any] | None


def of_decode() -> Asked:
    return Asked(
        "d1",
        {
            "do_remote_prefill": True,
            "remote_request_id": "p1",
            "remote_engine_id": "p",
            "remote_host": "10.0.0.2",
            "remote_port": 5601,
            "tp_size": 1,
        },
    )


class Slept:
    """What the engine's thread waited, in place of waiting."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made = Slept()
    monkeypatch.setattr(pull, "time", made)
    return made.seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def renewing(clock: ManualClock) -> PullScheduler:
    made = PullScheduler(Renewals(clock, lease_seconds=6 * INTERVAL))
    made.take_beats(is_idle=False)
    return made


def beats_of(half: PullScheduler) -> list[Any]:
    return half.take_beats(is_idle=False)


def test_prefill_steps_until_its_workers_have_let_go_of_every_request() -> None:
    half = PullScheduler(None)
    half.finished("p1", False)
    assert not half.pending
    half.finished("p2", True)
    assert half.pending and not half.is_sending("p2")
    assert half.ended({"p1"}, None) == [] and half.pending
    half.ended({"p2"}, set())
    assert not half.pending


def test_decode_steps_until_a_read_has_ended_whose_request_is_gone() -> None:
    half = PullScheduler(None)
    half.allocated(Asked("x", None), 8)
    half.allocated(Asked("y", {"do_remote_decode": True}), 0)
    half.allocated(of_decode(), 0)
    assert not half.pending
    half.allocated(of_decode(), 8)
    half.finished("d1", False)
    assert half.pending
    half.ended(None, {"d1"})
    assert not half.pending


def test_only_an_idle_prefill_waits_in_its_steps_and_ever_longer(slept: list[float]) -> None:
    half = PullScheduler(None)
    half.take_beats(is_idle=True)
    half.finished("p1", True)
    half.take_beats(is_idle=False)
    assert slept == []
    for _ in range(20):
        half.take_beats(is_idle=True)
    assert slept[:2] == [SHORTEST_IDLE_STEP_SECONDS, 2 * SHORTEST_IDLE_STEP_SECONDS]
    assert slept[-1] == max(slept) == LONGEST_IDLE_STEP_SECONDS
    half.take_beats(is_idle=False)
    half.take_beats(is_idle=True)
    assert slept[20:] == [SHORTEST_IDLE_STEP_SECONDS]
    half.allocated(of_decode(), 8)
    half.take_beats(is_idle=True)
    assert len(slept) == 21, "a READ that has ended is seen at once"


def test_a_request_is_renewed_from_its_arrival_until_it_has_its_kv(renewing: PullScheduler, clock: ManualClock) -> None:
    """Also when it is gone meanwhile: the READ goes on."""
    renewing.arrived(of_decode())
    assert beats_of(renewing) == [(PREFILL, ["p1"])]
    renewing.allocated(of_decode(), 8)
    renewing.finished("d1", False)
    clock.advance(INTERVAL)
    assert beats_of(renewing) == [(PREFILL, ["p1"])]
    renewing.ended(None, {"d1"})
    clock.advance(INTERVAL)
    assert beats_of(renewing) == []


@pytest.mark.parametrize("ends", ["aborted while it waits", "everything was in the prefix cache"])
def test_a_request_that_reads_nothing_is_renewed_no_more(ends: str, renewing: PullScheduler) -> None:
    renewing.arrived(of_decode())
    if ends == "aborted while it waits":
        renewing.finished("d1", False)
    else:
        renewing.allocated(of_decode(), 0)
    assert beats_of(renewing) == []


def test_where_vllm_renews_this_does_not(slept: list[float]) -> None:
    half = PullScheduler(None)
    half.arrived(of_decode())
    half.finished("d1", False)
    assert beats_of(half) == []
