# SPDX-License-Identifier: Apache-2.0
"""What goes between the processes of one engine: steps, timelines, failures, and numbers that it says of itself."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from support.codecs import each, plain_id

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.causes import MAX_SHOWN, FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.headroom import AskingFigures, Headroom, encode_headroom, read_headroom
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import (
    ORDER,
    AwaitClaim,
    FetchSpec,
    Finish,
    LeaseRenewal,
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
)
from kvcached_nixl.wire.timeline import MOST_MARKS, State, Timeline

PREFILL = RemotePrefill("p", "h", 1, 1)
WAKE = WakeAddress("127.0.0.1", 1, "k")
P1, D1 = PrefillRequestId("p"), DecodeRequestId("d")
EVERY: list[StepCommand] = [
    Revoke(P1, Revocation(RevocationCause.WEIGHTS, "why", computing=frozenset({P1}))),
    LeaseRenewal(D1, PREFILL, "n", 30.0),
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
    """Revocations first; an offer is made before it is stopped. Of one kind, the order in which they were told counts:
    a lease ends that has begun, or another one begins."""
    assert [type(one) for one in EVERY] == [*ORDER]
    for seed in range(50):
        told = random.Random(seed).sample(EVERY, len(EVERY))
        assert Step("h", 1, WAKE, "s", [*told, *told]).in_order() == [one for one in EVERY for _ in range(2)]
    for told in ([Withdraw(number, "") for number in (3, 1, 2)], [LeaseRenewal(D1), EVERY[1], LeaseRenewal(D1)]):
        assert Step("h", 1, WAKE, "s", [*told]).in_order() == told


def test_what_is_withheld_is_one_requests_tokens() -> None:
    """An offer without tokens stays: who has registered for it is told of its end."""
    empty, full = (msgspec.structs.replace(EVERY[3], ready_tokens=number) for number in (0, 4))
    other = msgspec.structs.replace(full, request_id=PrefillRequestId("other"))
    step = Step("h", 1, WAKE, "s", [empty, full, other, Finish(P1)])
    step.withhold(P1)
    assert step.commands == [empty, other, Finish(P1)]
    step.withhold(P1, even_empty=True)
    assert step.commands == [other, Finish(P1)] and step.of(OfferUpdate) == [other]


def decoded() -> Timeline:
    found = Timeline()
    found.enter(State.DECODE_ALLOCATED, 1.0)
    found.enter(State.DECODE_HANDSHAKE, 1.5)
    found.enter(State.DECODE_MOVING, 2.0)
    return found


def test_states_add_up_to_the_whole() -> None:
    found = decoded()
    found.enter(State.DECODE_VERIFYING, 3.0)
    found.end(3.25)
    assert found.lasted() == {
        State.DECODE_ALLOCATED: 0.5,
        State.DECODE_HANDSHAKE: 0.5,
        State.DECODE_MOVING: 1.0,
        State.DECODE_VERIFYING: 0.25,
    }
    assert sum(found.lasted().values()) == 3.25 - 1.0
    found.end(9.0)
    assert found.end_seconds == 3.25, "it has ended"


def test_a_timeline_is_bounded() -> None:
    """However often an offer is asked for and given up."""
    found = decoded()
    for number in range(2 * MOST_MARKS):
        found.enter(State.PREFILL_OFFERED if number % 2 else State.PREFILL_SENDING, 5e3 + number)
    found.end(1e5)
    assert len(found.marks) == MOST_MARKS and sum(found.lasted().values()) == pytest.approx(1e5 - 1.0)


def test_a_workers_timeline_takes_the_place_of_the_time_in_which_the_scheduler_knew_nothing() -> None:
    of_request = Timeline()
    of_request.enter(State.DECODE_HELD, 0.0)
    of_request.enter(State.DECODE_QUEUED, 0.25)
    of_request.enter(State.DECODE_REPORTING, 0.5)
    of_rank = decoded()
    of_rank.end(3.0)
    of_request.take_in(of_rank.marks, 3.0)
    of_request.enter(State.DECODE_RESUMING, 3.125)
    of_request.end(4.0)
    assert [(one.state, one.begin_seconds) for one in of_request.intervals()] == [
        (State.DECODE_HELD, 0.0),
        (State.DECODE_QUEUED, 0.25),
        (State.DECODE_ALLOCATED, 0.5),
        (State.DECODE_HANDSHAKE, 1.5),
        (State.DECODE_MOVING, 2.0),
        (State.DECODE_REPORTING, 3.0),
        (State.DECODE_RESUMING, 3.125),
    ]
    assert sum(of_request.lasted().values()) == 4.0


def test_each_cause_keeps_its_number_and_its_label() -> None:
    """Golden: the numbers cross between processes, and the labels are those of a metric."""
    assert [cause.label for cause in sorted(FailureCause)] == [
        "parameters", "no_manifest", "digest", "range", "restarted", "refused", "unreachable", "lost", "lease",
        "stopped", "deadline", "protocol", "defect", "quarantine", "checksum", "revoked", "media", "no_blocks",
        "queue_timeout",
    ]  # fmt: skip
    assert [int(cause) for cause in sorted(FailureCause)] == list(range(19))
    assert [cause.label for cause in sorted(RevocationCause)] == [
        "weights", "paused", "cleared", "states", "blocks", "limit", "neighbour",
    ]  # fmt: skip
    assert [cause.label for cause in sorted(RevocationCause) if cause.is_of_memory] == ["blocks", "limit", "neighbour"]


@pytest.mark.parametrize(
    ("request_id", "known", "expected"),
    [
        ("", {}, "cause=lost"),
        ("d-1", {}, "cause=lost request=d-1"),
        ("", {"attempt": 0}, "cause=lost attempt=0"),
        ("", {"prefill_request_id": "p-1"}, "cause=lost prefill_request=p-1"),
        ("d-1", {"attempt": 7, "prefill_request_id": "p-1"}, "cause=lost attempt=7 request=d-1 prefill_request=p-1"),
    ],
    ids=["nothing", "request", "attempt", "prefill's request", "all"],
)
def test_the_fields_of_a_failure_are_those_that_are_known(
    request_id: str, known: dict[str, str], expected: str
) -> None:
    """``grep`` finds a field by its name, so one that is not known is left out, with the space before it."""
    failure = HandOverFailed(FailureCause.LOST, "a reason")
    assert failure.tags(request_id, **known) == expected  # type: ignore[arg-type]
    assert (failure.cause, str(failure)) == (FailureCause.LOST, "a reason")


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [
        ("a b", "a?b"),
        ("a\nb\tc", "a?b?c"),
        ("a\"b'c\\d", "a?b?c?d"),
        ("\x7fé\ud800", "???"),
        ("!~[]^-X?", "!~[]^-X?"),
        ("x" * MAX_SHOWN, "x" * MAX_SHOWN),
        ("x" * MAX_SHOWN + "y", "x" * MAX_SHOWN),
    ],
    ids=["space", "lines", "quotes", "not ASCII", "plain", "longest", "too long"],
)
def test_an_id_that_a_client_chose_ends_no_field_and_no_line(request_id: str, shown: str) -> None:
    """Each character that could do so is shown as a question mark."""
    assert HandOverFailed(FailureCause.MEDIA, "").tags(request_id) == f"cause=media request={shown}"


FIGURES = AskingFigures(held=3, asked=2)
SAID = Headroom(10, 20, 30, 1, 5, 2**40, 2**30, 2**31, 2**30, 2, 1.5, 0.0, FIGURES)


def test_it_comes_back_as_it_was() -> None:
    assert read_headroom(encode_headroom(SAID)) == SAID


WRONG_FIGURES = each(held=[-1], ended=[{"lost": 1}], computed=[{"short": -1}], more=[1])
WRONG_HEADROOM: list[dict[str, Any]] = [
    {name: value}
    for name in Headroom.__struct_fields__[:-1]
    for value in (-1, 2**63, "1", None, float("nan") if name.endswith("_seconds") else 1.5)
] + [{"asking": msgspec.to_builtins(FIGURES) | one} for one in WRONG_FIGURES]


@pytest.mark.parametrize("changed", WRONG_HEADROOM, ids=plain_id)
def test_what_is_no_number_of_things_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read_headroom(msgspec.msgpack.encode(msgspec.to_builtins(SAID) | changed))


@pytest.mark.parametrize("said", [b"", b"x", b"\xc1", msgspec.msgpack.encode({"free_tokens": 1})])
def test_other_answers_are_refused(said: bytes) -> None:
    with pytest.raises(Malformed):
        read_headroom(said)
