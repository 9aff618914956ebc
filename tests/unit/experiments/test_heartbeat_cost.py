# SPDX-License-Identifier: Apache-2.0
"""The experiment's verdicts, on both sides of their limits."""

from __future__ import annotations

import pytest

from experiments.heartbeat_cost.__main__ import MOST_MILLISECONDS, OF_REQUESTS, Cost, judge
from kvcached_nixl.wire.lease import MOST_BEAT_BYTES


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"largest_bytes": MOST_BEAT_BYTES + 1}, [0]),
        ({"send_ms": MOST_MILLISECONDS}, [1]),
        ({"gather_ms": MOST_MILLISECONDS}, [1, 2]),
        ({"send_vllms_ms": MOST_MILLISECONDS}, [2]),
        ({"renew_ms": MOST_MILLISECONDS}, [3]),
        ({"waiting": 10_000, "renew_ms": 9.0}, []),
    ],
    ids=str,
)
def test_each_target_can_be_missed(changes: dict[str, float], missed: list[int]) -> None:
    usual: dict[str, float] = {
        "waiting": OF_REQUESTS,
        "gather_ms": 0.01,
        "send_ms": 0.1,
        "send_vllms_ms": 0.1,
        "renew_ms": 0.1,
        "step_without_beat_ms": 0.001,
        "notifications": 13,
        "largest_bytes": MOST_BEAT_BYTES,
    }
    verdicts = judge([Cost(**{**usual, **changes})])  # type: ignore[arg-type]
    assert [number for number, (_, _, reached) in enumerate(verdicts) if not reached] == missed
