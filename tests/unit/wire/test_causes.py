# SPDX-License-Identifier: Apache-2.0
"""wire/causes.py: each cause keeps its number, and every log line about a failure has the same fields."""

from __future__ import annotations

import pytest

from kvcached_nixl.wire.causes import MAX_SHOWN, FailureCause, HandOverFailed, RevocationCause


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
