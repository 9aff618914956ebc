# SPDX-License-Identifier: Apache-2.0
"""wire/lease.py: heartbeats of bounded size, encoded and decoded; malformed bytes raise only `Malformed`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codecs import fuzz
from support.parameter_ids import plain_id

from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.lease import MAX_HEARTBEAT_BYTES, heartbeats, is_heartbeat, is_nameable, read_heartbeat
from kvcached_nixl.wire.messages import is_ours

IDS = st.lists(
    st.one_of(st.text(min_size=1, max_size=60), st.integers(1, MAX_HEARTBEAT_BYTES - 3).map("x".__mul__)).filter(
        is_nameable
    ),
    max_size=100,
)


@given(IDS)
@settings(max_examples=25, deadline=None)
def test_heartbeats_name_each_id_once_in_order_and_none_is_too_large(ids: list[str]) -> None:
    """What is sent is what is read, however many notifications it takes; and two of them never fit into one."""
    sent = list(heartbeats(ids))
    assert [one for notification in sent for one in read_heartbeat(notification)] == ids
    assert all(len(one) <= MAX_HEARTBEAT_BYTES and is_heartbeat(one) and not is_ours(one) for one in sent)
    for one, following in zip(sent, sent[1:], strict=False):
        assert len(one) + 1 + len(read_heartbeat(following)[0].encode()) > MAX_HEARTBEAT_BYTES


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_id_that_fits_into_no_heartbeat_keeps_no_other_from_being_named(place: int) -> None:
    """vLLM's own worker would send it."""
    ids = ["a", "b"]
    ids.insert(place, "x" * MAX_HEARTBEAT_BYTES)
    assert [one for notification in heartbeats(ids) for one in read_heartbeat(notification)] == ["a", "b"]


@pytest.mark.parametrize(
    ("notification", "expected"),
    [
        (b"HB:a", ["a"]),
        (b"HB:a,b,", ["a", "b"]),
        (b"HB:", []),
        (b"HB:,,a", ["a"]),
        (b"HB:" + b"x" * (MAX_HEARTBEAT_BYTES - 3), ["x" * (MAX_HEARTBEAT_BYTES - 3)]),
    ],
    ids=plain_id,
)
def test_a_stock_decodes_heartbeat_is_read(notification: bytes, expected: list[str]) -> None:
    assert read_heartbeat(notification) == expected


@pytest.mark.parametrize(
    "notification",
    [b"", b"HB", b"hb:a", b"KVNX6:", b"HB:\xff", b"HB:" + b"x" * (MAX_HEARTBEAT_BYTES - 2)],
    ids=plain_id,
)
def test_what_is_no_heartbeat_is_malformed(notification: bytes) -> None:
    with pytest.raises(Malformed):
        read_heartbeat(notification)


@pytest.mark.parametrize(
    ("request_id", "nameable"),
    [
        ("cmpl-1-0-abcdef01", True),
        ("ü" * 2046, True),
        ("ü" * 2047, False),
        ("", False),
        ("a,b", False),
        ("x" * (MAX_HEARTBEAT_BYTES - 3), True),
        ("x" * (MAX_HEARTBEAT_BYTES - 2), False),
        ("\ud800", False),
    ],
    ids=lambda value: str(value)[:12].encode("ascii", "replace").decode(),
)
def test_what_a_heartbeat_can_name(request_id: str, nameable: bool) -> None:
    assert is_nameable(request_id) == nameable


def test_mutated_heartbeats_raise_nothing_but_malformed() -> None:
    assert min(fuzz(read_heartbeat, [b"HB:cmpl-1-0-abcdef01,p2"], 20_000)) > 1_000
