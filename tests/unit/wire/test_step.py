# SPDX-License-Identifier: Apache-2.0
"""wire/step.py: this package's entries in vLLM's sets come back unchanged, and other entries are not touched."""

from __future__ import annotations

import pickle
import random
import re
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.messages import MAX_ATTEMPT
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import (
    FAILING,
    ORDER,
    AwaitClaim,
    EndRenewal,
    FetchSpec,
    Finish,
    LeaseRenewal,
    Mark,
    OfferUpdate,
    Preempt,
    Revocation,
    Revoke,
    Step,
    StepCommand,
    Stop,
    UnneededOffer,
    WakeAddress,
    Withdraw,
    failed_mark,
    failure_of,
    finished_attempt_id,
    finished_attempts_of,
    idle_hold_id,
    idle_holds_of,
    mark,
    take_marked,
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


P1, D1 = PrefillRequestId("p"), DecodeRequestId("d")
EVERY: list[StepCommand] = [
    Revoke(P1, Revocation(RevocationCause.WEIGHTS, "why")),
    LeaseRenewal(D1, PREFILL, "n", 30.0),
    EndRenewal(D1),
    FetchSpec(1, D1, PREFILL, None, "n", "", 4, 0, 4, (BlockRange(0, (1,)),)),
    OfferUpdate(P1, "n", "", 4, (BlockRange(0, (1,)),), 4, None),
    AwaitClaim(P1, 1),
    Withdraw(1, "why"),
    UnneededOffer(PREFILL, "p", "n", ""),
    Preempt(P1, 1),
    Finish(P1),
    Stop(P1, "why"),
]
"""One of each kind, in the order in which workers take them in."""


def test_workers_take_commands_in_in_one_order_however_they_were_told() -> None:
    """Revocations first; a lease begins before it ends; an offer is made before it is stopped. Of one kind, the order
    in which they were told counts."""
    assert [type(one) for one in EVERY] == [*ORDER]
    assert {*ORDER} == {*typing.get_args(StepCommand)}
    for seed in range(50):
        told = random.Random(seed).sample(EVERY, len(EVERY))
        assert Step("h", 1, WAKE, "s", [*told, *told]).in_order() == [one for one in EVERY for _ in range(2)]
    withdrawals = [Withdraw(number, "") for number in (3, 1, 2)]
    assert Step("h", 1, WAKE, "s", [*withdrawals]).in_order() == withdrawals


def test_what_is_withheld_is_one_requests_tokens() -> None:
    """An offer without tokens stays: who has registered for it is told of its end."""
    empty, full = (msgspec.structs.replace(EVERY[4], ready_tokens=number) for number in (0, 4))
    other = msgspec.structs.replace(full, request_id=PrefillRequestId("other"))
    step = Step("h", 1, WAKE, "s", [empty, full, other, Finish(P1)])
    step.withhold(P1)
    assert step.commands == [empty, other, Finish(P1)]
    step.withhold(P1, even_empty=True)
    assert step.commands == [other, Finish(P1)] and step.of(OfferUpdate) == [other]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, False), ({"is_idle": False}, False), ({"is_stalled": True}, False), ({"lasted": [(1, True, 0.0)]}, False)]
    + [({"counts": {1: 1}}, True), ({"quarantined_blocks": 0}, True), ({"commands": EVERY[:1]}, True)],
)
def test_whatever_workers_act_on_is_news(fields: dict[str, Any], expected: bool) -> None:
    assert Step("h", 1, WAKE, "s", **fields).has_news == expected


def test_a_step_reaches_another_process_as_it_was() -> None:
    """vLLM's executors pickle what they send to workers."""
    step = Step("h", 1, WAKE, "s", EVERY, {1: 1}, 0)
    assert pickle.loads(pickle.dumps(step)) == step


@pytest.mark.parametrize(
    ("what", "other"), [(Mark.SPARED, Mark.CLAIMED), (Mark.CLAIMED, Mark.KNOWN), (Mark.KNOWN, Mark.SPARED)]
)
def test_marks_of_offers_are_told_from_blocks_and_from_failures(what: Mark, other: Mark) -> None:
    marks = {5, FAILING, failed_mark(1, FailureCause.MEDIA), failed_mark(2**62 - 1, FailureCause.LOST)}
    kept = set(marks)
    marks |= {mark(what, 1), mark(what, 77), mark(other, 77)}
    assert sorted(take_marked(what, marks)) == [1, 77] and marks == {*kept, mark(other, 77)}
    assert not take_marked(what, marks)
    assert take_marked(other, marks) == [77] and marks == kept
    assert not {*Mark} & {*FailureCause}
