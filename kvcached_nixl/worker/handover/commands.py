# SPDX-License-Identifier: Apache-2.0
"""What crosses between the engine's thread and the transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.causes import Cause
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.step import Released, Renewed, Wanted

__all__ = [
    "Begin",
    "Command",
    "Failed",
    "Finish",
    "Identify",
    "IsReached",
    "Known",
    "Offer",
    "Outcome",
    "Preempt",
    "Release",
    "Renew",
    "Revoke",
    "Stop",
    "Unrenew",
    "Want",
    "Withdraw",
]

IsReached: TypeAlias = Callable[[], bool]
"""Whether the device has ended every step that it was given before. Any thread may ask."""


@dataclass(frozen=True)
class Known:
    """Where this engine's side channel is, and what it takes for a word of its own workers; again for a new start."""

    own: Peer
    wake_key: str
    start: str


@dataclass(frozen=True)
class Want:
    """Decode: a request was given blocks."""

    wanted: Wanted


@dataclass(frozen=True)
class Begin:
    """Decode: nothing that is queued on the device can write these blocks any more, once that is reached (rule R8)."""

    attempts: tuple[int, ...]
    is_reached: IsReached


@dataclass(frozen=True)
class Withdraw:
    """Decode: the request is gone, or its time is over."""

    attempt: int
    reason: str


@dataclass(frozen=True)
class Release:
    """Decode: nothing is needed of a request of prefill's."""

    released: Released


@dataclass(frozen=True)
class Renew:
    """Decode: renew this lease from now on."""

    renewed: Renewed


@dataclass(frozen=True)
class Unrenew:
    """Decode: renew this request's lease no longer."""

    request_id: DecodeRequestId


@dataclass(frozen=True)
class Offer:
    """Prefill: a step ended. What it computed is there once the device has got there. ``is_held``: as of `Offered`."""

    request_id: PrefillRequestId
    name: str
    digest: str
    num_tokens: int
    block_ids: tuple[Sequence[int], ...]
    ready_tokens: int
    manifest: Manifest | None
    is_held: bool
    is_reached: IsReached


@dataclass(frozen=True)
class Finish:
    """Prefill: the request computes no more tokens."""

    request_id: PrefillRequestId


@dataclass(frozen=True)
class Stop:
    """Prefill: the request is gone. ``is_kept``: vLLM keeps its blocks until they are reported."""

    request_id: PrefillRequestId
    reason: str
    is_kept: bool = True


@dataclass(frozen=True)
class Revoke:
    """Prefill: decode may not have the request any more. It is still computed, or has ended: `Finish` says so."""

    request_id: PrefillRequestId
    reason: str


@dataclass(frozen=True)
class Identify:
    """What this rank computes with from now on."""

    weights: Weights


@dataclass(frozen=True)
class Preempt:
    """Prefill: the request lost its blocks, which are held under the number ``hold`` until they are quiet."""

    request_id: PrefillRequestId
    hold: int


Command: TypeAlias = (
    Known | Want | Begin | Withdraw | Release | Renew | Unrenew | Offer | Finish | Stop | Revoke | Preempt | Identify
)


class Failed(NamedTuple):
    """An attempt that brings no KV."""

    request_id: DecodeRequestId
    cause: Cause
    words: str


@dataclass
class Outcome:
    """What ended since it was last taken. Each attempt, request and hold is named once.

    Attributes:
        over: attempts of decode's of which nothing is in flight.
        failed: attempts that bring no KV, and why; nothing is said of what is in flight.
        done: prefill's requests whose blocks nobody needs.
        quiet: holds whose blocks nothing touches.
        expired: prefill's requests whose lease has ended; they are done, too.
        moved: (bytes, descriptors, seconds) of each transfer.
    """

    over: set[int] = field(default_factory=set)
    failed: dict[int, Failed] = field(default_factory=dict)
    done: set[PrefillRequestId] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)
    expired: set[PrefillRequestId] = field(default_factory=set)
    moved: list[tuple[int, int, float]] = field(default_factory=list)
