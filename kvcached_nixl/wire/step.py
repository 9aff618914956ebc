# SPDX-License-Identifier: Apache-2.0
"""What a scheduler tells the workers of its engine with each step, and what they report back.

A `Step` travels in the connector's metadata, so every rank gets the same one, in the order of the steps. It holds only
what has changed. Block ids are logical ones; tokens are counted from the start of the prompt.

Workers report with a `Report` in vLLM's ``KVConnectorWorkerMetadata``. A prefill request whose blocks no peer needs is
reported in vLLM's own set instead, under its own id, because a ``MultiConnector`` counts its connectors by that id.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, get_args

import msgspec

from kvcached_nixl.ids import DecodeRequestId, LogicalBlock, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.manifest import BlockRange, Manifest
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.timeline import Lasted, Reported

BlockIds: TypeAlias = tuple[list[LogicalBlock], ...]
"""Logical block ids per KV-cache group."""

FAILING = -1
"""A block id that no block has. Among the invalid blocks it makes vLLM ask which requests failed; our patch answers."""


def report_numbers() -> Iterator[int]:
    """Numbers for what workers report by number. They start at random, because vLLM joins the reports of all connectors
    of an engine, and another one of them may have been given the same small numbers."""
    return itertools.count(secrets.randbits(60))


@dataclass
class Report:
    """What workers report to their scheduler after a step, beside the requests that prefill has sent.

    Attributes:
        ended: (attempt, rank): nothing of the attempt is in flight on the rank any more, whether it failed or not.
        idle: (hold, rank): the rank does not use the blocks of the hold any more.
        failed: attempt -> why it has failed, by the first rank that saw it. Transfers of it may still be in flight.
        spared: numbers of `Revocation` whose offers a rank has not taken back.
        claimed: numbers of `AwaitClaim` for whose requests a rank of decode has registered.
        known: attempts whose requests still wait for their turn on prefill, or are computed.
        stuck: prefill's requests that a rank has stopped, and of which a WRITE is in flight all the same.
        has_fetched: a rank of decode has fetched what it needed of an offer.
    """

    ended: set[tuple[int, int]] = field(default_factory=set)
    idle: set[tuple[int, int]] = field(default_factory=set)
    failed: dict[int, tuple[FailureCause, str]] = field(default_factory=dict)
    spared: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    stuck: set[PrefillRequestId] = field(default_factory=set)
    has_fetched: bool = False

    def add(self, other: Report) -> None:
        """Takes in what another rank reports, or the same one later."""
        self.ended |= other.ended
        self.idle |= other.idle
        self.failed = other.failed | self.failed
        self.spared |= other.spared
        self.claimed |= other.claimed
        self.known |= other.known
        self.stuck |= other.stuck
        self.has_fetched |= other.has_fetched


@dataclass
class Reports:
    """What all workers have reported after a step. `SchedulerFacade.collect` changes it in place.

    Attributes:
        sent: requests whose blocks vLLM may free.
        received: requests that no longer wait.
        invalid: block ids that hold no valid KV.
        ending: requests that must end with an error now, whatever they wait for (rule R4).
        refused: (request id, client index) of requests that were refused, or ended between two steps.
        report: of all ranks.
        timelines: of hand-overs that have ended on a rank.
        lasted: set by `SchedulerFacade.collect`, for the metrics.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)
    ending: set[str] = field(default_factory=set)
    refused: list[tuple[str, int]] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    timelines: list[Reported] = field(default_factory=list)
    lasted: list[Lasted] = field(default_factory=list)


class _Command(msgspec.Struct, frozen=True, tag=True):
    """Of a step."""


class FetchSpec(_Command, frozen=True):
    """Decode: a request was given blocks for tokens that prefill has or will have.

    Attributes:
        manifest: None if the router asked both sides at once.
        name: as in `params.FetchParams`.
        digest: of the first ``num_tokens`` tokens; decode may fetch one less and compute the last one itself.
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


class UnneededOffer(_Command, frozen=True):
    """Decode: it needs no KV of this prefill request.

    Attributes:
        digest: empty if the prompt is not known.
        attempt: prefill is told when nothing of this attempt is in flight any more; None: at once.
    """

    prefill: RemotePrefill
    request_id: str
    name: str
    digest: str
    attempt: int | None = None


class LeaseRenewal(_Command, frozen=True):
    """Decode: from now on renew the lease of this prefill request, and no other one, for its own request; without
    ``prefill``, none."""

    request_id: DecodeRequestId
    prefill: RemotePrefill | None = None
    name: str = ""
    lease_seconds: float = 0.0


class OfferUpdate(_Command, frozen=True):
    """Prefill: at the end of this step the first ``ready_tokens`` tokens of a request are in its blocks.

    Attributes:
        name, digest, num_tokens: what decode may look for it by; ``digest`` covers the first ``num_tokens`` tokens.
        groups: per KV-cache group the blocks that the request has; those of the manifest if there is one.
        manifest: set when the whole prompt is computed.
        is_held: workers may read the blocks before the request has ended: if it loses them, they are held until no rank
            reads them.
        trace: that it belongs to; comes back with the offer's timeline. "" if it is not traced.
    """

    request_id: PrefillRequestId
    name: str
    digest: str
    num_tokens: int
    groups: tuple[BlockRange, ...]
    ready_tokens: int
    manifest: Manifest | None
    is_held: bool = False
    trace: str = ""


class Revocation(msgspec.Struct, frozen=True):
    """Why an offer is taken back. For a cause of memory it stays if a rank of decode has begun to fetch it.

    Attributes:
        spares_wanted: it stays, too, if decode sends heartbeats for it.
        number: reported if it stays (`Report.spared`); 0 where it cannot stay.
        computing: prompts to be offered that have blocks: they are computed whether it stays or not.
    """

    cause: RevocationCause
    reason: str
    spares_wanted: bool = False
    number: int = 0
    computing: frozenset[PrefillRequestId] = frozenset()


class WakeAddress(msgspec.Struct, frozen=True):
    """Where this engine's side channel listens for its own workers, and the key by which it recognises them.

    Peers may need another address: NAT, or a listener on every address of the host.
    """

    host: str
    port: int
    key: str


class Withdraw(_Command, frozen=True):
    """Decode: its request has ended, its deadline has passed, or another rank has failed."""

    attempt: int
    reason: str


class Finish(_Command, frozen=True):
    """Prefill: the request computes no more tokens, and its blocks are kept for decode."""

    request_id: PrefillRequestId


class Stop(_Command, frozen=True):
    """Prefill: the request ended before it was offered completely.

    ``is_kept``: vLLM keeps its blocks until the request is reported as sent. Else workers report nothing of it.
    """

    request_id: PrefillRequestId
    reason: str
    is_kept: bool = True


class Revoke(_Command, frozen=True):
    """Prefill: decode may not have the request's KV any more. The request is still computed, or has ended: then its
    `Finish` is in this step, or was in an earlier one."""

    request_id: PrefillRequestId
    revocation: Revocation


class AwaitClaim(_Command, frozen=True):
    """Prefill: report ``number`` when a rank of decode registers for the request, or at once if one has already."""

    request_id: PrefillRequestId
    number: int


class Preempt(_Command, frozen=True):
    """Prefill: the request was preempted and lost its blocks. The scheduler keeps them under the number ``hold`` until
    nothing reads them."""

    request_id: PrefillRequestId
    hold: int


StepCommand: TypeAlias = (
    # First: no message of a peer that is handled after it finds the offer.
    Revoke
    | LeaseRenewal
    # Before `Withdraw`: a request may arrive and end between two steps.
    | FetchSpec
    # Before `Stop`: of a request that has arrived and was aborted since, both are told.
    | OfferUpdate
    | AwaitClaim
    | Withdraw
    | UnneededOffer
    | Preempt
    | Finish
    | Stop
)
ORDER: tuple[type[StepCommand], ...] = get_args(StepCommand)
"""The order in which workers take in the commands of one step, whatever the order in which they were told. An
`OfferUpdate` with tokens follows when the step was launched on the device, and then the request's `Finish`."""

Told = TypeVar("Told", bound=_Command)


class Step(msgspec.Struct):
    """The changes of one step.

    Attributes:
        host, port: where peers reach this engine's side channel.
        wake_address: where its own workers do.
        incarnation: drawn when this engine starts, and again whenever its weights change.
        commands: what workers have to do, as the scheduler has found it; see `ORDER`.
        counts: failures for the metrics, by `FailureCause`.
        quarantined_blocks: blocks held for transfers that may be in flight; None if the number has not changed.
        lasted: times in states of hand-overs, for the metrics.
        is_idle: the step computes no request.
        is_stalled: the engine stands still: it runs nothing, and is paused, or the next request lacks blocks while none
            waits for KV.
    """

    host: str
    port: int
    wake_address: WakeAddress
    incarnation: str
    commands: list[StepCommand] = msgspec.field(default_factory=list)
    counts: dict[int, int] = msgspec.field(default_factory=dict)
    quarantined_blocks: int | None = None
    lasted: list[Lasted] = msgspec.field(default_factory=list)
    is_idle: bool = True
    is_stalled: bool = False

    def tell(self, *commands: StepCommand) -> None:
        self.commands += commands

    def of(self, kind: type[Told]) -> list[Told]:
        return [one for one in self.commands if isinstance(one, kind)]

    def withhold(self, *request_ids: PrefillRequestId, even_empty: bool = False) -> None:
        """Drops what the step being built offers of requests' tokens. An offer without tokens stays, so that ranks of
        decode that have registered for it are told that it has ended; ``even_empty``: not that, either."""
        named = set(request_ids)
        self.commands = [
            one
            for one in self.commands
            if not isinstance(one, OfferUpdate) or one.request_id not in named or not (even_empty or one.ready_tokens)
        ]

    def in_order(self) -> list[StepCommand]:
        """Returns the commands in the order in which workers take them in."""
        return sorted(self.commands, key=lambda one: ORDER.index(type(one)))

    @property
    def has_news(self) -> bool:
        """Whether the workers need this step even if it computes nothing."""
        return bool(self.commands or self.counts or self.quarantined_blocks is not None)
