# SPDX-License-Identifier: Apache-2.0
"""Prefill: decode's registrations, from their arrival until they are finished, and the WRITEs for them. Once per
worker, on the transfer thread.

A registration finds its offer by the request's id where decode knows that, else by name and digest; a name alone
matches nothing (rule R7). One that finds no offer waits for it, for a limited time. No time is limited while its
request waits for its turn, or is computed: decode is told so by heartbeats, which name attempts.

It is finished when none of its WRITEs is in flight; only then is it answered, and only then are the blocks on both
sides free (rule R2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from kvcached_nixl.deadlines import Clock, Deadlines, earliest
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import (
    INTERVAL,
    Peer,
    Registration,
    StagingGrant,
    StagingRequest,
    Stopped,
    Withdrawal,
    encode,
    heartbeats,
)
from kvcached_nixl.wire.params import is_of_transfer
from kvcached_nixl.worker.geometry.descriptors import Descriptors
from kvcached_nixl.worker.prefill.offers import Offer, OfferMatcher, WriteKey, WriteTask
from kvcached_nixl.worker.prefill.source import FromBlocks, Staged
from kvcached_nixl.worker.transfer import topology
from kvcached_nixl.worker.transfer.context import RecentSet, WorkerContext
from kvcached_nixl.worker.transfer.peers import PeerListener, contained
from kvcached_nixl.worker.transfer.staging import Held
from kvcached_nixl.worker.transfer.topology import ConnectedPeer
from kvcached_nixl.worker.transfer.transfer_queue import TransferJob

PROBE_SECONDS = 5.0
"""How often a rank of decode is probed once its registration is overdue."""
RENEW_SECONDS = 5.0
"""How often decode is told of registrations whose request is not computed yet, at least."""

_STARTED_AGAIN = "prefill was restarted, or its weights were changed, since decode's handshake with it"
_WITHDRAWN = HandOverFailed(FailureCause.STOPPED, "withdrawn")


class Writer(PeerListener):
    """See the module. ``settle``: called with an offer whose blocks may be free now, and the rank of decode that needs
    nothing more of it, if it is because of one.

    Attributes:
        tasks: registrations that are not finished.
        asked_at_once: whether names are of transfers (`is_of_transfer`), if the last registration with such a name came
            without the request's id, and so without prefill's answer. Decode that asks does so for some prompts.
        num_final: last WRITEs of registrations that have not ended; decode waits for nothing else.
    """

    def __init__(
        self, context: WorkerContext, matcher: OfferMatcher, settle: Callable[[Offer, Peer | None], None]
    ) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self._matcher = matcher
        self._settle = settle
        self.source = FromBlocks()
        if context.staging is not None:
            self.source = Staged(context, self.advance, lambda offer: settle(offer, None), self.stop)
        self.num_final = 0
        self._unmatched_seconds = context.settings.handover_timeout_seconds
        self.tasks: dict[WriteKey, WriteTask] = {}
        self.asked_at_once: frozenset[bool] = frozenset()
        self._finished, self._failed = RecentSet[WriteKey](), RecentSet[WriteKey]()
        self._stuck = Deadlines[WriteKey]()
        self._renew_seconds = min(RENEW_SECONDS, INTERVAL * self._unmatched_seconds)
        self._renewed = Deadlines[WriteKey]()

    def register(self, agent: str, registration: Registration) -> None:
        """Serve a registration; one that came already, or was withdrawn, is dropped."""
        key, now = (agent, registration.attempt), self._clock.now_seconds()
        if key in self.tasks or key in self._finished:
            self._context.dropped["doubled or late registration"] += 1
            return
        task = self.tasks[key] = WriteTask(agent, registration, next_token=registration.begin_token)
        kind = frozenset({is_of_transfer(registration.name)})
        self.asked_at_once = self.asked_at_once - kind if registration.request_id else self.asked_at_once | kind
        # Later than the matcher's deadline, so that a missing request is reported as that.
        self._stuck[key] = now + self._unmatched_seconds + PROBE_SECONDS
        self._renewed[key] = now + self._renew_seconds
        try:
            self._find_offer(task)
        except HandOverFailed as cause:
            self.stop(task, cause)
            return
        if task.offer is not None:
            task.offer.report_claim(self._context.outcomes)
            task.offer.follow(now)
        self._connect(task)

    def _find_offer(self, task: WriteTask) -> None:
        """Join a registration with its offer, or let it wait for that. Raises `HandOverFailed`: there will be none."""
        registration, matcher = task.registration, self._matcher
        if self._context.incarnation not in ("", registration.incarnation):
            raise HandOverFailed(FailureCause.RESTARTED, _STARTED_AGAIN)
        if registration.request_id:
            offer = matcher.offers.get(PrefillRequestId(registration.request_id))
            if offer is None or offer.stopped:
                why = "" if offer is None else f": {offer.stopped}"
                raise HandOverFailed(FailureCause.LEASE, f"prefill does not keep this request any more{why}")
            if not offer.means(registration):
                raise HandOverFailed(FailureCause.DIGEST, "prefill computed another prompt")
        elif not self._context.settings.transfer_mode.is_push:
            # In pull only an ended request may be written: before that vLLM may give its blocks to another one.
            reason = "found a pull without a request id; expected that of a request that has ended"
            raise HandOverFailed(FailureCause.PROTOCOL, reason)
        else:
            offer = matcher.wanted_by(registration)
        if offer is not None:
            matcher.join(task, offer)
        else:
            matcher.wait(task)

    def take_grant(self, agent: str, grant: StagingGrant) -> None:
        """Decode grants slots for the tokens that prefill has asked for; a late or repeated grant is ignored."""
        task = self.tasks.get((agent, grant.attempt))
        if task is None:
            return
        first_token, end_token = task.asked
        if grant.first_token == first_token == task.next_token and grant.end_token <= end_token:
            task.grant = grant
            self.advance(task)

    def withdraw(self, agent: str, message: Withdrawal) -> None:
        """Decode needs a registration no more. It is answered in any case."""
        key = agent, message.attempt
        task = self.tasks.get(key)
        if task is not None:
            self.stop(task, _WITHDRAWN)
            return
        # It is finished, or its registration is still on its way: remember it, so that it is dropped when it arrives.
        self._finished.add(key)
        self._answer(agent, message.decode, message.attempt, _WITHDRAWN, has_failed=key in self._failed)

    def advance(self, task: WriteTask) -> None:
        """Make WRITEs of the tokens that are ready and in no WRITE yet, up to a block boundary of both sides."""
        offer, registration = task.offer, task.registration
        if task.stopping is not None or task.is_complete or offer is None:
            return
        if offer.finished and offer.update.ready_tokens < registration.end_token:
            reason = f"prefill computed {offer.update.ready_tokens} of {registration.end_token} tokens"
            self.stop(task, HandOverFailed(FailureCause.STOPPED, reason))
            return
        with contained(partial(self.stop, task)):
            try:
                while self._advance(task, offer):
                    pass
            except (ValueError, HandOverFailed) as error:
                what = error.cause if isinstance(error, HandOverFailed) else FailureCause.RANGE
                self.stop(task, HandOverFailed(what, f"no WRITE was made: {error}"))

    def _advance(self, task: WriteTask, offer: Offer) -> bool:
        """Make one WRITE, if possible. Returns whether there may be another one to make."""
        known, registration = task.known, task.registration
        end = min(offer.update.ready_tokens, registration.end_token)
        if end < registration.end_token:
            # A step may end inside a block; the tokens of that block go with the next step's.
            end -= end % self._context.local.step_tokens(registration.block_sizes)
        if known is None or end <= task.next_token:
            return False
        if registration.is_staged:
            if task.grant is None or task.grant.end_token <= task.next_token:
                if task.asked[0] != task.next_token:
                    task.asked = task.next_token, end
                    said = StagingRequest(registration.attempt, self._context.local.tp_rank, *task.asked)
                    self._context.peers.send(registration.decode, encode(said), only=task.agent)
                return False
            end = min(end, task.grant.end_token)
        found = self.source.find(task, end)
        if found is None:
            return False
        self._write(task, offer, known, *found)
        return not task.is_complete

    def _write(self, task: WriteTask, offer: Offer, known: ConnectedPeer, end: int, held: Held | None) -> None:
        registration, blocks = task.registration, offer.blocks if held is None else held.groups
        targets = registration.groups if task.grant is None else task.grant.groups
        block_sizes = tuple(group.kernel_block_size for group in known.rank.groups)
        if len(targets) != len(blocks) or registration.block_sizes != block_sizes:
            reason = "the registration does not fit the handshake (groups or block sizes)"
            raise HandOverFailed(FailureCause.RANGE, reason)
        firsts = [max(task.next_token, target.first_token) for target in targets]
        found = Descriptors.none()
        if not registration.is_read:
            groups = list(zip(blocks, targets, firsts, strict=True))
            found = topology.ranges(known.routes(self._context.local, is_prefill=True), groups, end)
        task.next_token, is_final = end, end >= registration.end_token
        if not (len(found.local) or is_final or registration.is_verified or registration.is_staged):
            # Other ranks write these tokens, and decode waits for the last range only.
            self.source.written(task, held, is_begun=False)
            return
        manifest = offer.update.manifest
        if is_final and manifest is None:
            raise HandOverFailed(FailureCause.PROTOCOL, "prefill has no manifest of what it computed")
        say = partial(task.say, self._context.local.tp_rank, end, manifest if is_final else None)

        # Without a gate, or where nothing is written, the notification goes to the rank's own agent.
        gates = self._context.gate_connections
        target = gates.use(known, registration.gate) if registration.gate else known.agent
        ended = contained(partial(self.stop, task))(lambda failed: self._written(task, job, held, failed))
        job: TransferJob = TransferJob(
            "WRITE", target, found.local, found.remote, ended, partial(say, None), tally=task.tally
        )
        if held is not None:
            held.jobs += 1
        if not registration.is_verified:
            self._submit(task, job, is_final)
            return

        @contained(partial(self.stop, task))
        def digested(digest: str, failed: str) -> None:
            job.notify = partial(say, digest)
            task.awaiting_checksum.discard(job)
            if failed:
                self.stop(task, HandOverFailed(FailureCause.DEFECT, failed))
            if task.stopping is not None:
                self._context.transfer_queue.drop(job)
            else:
                self._submit(task, job, is_final)

        # In `jobs` already: the checksum reads the bytes, so the blocks must not be freed before it has ended.
        task.jobs[job] = False
        sent = list(zip(blocks, firsts, strict=True)), end
        self._context.checksums.of_sent(known.agent, sent, known.rank.groups, lambda: task.stopping is None, digested)
        task.awaiting_checksum.add(job)

    def _submit(self, task: WriteTask, job: TransferJob, is_final: bool) -> None:
        task.jobs[job] = is_final
        self.num_final += is_final
        if not len(job.local) and job.notify is not None:
            # Decode has read the bytes already, or other ranks write all of them: only the notification is sent.
            self._context.peers.send(task.registration.decode, job.notify(0, True), only=task.agent)
        self._context.transfer_queue.submit(job)

    def _written(self, task: WriteTask, job: TransferJob, held: Held | None, failed: str) -> None:
        self.num_final -= task.jobs.pop(job)
        self.source.written(task, held)
        if task.registration.gate:
            self._context.gate_connections.used(job.peer)
        if failed:
            task.has_failed = True
            self.stop(task, HandOverFailed(FailureCause.LOST, failed))
        self._end_if_idle(task, True)
        if not task.is_finished:
            # A staging window may be free now for the tokens that follow.
            self.advance(task)
            if task.offer is not None:
                self._settle(task.offer, None)

    def _connect(self, task: WriteTask, *, is_doubted: bool = False) -> None:
        """Connect to the rank that has registered. ``is_doubted``: with a new handshake."""

        def connected(known: ConnectedPeer) -> None:
            if known.agent != task.agent and not is_doubted:
                # The known agent may be from before a restart, and this registration the first message of the new one.
                if task.stopping is None or task.jobs:
                    self._connect(task, is_doubted=True)
            elif known.agent != task.agent:
                cause = HandOverFailed(FailureCause.LOST, "another engine answers at decode's address")
                self.stop(task, cause, is_answered=False)
            elif task.stopping is None:
                task.known = known
                if task.offer is not None:
                    task.offer.follow(self._clock.now_seconds())
                self.advance(task)

        failed = partial(self.stop, task, is_answered=False)
        self._context.peers.need(task.registration.decode, "", connected, failed, is_doubted=is_doubted)

    def is_used(self, agent: str) -> bool:
        return any(task.agent == agent for task in self.tasks.values())

    def dead(self, agent: str) -> None:
        """Stop an agent's registrations without an answer."""
        for task in [one for one in self.tasks.values() if one.agent == agent]:
            cause = HandOverFailed(FailureCause.LOST, "the peer is dead or unreachable")
            self.stop(task, cause, is_answered=False)

    unreachable = dead

    def stop(self, task: WriteTask, cause: HandOverFailed, *, is_answered: bool = True) -> None:
        """Stop a registration: post nothing more of it, and answer it once it is idle. Only the first reason counts."""
        if task.stopping is not None:
            return
        # Its traceback would keep all frames that have led here, and their engine, until garbage is collected.
        task.stopping = cause.with_traceback(None)
        for job in [job for job in task.jobs if job not in task.awaiting_checksum]:
            self._context.transfer_queue.drop(job)
        if not is_answered:
            task.known = None
        self._end_if_idle(task, is_answered)

    def fail(self, key: WriteKey, failure: HandOverFailed) -> None:
        task = self.tasks.get(key)
        if task is not None:
            self.stop(task, failure)

    def started(self, incarnation: str) -> None:
        """Stop registrations that were made for another incarnation of this engine."""
        for task in list(self.tasks.values()):
            if task.registration.incarnation != incarnation:
                self.stop(task, HandOverFailed(FailureCause.RESTARTED, _STARTED_AGAIN))

    def stop_those_of(self, offer: Offer, cause: HandOverFailed) -> None:
        """Nothing more of this offer is written."""
        for task in list(offer.write_tasks.values()):
            # Otherwise a decode that has vanished silently would be probed only at its deadline.
            self._stuck[task.key] = self._clock.now_seconds() + PROBE_SECONDS
            self.stop(task, cause)

    def _answer(self, agent: str, decode: Peer, attempt: int, cause: HandOverFailed, *, has_failed: bool) -> None:
        """Tell a rank of decode that nothing of its attempt is in flight, or will be; ``agent``: the one that asked."""
        message = Stopped(attempt, self._context.local.tp_rank, int(cause.cause), str(cause)[:1000], has_failed)
        self._context.peers.send(decode, encode(message), only=agent)

    def _end_if_idle(self, task: WriteTask, is_answered: bool) -> None:
        if task.is_finished or task.jobs or (task.stopping is None and not task.is_complete):
            return
        task.is_finished = True
        if task.stopping is not None and is_answered:
            decode, attempt = task.registration.decode, task.registration.attempt
            self._answer(task.agent, decode, attempt, task.stopping, has_failed=task.has_failed)
        self.source.finished(task)
        del self.tasks[task.key]
        self._finished.add(task.key)
        if task.has_failed:
            self._failed.add(task.key)
        self._stuck.pop(task.key, None)
        self._renewed.pop(task.key, None)
        self._matcher.forget(task)
        if task.stopping is None:
            self._context.outcomes.fetched()
            if task.tally.num_bytes:
                self._context.outcomes.moved(task.tally)
        if task.offer is not None:
            del task.offer.write_tasks[task.key]
            self._settle(task.offer, task.registration.decode)

    def turn(self, now_seconds: float, *, is_engine_alive: bool) -> float | None:
        """Renew those whose request is not computed yet; stop those that are due: without an offer, or not written in
        time. Returns when something is due next, in the clock's seconds; None if nothing is."""
        if due := self._renewed.take_due(now_seconds):
            self._renewed.move(dict.fromkeys(due, now_seconds + self._renew_seconds))
            if is_engine_alive:
                self._renew(due, now_seconds)
        for key in self._matcher.take_due(now_seconds):
            self.fail(key, HandOverFailed(FailureCause.DEADLINE, "prefill has no request of this name and prompt"))
        for key in self._stuck.take_due(now_seconds):
            task = self.tasks.get(key)
            if task is not None:
                # Decode has given up by now.
                self._stuck[key] = now_seconds + PROBE_SECONDS
                self.stop(task, HandOverFailed(FailureCause.DEADLINE, "prefill did not write it in time"))
                self._context.peers.probe(task.registration.decode)
                if not task.is_finished and task.offer is not None:
                    self._context.outcomes.stuck(task.offer.request_id)
        return earliest(*(one.first_seconds for one in (self._matcher, self._stuck, self._renewed)))

    def _renew(self, keys: Iterable[WriteKey], now_seconds: float) -> None:
        names: dict[tuple[Peer, str], list[str]] = {}
        for task in map(self.tasks.__getitem__, keys):
            if task.offer is not None and not (task.offer.finished or task.is_complete or task.stopping):
                self._stuck[task.key] = now_seconds + self._unmatched_seconds + PROBE_SECONDS
                registration = task.registration
                names.setdefault((registration.decode, task.agent), []).append(str(registration.attempt))
        for (address, agent), of_agent in names.items():
            for heartbeat in heartbeats(of_agent):
                self._context.peers.send(address, heartbeat, only=agent)
