# SPDX-License-Identifier: Apache-2.0
"""worker/decode/{receiver,attempt,write_part}.py: decode's attempts, from their blocks to the last byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ManualClock
from support.internals import leftovers, links_of, num_open, writers_of
from support.worker_fakes import BLOCK_SIZE, DIGEST, Local, Remote, address, manifest, wanted

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Process
from kvcached_nixl.wire.manifest import BlockRange, Manifest
from kvcached_nixl.wire.messages import Registration, Release, StagingRequest, Stopped, Withdrawal, Written, decode
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import FetchSpec, LeaseRenewal, UnneededOffer
from kvcached_nixl.worker.decode.fencing import (
    AGAIN_SECONDS,
    DEAD_SECONDS,
    DRAIN_SECONDS,
    LOOK_SECONDS,
    UNHEARD_SECONDS,
)
from kvcached_nixl.worker.decode.receiver import MOST_DUE, REPEAT_SECONDS, Receiver, Renewals
from kvcached_nixl.worker.transfer.ownership_tokens import TokenBuffers
from kvcached_nixl.worker.transfer.topology import ConnectedPeer
from kvcached_nixl.worker.transfer.transfer_queue import TransferTally

MANIFEST = manifest(17, 13, 19)
ALL_WRITTEN = manifest()


class Decode(Local):
    """`Receiver`, and what it has reported."""

    def __init__(self, mode: TransferMode = TransferMode.PULL, **more: Any) -> None:
        super().__init__(mode=mode, **more)
        self.failed: dict[int, FailureCause] = {}
        self.said: dict[int, str] = {}
        self.over: list[int] = []
        self.moved: list[TransferTally] = []
        outcomes: Any = SimpleNamespace(
            failed=self._failed,
            finished=self._finished,
            moved=self.moved.append,
            timed=lambda reported: None,
        )
        self.side.outcomes = outcomes
        self.receiver = Receiver(self.side, self.gates)
        self.listener.role, self.listener.may_write = self.receiver, self.receiver.may_write

    def _failed(self, wanted: FetchSpec, cause: HandOverFailed) -> None:
        assert wanted.attempt not in self.failed, "reported twice"
        self.failed[wanted.attempt], self.said[wanted.attempt] = cause.cause, str(cause)

    def _finished(self, attempt: int) -> None:
        assert attempt not in self.over, "over twice"
        self.over.append(attempt)

    def want(self, one: FetchSpec) -> None:
        self.receiver.fetch(one)
        self.receiver.begin(one.attempt)

    def hear(self) -> None:
        for agent, said in [one for each in (self.transport, *self.gates) for one in each.received()]:
            message = decode(said)
            assert isinstance(message, (StagingRequest, Written, Stopped))
            self.receiver.handle(agent, message)

    def deliver(self) -> None:
        super().deliver()
        self.hear()
        super().deliver()

    def is_clean(self) -> bool:
        """Whether no attempt, writer, deadline or transfer is left."""
        left = leftovers(self.receiver, writers_of(self.receiver), self.side.token_buffers, but=("_free",))
        return not (left or self.unreleased() or self.transfer_queue.is_busy)


@pytest.fixture
def pull() -> Decode:
    return Decode()


@pytest.fixture
def push() -> Decode:
    return Decode(TransferMode.PUSH)


def keep(remote: Remote, made: Manifest = MANIFEST) -> None:
    """Prefill has these blocks, and their ownership token."""
    remote.memory.cells[:] = np.arange(remote.memory.cells.size).reshape(remote.memory.cells.shape) + 1
    assert remote.table.publish(made.request_id, made.ownership_token)


# ---------------------------------------------------------------------------------------------------------------- READ


@pytest.mark.parametrize(
    "made",
    [
        manifest(17, 13, 32),
        manifest(17, 13, 2**31 - 1),
        manifest(17, 13, block_size=5, num_tokens=10),
        manifest(17, 13, 19, 20, 21, block_size=2, num_tokens=10),
        manifest(17, 13, num_tokens=8),
        msgspec.structs.replace(MANIFEST, groups=MANIFEST.groups * 2, block_sizes=(BLOCK_SIZE,) * 2),
        msgspec.structs.replace(MANIFEST, groups=()),
        msgspec.structs.replace(MANIFEST, groups=(BlockRange(8, (19,)),)),
    ],
    ids=["a block too many", "far out", "block size", "smaller blocks", "short", "groups", "no groups", "too late"],
)
def test_a_manifest_that_does_not_fit_prefills_memory_costs_only_its_attempt(pull: Decode, made: Manifest) -> None:
    remote = pull.remote()
    keep(remote, made)
    pull.want(wanted(1, made))
    pull.deliver()
    assert (pull.over, pull.failed, pull.moved) == ([1], {1: FailureCause.RANGE}, [])
    assert pull.transport.posted == [] and pull.transport.connection("remote-0")


def test_a_pull_without_a_manifest_is_refused(pull: Decode) -> None:
    pull.want(wanted(1, None))
    assert (pull.over, pull.failed) == ([1], {1: FailureCause.NO_MANIFEST})


@pytest.mark.parametrize("where", ["routes", "token_buffers"])
def test_a_defect_while_it_is_read_costs_its_attempt(pull: Decode, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in flight then, so it is over."""

    def fail(*_: object, **__: object) -> None:
        raise IndexError("of ours")

    monkeypatch.setattr(*((ConnectedPeer, "routes") if where == "routes" else (TokenBuffers, "holds")), fail)
    keep(pull.remote())
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    assert pull.failed == {1: FailureCause.DEFECT} and pull.said[1] == "IndexError: of ours"
    assert pull.over == [1]


def test_an_offer_that_another_attempt_uses_is_not_released(pull: Decode) -> None:
    """A router has sent the same parameters again, and the first request was aborted."""
    remote = pull.remote()
    keep(remote)
    for number in (1, 2):
        pull.want(wanted(number, MANIFEST))
    pull.turn()
    pull.receiver.release(UnneededOffer(wanted(1, MANIFEST).prefill, "p-1", "", DIGEST, 1))
    pull.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "the request has ended"))
    pull.network.deliver(pull.in_flight[0])
    pull.clock.advance(1.0)
    pull.turn()
    assert pull.over == [1] and remote.heard() == []
    # The same, where the attempt was over before it was given up.
    pull.receiver.release(UnneededOffer(wanted(1, MANIFEST).prefill, "p-1", "", DIGEST, 1))
    pull.turn()
    assert remote.heard() == []
    pull.deliver()
    assert pull.over == [1, 2] and pull.failed == {1: FailureCause.STOPPED}
    assert remote.heard() == [Release("p-1", "", DIGEST, 0, 1)] and len(pull.moved) == 1


# --------------------------------------------------------------------------------------------------------------- WRITE


def registered(push: Decode, one: FetchSpec, **more: Any) -> Remote:
    remote = push.remote(**more)
    push.want(one)
    push.deliver()
    return remote


@pytest.mark.parametrize(
    "said",
    [
        [Written(1, 0, 3), Written(1, 0, 2, ALL_WRITTEN)],
        [Written(1, 0, 2, ALL_WRITTEN), Written(1, 0, 3)],
        [Written(1, 0, 2, ALL_WRITTEN), Written(1, 0, 1, ALL_WRITTEN)],
        [Written(1, 0, 1, ALL_WRITTEN), Written(1, 0, 2, ALL_WRITTEN)],
    ],
    ids=["behind the last", "beyond the last", "two last ones", "two, growing"],
)
def test_wrong_numbers_never_make_a_request_received(push: Decode, said: list[Written]) -> None:
    """The attempt fails, but its blocks stay held until prefill says that it has stopped."""
    remote = registered(push, wanted(1, None))
    remote.heard()
    for message in said:
        remote.say("local", message)
    push.deliver()
    assert push.failed == {1: FailureCause.PROTOCOL} and not push.over
    assert remote.heard() == [Withdrawal(1, push.side.own)]  # type: ignore[arg-type]
    remote.say("local", Stopped(1, 0, 255, "for a cause that is not known here", False))
    push.deliver()
    assert push.over == [1] and push.is_clean()


def test_a_contributor_that_cannot_be_told_over_two_connections_fails_the_request(push: Decode) -> None:
    """It was not told of blocks, so it is neither waited for nor probed."""
    remote = push.remote()
    push.peers.probe(remote.address)
    push.turn()

    def refuse(peer: str, notification: bytes) -> None:
        raise TransportError("no way")

    push.transport.send = refuse  # type: ignore[method-assign]
    push.want(wanted(1, None))
    assert not push.over and len(push.asking.asked) == 2
    push.turn()
    assert (push.over, push.failed) == ([1], {1: FailureCause.LOST})
    push.turn()
    assert push.is_clean()
    asked = len(push.asking.asked)
    for _ in range(3):
        push.clock.advance(REPEAT_SECONDS)
        push.receiver.turn()
    assert len(push.asking.asked) == asked


# ----------------------------------------------------------------------------------------------------------- dead peers


THERE, HERE = Process("there", "", 2, 2), Process("here", "", 3, 3)


def pass_time(push: Decode, seconds: float) -> None:
    """Advances the clock in slices, and runs everything that is due after each."""
    until = push.clock.now_seconds() + seconds
    while push.clock.now_seconds() < until:
        push.clock.advance(min(1.0, until - push.clock.now_seconds()))
        push.receiver.turn()
        push.gates.turn()
        push.deliver()


def registered_with(push: Decode, engine_id: str, attempt: int) -> Remote:
    """Registers an attempt with an engine at a port of its own."""
    port = 6000 + attempt
    one = wanted(attempt, None, engine_id=engine_id)
    one = msgspec.structs.replace(one, prefill=RemotePrefill(engine_id, "10.0.0.2", port, 1))
    return registered(push, one, name=engine_id, address=address(engine_id, port=port), process=THERE)


def gate_of(remote: Remote) -> bytes:
    (said,) = remote.heard()
    assert isinstance(said, Registration)
    return said.gate


def test_what_a_process_of_this_host_has_left_is_taken_in_before_it_is_over(push: Decode) -> None:
    """If this process was suspended meanwhile, NIXL's thread was, too: DEAD_SECONDS begin when it goes on."""
    push.host.living.add(HERE)
    registered(push, wanted(1, None), process=HERE)
    push.host.living.remove(HERE)
    pass_time(push, LOOK_SECONDS)
    assert push.failed == {1: FailureCause.LOST}
    pass_time(push, DEAD_SECONDS / 2)
    assert push.over == []
    push.clock.advance(100.0)
    push.receiver.turn()
    assert push.over == []
    pass_time(push, DEAD_SECONDS + 0.1)
    assert push.over == [1]


def test_a_process_that_the_handshake_could_not_look_at_is_looked_at_again(push: Decode) -> None:
    """For lack of file descriptors, perhaps. Else its death would never be noticed, and its blocks held for ever."""
    registered(push, wanted(1, None), process=HERE)
    push.host.living.add(HERE)
    push.want(wanted(2, None))
    push.deliver()
    push.host.living.remove(HERE)
    pass_time(push, LOOK_SECONDS + DEAD_SECONDS + 0.1)
    assert push.failed[2] is FailureCause.LOST and 2 in push.over


def test_others_are_written_through_the_gate_that_is_to_be_closed_until_they_are_done(push: Decode) -> None:
    """Attempts on the gate that is to be closed may end first; those that take longer than DRAIN_SECONDS fail."""
    remote = registered(push, wanted(1, None), process=THERE)
    other, slow = registered_with(push, "other", 2), registered_with(push, "slow", 3)
    push.network.vanish(remote.transport.name)
    push.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    pass_time(push, UNHEARD_SECONDS + REPEAT_SECONDS)
    assert push.over == [] and num_open(push.gates) == 2
    later = registered_with(push, "later", 4)
    assert [gate_of(one) for one in (other, slow, later)] == [b"local#1", b"local#1", b"local#2"]
    other.say("local#1", Written(2, 0, 0, ALL_WRITTEN))
    pass_time(push, 1)
    assert push.over == [2] and push.failed == {1: FailureCause.DEADLINE}
    pass_time(push, DRAIN_SECONDS)
    assert push.over == [2, 1, 3] and push.failed == {1: FailureCause.DEADLINE, 3: FailureCause.LOST}
    assert num_open(push.gates) == 1
    later.say("local#2", Written(4, 0, 0, ALL_WRITTEN))
    pass_time(push, 1)
    assert push.over == [2, 1, 3, 4] and push.is_clean()


@pytest.mark.parametrize("what", ["opened", "closed"])
def test_a_gate_that_cannot_be_opened_or_closed_keeps_what_may_be_written(
    what: str, push: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    remote = registered(push, wanted(1, None), process=THERE)
    push.network.vanish(remote.transport.name)
    first = push.network.gates["local#1"]
    if what == "opened":
        push.awaiting_checksum.fails = 10**6
    else:
        first.is_held = True
    push.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    pass_time(push, UNHEARD_SECONDS + 5 * AGAIN_SECONDS)
    assert push.over == [] and "stay in quarantine; trying again" in caplog.text
    push.awaiting_checksum.fails, first.is_held = 0, False
    pass_time(push, 2 * AGAIN_SECONDS)
    assert push.over == [1] and push.is_clean() and num_open(push.gates) == 1


# -------------------------------------------------------------------------------------------------------------- leases


LEASE = 30.0
ENGINE = RemotePrefill("p", "h", 1)


def test_a_turn_renews_so_many_and_the_next_one_the_others() -> None:
    renewals = Renewals(ManualClock(), LEASE)
    for number in range(3 * MOST_DUE):
        renewals.want(LeaseRenewal(DecodeRequestId(f"d{number}"), ENGINE, f"p{number}", LEASE))
    found = [name for _ in range(4) for names in renewals.take_due().values() for name in names]
    assert sorted(found) == sorted(f"p{number}" for number in range(3 * MOST_DUE))


@pytest.mark.parametrize(("own_seconds", "expected"), [(LEASE, 10), (0.75, 80)])
def test_a_client_s_parameters_make_no_more_heartbeats_than_one_a_second(own_seconds: float, expected: int) -> None:
    """A shorter lease of this engine's own does."""
    clock = ManualClock()
    renewals = Renewals(clock, own_seconds)
    renewals.want(LeaseRenewal(DecodeRequestId("d"), ENGINE, "p", 1e-6))
    num_sent = 0
    for _ in range(1280):
        num_sent += len(renewals.take_due())
        clock.advance(1 / 128)
    assert num_sent == expected


def test_no_heartbeats_pile_up_while_a_handshake_is_under_way(pull: Decode) -> None:
    """A client may name ranks that never answer."""
    pull.receiver.renewals.want(LeaseRenewal(DecodeRequestId("d"), RemotePrefill("p", "h", 5600, 8), "p-1", LEASE))
    for _ in range(10):
        pull.receiver.send_heartbeats()
        pull.turn()
        pull.clock.advance(LEASE / 6)
    links: Any = links_of(pull.peers)
    assert len(pull.asking.asked) == 8 and [len(one.waiting) for one in links.values()] == [1] * 8


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "end", "advance"]), st.integers(0, 3), st.integers(0, 2)), max_size=60)
)
def test_what_is_wanted_is_never_without_a_heartbeat_for_longer_than_an_interval(
    events: list[tuple[str, int, int]],
) -> None:
    clock = ManualClock()
    renewals = Renewals(clock, LEASE)
    leases: dict[int, int] = {}
    beaten: dict[int, float] = {}
    for event, request, lease in events:
        name = DecodeRequestId(str(request))
        if event == "begin":
            leases[request] = lease
            renewals.want(LeaseRenewal(name, ENGINE, str(lease), LEASE))
        elif event == "end":
            renewals.want(LeaseRenewal(name))
            leases.pop(request, None)
        elif event == "advance":
            clock.advance(1.0)
        for found in renewals.take_due().get(ENGINE, []):
            assert int(found) in leases.values()
            beaten[int(found)] = clock.now_seconds()
        for one in leases.values():
            assert clock.now_seconds() - beaten[one] < LEASE / 6
