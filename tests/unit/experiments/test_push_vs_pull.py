# SPDX-License-Identifier: Apache-2.0
"""The experiment's arithmetic: percentiles, cells, and each target on both sides of its limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.push_vs_pull.arms import (
    ARMS,
    CHUNK_TOKENS,
    FULL,
    PULL,
    PUSH_STREAMED,
    PUSH_WHOLE,
    QUICK,
    SHARED_MEMORY,
    STOCK_PUSH,
    TCP,
    TRANSPORTS,
    Arm,
    Transport,
    specs,
)
from experiments.push_vs_pull.measure import Sample
from experiments.push_vs_pull.report import cells, judge, percentile, plot


def sample(
    arm: Arm,
    first: float,
    *,
    transport: Transport = TCP,
    tokens: int = 1024,
    at_a_time: int = 1,
    exposed: float | None = None,
) -> Sample:
    return Sample(arm.name, transport.name, tokens, at_a_time, first, 0.01, exposed)


def verdicts(samples: Sequence[Sample]) -> list[tuple[str, bool]]:
    return [(figure, reached) for _, figure, reached in judge(cells(samples))]


@pytest.mark.parametrize(
    ("values", "hundredths", "expected"),
    [([3.0], 50, 3.0), ([3.0, 1.0], 50, 1.0), ([1.0, 2.0, 3.0], 50, 2.0), ([1.0, 2.0], 90, 2.0), ([2.0, 1.0], 0, 1.0)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], hundredths: int, expected: float) -> None:
    """Nothing is interpolated, and few values have their largest as the 99th."""
    assert percentile(values, hundredths) == expected


def test_a_cell_is_one_arm_transport_length_and_number_at_a_time() -> None:
    """None of the four is mixed with another, and a cell that was not asked for what is left has none."""
    samples = [
        sample(PULL, 1.0, exposed=0.5),
        sample(PULL, 3.0, exposed=0.7),
        sample(PULL, 2.0, at_a_time=2),
        sample(PULL, 2.0, tokens=128),
        sample(PULL, 2.0, transport=SHARED_MEMORY),
        sample(PUSH_WHOLE, 2.0),
    ]
    found = cells(samples)
    assert [one.samples for one in found] == [2, 1, 1, 1, 1]
    assert (found[0].first_token_p50, found[0].first_token_p99) == (1.0, 3.0)
    assert found[0].exposed_p50 == pytest.approx(0.6)
    assert found[1].exposed_p50 is None


@pytest.mark.parametrize(
    ("tokens", "pull", "reached"), [(1024, 1.5, True), (1024, 1.49, False), (512, 1.0, True), (512, 0.99, False)]
)
def test_streamed_push_against_pull(tokens: int, pull: float, reached: bool) -> None:
    """Half again as soon from 1,024 tokens up, and below that never later."""
    samples = [sample(PULL, pull, tokens=tokens), sample(PUSH_STREAMED, 1.0, tokens=tokens)]
    assert verdicts(samples) == [(f"{pull:.2f} x", reached)]
    elsewhere = [sample(arm, 1.0, transport=SHARED_MEMORY) for arm in (PULL, PUSH_STREAMED)]
    assert verdicts(elsewhere) == [], "the target is TCP's"


@pytest.mark.parametrize(("left", "reached"), [(0.11, True), (0.111, False)])
def test_what_is_left_after_the_last_step(left: float, reached: bool) -> None:
    """As much as a prompt of one chunk leaves, whatever the length."""
    samples = [
        sample(PUSH_STREAMED, 1.0, tokens=CHUNK_TOKENS, exposed=0.1),
        sample(PUSH_STREAMED, 1.0, tokens=4 * CHUNK_TOKENS, exposed=left),
    ]
    assert verdicts(samples) == [(f"{left * 1e3:.0f} ms of 100 ms", reached)]
    assert verdicts(samples[1:]) == []


@pytest.mark.parametrize(("tokens", "stock", "expected"), [(2048, 1.2, [True]), (2048, 1.1, [False]), (1024, 1.1, [])])
def test_streamed_push_against_the_stock_one(tokens: int, stock: float, expected: list[bool]) -> None:
    """From 2,048 tokens up, over whatever carries it."""
    samples = [
        sample(STOCK_PUSH, stock, tokens=tokens, transport=SHARED_MEMORY),
        sample(PUSH_STREAMED, 1.0, tokens=tokens, transport=SHARED_MEMORY),
    ]
    assert [reached for _, reached in verdicts(samples)] == expected


def test_arms_differ_in_what_they_are_named_for(tmp_path: Path) -> None:
    """Both sides of an arm are alike but for their roles, only kvcached's arms run it, and TCP is forced where its name
    says so."""
    for arm in ARMS:
        for transport in TRANSPORTS:
            prefill, decode = specs(arm, transport, tmp_path)
            assert prefill.name != decode.name
            assert prefill.kv_transfer and decode.kv_transfer
            assert {**prefill.kv_transfer, "kv_role": ""} == {**decode.kv_transfer, "kv_role": ""}
            assert (prefill.kv_transfer["kv_role"], decode.kv_transfer["kv_role"]) == ("kv_producer", "kv_consumer")
            assert ("ENABLE_KVCACHED" in prefill.environment) == arm.kvcached
            assert prefill.environment.get("UCX_TLS") == ("tcp" if transport.is_tcp else None)
            assert transport.is_tcp == transport.name.startswith("TCP")
    assert len({arm.servers for arm in ARMS}) == len(ARMS) - 1 and PUSH_WHOLE.servers == PUSH_STREAMED.servers
    assert set(QUICK.lengths) <= set(FULL.lengths)
    assert set(QUICK.at_a_time) <= set(FULL.at_a_time)


@pytest.mark.parametrize(("length", "at_a_time", "rounds"), [(128, 1, 6), (8192, 1, 3), (8192, 2, 2), (8192, 8, 1)])
def test_long_prompts_have_fewer_rounds(length: int, at_a_time: int, rounds: int) -> None:
    assert FULL.rounds(length, at_a_time) == rounds


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    """One panel per transport."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "plot.png"
    samples = [
        sample(arm, 1.0, transport=transport, tokens=tokens)
        for arm in (PULL, PUSH_STREAMED)
        for transport in TRANSPORTS
        for tokens in (128, 1024)
    ]
    plot(cells(samples), "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
