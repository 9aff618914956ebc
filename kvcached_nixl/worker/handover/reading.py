# SPDX-License-Identifier: Apache-2.0
"""Decode READs: one share of an attempt. Owned by the transfer thread."""

from __future__ import annotations

from collections.abc import Callable

from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Peer, Release, encode
from kvcached_nixl.worker.handover.attempt import Attempt, Side
from kvcached_nixl.worker.handover.local import as_blocks
from kvcached_nixl.worker.handover.meeting import Known
from kvcached_nixl.worker.handover.posting import Job

__all__ = ["ReadShare"]


class ReadShare:
    """This rank reads what one rank of prefill keeps, and then the word that says that it was kept meanwhile.

    Args:
        instead: called where there is nothing to read because prefill stages (False), and where what was read is to
            be verified (True): this share is put out of its attempt.
    """

    def __init__(
        self,
        side: Side,
        attempt: Callable[[], Attempt],
        address: Peer,
        manifest: Manifest,
        instead: Callable[[Attempt, ReadShare, bool], None],
    ) -> None:
        self._side = side
        self._attempt = attempt
        self.address = address
        self.agent: str | None = None
        self.is_quiet = False
        self._manifest = manifest
        self._instead = instead
        self._known: Known | None = None
        self._job: Job | None = None
        self._landing: int | None = None
        self._is_stopping = False

    def begin(self) -> None:
        self._side.meet(self.address, self._manifest.start, self._connected, self._fail)

    def stop(self) -> None:
        self._is_stopping = True
        if self._job is None:
            self.is_quiet = True
        else:
            self._side.posting.drop(self._job)

    def _connected(self, known: Known) -> None:
        if self._is_stopping:
            return
        if known.rank.is_staged:
            self._instead(self._attempt(), self, False)
            return
        self._known = known
        doubt = self._side.distrust_of(self.address, known.start)
        if doubt is not None:
            self._fail(doubt)
            return
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
        elif (doubt := side.distrust_of(self.address, known.start)) is not None:
            # Found meanwhile, in another hand-over.
            self._fail(doubt)
        elif side.digests.are_compared(self._attempt().number):
            self._instead(self._attempt(), self, True)
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
