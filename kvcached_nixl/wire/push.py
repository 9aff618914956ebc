# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode say to each other about a push, as NIXL notifications between workers.

    decode  -> prefill   Registration   here are my blocks, write the tokens from first_token on into them
    decode  -> prefill   Withdrawal     do not write any more (the request is gone), and say when you have stopped
    decode  -> prefill   Declined       I need nothing: every block was in my prefix cache
    prefill -> decode    Written        travels with a WRITE and arrives when its bytes have
    prefill -> decode    Failed         I have stopped, and not everything is written
    prefill -> decode    Withdrawn      I have stopped, as you asked

Every message names the *transfer* (what pairs a prefill request with a decode request) and, but for Declined, the
*attempt*: a number that decode draws for each registration and prefill repeats. A late, doubled or reordered message of
an earlier attempt therefore never meets a later one's blocks.

A rank of prefill that writes into a rank of decode is a *contributor*. It numbers its WRITEs from 0 and marks the last.
Decode has everything when it has every number of every contributor, in any order (vllm#48633, rows C1 and C2).
"""

from __future__ import annotations

import secrets
from typing import TypeAlias

import msgspec

from kvcached_nixl.ids import DecodeRequestId, EngineId

__all__ = [
    "PREFIX",
    "AttemptKey",
    "Declined",
    "Failed",
    "Malformed",
    "Message",
    "Peer",
    "Registration",
    "Withdrawal",
    "Withdrawn",
    "Written",
    "decode",
    "draw_attempt",
    "encode",
    "is_push",
]

PREFIX = b"KVNX1:"
"""Starts each notification; vLLM's own start with ``HB:``, ``PUSH_REG:`` or a request id and a colon."""

AttemptKey: TypeAlias = tuple[str, int]
"""What names an attempt: its transfer and its number."""

MAX_BLOCK_ID = 2**31 - 1


class Malformed(ValueError):
    """Bytes that are no message of this protocol. Drop and count them; nothing else may follow from them."""


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="say"):
    """Base of all messages. ``transfer``: what pairs the two requests, equal on both sides."""

    transfer: str


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank is to be found: its engine, its side channel, its place in the tensor-parallel group."""

    engine_id: EngineId
    host: str
    port: int
    tp_size: int
    tp_rank: int

    def __post_init__(self) -> None:
        _require(0 < self.port < 65536, "a port from 1 to 65535")
        _require(0 <= self.tp_rank < self.tp_size, "a rank below the tensor-parallel size")


class _OfAttempt(_Said, frozen=True):
    attempt: int

    @property
    def key(self) -> AttemptKey:
        return self.transfer, self.attempt

    def __post_init__(self) -> None:
        _require(self.attempt >= 0, "an attempt that is not negative")


class Registration(_OfAttempt, frozen=True, tag="register"):
    """Decode's blocks for one request.

    Attributes:
        decode_request_id: the request inside decode's engine; only for messages and logs.
        decode: who registers.
        first_token: tokens before this one are in decode's prefix cache; a multiple of ``block_size``.
        end_token: one past the last token that prefill has to write.
        block_size: tokens in one of decode's blocks.
        block_ids: per KV-cache group, the blocks that hold the tokens from ``first_token`` on.
    """

    decode_request_id: DecodeRequestId
    decode: Peer
    first_token: int
    end_token: int
    block_size: int
    block_ids: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.block_size > 0, "a block size above 0")
        _require(0 <= self.first_token < self.end_token, "a range of at least one token")
        _require(self.first_token % self.block_size == 0, "a first token that starts a block")
        _require(len(self.block_ids) > 0, "at least one KV-cache group")
        for group in self.block_ids:
            _require(len(set(group)) == len(group), "no block twice in a group")
            _require(not group or (min(group) >= 0 and max(group) <= MAX_BLOCK_ID), "block ids in range")


class Withdrawal(_OfAttempt, frozen=True, tag="withdraw"):
    """Decode's request is gone. Its blocks stay reserved until Withdrawn comes, or prefill is known to be dead.

    ``decode``: whom to answer; prefill may never have seen the registration.
    """

    decode: Peer


class Declined(_Said, frozen=True, tag="decline"):
    """Decode needs nothing of this request; prefill may free its blocks at once."""


class _OfContributor(_OfAttempt, frozen=True):
    """``tp_rank``: the rank of prefill that speaks, of ``tp_size``."""

    tp_rank: int
    tp_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.tp_rank < self.tp_size, "a rank below the tensor-parallel size")


class Written(_OfContributor, frozen=True, tag="written"):
    """The WRITE number ``index`` of a contributor has arrived; ``is_last`` if it sends no further one."""

    index: int
    is_last: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.index >= 0, "an index that is not negative")


class Failed(_OfContributor, frozen=True, tag="fail"):
    """A contributor has stopped with WRITEs missing, for ``reason``; none of its own is in flight any more."""

    reason: str


class Withdrawn(_OfContributor, frozen=True, tag="withdrawn"):
    """A contributor has stopped as asked: none of its WRITEs is in flight, and none will be posted."""


Message: TypeAlias = Registration | Withdrawal | Declined | Written | Failed | Withdrawn

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def draw_attempt() -> int:
    """A number that no other attempt of any engine has, for all practical purposes."""
    return secrets.randbits(63)


def is_push(notification: bytes) -> bool:
    """Whether a NIXL notification belongs to this protocol."""
    return notification.startswith(PREFIX)


def encode(message: Message) -> bytes:
    """The notification to send."""
    return PREFIX + _encoder.encode(message)


def decode(notification: bytes) -> Message:
    """Read a notification.

    Raises:
        Malformed: the prefix, the types, the ranges or an unknown field are wrong.
    """
    if not is_push(notification):
        raise Malformed(f"found {notification[:16]!r}; expected it to start with {PREFIX!r}")
    try:
        return _decoder.decode(notification[len(PREFIX) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise Malformed(str(cause)) from cause


def _require(holds: bool, expected: str) -> None:
    # msgspec turns this into a ValidationError, which is a DecodeError.
    if not holds:
        raise ValueError(f"expected {expected}")
