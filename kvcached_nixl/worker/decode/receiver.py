# SPDX-License-Identifier: Apache-2.0
"""Decode's side of hand-overs: begins, fails and finishes attempts, and renews leases. Once per worker, on the transfer
thread.

A request may wait in decode's queue for longer than a lease before its blocks are allocated (vllm#38027). So decode
renews the lease from the request's arrival until it has the KV. The cost of a turn depends on what is due in it, not on
how many attempts wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.deadlines import Clock, Deadlines, earliest
from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import INTERVAL, Peer, Release, StagingRequest, Stopped, Written, encode, heartbeats
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import FetchSpec, LeaseRenewal, UnneededOffer
from kvcached_nixl.worker.decode.attempt import Attempt, Part, ReadPart
from kvcached_nixl.worker.decode.fencing import ActiveWriters, WriteGates
from kvcached_nixl.worker.decode.write_part import WritePart
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.peers import PeerListener
from kvcached_nixl.worker.transfer.topology import kernel_blocks_of

REPEAT_SECONDS = 5.0
"""How often a rank that may still write is asked again to stop."""


SHORTEST_INTERVAL_SECONDS = 1.0
"""Shortest time between two heartbeats, whatever lease the client's parameters name; shorter if this engine's lease is.
"""
MOST_DUE = 256
"""Most leases that are renewed in one turn, to bound its cost; the others follow in the next turn."""


class Renewals:
    """Which leases to renew, and when the next heartbeat of each is ``due``. If several requests want the same request
    of prefill, its lease is renewed once, as long as one of them wants it. ``lease_seconds``: this engine's own."""

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        self._clock = clock
        self._shortest_seconds = min(INTERVAL * lease_seconds, SHORTEST_INTERVAL_SECONDS)
        self._lease_of: dict[DecodeRequestId, tuple[RemotePrefill, str]] = {}
        self._wanted_by: dict[tuple[RemotePrefill, str], set[DecodeRequestId]] = {}
        self._interval_seconds: dict[tuple[RemotePrefill, str], float] = {}
        self.due = Deadlines[tuple[RemotePrefill, str]]()

    def want(self, renewal: LeaseRenewal) -> None:
        """Start to renew the lease that a request needs, or stop if it no longer needs one (`prefill` is None). The
        first heartbeat is due at once: how long the request took to arrive is unknown."""
        request_id = renewal.request_id
        self._end(request_id)
        if renewal.prefill is None:
            return
        lease = self._lease_of[request_id] = renewal.prefill, renewal.name
        wanting = self._wanted_by.setdefault(lease, set())
        if not wanting:
            self.due[lease] = self._clock.now_seconds()
            self._interval_seconds[lease] = max(INTERVAL * renewal.lease_seconds, self._shortest_seconds)
        wanting.add(request_id)

    def _end(self, request_id: DecodeRequestId) -> None:
        lease = self._lease_of.pop(request_id, None)
        if lease is None:
            return
        wanting = self._wanted_by[lease]
        wanting.discard(request_id)
        if not wanting:
            del self._wanted_by[lease], self._interval_seconds[lease]
            self.due.pop(lease, None)

    def take_due(self) -> dict[RemotePrefill, list[str]]:
        """Returns the names whose leases are to be renewed now, by the engine that holds them."""
        now = self._clock.now_seconds()
        found: dict[RemotePrefill, list[str]] = {}
        due = self.due.take_due(now, MOST_DUE)
        self.due.move({lease: now + self._interval_seconds[lease] for lease in due})
        for prefill, name in due:
            found.setdefault(prefill, []).append(name)
        return found


class Receiver(PeerListener):
    """See the module. ``gates``: that peers write through."""

    def __init__(self, context: WorkerContext, gates: WriteGates) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self.gates = gates
        self._outcomes = context.outcomes
        self._attempts: dict[int, Attempt] = {}
        self._asked_again = Deadlines[int]()
        self._unanswered: set[int] = set()
        self._writers = ActiveWriters(context, self._attempts)
        self.renewals = Renewals(context.clock, context.settings.kv_lease_duration_seconds)

    def __len__(self) -> int:
        """Attempts that are not finished."""
        return len(self._attempts)

    @property
    def is_awaiting(self) -> bool:
        """Whether a notification that an attempt waits for may arrive at any moment."""
        return len(self._attempts) > len(self._unanswered)

    def fetch(self, spec: FetchSpec) -> None:
        """A request was given blocks. Nothing is moved before `begin`."""
        local = self._context.local
        is_whole = len(spec.groups) == len(local.groups)
        blocks = kernel_blocks_of(spec.groups, local.groups) if is_whole else ()
        attempt = Attempt(spec, blocks, self._clock, self._changed)
        self._attempts[spec.attempt] = attempt
        if not is_whole:
            reason = f"found blocks of {len(spec.groups)} KV-cache groups; expected {len(local.groups)}"
            attempt.fail(HandOverFailed(FailureCause.DEFECT, reason))
            return
        try:
            writers, others = local.contributors(spec.prefill)
        except ValueError as error:
            attempt.fail(HandOverFailed(FailureCause.REFUSED, str(error)))
            return
        is_push, is_staged = self._context.settings.transfer_mode.is_push, self._context.staging is not None
        for address in writers:
            if is_push or (spec.manifest is not None and is_staged):
                attempt.parts.append(WritePart(self._context, self.gates, attempt, address))
            elif spec.manifest is not None:
                attempt.parts.append(ReadPart(self._context, attempt, address, self._be_written))
        if not attempt.parts:
            attempt.fail(
                HandOverFailed(FailureCause.NO_MANIFEST, "found no manifest; reading prefill's blocks needs one")
            )
            return
        # Another rank of prefill has the same bytes as these.
        request_id = "" if spec.manifest is None else spec.manifest.request_id
        self._release(others, request_id, spec.name, spec.digest)

    def begin(self, *numbers: int) -> None:
        """Begin moving: the device has finished every step that could still write the attempts' blocks (rule R8)."""
        for attempt in filter(None, map(self._attempts.get, numbers)):
            if attempt.failed is None:
                for part in attempt.parts:
                    if isinstance(part, WritePart):
                        self._writers.expect(part, attempt.number)
            for part in list(attempt.parts):
                # A part that cannot begin fails the attempt at once.
                if attempt.failed is None:
                    part.begin()

    def release(self, released: UnneededOffer) -> None:
        """Tell all ranks of prefill that this rank of decode needs nothing, when nothing of the offer is being moved.
        If that gets lost, the lease expires."""
        if released.attempt is not None:
            attempt = self._attempts.get(released.attempt)
            if attempt is not None:
                attempt.unneeded = released
            # A router may have sent the same parameters again.
            manifests = [one.spec.manifest for one in self._attempts.values()]
            if attempt is not None or any(one and one.request_id == released.request_id for one in manifests):
                return
        try:
            writers, others = self._context.local.contributors(released.prefill)
        except ValueError:
            return
        self._release((*writers, *others), released.request_id, released.name, released.digest)

    def fail(self, number: int, cause: HandOverFailed) -> None:
        """Fail an attempt. Idempotent."""
        attempt = self._attempts.get(number)
        if attempt is not None:
            attempt.fail(cause)

    def handle(self, agent: str, message: StagingRequest | Written | Stopped) -> None:
        """Drops a message that matches no attempt or comes from another agent."""
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            self._context.dropped["unknown attempt"] += 1
            return
        for part in attempt.parts:
            if isinstance(part, WritePart) and part.address.tp_rank == message.tp_rank and part.agent == agent:
                if part.is_idle:
                    self._context.dropped["after the end"] += 1
                else:
                    part.take(message)
                    if isinstance(message, Stopped):
                        self._writers.look_after(attempt)
                return
        self._context.dropped["not a contributor"] += 1

    def renew(self, agent: str, names: Iterable[str]) -> None:
        """Handle a heartbeat of prefill: it names attempts."""
        for attempt in (self._attempts.get(int(name)) for name in names if name.isdecimal()):
            if attempt is not None and attempt.failed is None and any(part.agent == agent for part in attempt.parts):
                self._outcomes.known(attempt.number)

    def send_heartbeats(self) -> float | None:
        """Send the heartbeats that are due; returns when the next one is, in the clock's seconds."""
        for prefill, names in self.renewals.take_due().items():
            # Sizes that do not divide are reported as a failure when the request gets its blocks.
            try:
                writers, others = self._context.local.contributors(prefill)
            except ValueError:
                continue
            said = list(heartbeats(names))
            for address in (*writers, *others):
                for heartbeat in said:
                    self._context.peers.send(address, heartbeat, waits=False)
        return self.renewals.due.first_seconds

    def is_used(self, agent: str) -> bool:
        return bool(self._parts_of(agent))

    def may_write(self, agent: str) -> bool:
        return any(part.may_write for _, part in self._parts_of(agent))

    def dead(self, agent: str) -> None:
        """Another engine answers at an agent's address. Its process may still run, but cannot be asked any more."""
        for _, part in self._parts_of(agent):
            part.is_abandoned = True
        self._lose(agent, "another engine answers at the address of")

    def unreachable(self, agent: str) -> None:
        """Nobody listens at an agent's address. Attempts that wait for it fail at once, but their blocks are held."""
        self._lose(agent, "nobody listens any more at the address of")

    def _lose(self, agent: str, what: str) -> None:
        for attempt, part in self._parts_of(agent):
            attempt.fail(HandOverFailed(FailureCause.LOST, f"{what} rank {part.address.rank} of prefill"))
            self._writers.look_after(attempt)

    def turn(self) -> float | None:
        """Do what is due now; returns when to call again, in the clock's seconds, None if nothing will be due."""
        now = self._clock.now_seconds()
        due_at = self._writers.turn()
        for number in self._asked_again.take_due(now):
            attempt = self._attempts.get(number)
            if attempt is not None:
                self._asked_again[number] = now + REPEAT_SECONDS
                self._unanswered.add(number)
                self._writers.look_after(attempt)
                for part in attempt.parts:
                    if not part.is_idle:
                        part.stop()
                        self._context.peers.probe(part.address)
        return earliest(self._asked_again.first_seconds, due_at, self.gates.turn())

    def _parts_of(self, agent: str) -> list[tuple[Attempt, Part]]:
        parts = [(attempt, part) for attempt in self._attempts.values() for part in attempt.parts]
        return [(attempt, part) for attempt, part in parts if part.agent == agent and not part.is_idle]

    def _be_written(self, attempt: Attempt, part: ReadPart, is_read: bool) -> None:
        """Replace a `ReadPart` by a `WritePart`: prefill stages, so it has to write; or, where ``is_read``, it sends
        checksums of what was read."""
        other = WritePart(self._context, self.gates, attempt, part.address, is_read=is_read)
        attempt.parts[attempt.parts.index(part)] = other
        self._writers.expect(other, attempt.number)
        other.begin()

    def _release(self, addresses: Iterable[Peer], request_id: str, name: str, digest: str) -> None:
        local = self._context.local
        message = encode(Release(request_id, name, digest, local.tp_rank, local.tp_size))
        for address in addresses:
            self._context.peers.send(address, message)

    def _changed(self, attempt: Attempt) -> None:
        number = attempt.number
        if number not in self._attempts:
            return
        is_finished = all(part.is_idle for part in attempt.parts)
        if attempt.failed is None and is_finished and attempt.lacks_layers(self._context.local.groups):
            reason = "prefill's pipeline stages do not have the layers of this rank; expected the same model"
            attempt.failed = HandOverFailed(FailureCause.REFUSED, reason)
        if attempt.failed is not None and attempt.failed_at_seconds is None:
            attempt.failed_at_seconds = self._clock.now_seconds()
            self._asked_again[number] = attempt.failed_at_seconds + REPEAT_SECONDS
            self._report(attempt)
            self._outcomes.failed(attempt.spec, attempt.failed)
        if is_finished:
            del self._attempts[number]
            self._asked_again.pop(number, None)
            self._unanswered.discard(number)
            self._writers.finished(attempt)
            if attempt.failed is None:
                self._report(attempt)
                if attempt.tally.num_bytes:
                    self._outcomes.moved(attempt.tally)
            self._outcomes.finished(number)
            if attempt.unneeded is not None:
                self.release(attempt.unneeded)

    def _report(self, attempt: Attempt) -> None:
        attempt.timeline.end(self._clock.now_seconds())
        self._outcomes.timed(attempt.timeline.reported(attempt.number))
