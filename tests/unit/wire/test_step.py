# SPDX-License-Identifier: Apache-2.0
"""wire/step.py: this package's entries in vLLM's sets come back unchanged, and other entries are not touched."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.messages import MAX_ATTEMPT
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import (
    FAILING,
    FetchSpec,
    LeaseRenewal,
    OfferUpdate,
    Step,
    UnneededOffer,
    WakeAddress,
    claimed_mark,
    failed_mark,
    failure_of,
    finished_attempt_id,
    finished_attempts_of,
    idle_hold_id,
    idle_holds_of,
    known_mark,
    spared_mark,
    take_claimed,
    take_known,
    take_spared,
)

PREFILL = RemotePrefill("p", "h", 1, 1)
WAKE = WakeAddress("127.0.0.1", 1, "k")
ATTEMPTS = st.integers(0, MAX_ATTEMPT - 1)
# Hypothesis also draws strings that the source has.
OTHERS = st.text().filter(lambda text: not re.fullmatch(r"kvcached-nixl:\w+:[0-9]+", text))


@given(attempts=st.sets(ATTEMPTS), holds=st.sets(st.integers(0, 2**61)), others=st.sets(OTHERS))
def test_each_name_is_taken_out_by_its_own_reader_and_no_other(
    attempts: set[int], holds: set[int], others: set[str]
) -> None:
    received = {*map(finished_attempt_id, attempts), *others}
    assert sorted(finished_attempts_of(received)) == sorted(attempts)
    assert received == others
    sent = {*map(idle_hold_id, holds), *others}
    assert sorted(idle_holds_of(sent)) == sorted(holds)
    assert sent == others


@given(ATTEMPTS, st.sampled_from(FailureCause))
def test_a_failure_comes_back_with_its_cause(attempt: int, cause: FailureCause) -> None:
    """It is below every block id there is, and is not the sign that tells vLLM to ask."""
    mark = failed_mark(attempt, cause)
    assert failure_of(mark) == (attempt, cause)
    assert mark < FAILING < 0


@given(st.integers(0, 2**31))
def test_a_block_is_no_failure(block_id: int) -> None:
    assert failure_of(block_id) is None
    assert failure_of(FAILING) is None


def test_marks_of_different_attempts_and_causes_differ() -> None:
    marks = {failed_mark(attempt, cause) for attempt in range(200) for cause in FailureCause}
    assert len(marks) == 200 * len(FailureCause)


NEWS: dict[str, Any] = {
    "awaited": [(PrefillRequestId("p1"), 1)],
    "renewed": [LeaseRenewal(DecodeRequestId("d"), PREFILL, "n", 30.0)],
    "unrenewed": [DecodeRequestId("d")],
    "fetches": [FetchSpec(1, DecodeRequestId("d"), PREFILL, None, "n", "", 4, 0, 4, (BlockRange(0, (1,)),))],
    "withdrawn": {1: "why"},
    "released": [UnneededOffer(PREFILL, "p", "n", "")],
    "preempted": [(PrefillRequestId("p"), 1)],
    "finished": [PrefillRequestId("p")],
    "stopped": {PrefillRequestId("p"): "why"},
    "revoked": {PrefillRequestId("p"): "why"},
    "offered": [OfferUpdate(PrefillRequestId("p"), "n", "", 4, (BlockRange(0, (1,)),), 4, None)],
    "counts": {1: 1},
    "quarantined_blocks": 0,
}


@pytest.mark.parametrize("field", sorted(NEWS))
def test_anything_in_a_step_is_news(field: str) -> None:
    """But for a step's own frame, and for what it computes."""
    frame = {"host", "port", "wake_address", "incarnation", "is_idle", "is_stalled", "unkept", "lasted"}
    assert set(Step.__struct_fields__) == {*NEWS, *frame}
    assert not Step("h", 1, WAKE, "s").has_news
    assert not Step("h", 1, WAKE, "s", is_idle=False).has_news
    assert Step("h", 1, WAKE, "s", **{field: NEWS[field]}).has_news


def test_a_step_reaches_another_process_as_it_was() -> None:
    """vLLM's executors pickle what they send to workers."""
    step = Step("h", 1, WAKE, "s", **NEWS)
    assert pickle.loads(pickle.dumps(step)) == step
    assert msgspec.structs.asdict(step).keys() == set(Step.__struct_fields__)


@pytest.mark.parametrize(
    ("mark", "other", "take", "take_other"),
    [
        (spared_mark, claimed_mark, take_spared, take_claimed),
        (claimed_mark, known_mark, take_claimed, take_known),
        (known_mark, spared_mark, take_known, take_spared),
    ],
)
def test_marks_of_offers_are_told_from_blocks_and_from_failures(
    mark: Callable[[int], int],
    other: Callable[[int], int],
    take: Callable[[set[int]], list[int]],
    take_other: Callable[[set[int]], list[int]],
) -> None:
    marks = {5, FAILING, failed_mark(1, FailureCause.MEDIA), failed_mark(2**62 - 1, FailureCause.LOST)}
    kept = set(marks)
    marks |= {mark(1), mark(77), other(77)}
    assert sorted(take(marks)) == [1, 77] and marks == {*kept, other(77)}
    assert not take(marks)
    assert take_other(marks) == [77] and marks == kept
