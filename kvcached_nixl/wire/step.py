# SPDX-License-Identifier: Apache-2.0
"""What a scheduler tells the workers of its own engine, once a step, and what they tell it.

A `Step` rides on the connector's metadata, so every rank gets the same one, in the order of the steps. It names only
what has changed. Block ids are logical ones (vLLM's scheduler's), tokens are counted from the start of the prompt.

The way back is vLLM's ``KVConnectorOutput``, which sums up all ranks: a string in one of its two sets arrives when
every rank has reported it, a number among its invalid blocks as soon as one has. Our strings and (negative) numbers are
taken out again before vLLM looks. A request of prefill's whose blocks nobody needs is named by its own id, by which a
``MultiConnector`` counts its connectors, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvcached_nixl.ids import DecodeRequestId, LogicalBlock, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.manifest import BlockRange, Manifest
from kvcached_nixl.wire.params import RemotePrefill

__all__ = [
    "FAILING",
    "BlockIds",
    "OfferUpdate",
    "UnneededOffer",
    "LeaseRenewal",
    "Reports",
    "Step",
    "FetchSpec",
    "failed_mark",
    "failure_of",
    "finished_attempt_id",
    "finished_attempts_of",
    "idle_hold_id",
    "idle_holds_of",
]

BlockIds: TypeAlias = tuple[list[LogicalBlock], ...]
"""Per KV-cache group."""

FAILING = -1
"""An invalid block that there is not: vLLM then asks which requests have failed, and our patch answers."""
_CAUSES = 64
_IDLE_HOLD, _FINISHED = "kvcached-nixl:quiet:", "kvcached-nixl:over:"


def idle_hold_id(hold: int) -> str:
    """Among the requests that were sent: nothing touches the blocks of a hold any more."""
    return f"{_IDLE_HOLD}{hold}"


def finished_attempt_id(attempt: int) -> str:
    """Among the requests that were received: nothing of an attempt is in flight any more, whether it failed or not."""
    return f"{_FINISHED}{attempt}"


def failed_mark(attempt: int, cause: FailureCause) -> int:
    """Among the invalid blocks: an attempt has failed. Something of it may still be in flight."""
    return -(attempt * _CAUSES + cause + 2)


def idle_holds_of(names: set[str]) -> list[int]:
    """Takes what `idle_hold_id` made out of a set."""
    return _taken(names, _IDLE_HOLD)


def finished_attempts_of(names: set[str]) -> list[int]:
    """Takes what `finished_attempt_id` made out of a set."""
    return _taken(names, _FINISHED)


def failure_of(mark: int) -> tuple[int, FailureCause] | None:
    """(attempt, cause) of a `failed_mark`; None of a block id."""
    return None if mark > FAILING - 1 else (((-mark - 2) // _CAUSES), FailureCause((-mark - 2) % _CAUSES))


def _taken(names: set[str], prefix: str) -> list[int]:
    # A request may be called as our words are but for the number.
    ours = re.compile(rf"{prefix}([0-9]{{1,20}})", re.ASCII)
    found = {name: int(match[1]) for name in names if (match := ours.fullmatch(name))}
    names.difference_update(found)
    return list(found.values())


@dataclass
class Reports:
    """What vLLM has summed up of its workers after a step; whoever takes ours out changes it.

    Attributes:
        sent: requests whose blocks are free; ids of ours among them.
        received: requests that wait no more; ids of ours among them.
        invalid: block ids that hold no KV; marks of ours among them.
        reasons: attempts that have failed -> what the first rank to meet a failure says of it.
    """

    sent: set[str]
    received: set[str]
    invalid: set[int]
    reasons: dict[int, str] = field(default_factory=dict)


class FetchSpec(msgspec.Struct):
    """Decode: a request was given blocks for tokens that prefill has or will have.

    Attributes:
        manifest: None where both sides were asked at once.
        name: as in `params.FetchParams`.
        digest: of the first ``num_tokens`` tokens; decode may want one less and compute that itself.
        groups: the blocks to fill, per KV-cache group; each range ends at ``end_token``.
    """

    attempt: int
    request_id: DecodeRequestId
    prefill: RemotePrefill
    manifest: Manifest | None
    name: str
    digest: str
    num_tokens: int
    first_token: int
    end_token: int
    groups: tuple[BlockRange, ...]


class UnneededOffer(msgspec.Struct):
    """Decode: nothing is needed of a request of prefill's. ``digest`` is empty where its prompt is not known."""

    prefill: RemotePrefill
    request_id: str
    name: str
    digest: str


class LeaseRenewal(msgspec.Struct):
    """Decode: from now on the lease of a request of prefill's is to be renewed, for ``longest_seconds`` at most."""

    request_id: DecodeRequestId
    prefill: RemotePrefill
    name: str
    lease_seconds: float
    longest_seconds: float


class OfferUpdate(msgspec.Struct):
    """Prefill: at the end of this step the first ``ready_tokens`` tokens of a request are in ``block_ids``.

    Attributes:
        name, digest, num_tokens: under which decode may look for it, and how many tokens the digest is of.
        manifest: when the whole prompt is computed.
        is_held: if the request loses these blocks, they are held until nobody reads them, so they may be read before it
            has ended.
    """

    request_id: PrefillRequestId
    name: str
    digest: str
    num_tokens: int
    block_ids: BlockIds
    ready_tokens: int
    manifest: Manifest | None
    is_held: bool = False


class Step(msgspec.Struct):
    """One step. The lists are taken in in this order, ``offered`` last, when the step has been given to the device.

    Attributes:
        host, port, wake_key: where this engine's side channel listens, and what it takes for a word of its own workers.
        start: drawn when this engine started, and anew whenever its weights change.
        renewed, unrenewed: leases that decode renews from now on, and no longer.
        wanted: what decode's requests wait for.
        withdrawn: attempts whose requests are gone, and why.
        released: what decode does not need.
        preempted: prefill's requests that lost their blocks, and the number under which those are held.
        finished: prefill's requests that compute no more.
        stopped: prefill's requests that are gone, and why.
        revoked: prefill's requests that decode may not have any more, and why. They are still computed, or have ended:
            then they are in ``finished``, of this step or of one before.
        unkept: those of ``stopped`` whose blocks vLLM has already freed: nothing is reported of them.
        counts: for the metrics, by `FailureCause`.
        quarantined_blocks: held for what may still be in flight; None if that has not changed.
        is_idle: the step computes nothing, for no request.
    """

    host: str
    port: int
    wake_key: str
    incarnation: str
    renewed: list[LeaseRenewal] = msgspec.field(default_factory=list)
    unrenewed: list[DecodeRequestId] = msgspec.field(default_factory=list)
    fetches: list[FetchSpec] = msgspec.field(default_factory=list)
    withdrawn: dict[int, str] = msgspec.field(default_factory=dict)
    released: list[UnneededOffer] = msgspec.field(default_factory=list)
    preempted: list[tuple[PrefillRequestId, int]] = msgspec.field(default_factory=list)
    finished: list[PrefillRequestId] = msgspec.field(default_factory=list)
    stopped: dict[PrefillRequestId, str] = msgspec.field(default_factory=dict)
    revoked: dict[PrefillRequestId, str] = msgspec.field(default_factory=dict)
    unkept: set[PrefillRequestId] = msgspec.field(default_factory=set)
    offered: list[OfferUpdate] = msgspec.field(default_factory=list)
    counts: dict[int, int] = msgspec.field(default_factory=dict)
    quarantined_blocks: int | None = None
    is_idle: bool = True

    @property
    def has_news(self) -> bool:
        """Whether the workers have to hear of it even if there is nothing to compute."""
        return bool(
            self.renewed
            or self.unrenewed
            or self.fetches
            or self.withdrawn
            or self.released
            or self.preempted
            or self.finished
            or self.stopped
            or self.revoked
            or self.offered
            or self.counts
            or self.quarantined_blocks is not None
        )
