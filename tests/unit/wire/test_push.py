# SPDX-License-Identifier: Apache-2.0
"""Push messages: each comes back as it was sent, and nothing else ever comes out of bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvcached_nixl.ids import DecodeRequestId, EngineId
from kvcached_nixl.wire.push import (
    PREFIX,
    Declined,
    Failed,
    Malformed,
    Message,
    Peer,
    Registration,
    Withdrawal,
    Withdrawn,
    Written,
    decode,
    draw_attempt,
    encode,
    is_push,
)

PEER = Peer(EngineId("engine"), "127.0.0.1", 5600, 2, 1)
REGISTRATION = Registration(
    transfer="t", attempt=7, decode_request_id=DecodeRequestId("d-1"), decode=PEER, first_token=32, end_token=97,
    block_size=32, block_ids=((3, 9, 4), (0, 2**31 - 1, 5)),
)  # fmt: skip
MESSAGES: list[Message] = [
    REGISTRATION,
    Withdrawal("t", 7, PEER),
    Declined("t"),
    Written("t", 7, 0, 2, 5, True),
    Failed("t", 7, 1, 2, "no peer"),
    Withdrawn("t", 2**63 - 1, 1, 2),
]
FUZZED_MESSAGES = 100_000


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message
    assert is_push(encode(message))


@pytest.mark.parametrize("stock", [b"HB:a,b", b"PUSH_REG:\x80", b"cmpl-1-0-abcdef01:1", b""])
def test_a_notification_of_vllm_is_not_taken_for_one_of_ours(stock: bytes) -> None:
    assert not is_push(stock)
    with pytest.raises(Malformed):
        decode(stock)


@pytest.mark.parametrize(
    "changed",
    [
        {"attempt": -1},
        {"attempt": "7"},
        {"transfer": None},
        {"first_token": 33},
        {"first_token": 128},
        {"first_token": -32},
        {"end_token": 32},
        {"block_size": 0},
        {"block_ids": []},
        {"block_ids": [[1, 1]]},
        {"block_ids": [[-1]]},
        {"block_ids": [[2**31]]},
        {"block_ids": [1, 2]},
        {"decode": {"engine_id": "e", "host": "h", "port": 0, "tp_size": 1, "tp_rank": 0}},
        {"decode": {"engine_id": "e", "host": "h", "port": 1, "tp_size": 1, "tp_rank": 1}},
        {"surplus": 1},
        {"say": "unknown"},
    ],
    ids=str,
)
def test_a_registration_out_of_range_is_malformed(changed: dict[str, Any]) -> None:
    """A wrong field is found on receipt, before any block is looked at."""
    fields = msgspec.to_builtins(REGISTRATION) | changed
    with pytest.raises(Malformed):
        decode(PREFIX + msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("index", [-1, "0"])
def test_a_write_out_of_range_is_malformed(index: object) -> None:
    fields = msgspec.to_builtins(Written("t", 7, 0, 2, 5, True)) | {"index": index}
    with pytest.raises(Malformed):
        decode(PREFIX + msgspec.msgpack.encode(fields))


def test_mutated_messages_are_either_valid_or_malformed() -> None:
    """Flipped, cut, grown and spliced bytes raise nothing but Malformed; what decodes holds to every range."""
    source = random.Random(3)
    whole = [encode(message) for message in MESSAGES]
    outcomes = {"valid": 0, "malformed": 0}
    for _ in range(FUZZED_MESSAGES):
        data = bytearray(source.choice(whole))
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(data)) if data else 0
            match source.randrange(4):
                case 0 if data:
                    data[at] ^= 1 << source.randrange(8)
                case 1:
                    del data[at : at + source.randint(1, 8)]
                case 2:
                    data[at:at] = source.randbytes(source.randint(1, 8))
                case _:
                    other = source.choice(whole)
                    data[at:] = other[source.randrange(len(other)) :]
        try:
            message = decode(bytes(data))
        except Malformed:
            outcomes["malformed"] += 1
        else:
            outcomes["valid"] += 1
            assert decode(encode(message)) == message
    assert outcomes["malformed"] > FUZZED_MESSAGES // 2
    assert outcomes["valid"] > 0


def test_attempts_differ() -> None:
    assert len({draw_attempt() for _ in range(1000)}) == 1000
