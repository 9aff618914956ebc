# SPDX-License-Identifier: Apache-2.0
"""kvcached's own pages are registered only where that is proved."""

from __future__ import annotations

import pytest

from kvcached_nixl.errors import MemoryRefused
from kvcached_nixl.proof.result import LaneFound, Proof, Question, Rates
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath
from kvcached_nixl.worker.memory_path import require_direct

FAST, SLOW = Rates(8e9, 8e9, 1e6), Rates(1e7, 1e7, 1e3)


def proof(*lanes: LaneFound) -> Proof:
    return Proof(Question("cpu", 0, "DRAM", ("UCX",)), {}, lanes, None, 1.0)


@pytest.mark.parametrize("wish", MemoryPath)
def test_what_does_not_follow_is_refused_whatever_is_asked_for(wish: MemoryPath) -> None:
    good = LaneFound("tcp", "tcp", rates={"elastic": FAST, "ordinary": FAST})
    require_direct(wish, proof(good))
    wrong = LaneFound("cma", "cma,tcp", wrong=("mapped again (a peer READ)",), rates=good.rates)
    unknown = LaneFound("rc_mlx5", "rc_mlx5,tcp", unusable="no endpoint")
    with pytest.raises(MemoryRefused) as refused:
        require_direct(wish, proof(good, wrong, unknown))
    words = str(refused.value)
    assert all(one in words for one in (wish.value, "cma", "a peer READ", "rc_mlx5", "no endpoint", "UCX_TLS"))


def test_what_is_slow_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", SERVER_LOGGER):
        require_direct(MemoryPath.AUTO, proof(LaneFound("cuda_ipc", "all", rates={"elastic": SLOW, "ordinary": FAST})))
    assert "cuda_ipc" in caplog.text and "0.01 GB/s" in caplog.text
