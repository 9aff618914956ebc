# SPDX-License-Identifier: Apache-2.0
"""What crosses between the engine's thread and the writer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import Peer, Registration

__all__ = [
    "Command",
    "Connected",
    "Decline",
    "Finish",
    "Offer",
    "Outcome",
    "PeerGone",
    "Refuse",
    "Register",
    "Renew",
    "Restart",
    "Stop",
    "Withdraw",
]


class PeerGone(Exception):
    """A handshake found out that the rank it asked for is gone for good: nobody listens, or another engine does."""


@dataclass(frozen=True)
class Register:
    """Decode: register a request with ``contributors``, ranks of prefill."""

    registration: Registration
    contributors: tuple[Peer, ...]


@dataclass(frozen=True)
class Withdraw:
    """Decode: the request is gone."""

    request_id: DecodeRequestId
    reason: str


@dataclass(frozen=True)
class Decline:
    """Decode: nothing of this transfer is needed."""

    transfer: str
    contributors: tuple[Peer, ...]


@dataclass(frozen=True)
class Renew:
    """Decode: ``contributors`` are to keep these requests, as they call them."""

    names: Sequence[PrefillRequestId]
    contributors: tuple[Peer, ...]


@dataclass(frozen=True)
class Offer:
    """Prefill: a step ended. ``is_computed`` tells whether the device has got there."""

    transfer: str
    request_id: PrefillRequestId
    block_ids: tuple[Sequence[int], ...]
    ready_tokens: int
    is_computed: Callable[[], bool]


@dataclass(frozen=True)
class Finish:
    """Prefill: the request computes no more tokens."""

    request_id: PrefillRequestId


@dataclass(frozen=True)
class Stop:
    """Prefill: the request is gone."""

    request_id: PrefillRequestId
    reason: str


@dataclass(frozen=True)
class Restart:
    """Prefill: the request was preempted; its earlier blocks are held under the number ``hold`` until it is quiet."""

    request_id: PrefillRequestId
    hold: int


@dataclass(frozen=True)
class Refuse:
    """Prefill: there is no request of this name to wait for."""

    transfer: str
    reason: str


Command: TypeAlias = Register | Withdraw | Decline | Renew | Offer | Finish | Stop | Restart | Refuse


@dataclass(frozen=True)
class Connected:
    """What a handshake found out about a rank: its agent, its device, its memory."""

    metadata: bytes
    device_id: int
    planes: Planes


@dataclass
class Outcome:
    """What ended since it was last taken. Each request and each hold is named once."""

    received: set[DecodeRequestId] = field(default_factory=set)
    failed: dict[DecodeRequestId, str] = field(default_factory=dict)
    done: set[PrefillRequestId] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)
    expired: set[PrefillRequestId] = field(default_factory=set)
