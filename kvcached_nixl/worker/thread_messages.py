# SPDX-License-Identifier: Apache-2.0
"""What crosses between the engine's thread and the transfer thread.

Commands of a step are passed on unchanged (`wire.step.StepCommand`); those of this rank alone are defined here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.step import Finish, OfferUpdate, StepCommand, WakeAddress
from kvcached_nixl.wire.timeline import Reported
from kvcached_nixl.worker.staging.slots import SlabUse

__all__ = [
    "BlocksWritable",
    "Command",
    "Failed",
    "IsReached",
    "LocalIdentity",
    "NewWeights",
    "Outcome",
    "Reached",
]

IsReached: TypeAlias = Callable[[], bool]
"""Returns whether the device has finished every step that was submitted before. May be called on any thread."""


@dataclass(frozen=True)
class LocalIdentity:
    """This rank's address for peers, the one under which it wakes its engine, and the engine's incarnation. Sent again
    when one of them changes."""

    own: Peer
    wake_address: WakeAddress
    incarnation: str


@dataclass(frozen=True)
class NewWeights:
    """The weights that this rank computes with from now on. ``names``: of their tensors, as in `Weights.misfit`."""

    weights: Weights
    names: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class BlocksWritable:
    """Decode: no work queued on the device writes these attempts' blocks."""

    attempts: tuple[int, ...]


@dataclass(frozen=True)
class Reached:
    """A command that counts once the device has finished what was submitted before it (rule R8): then the tokens of an
    offer are in its blocks. A `Finish` waits for the offers before it."""

    command: OfferUpdate | Finish | BlocksWritable
    is_reached: IsReached = lambda: True


Command: TypeAlias = StepCommand | LocalIdentity | NewWeights | Reached


class Failed(NamedTuple):
    """An attempt that brings no KV."""

    request_id: DecodeRequestId
    cause: FailureCause
    reason: str


@dataclass
class Outcome:
    """What has ended since the last `take`. Each attempt, request and hold is named once.

    Attributes:
        finished: decode's attempts that have nothing in flight any more.
        failed: decode's attempts that bring no KV, and why; their transfers may still be in flight.
        done: prefill's requests whose blocks are not needed any more.
        idle_holds: holds whose blocks nothing reads any more.
        expired: prefill's requests whose lease expired; they are in ``done`` as well.
        moved: (bytes, descriptors, seconds) of each hand-over whose bytes this rank has moved.
        revoked: offers that were taken back, by `RevocationCause`.
        spared: numbers of revocations whose offers were not.
        claimed: numbers of `AwaitClaim`.
        known: decode's attempts whose request waits for its turn at prefill, or is computed there.
        moved_bytes: of KV that this rank's transfers have moved, also for hand-overs that fail.
        slab: its use now; None if it has not changed, or there is none.
        slab_waits: how often a hand-over has begun to wait for slots.
        timelines: of hand-overs that have ended on this rank.
    """

    finished: set[int] = field(default_factory=set)
    failed: dict[int, Failed] = field(default_factory=dict)
    done: set[PrefillRequestId] = field(default_factory=set)
    idle_holds: set[int] = field(default_factory=set)
    expired: set[PrefillRequestId] = field(default_factory=set)
    moved: list[tuple[int, int, float]] = field(default_factory=list)
    revoked: Counter[int] = field(default_factory=Counter)
    spared: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    moved_bytes: int = 0
    slab: SlabUse | None = None
    slab_waits: int = 0
    timelines: list[Reported] = field(default_factory=list)
