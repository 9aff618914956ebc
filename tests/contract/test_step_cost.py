# SPDX-License-Identifier: Apache-2.0
"""`experiments/step_cost` times what it claims: vLLM's own scheduler, with that many waiting requests and connector."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from vllm.v1.request import RequestStatus

from experiments.bench.samples import Samples
from experiments.step_cost.hand_over import RUNNING
from experiments.step_cost.real_scheduler import Kind, Making, RealScheduler, measure, patched
from experiments.step_cost.report import SCHEDULE_FORMS
from kvcached_nixl.vllm.adapter.attributes import side_of
from kvcached_nixl.vllm.adapter.versions import BEYOND_KVCACHED, installed_has

pytestmark = pytest.mark.skipif(
    installed_has(BEYOND_KVCACHED),
    reason="this scheduler asserts that no more run than may: the experiment lowers that number while they run",
)

WAITING = 40


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize(
    "making",
    [
        Making(Kind.QUEUED, None, False, WAITING),
        *(Making(kind, "pull", False, WAITING) for kind in (Kind.DECODE, Kind.PREFILL)),
        *(Making(kind, mode, True, WAITING) for kind in (Kind.DECODE, Kind.PREFILL) for mode in ("pull", "push")),
    ],
    ids=lambda one: f"{one.kind.value} {one.mode} {'ours' if one.is_ours else 'stock'}",
)
def test_so_many_wait_and_the_others_run(making: Making, has_room: bool) -> None:
    with patched() if making.is_ours else contextlib.nullcontext():
        side = RealScheduler(making, has_room=has_room)
        scheduler = side.scheduler
        for _ in range(5):
            assert side.step() > 0.0
            assert len(scheduler.running) == RUNNING and side.num_waiting == WAITING
        waiting = [one for one in scheduler.requests.values() if one not in scheduler.running]
        of_kind = {
            Kind.QUEUED: lambda one: one.status == RequestStatus.WAITING,
            Kind.DECODE: lambda one: one.status == RequestStatus.WAITING_FOR_REMOTE_KVS,
            Kind.PREFILL: lambda one: RequestStatus.is_finished(one.status),
        }[making.kind]
        assert all(map(of_kind, waiting))
        if scheduler.connector is not None:
            assert (side_of(scheduler.connector) is not None) == making.is_ours
        if has_room and making.kind is not Kind.QUEUED:
            side.arrival()
            assert side.num_waiting == WAITING + 1
        side.close()


def test_every_engine_is_measured() -> None:
    samples = Samples(SCHEDULE_FORMS)
    measure(samples, 5, 3, lambda words: None)
    assert len(samples.figures) == 13 and {waiting for *_, waiting in samples.settings} == {5}
    assert all(found["step_p50"][0] > 0 for found in samples.figures.values())
