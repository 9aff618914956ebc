# SPDX-License-Identifier: Apache-2.0
"""Prefill: what a registration of decode's is written with, and its end. Once per worker, on the transfer thread.

A registration is over when none of its WRITEs is in flight; only then is it answered, and only then are the blocks on
either side free (rule R2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.messages import Peer, Ready, Room, Stopped, Written, encode
from kvcached_nixl.worker.descriptors import Blocks, Descriptors
from kvcached_nixl.worker.handover.attempt import Side
from kvcached_nixl.worker.handover.digests import Asked
from kvcached_nixl.worker.handover.meeting import Known
from kvcached_nixl.worker.handover.offer import Offer, Writing
from kvcached_nixl.worker.handover.posting import Job
from kvcached_nixl.worker.handover.source import FromBlocks, Source
from kvcached_nixl.worker.staging.staging import Held

__all__ = ["Writer"]

logger = logging.getLogger(SERVER_LOGGER)


class Writer:
    """See the module.

    Args:
        ended: called with a registration that is over.
        written: called with one that goes on, of which a WRITE has ended.

    Attributes:
        source: where the bytes are.
        num_final: registrations whose last WRITEs are under way; decode waits for nothing else.
    """

    def __init__(self, side: Side, ended: Callable[[Writing], None], written: Callable[[Writing], None]) -> None:
        self._side = side
        self._ended = ended
        self._written_to = written
        self.source = FromBlocks(side.place.kernel_block_size)
        self.num_final = 0

    @property
    def tp_size(self) -> int:
        return self._side.place.tp_size

    def connect(self, writing: Writing) -> None:
        """Meet whoever has registered."""
        if writing.stopping is None or writing.jobs:
            self._side.peers.need(
                writing.registration.decode,
                "",
                lambda known: self._connected(writing, known),
                lambda cause: self.stop(writing, cause.cause, str(cause), is_answered=False),
                is_doubted=writing.is_doubted,
            )

    def advance(self, writing: Writing) -> None:
        """Make WRITEs of the tokens that are ready and in none yet, up to a boundary that both sides' blocks share."""
        offer, registration = writing.offer, writing.registration
        if writing.stopping is not None or writing.is_complete or offer is None:
            return
        if offer.finished and offer.ready_tokens < registration.end_token:
            words = f"prefill computed {offer.ready_tokens} of {registration.end_token} tokens"
            self.stop(writing, Cause.STOPPED, words)
            return
        try:
            while self._advance(writing, offer):
                pass
        except (ValueError, HandOverFailed) as cause:
            what = cause.cause if isinstance(cause, HandOverFailed) else Cause.RANGE
            self.stop(writing, what, f"no WRITE was made: {cause}")
        except Exception as defect:
            logger.exception("A registration fails by a defect of kvcached_nixl")
            self.stop(writing, Cause.DEFECT, f"{type(defect).__name__}: {defect}")

    def give_room(self, writing: Writing, room: Room) -> None:
        """Decode has room for the tokens that it was asked for; what comes late or again is not looked at."""
        first_token, end_token = writing.asked
        if room.first_token == first_token == writing.next_token and room.end_token <= end_token:
            writing.room = room
            self.advance(writing)

    def _advance(self, writing: Writing, offer: Offer) -> bool:
        """Make one WRITE. Returns whether there may be another one."""
        known, registration = writing.known, writing.registration
        end = min(offer.ready_tokens, registration.end_token)
        if end < registration.end_token:
            # A step ends anywhere; the rest of its last block goes with the next one.
            end -= end % max(self._side.place.kernel_block_size, registration.block_size)
        if known is None or end <= writing.next_token:
            return False
        if registration.by_rooms:
            if writing.room is None or writing.room.end_token <= writing.next_token:
                self._ask_for_room(writing, end)
                return False
            end = min(end, writing.room.end_token)
        found = self.source.find(writing, end)
        if found is None:
            return False
        self._write(writing, offer, known, found)
        return not writing.is_complete

    def _ask_for_room(self, writing: Writing, end: int) -> None:
        if writing.asked[0] != writing.next_token:
            writing.asked = writing.next_token, end
            said = Ready(writing.registration.attempt, self._side.place.tp_rank, *writing.asked)
            self._side.peers.send(writing.registration.decode, encode(said), only=writing.agent)

    def stop(self, writing: Writing, cause: Cause, reason: str, *, is_answered: bool = True) -> None:
        """Post nothing more of it; the first reason is the one that is told."""
        if writing.stopping is not None:
            return
        writing.stopping = cause, reason
        for job in [job for job in writing.jobs if job not in writing.digesting]:
            self._side.posting.drop(job)
        if not is_answered:
            writing.known = None
        self._end_if_quiet(writing, is_answered)

    def answer(self, agent: str, decode: Peer, attempt: int, cause: Cause, reason: str) -> None:
        """Tell a rank of decode that nothing of its attempt is in flight, or will be; ``agent`` is who has asked."""
        message = Stopped(attempt, self._side.place.tp_rank, int(cause), reason[:1000])
        self._side.peers.send(decode, encode(message), only=agent)

    def _connected(self, writing: Writing, known: Known) -> None:
        if known.agent != writing.agent and not writing.is_doubted:
            # Known from before: it may have been started again since, and this is its first word.
            writing.is_doubted = True
            self.connect(writing)
        elif known.agent != writing.agent:
            self.stop(writing, Cause.LOST, "another engine answers at its address", is_answered=False)
        elif writing.stopping is None:
            writing.known = known
            self.advance(writing)

    def _write(self, writing: Writing, offer: Offer, known: Known, source: Source) -> None:
        registration, side = writing.registration, self._side
        memory, end = known.rank.memory, source.end_token
        targets = registration.groups if writing.room is None else writing.room.groups
        if len(targets) != len(source.groups) or registration.block_size != memory[0].block_size:
            raise HandOverFailed(Cause.RANGE, "the registration does not fit the handshake (groups or block size)")
        groups = [
            (here, Blocks(there.block_ids, there.first_token), max(writing.next_token, there.first_token))
            for here, there in zip(source.groups, targets, strict=True)
        ]
        routes = side.routes.of(known.agent, memory)
        nothing = np.empty((0, 2), np.int64)
        found = Descriptors(nothing, nothing) if registration.is_read else side.routes.ranges(routes, groups, end)
        writing.next_token = end
        is_final = writing.is_complete
        if is_final and offer.manifest is None:
            raise HandOverFailed(Cause.PROTOCOL, "prefill has no manifest of what it computed")
        manifest = None if offer.manifest is None else msgspec.structs.replace(offer.manifest, groups=())
        digest: str | None = None

        def notify(_: int, is_last: bool) -> bytes:
            said = Written(
                registration.attempt,
                side.place.tp_rank,
                writing.next_index,
                manifest if is_final and is_last else None,
                end if is_last else 0,
                digest if is_last else None,
            )
            writing.next_index += 1
            return encode(said)

        ended = side.contained(
            lambda failed: self._written(writing, job, source.held, failed),
            lambda cause: self.stop(writing, cause.cause, str(cause)),
        )
        # Where nothing is written there is no gate; what is said then goes to the rank itself.
        target = side.entrances.use(known, registration.gate) if registration.gate else known.agent
        job = Job("WRITE", target, found.local, found.remote, ended, notify)
        if source.held is not None:
            source.held.jobs += 1
        if not registration.is_verified:
            self._submit(writing, job, is_final)
            return

        def digested(found_digest: str, failed: str) -> None:
            nonlocal digest
            digest = found_digest
            side.contained(
                lambda failed: self._digested(writing, job, failed, is_final, notify),
                lambda cause: self.stop(writing, cause.cause, str(cause)),
            )(failed)

        # While the bytes are read, nobody else may have them: the job is not quiet.
        writing.jobs[job] = False
        asked = Asked(known.agent, memory, lambda: writing.stopping is None)
        side.digests.of_sent(asked, ([(here, first) for here, _, first in groups], end), digested)
        writing.digesting.add(job)

    def _submit(self, writing: Writing, job: Job, is_final: bool) -> None:
        writing.jobs[job] = is_final
        self.num_final += is_final
        self._side.posting.submit(job)

    def _digested(
        self, writing: Writing, job: Job, failed: str, is_final: bool, notify: Callable[[int, bool], bytes]
    ) -> None:
        writing.digesting.discard(job)
        if failed:
            self.stop(writing, Cause.DEFECT, failed)
        if writing.stopping is not None:
            self._side.posting.drop(job)
            return
        if writing.registration.is_read:
            # It has been read already: this is all that is said.
            self._side.peers.send(writing.registration.decode, notify(0, True), only=writing.agent)
        self._submit(writing, job, is_final)

    def _written(self, writing: Writing, job: Job, held: Held | None, failed: str) -> None:
        self.num_final -= writing.jobs.pop(job)
        self.source.written(writing, held)
        if writing.registration.gate:
            self._side.entrances.used(job.peer)
        if failed:
            self.stop(writing, Cause.LOST, failed)
        self._end_if_quiet(writing, True)
        if not writing.is_over:
            # A window may be free for the tokens that follow.
            self.advance(writing)
            self._written_to(writing)

    def _end_if_quiet(self, writing: Writing, is_answered: bool) -> None:
        if writing.is_over or writing.jobs or (writing.stopping is None and not writing.is_complete):
            return
        writing.is_over = True
        if writing.stopping is not None and is_answered:
            self.answer(writing.agent, writing.registration.decode, writing.registration.attempt, *writing.stopping)
        self.source.over(writing)
        self._ended(writing)
