# SPDX-License-Identifier: Apache-2.0
"""The messages between ranks of prefill and decode, sent as NIXL notifications.

    decode  -> prefill   Registration     these are my blocks, WRITE the tokens from first_token on into them
    prefill -> decode    StagingRequest   these tokens are ready, grant me slots for them
    decode  -> prefill   StagingGrant     these are my slots, WRITE these tokens into them
    decode  -> prefill   Withdrawal       stop writing (the request has ended), and say when you have stopped
    decode  -> prefill   Reading          this rank reads the blocks of this request
    decode  -> prefill   Release          this rank needs nothing more of this request
    prefill -> decode    Written          travels with a WRITE and arrives after its bytes
    prefill -> decode    Stopped          nothing of this attempt is in flight any more, and not everything is written
    decode  -> prefill   HB:NAME,NAME,... heartbeat: it still waits for these requests. vLLM's own format (vllm#41383)

An *attempt* is a number that decode draws for each request that it fetches KV for; prefill repeats it. So a late,
duplicated or reordered message of an earlier attempt never affects a later one's blocks.

A rank of prefill that has bytes which a rank of decode needs is a *contributor*. It numbers its WRITEs from 0, and
sends with the last one the manifest of what it has written. Decode has everything when it has every number of every
contributor, in any order (vllm#48633, rows C1 and C2).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias

import msgspec

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import (
    Count,
    Digest,
    Identifier,
    Incarnation,
    KernelBlockNumber,
    Malformed,
    Port,
    Rank,
    TpSize,
    decoder,
    require,
)
from kvcached_nixl.wire.manifest import PROTOCOL, Manifest

PREFIX = f"KVNX{PROTOCOL}:".encode()
"""Starts each notification of this package but heartbeats. vLLM's start with ``HB:``, ``PUSH_REG:`` or a request id and
a colon."""

MAX_ATTEMPT = 2**62
Attempt: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ATTEMPT)]


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="say"):
    """A message."""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to find a rank: its engine, its side channel, its places in the tensor- and pipeline-parallel groups."""

    engine_id: Annotated[EngineId, msgspec.Meta(min_length=1, max_length=1024)]
    host: Identifier
    port: Port
    tp_size: TpSize
    tp_rank: Rank
    pp_size: TpSize = 1
    pp_rank: Rank = 0

    def __post_init__(self) -> None:
        require(self.tp_rank < self.tp_size, "a rank below the tensor-parallel size")
        require(self.pp_rank < self.pp_size, "a stage below the pipeline-parallel size")

    @property
    def rank(self) -> int:
        """Its number among all workers of its engine, as vLLM counts them."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def engine(self) -> str:
        """Names its engine. An operator may give several engines one ``engine_id``."""
        return f"{self.engine_id} at {self.host}:{self.port}"


class _OfAttempt(_Said, frozen=True):
    attempt: Attempt


class KernelBlockRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kernel blocks, or slots of a staging slab, of one KV-cache group: ``block_ids[i]`` holds the tokens from
    ``first_token + i * block_size`` on, where ``block_size`` is that of the group's kernel blocks."""

    first_token: Count
    block_ids: tuple[KernelBlockNumber, ...]


Groups: TypeAlias = Annotated[tuple[KernelBlockRange, ...], msgspec.Meta(min_length=1, max_length=64)]
"""Per KV-cache group."""


class Registration(_OfAttempt, frozen=True, tag="register"):
    """Decode's blocks for one request, to be written by prefill.

    Attributes:
        incarnation: of prefill's engine, as decode knows it. KV of another incarnation is refused.
        name: name under which prefill looks for its request.
        request_id: prefill's request id, if decode knows it; else empty.
        digest: of the first ``num_tokens`` tokens.
        first_token: tokens before this one are in decode's prefix cache; a multiple of each of ``block_sizes``.
        end_token: one past the last token that prefill has to write.
        block_sizes: per KV-cache group, tokens in one of decode's kernel blocks.
        groups: the kernel blocks for the tokens that decode needs of each.
        is_staged: decode grants slots of a slab range by range (`StagingGrant`); the groups have no blocks.
        is_verified: prefill sends a checksum with each range.
        is_read: nothing is to be written; decode has read the tokens, and asks for their checksums.
        gate: NIXL metadata of the agent to write through (`transport.agent.WriteGate`); empty if nothing is written.
    """

    decode: Peer
    incarnation: Incarnation
    name: str
    request_id: str
    digest: Digest
    num_tokens: Count
    first_token: Count
    end_token: Count
    block_sizes: tuple[Count, ...]
    groups: Groups
    is_staged: bool = False
    is_verified: bool = False
    is_read: bool = False
    gate: bytes = b""

    @property
    def begin_token(self) -> int:
        """The first token that is moved, of any group."""
        return min(group.first_token for group in self.groups)

    def __post_init__(self) -> None:
        require(self.first_token < self.end_token, "a range of at least one token")
        require(self.end_token <= self.num_tokens, "no more tokens than the digest is of")
        require(not self.is_read or (self.is_verified and not self.is_staged), "something to be written, or verified")
        require(len(self.block_sizes) == len(self.groups), "a block size for each KV-cache group")
        for group, block_size in zip(self.groups, self.block_sizes, strict=True):
            require(block_size > 0, "block sizes above 0")
            require(self.first_token % block_size == 0, "a first token that starts a block of each group")
            require(len(set(group.block_ids)) == len(group.block_ids), "no block twice in a group")
            has_no_blocks = self.is_staged or self.is_read
            require(not (has_no_blocks and group.block_ids), "no blocks if KV is staged, or was read already")
            require(group.first_token % block_size == 0, "groups that start a block")
            require(group.first_token >= self.first_token, "groups that begin no earlier than the request")


class StagingGrant(_OfAttempt, frozen=True, tag="room"):
    """Slots of decode, to be written by prefill; prefill asks for each grant with a `StagingRequest`.

    Attributes:
        decode: the rank that grants the slots.
        first_token, end_token: the range of tokens that it is for.
        groups: the slab's blocks for those of the tokens that decode needs. Blocks of different groups may be of
            different sizes, and then are counted apart.
    """

    decode: Peer
    first_token: Count
    end_token: Count
    groups: Groups

    def __post_init__(self) -> None:
        require(self.first_token < self.end_token, "a range of at least one token")
        for group in self.groups:
            require(len(set(group.block_ids)) == len(group.block_ids), "no block twice in a group")


class Withdrawal(_OfAttempt, frozen=True, tag="withdraw"):
    """Decode's request has ended. Its blocks stay held until Stopped arrives, or prefill is dead or fenced.

    ``decode``: the rank to answer; prefill may never have received the registration.
    """

    decode: Peer


class Release(_Said, frozen=True, tag="release"):
    """A rank of decode needs nothing more: it has read everything, or everything was in its prefix cache.

    Attributes:
        request_id: prefill's request id, if decode knows it; else empty, and ``name`` and ``digest`` identify it.
        digest: empty if decode does not know the prompt, because its server has rejected the request.
        tp_rank, tp_size: decode's.
    """

    request_id: str
    name: str
    digest: str
    tp_rank: Rank
    tp_size: TpSize

    def __post_init__(self) -> None:
        require(self.tp_rank < self.tp_size, "a rank below the tensor-parallel size")


class Reading(_Said, frozen=True, tag="reading"):
    """A rank of decode reads the blocks of an offer from now on, until its `Release` or the end of the lease.

    Prefill takes such an offer back for other causes than memory only. If it already has, decode finds that out by the
    ownership token, whether this message has arrived or not.

    ``request_id``: prefill's. ``tp_rank``: decode's.
    """

    request_id: str
    tp_rank: Rank


class _OfContributor(_OfAttempt, frozen=True):
    """``tp_rank``: the rank of prefill that sends the message."""

    tp_rank: Rank


class Written(_OfContributor, frozen=True, tag="written"):
    """The WRITE number ``index`` of a contributor has arrived.

    Attributes:
        manifest: only with the last WRITE: describes what all of them have written.
        end_token: with the last WRITE of a range: it and those before it have written every token before this one.
            Else 0.
        digest: checksum of the range's bytes, if the registration asked for it (`worker.transfer.checksums`).
    """

    index: Count
    manifest: Manifest | None = None
    end_token: Count = 0
    digest: Digest | None = None

    @property
    def is_last(self) -> bool:
        return self.manifest is not None


class StagingRequest(_OfContributor, frozen=True, tag="ready"):
    """A contributor has these tokens ready, and needs slots for them."""

    first_token: Count
    end_token: Count

    def __post_init__(self) -> None:
        require(self.first_token < self.end_token, "a range of at least one token")


class Stopped(_OfContributor, frozen=True, tag="stopped"):
    """A contributor has stopped: none of its WRITEs is in flight, and none will be posted.

    Attributes:
        cause: a `FailureCause`.
        has_failed: a WRITE has failed. What decode's host has buffered of it may be stored later than this is read.
    """

    cause: Count
    reason: str
    has_failed: bool


Message: TypeAlias = Registration | StagingGrant | Withdrawal | Reading | Release | StagingRequest | Written | Stopped

_encoder = msgspec.msgpack.Encoder()
_decode: decoder[Message] = decoder(Message)


def draw_attempt() -> int:
    """Draws a random number above 0 for an attempt, unique among all engines for all practical purposes."""
    return 1 + secrets.randbelow(MAX_ATTEMPT - 1)


def encode(message: Message) -> bytes:
    """Encodes a message as a notification."""
    return PREFIX + _encoder.encode(message)


def decode(notification: bytes) -> Message:
    """Raises `Malformed`: the prefix, a type or a range is wrong, or a field is unknown."""
    if not notification.startswith(PREFIX):
        raise Malformed(f"found {notification[:16]!r}; expected it to start with {PREFIX!r}")
    return _decode(notification[len(PREFIX) :])


# ----------------------------------------------------------------------------------------------------------- heartbeats

INTERVAL, EXTENSION = 1 / 6, 2 / 3
"""Fractions of a lease: the time between two heartbeats, and how long a lease lasts at least after one. As in vLLM."""

MAX_HEARTBEAT_BYTES = 4096
"""Largest heartbeat. About eighty of vLLM's request ids fit into it."""

_HEARTBEAT = b"HB:"


def is_nameable(name: str) -> bool:
    """Whether a heartbeat can name this request: its id contains the client's ``X-Request-Id``, perhaps with commas."""
    if not name or "," in name:
        return False
    try:
        return len(name.encode()) <= MAX_HEARTBEAT_BYTES - len(_HEARTBEAT)
    except UnicodeEncodeError:
        return False


def heartbeats(names: Iterable[str]) -> Iterator[bytes]:
    """Encodes prefill's request ids, or names of transfers, in as few notifications as possible; a name that does not
    fit into one is left out. Prefill ignores names that it does not know."""
    joined, begin, room = ",".join(names).encode(), 0, MAX_HEARTBEAT_BYTES - len(_HEARTBEAT)
    while begin < len(joined):
        # The comma after the last name that fits.
        end = len(joined) if len(joined) - begin <= room else joined.rfind(b",", begin, begin + room + 1)
        if end >= 0:
            yield _HEARTBEAT + joined[begin:end]
        else:
            end = joined.find(b",", begin) % (len(joined) + 1)
        begin = end + 1


def is_heartbeat(notification: bytes) -> bool:
    return notification.startswith(_HEARTBEAT)


def read_heartbeat(notification: bytes) -> list[str]:
    """The names in a heartbeat. Raises `Malformed`: it is none, larger than `MAX_HEARTBEAT_BYTES`, or not UTF-8."""
    if not is_heartbeat(notification) or len(notification) > MAX_HEARTBEAT_BYTES:
        found = f"found {notification[:16]!r} ({len(notification)} bytes)"
        raise Malformed(f"{found}; expected a heartbeat of {_HEARTBEAT!r}")
    try:
        names = notification[len(_HEARTBEAT) :].decode().split(",")
    except UnicodeDecodeError as error:
        raise Malformed(str(error)) from error
    return [name for name in names if name]
