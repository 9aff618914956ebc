# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.deadlines`."""

from __future__ import annotations

import time

import pytest

from kvcached_nixl.deadlines import Clock, ManualClock, MonotonicClock


def test_the_monotonic_clock_is_the_one_vllm_stamps_deadlines_with() -> None:
    """A deadline from vLLM can be compared with it."""
    clock: Clock = MonotonicClock()
    before = time.perf_counter()
    assert before <= clock.now_seconds() <= time.perf_counter()


def test_a_manual_clock_moves_only_when_told_and_never_back() -> None:
    """Tests own the time."""
    clock = ManualClock(5.0)
    assert clock.now_seconds() == clock.now_seconds() == 5.0
    clock.advance(2.5)
    assert clock.now_seconds() == 7.5
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1)
