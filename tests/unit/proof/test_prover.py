# SPDX-License-Identifier: Apache-2.0
"""A prover with slow lanes still reports what it has found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcached_nixl.proof import __main__ as prover
from kvcached_nixl.proof.__main__ import LANES_SECONDS, prove_lanes
from kvcached_nixl.proof.result import AS_CONFIGURED, LaneFound, Question, Rates, Ucx

QUESTION = Question("cuda", 0, "VRAM", ("UCX",))
RATES = Rates(1e9, 1e9, 1e5)


class Remote:
    def __init__(self, question: Question, transports: str, *, has_memory: bool) -> None:
        assert not has_memory, "a full device would keep it from answering"

    def begun(self) -> None:
        pass

    def call(self, name: str) -> Ucx:
        return Ucx("1.19.0", ("self/memory", "rc_mlx5/mlx5_0:1", "cuda_ipc/cuda", "tcp/eth0"))

    def end(self) -> None:
        pass


def test_lanes_that_hang_leave_the_others_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has not timed out by then, and keeps the answer."""
    now = 1000.0

    def prove_one(question: Question, name: str, transports: Sequence[str]) -> LaneFound:
        nonlocal now
        now += LANES_SECONDS / 2 + 1
        return LaneFound(name, transports[0], rates={"elastic": RATES, "ordinary": RATES})

    monkeypatch.setattr(prover, "Remote", Remote)
    monkeypatch.setattr(prover, "prove_one", prove_one)
    monkeypatch.setattr(prover.time, "monotonic", lambda: now)
    said = prove_lanes(QUESTION)
    assert [lane.name for lane in said.lanes] == ["rc_mlx5", "cuda_ipc", "tcp", AS_CONFIGURED]
    assert [lane.name for lane in said.lanes if lane.unusable] == ["tcp", AS_CONFIGURED]
    assert "took 150 s" in said.lanes[-1].why_not
