# SPDX-License-Identifier: Apache-2.0
"""wire/messages.py: what was encoded is decoded, and other bytes raise only `Malformed`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codecs import each, fuzz, plain_id

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.manifest import PROTOCOL, Manifest
from kvcached_nixl.wire.messages import (
    MAX_ATTEMPT,
    MAX_HEARTBEAT_BYTES,
    PREFIX,
    KernelBlockRange,
    Message,
    Peer,
    Registration,
    Release,
    StagingGrant,
    StagingRequest,
    Stopped,
    Withdrawal,
    Written,
    decode,
    draw_attempt,
    encode,
    heartbeats,
    is_heartbeat,
    is_nameable,
    read_heartbeat,
)

DIGEST = "0123456789abcdef" * 2
PEER = Peer(EngineId("engine"), "127.0.0.1", 5600, 2, 1)
MANIFEST = Manifest(PROTOCOL, "0" * 16, "p-1", DIGEST, 97, (32,), (1, 1), (), 30.0, 0)
REGISTRATION = Registration(
    attempt=7, decode=PEER, incarnation="0" * 16, name="transfer:t",
    request_id="p-1", digest=DIGEST, num_tokens=98, first_token=32, end_token=97, block_sizes=(32, 32),
    groups=(KernelBlockRange(32, (3, 9, 4)), KernelBlockRange(64, (2**31 - 1, 5))),
)  # fmt: skip
MESSAGES: list[Message] = [
    REGISTRATION,
    Withdrawal(7, PEER),
    Release("p-1", "request:x", DIGEST, 1, 2),
    Release("", "request:x", "", 0, 1),
    Written(7, 0, 2),
    Written(MAX_ATTEMPT - 1, 1, 0, MANIFEST),
    Stopped(0, 1, 8, "no peer", True),
]
GROUP = {"first_token": 32, "block_ids": [1]}
ROOM = StagingGrant(7, PEER, 32, 97, (KernelBlockRange(32, (3, 9, 4)), KernelBlockRange(64, (7, 5))))


MESSAGES += [
    msgspec.structs.replace(REGISTRATION, groups=(KernelBlockRange(32, ()),), block_sizes=(32,), is_staged=True),
    msgspec.structs.replace(REGISTRATION, is_verified=True),
    msgspec.structs.replace(
        REGISTRATION, groups=(KernelBlockRange(32, ()),), block_sizes=(32,), is_verified=True, is_read=True
    ),
    ROOM,
    # A slot's number is that of a state, and of another slot's kernel block.
    msgspec.structs.replace(ROOM, groups=(KernelBlockRange(32, (0, 1, 2, 3)), KernelBlockRange(96, (2,)))),
    StagingRequest(7, 1, 32, 97),
    Written(7, 1, 3, None, 64),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message
    assert not is_heartbeat(encode(message))


def fields_of(message: Message, changed: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message, with some changed; each group has a block size unless these are changed themselves."""
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    if isinstance(message, Registration) and isinstance(changed.get("groups"), list):
        fields["block_sizes"] = [32] * len(changed["groups"])
    return fields | changed


@pytest.mark.parametrize(
    "stock",
    [b"HB:a,b", b"PUSH_REG:\x80", b"cmpl-1-0-abcdef01:1", b"KVNX3:\x80", b"", *heartbeats(["a"])],
    ids=plain_id,
)
def test_a_notification_of_vllm_is_not_taken_for_one_of_ours(stock: bytes) -> None:
    with pytest.raises(Malformed, match="expected it to start with"):
        decode(stock)


def peer(**changed: Any) -> dict[str, Any]:
    return {"engine_id": "e", "host": "h", "port": 1, "tp_size": 1, "tp_rank": 0, **changed}


def groups(count: int, *block_ids: int) -> list[dict[str, Any]]:
    """Groups with one block each, of another number if a number is given for it."""
    return [{"first_token": 32, "block_ids": [block]} for block in (*block_ids, *range(100, 100 + count))[:count]]


NO_BLOCKS = [{"first_token": 32, "block_ids": []}]
WRONG_PEERS = each(
    port=[0, 65536], tp_rank=[1], tp_size=[10**9], engine_id=["", "e" * 1025], host=["", "h" * 1025], more=[1]
)
WRONG_REGISTRATIONS = [
    *each(
        attempt=[-1, MAX_ATTEMPT, "7", True],
        name=[None],
        request_id=[None],
        digest=["x"],
        incarnation=["0" * 15],
        first_token=[33, 128, 97, -32],
        end_token=[32, 99, 2**31],
        block_sizes=[(0, 32), (32,), (32, 32, 32), (64, 32)],
        groups=[[], [GROUP] * 65, [1, 2], *([{**GROUP, **one}] for one in each(first_token=[0, 33]))],
        decode=[peer(**one) for one in WRONG_PEERS],
        is_staged=[True],
        gate=["text"],
        surplus=[1],
        say=["unknown"],
    ),
    *each(groups=[[{**GROUP, "block_ids": ids}] for ids in ([1, 1], [-1], [2**31])]),
    {"groups": [GROUP], "is_staged": True},
    {"groups": [GROUP], "is_verified": True, "is_read": True},
    {"groups": NO_BLOCKS, "is_read": True},
    {"groups": NO_BLOCKS, "is_read": True, "is_verified": True, "is_staged": True},
    {"is_read": True, "is_verified": True},
]


WRONG: list[tuple[Message, list[dict[str, Any]]]] = [
    (REGISTRATION, WRONG_REGISTRATIONS),
    (ROOM, each(first_token=[97], attempt=[-1], decode=[None], groups=[[], groups(65)])),
    (ROOM, [{"groups": [{**GROUP, "block_ids": [1, 1]}]}]),
    (StagingRequest(7, 1, 32, 97), each(attempt=[MAX_ATTEMPT], end_token=[32], first_token=[-1])),
    (
        Written(7, 0, 2, MANIFEST),
        each(
            end_token=[-1],
            index=[-1, "0", 2**31],
            tp_rank=[256],
            attempt=[MAX_ATTEMPT],
            manifest=[{}, msgspec.to_builtins(MANIFEST) | {"num_tokens": 0}],
        ),
    ),
    (Stopped(7, 0, 2, "w", False), each(cause=[-1], reason=[None], has_failed=[0])),
    (Withdrawal(7, PEER), each(decode=[None], attempt=[-1])),
    (Release("p", "n", DIGEST, 0, 1), each(tp_rank=[1], tp_size=[0, 257])),
]


@pytest.mark.parametrize(
    ("message", "changed"),
    [(message, one) for message, changes in WRONG for one in changes],
    ids=lambda one: type(one).__name__ if isinstance(one, msgspec.Struct) else str(one)[:40],
)
def test_a_message_out_of_range_is_malformed(message: Message, changed: dict[str, Any]) -> None:
    """A wrong field is found on receipt, before any block is looked at."""
    with pytest.raises(Malformed):
        decode(PREFIX + msgspec.msgpack.encode(fields_of(message, changed)))


BOUNDS: list[tuple[Message, list[dict[str, Any]]]] = [
    (
        REGISTRATION,
        [
            {},
            *each(
                attempt=[0, MAX_ATTEMPT - 1],
                end_token=[33, 98],
                num_tokens=[2**31 - 1],
                block_sizes=[(1, 1), (2, 32)],
                groups=[groups(1), groups(64), groups(2, 7, 7), [{**GROUP, "block_ids": [0, 2**31 - 1]}]],
                gate=[b"a gate"],
                decode=[peer(), peer(engine_id="e" * 1024), peer(host="h" * 1024)],
            ),
            {"decode": peer(port=65535, tp_size=256, tp_rank=255)},
            {"name": "", "request_id": ""},
            {"first_token": 0, "end_token": 1},
            {"groups": NO_BLOCKS, "is_staged": True, "is_verified": True},
        ],
    ),
    (ROOM, [{"first_token": 0, "end_token": 1}, *each(first_token=[96], groups=[groups(1), groups(64), NO_BLOCKS])]),
    (StagingRequest(7, 1, 32, 97), [{"end_token": 33}, {"first_token": 0, "end_token": 1}]),
    (Withdrawal(7, PEER), each(attempt=[0, MAX_ATTEMPT - 1])),
    (
        Release("p", "n", DIGEST, 0, 1),
        [{"request_id": "", "name": "", "digest": ""}, {"tp_rank": 255, "tp_size": 256}],
    ),
    (Written(7, 0, 2, MANIFEST), [{"index": 2**31 - 1, "end_token": 2**31 - 1, "tp_rank": 255}]),
    (Stopped(7, 0, 2, "w", False), [{"cause": 0, "reason": ""}]),
]


@pytest.mark.parametrize(
    ("message", "changed"),
    [(message, one) for message, changes in BOUNDS for one in changes],
    ids=lambda one: type(one).__name__ if isinstance(one, msgspec.Struct) else str(one)[:40],
)
def test_a_message_at_its_bounds_is_sound(message: Message, changed: dict[str, Any]) -> None:
    assert msgspec.to_builtins(decode(PREFIX + msgspec.msgpack.encode(fields_of(message, changed))))


def test_mutated_messages_raise_nothing_but_malformed() -> None:
    """What is read is in range, so it can be sent on."""
    sound = [encode(message)[len(PREFIX) :] for message in MESSAGES]
    read, malformed = fuzz(lambda said: encode(decode(PREFIX + said)), sound, 50_000)
    assert read > 500 and malformed > 25_000


def test_attempts_differ() -> None:
    drawn = {draw_attempt() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(0 <= one < MAX_ATTEMPT for one in drawn)


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
    assert all(len(one) <= MAX_HEARTBEAT_BYTES and is_heartbeat(one) for one in sent)
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


@pytest.mark.parametrize(
    ("changed", "is_same"), [({"tp_rank": 0}, True), ({"port": 5601}, False), ({"host": "b"}, False)], ids=str
)
def test_engines_of_one_id_are_told_apart_and_ranks_of_one_engine_are_not(changed: Any, is_same: bool) -> None:
    """Two replicas with one ``engine_id`` have a share of the slots each."""
    assert (msgspec.structs.replace(PEER, **changed).engine == PEER.engine) is is_same
