# SPDX-License-Identifier: Apache-2.0
"""Decode: one request's attempt to get its KV, with a share for each rank of prefill that has a part of its bytes.

    share    connecting ─► moving ─► verifying ─► done
                 │            │          │
                 └────────────┴──────────┴──► stopping ─► quiet        (done is quiet, too)

    attempt  waiting ─► received     every share is done
             waiting ─► failed       one share has failed, or it was withdrawn; the client hears of it at once
                        ─► over      no share has anything in flight: only now are the blocks free (rules R2, R9)

The two directions differ in who moves the bytes and in what is verified: `reading.ReadShare` reads them, and then the
word; `registering.WriteShare` registers blocks, and counts what arrives. Owned by the transfer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Transport
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.step import Wanted
from kvcached_nixl.worker.handover.digests import Digests
from kvcached_nixl.worker.handover.entrances import Entrances
from kvcached_nixl.worker.handover.gates import Gates
from kvcached_nixl.worker.handover.host import Host
from kvcached_nixl.worker.handover.local import Place, Routes
from kvcached_nixl.worker.handover.meeting import Known
from kvcached_nixl.worker.handover.offer import Memory
from kvcached_nixl.worker.handover.peers import Peers
from kvcached_nixl.worker.handover.posting import Posting
from kvcached_nixl.worker.handover.rooms import Rooms
from kvcached_nixl.worker.handover.verification import Landings
from kvcached_nixl.worker.staging.staging import Staging

__all__ = ["Attempt", "Share", "Side"]

logger = logging.getLogger(SERVER_LOGGER)


@dataclass
class Side:
    """What all shares of a worker use.

    Attributes:
        own: this rank's address, which a registration names; None until the first step has told it.
        start: of this engine; "" until then.
        weights: what this rank computes with; None until that is known.
        host: what is known here of other processes.
        entrances: gates of decode's ranks, which this rank writes through.
        staging: what KV passes through; None where NIXL touches the KV cache itself.
        gates: what this rank is written through; None where that is its own agent, which nobody can close.
        waiting_for_landing: shares that look at their word when a landing is free.
        distrusted: host, port and start of engines whose bytes were others than they said.
    """

    place: Place
    transport: Transport
    peers: Peers
    posting: Posting
    routes: Routes
    landings: Landings
    digests: Digests
    host: Host
    entrances: Entrances
    staging: Staging | None = None
    gates: Gates | None = None
    own: Peer | None = None
    start: str = ""
    weights: Weights | None = None
    waiting_for_landing: list[Callable[[], None]] = field(default_factory=list)
    distrusted: Memory[tuple[str, int, str]] = field(default_factory=Memory)

    def distrust(self, address: Peer, start: str) -> None:
        """Nothing more of an engine is used. What it says its start is, is no other address's."""
        self.distrusted.add((address.host, address.port, start))

    def distrust_of(self, address: Peer, start: str) -> HandOverFailed | None:
        """Why nothing of an engine is used; None if it may be."""
        if (address.host, address.port, start) not in self.distrusted:
            return None
        words = (
            "the bytes of another hand-over from this engine were not those that it sent, so none of its is used. "
            'Start both sides again, with "memory_path": "host" in kv_connector_extra_config'
        )
        return HandOverFailed(Cause.BYTES, words)

    def meet(
        self, address: Peer, start: str, connected: Callable[[Known], None], failed: Callable[[HandOverFailed], None]
    ) -> None:
        """Meet a rank of prefill whose KV may be used here; ``start`` as of `Peers.need`."""

        def met(known: Known) -> None:
            # It is known from before: it may have been updated since, or this rank.
            if self.misfit_of(known) is None:
                connected(known)
            else:
                self.peers.need(address, start, met_anew, failed, is_doubted=True)

        def met_anew(known: Known) -> None:
            misfit = self.misfit_of(known)
            if misfit is None:
                connected(known)
            else:
                failed(misfit)

        self.peers.need(address, start, met, failed)

    def misfit_of(self, known: Known) -> HandOverFailed | None:
        """Why KV of a rank is not this rank's: it computes with other weights; None if it is."""
        if self.weights is None:
            return HandOverFailed(Cause.REFUSED, "what this rank computes with is not known yet")
        misfit = self.weights.misfit(known.rank.weights)
        if not misfit:
            return None
        words = f"prefill (engine {known.rank.engine_id}) computes with other weights: {misfit}"
        return HandOverFailed(Cause.REFUSED, f"{words}. Load the same on both sides, or update those that are older.")

    @staticmethod
    def contained(action: Callable[[str], None], failed: Callable[[HandOverFailed], None]) -> Callable[[str], None]:
        """What is called when a job has ended, so that an exception in it fails its owner and nobody else."""

        def ended(reason: str) -> None:
            try:
                action(reason)
            except Exception as defect:
                logger.exception("A hand-over fails by a defect of kvcached_nixl")
                failed(HandOverFailed(Cause.DEFECT, f"{type(defect).__name__}: {defect}"))

        return ended


class Share(Protocol):
    """What one rank of prefill contributes to an attempt."""

    address: Peer
    agent: str | None
    """Who may still write; None before anybody was told, and of a READ."""
    is_quiet: bool

    def begin(self) -> None:
        """The device has ended whatever could still write the blocks (rule R8)."""
        ...

    def stop(self) -> None:
        """Move nothing more; ``is_quiet`` when nothing is in flight. Again asks again."""
        ...


class Attempt:
    """See the module.

    Args:
        changed: called whenever the attempt has failed or is over.

    Attributes:
        failed: why; None as long as it has not.
        rooms: slots that its KV comes in; None as long as nobody was told of any.
    """

    def __init__(self, wanted: Wanted, shares: Sequence[Share], changed: Callable[[Attempt], None]) -> None:
        self.wanted = wanted
        self.shares = list(shares)
        self.failed: HandOverFailed | None = None
        self.rooms: Rooms | None = None
        self._changed = changed

    @property
    def number(self) -> int:
        return self.wanted.attempt

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is in flight any more, and nothing will be."""
        return all(share.is_quiet for share in self.shares)

    def fail(self, cause: HandOverFailed) -> None:
        """It brings no KV; the first cause is the one that counts. Asks the shares to stop."""
        if self.failed is None:
            self.failed = cause
            for share in self.shares:
                if not share.is_quiet:
                    share.stop()
        self.settle()

    def settle(self) -> None:
        """Something of it has ended."""
        self._changed(self)
