# SPDX-License-Identifier: Apache-2.0
"""Decode: one request's attempt to get its KV, with a share for each rank of prefill that has a part of its bytes.

    share    connecting ─► moving ─► verifying ─► done
                 │            │          │
                 └────────────┴──────────┴──► stopping ─► quiet        (done is quiet, too)

    attempt  waiting ─► received     every share is done
             waiting ─► failed       one share has failed, or it was withdrawn; the client hears of it at once
                        ─► over      no share has anything in flight: only now are the blocks free (rules R2, R9)

The two directions differ in who moves the bytes and in what is verified: `ReadShare` reads them, and then the word;
`WriteShare` registers blocks, and counts what arrives. Owned by the transfer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Transport, TransportError
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Peer, Registration, Release, Stopped, Withdrawal, Written, encode
from kvcached_nixl.wire.step import Wanted
from kvcached_nixl.worker.handover.local import Place, Routes, as_blocks, kernel_blocks
from kvcached_nixl.worker.handover.peers import Known, Peers
from kvcached_nixl.worker.handover.posting import Job, Posting
from kvcached_nixl.worker.handover.verification import Landings

__all__ = ["Attempt", "ReadShare", "Share", "Side", "WriteShare"]

logger = logging.getLogger(SERVER_LOGGER)


@dataclass
class Side:
    """What all shares of a worker use.

    Attributes:
        own: this rank's address, which a registration names; None until the first step has told it.
        waiting_for_landing: shares that look at their word when a landing is free.
    """

    place: Place
    transport: Transport
    peers: Peers
    posting: Posting
    routes: Routes
    landings: Landings
    own: Peer | None = None
    waiting_for_landing: list[Callable[[], None]] = field(default_factory=list)

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
    """

    def __init__(self, wanted: Wanted, shares: Sequence[Share], changed: Callable[[Attempt], None]) -> None:
        self.wanted = wanted
        self.shares = list(shares)
        self.failed: HandOverFailed | None = None
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


class ReadShare:
    """This rank reads what one rank of prefill keeps, and then the word that says that it was kept meanwhile."""

    def __init__(self, side: Side, attempt: Callable[[], Attempt], address: Peer, manifest: Manifest) -> None:
        self._side = side
        self._attempt = attempt
        self.address = address
        self.agent: str | None = None
        self.is_quiet = False
        self._manifest = manifest
        self._known: Known | None = None
        self._job: Job | None = None
        self._landing: int | None = None
        self._is_stopping = False

    def begin(self) -> None:
        self._side.peers.need(self.address, self._manifest.start, self._connected, self._fail)

    def stop(self) -> None:
        self._is_stopping = True
        if self._job is None:
            self.is_quiet = True
        else:
            self._side.posting.drop(self._job)

    def _connected(self, known: Known) -> None:
        if self._is_stopping:
            return
        self._known = known
        side, wanted, manifest, ratio = (
            self._side,
            self._attempt().wanted,
            self._manifest,
            known.rank.kernel_blocks_per_block,
        )
        if manifest.block_size != known.rank.memory[0].block_size * ratio or len(manifest.groups) != len(wanted.groups):
            self._fail(HandOverFailed(Cause.RANGE, "the manifest does not fit the handshake (block size or groups)"))
            return
        groups = [
            (as_blocks(here, side.place.kernel_blocks_per_block), as_blocks(there, ratio), here.first_token)
            for here, there in zip(wanted.groups, manifest.groups, strict=True)
        ]
        try:
            routes = side.routes.of(known.agent, known.rank.memory)
            found = side.routes.ranges(routes, groups, wanted.end_token)
        except ValueError as cause:
            self._fail(HandOverFailed(Cause.RANGE, str(cause)))
            return
        ended = side.contained(self._read, self._fail)
        self._job = Job("READ", known.agent, found.local, found.remote, ended)
        side.posting.submit(self._job)

    def _read(self, failed: str) -> None:
        self._job = None
        if failed:
            self.is_quiet = True
            self._fail(HandOverFailed(Cause.LOST, failed))
        elif self._is_stopping:
            self._end()
        else:
            self._look()

    def _look(self) -> None:
        side, known = self._side, self._known
        assert known is not None
        if self._is_stopping:
            return
        self._landing = side.landings.take()
        if self._landing is None:
            side.waiting_for_landing.append(self._look)
            return
        ranges = side.landings.ranges(self._landing, known.rank.words_address, self._manifest.word)
        self._job = Job("READ", known.agent, *ranges, side.contained(self._looked, self._fail), is_host=True)
        side.posting.submit(self._job, is_urgent=True)

    def _looked(self, failed: str) -> None:
        side, known, landing = self._side, self._known, self._landing
        assert known is not None and landing is not None
        # Nothing is in flight any more, whatever follows.
        self._job = self._landing = None
        is_kept = not failed and side.landings.holds(landing, self._manifest.word)
        side.landings.give_back(landing)
        self.is_quiet = True
        # One that was stopped meanwhile takes none.
        while side.waiting_for_landing and side.landings.has_room:
            side.waiting_for_landing.pop(0)()
        if self._is_stopping:
            self._end()
        elif failed:
            self._fail(HandOverFailed(Cause.LOST, failed))
        elif not is_kept:
            words = f"prefill does not keep {self._manifest.request_id} any more, or never made these parameters"
            self._fail(HandOverFailed(Cause.LEASE, words))
        else:
            place = side.place
            done = Release(self._manifest.request_id, "", self._manifest.digest, place.tp_rank, place.tp_size)
            side.peers.send(self.address, encode(done))
            self._end()

    def _end(self) -> None:
        self.is_quiet = True
        self._attempt().settle()

    def _fail(self, cause: HandOverFailed) -> None:
        self._is_stopping = True
        if self._job is None:
            self.is_quiet = True
        self._attempt().fail(cause)


class WriteShare:
    """One rank of prefill writes into blocks that this rank has registered, and says with the last WRITE what it wrote.

    Attributes:
        agent: who was told of the blocks, and may write until it has stopped or is gone.
    """

    def __init__(self, side: Side, attempt: Callable[[], Attempt], address: Peer) -> None:
        self._side = side
        self._attempt = attempt
        self.address = address
        self.agent: str | None = None
        self.is_quiet = False
        self._known: Known | None = None
        self._arrived: set[int] = set()
        self._last: int | None = None
        self._is_stopping = False
        self._is_begun_again = False

    def begin(self) -> None:
        manifest = self._attempt().wanted.manifest
        start = "" if manifest is None else manifest.start
        self._side.peers.need(self.address, start, self._connected, self._fail)

    def stop(self) -> None:
        self._is_stopping = True
        if self.agent is None:
            self.is_quiet = True
        elif self._side.own is not None:
            withdrawal = Withdrawal(self._attempt().number, self._side.own)
            self._side.peers.send(self.address, encode(withdrawal))

    def gone(self) -> None:
        """Whoever was told of the blocks is gone for good."""
        if not self.is_quiet:
            self.is_quiet = True
            self._fail(HandOverFailed(Cause.LOST, f"rank {self.address.tp_rank} of prefill is gone"))

    def take(self, message: Written | Stopped) -> None:
        """What the rank says of this attempt."""
        if isinstance(message, Stopped):
            self.is_quiet = True
            cause = Cause(message.cause) if message.cause in set(Cause) else Cause.STOPPED
            words = f"rank {self.address.tp_rank} of prefill stopped: {message.reason:.500}"
            self._fail(HandOverFailed(cause, words))
            return
        last = message.index if message.is_last else self._last
        is_beyond = last is not None and max(message.index, *self._arrived, 0) > last
        if is_beyond or (message.is_last and self._last not in (None, message.index)):
            # Somebody counts wrongly, so the bytes cannot be trusted; but it has not said that it stopped.
            self._fail(HandOverFailed(Cause.PROTOCOL, f"rank {self.address.tp_rank} of prefill numbers WRITEs wrongly"))
            return
        self._arrived.add(message.index)
        if message.manifest is not None:
            self._last = message.index
            misfit = self._misfit(message.manifest)
            if misfit is not None:
                self._fail(misfit)
        if self._last is not None and len(self._arrived) == self._last + 1:
            self.is_quiet = True
            self._attempt().settle()

    def _misfit(self, made: Manifest) -> HandOverFailed | None:
        """Why what was written is not what was wanted."""
        wanted = self._attempt().wanted
        if made.digest != wanted.digest or made.num_tokens != wanted.end_token:
            return HandOverFailed(Cause.DIGEST, f"prefill wrote {made.num_tokens} tokens of another prompt")
        if self._known is not None and made.start != self._known.start:
            return HandOverFailed(Cause.START, "prefill has been started again")
        if wanted.manifest is not None and made.request_id != wanted.manifest.request_id:
            return HandOverFailed(Cause.PROTOCOL, "prefill wrote another request than the parameters name")
        return None

    def _connected(self, known: Known) -> None:
        attempt, side = self._attempt(), self._side
        if self._is_stopping or side.own is None:
            return
        self._known, wanted, ratio = known, attempt.wanted, side.place.kernel_blocks_per_block
        registration = Registration(
            attempt=wanted.attempt,
            decode_request_id=wanted.request_id,
            decode=side.own,
            name=wanted.name,
            request_id="" if wanted.manifest is None else wanted.manifest.request_id,
            digest=wanted.digest,
            first_token=wanted.first_token,
            end_token=wanted.end_token,
            block_size=side.place.kernel_block_size,
            block_ids=tuple(tuple(kernel_blocks(group.block_ids, ratio)) for group in wanted.groups),
        )
        try:
            side.transport.send(known.agent, encode(registration))
        except TransportError as cause:
            # It was not told, so it will not write.
            side.peers.lost(known.agent)
            if self._is_begun_again:
                words = f"rank {self.address.tp_rank} of prefill was not reached: {cause}"
                self._fail(HandOverFailed(Cause.LOST, words))
            else:
                # It may have been started again since it was met.
                self._is_begun_again = True
                self.begin()
            return
        self.agent = known.agent

    def _fail(self, cause: HandOverFailed) -> None:
        if self.agent is None:
            self._is_stopping = self.is_quiet = True
        self._attempt().fail(cause)
