# SPDX-License-Identifier: Apache-2.0
"""worker/decode/{receiver,attempt,write_part}.py: decode's attempts, from their blocks to the last byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.internals import forbid_scans, leftovers, num_open, writers_of
from support.worker_fakes import (
    BLOCK_SIZE,
    DIGEST,
    OTHER_DIGEST,
    OTHER_START,
    TOKENS,
    HeldCopies,
    Local,
    Memory,
    Remote,
    address,
    manifest,
    staging_over,
    wanted,
)

from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Process
from kvcached_nixl.wire.manifest import BlockRange, Manifest
from kvcached_nixl.wire.messages import (
    Registration,
    Release,
    StagingRequest,
    Stopped,
    Withdrawal,
    Written,
    decode,
)
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import FetchSpec, UnneededOffer
from kvcached_nixl.wire.timeline import Reported
from kvcached_nixl.worker.decode.fencing import (
    AGAIN_SECONDS,
    DEAD_SECONDS,
    DRAIN_SECONDS,
    LOOK_SECONDS,
    UNHEARD_SECONDS,
)
from kvcached_nixl.worker.decode.receiver import REPEAT_SECONDS, Receiver
from kvcached_nixl.worker.transfer.slab import Slots
from kvcached_nixl.worker.transfer.staging import Staging
from kvcached_nixl.worker.transfer.transfer_queue import TransferTally

MANIFEST = manifest(17, 13, 19)
ALL_WRITTEN = manifest()


class Decode(Local):
    """`Receiver`, and what it has reported."""

    def __init__(self, mode: TransferMode = TransferMode.PULL, **more: Any) -> None:
        super().__init__(**more)
        self.failed: dict[int, FailureCause] = {}
        self.said: dict[int, str] = {}
        self.over: list[int] = []
        self.moved: list[TransferTally] = []
        self.timed: list[Reported] = []
        self.known: list[int] = []
        outcomes: Any = SimpleNamespace(
            failed=self._failed,
            finished=self._finished,
            moved=self.moved.append,
            marked=lambda _, number: self.known.append(number),
            timed=self.timed.append,
        )
        self.side.outcomes, self.side.settings = outcomes, Settings(mode)
        self.receiver = Receiver(self.side, self.gates)
        self.listener.role, self.listener.may_write = self.receiver, self.receiver.may_write

    def _failed(self, wanted: FetchSpec, cause: HandOverFailed) -> None:
        assert wanted.attempt not in self.failed, "reported twice"
        self.failed[wanted.attempt], self.said[wanted.attempt] = cause.cause, str(cause)

    def _finished(self, wanted: FetchSpec) -> None:
        assert wanted.attempt not in self.over, "over twice"
        self.over.append(wanted.attempt)

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
        left = leftovers(self.receiver, writers_of(self.receiver))
        return not (left or self.side.waiting_for_buffer or self.unreleased() or self.transfer_queue.is_busy)


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
    """The attempt fails with RANGE, nothing is posted, and the connection to prefill is kept."""
    remote = pull.remote()
    keep(remote, made)
    pull.want(wanted(1, made))
    pull.deliver()
    assert (pull.over, pull.failed, pull.moved) == ([1], {1: FailureCause.RANGE}, [])
    assert pull.transport.posted == [] and pull.peers.connection("remote-0")


def test_a_pull_without_a_manifest_is_refused(pull: Decode) -> None:
    pull.want(wanted(1, None))
    assert (pull.over, pull.failed) == ([1], {1: FailureCause.NO_MANIFEST})


@pytest.mark.parametrize("cause", [FailureCause.UNREACHABLE, FailureCause.REFUSED])
def test_a_prefill_that_is_not_met_costs_the_attempt(pull: Decode, cause: FailureCause) -> None:
    remote = pull.remote()
    error: Any = ConnectionRefusedError() if cause is FailureCause.UNREACHABLE else ("another tag", b"")
    pull.asking.answers[remote.place] = error
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    assert (pull.over, pull.failed) == ([1], {1: cause})


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
    assert remote.heard() == [Release("p-1", "", DIGEST, 0, 1)]


def test_sizes_that_do_not_divide_fail_the_request_and_nothing_else() -> None:
    decode = Decode(tp_size=2)
    decode.want(wanted(1, MANIFEST, tp_size=3))
    assert (decode.over, decode.failed) == ([1], {1: FailureCause.REFUSED})
    assert "3 and decode's 2 do not divide" in decode.said[1]
    decode.receiver.release(UnneededOffer(RemotePrefill("remote", "10.0.0.2", 5601, 3), "p-1", "", DIGEST))
    assert decode.asking.asked == []


@pytest.mark.parametrize("where", ["routes", "token_buffers"])
def test_a_defect_while_it_is_read_costs_its_attempt(pull: Decode, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in flight then, so it is over."""

    def fail(*_: object) -> None:
        raise IndexError("of ours")

    monkeypatch.setattr(getattr(pull.side, where), "ranges" if where == "routes" else "holds", fail)
    keep(pull.remote())
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    assert pull.failed == {1: FailureCause.DEFECT} and pull.said[1] == "IndexError: of ours"
    assert pull.over == [1]


def test_more_tokens_than_there_is_room_for_are_read_one_after_the_other() -> None:
    """Attempts that wait for a token buffer get one in turn, also behind an attempt that was aborted."""
    decode = Decode(token_buffers=1)
    remote = decode.remote()
    keep(remote)
    for number in range(1, 7):
        decode.want(wanted(number, MANIFEST))
    decode.turn()
    for one in decode.in_flight:
        decode.network.deliver(one)
    decode.turn()
    assert len(decode.in_flight) == 1 and len(decode.side.waiting_for_buffer) == 5
    for number in (2, 3, 4):
        decode.receiver.fail(number, HandOverFailed(FailureCause.STOPPED, "dead"))
    decode.deliver()
    assert sorted(decode.over) == [1, 2, 3, 4, 5, 6]
    assert sorted(decode.failed) == [2, 3, 4]
    assert decode.is_clean() and decode.side.token_buffers.has_room
    assert len(remote.heard()) == 3


# --------------------------------------------------------------------------------------------------------------- WRITE


def registered(push: Decode, one: FetchSpec, **more: Any) -> Remote:
    remote = push.remote(**more)
    push.want(one)
    push.deliver()
    return remote


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 2, 0, 1), (0, 0, 0, 1, 2)], ids=str)
def test_it_is_there_when_every_write_has_arrived_in_any_order(push: Decode, order: tuple[int, ...]) -> None:
    """Notifications may be late, repeated or reordered: the numbers of the WRITEs decide (vllm#48633)."""
    remote = registered(push, wanted(1, None))
    for place, index in enumerate(order):
        assert not push.over
        remote.say("local", Written(1, 0, index, ALL_WRITTEN if index == 2 else None))
        push.deliver()
        assert bool(push.over) == ({0, 1, 2} <= set(order[: place + 1]))
    assert not push.failed and push.is_clean()
    remote.say("local", Written(1, 0, 0))
    push.deliver()
    assert push.side.dropped == {"unknown attempt": 1}


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (manifest(digest=OTHER_DIGEST), FailureCause.DIGEST),
        (manifest(num_tokens=9), FailureCause.DIGEST),
        (manifest(num_tokens=12), FailureCause.DIGEST),
        (manifest(incarnation=OTHER_START), FailureCause.RESTARTED),
        (manifest(request_id="p-2"), FailureCause.PROTOCOL),
    ],
    ids=["digest", "shorter", "longer", "start", "request"],
)
def test_what_was_written_is_checked(push: Decode, made: Manifest, cause: FailureCause) -> None:
    """The manifest in prefill's last notification is compared with what decode wants."""
    remote = registered(push, wanted(1, MANIFEST))
    remote.say("local", Written(1, 0, 1, made))
    push.deliver()
    assert push.failed == {1: cause} and not push.over, "another WRITE of it may be in flight"
    remote.say("local", Written(1, 0, 0))
    push.deliver()
    assert push.over == [1]


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
    remote.say("local", Stopped(1, 0, FailureCause.STOPPED, "withdrawn"))
    push.deliver()
    assert push.over == [1] and push.is_clean()


def test_a_cause_that_nobody_knows_is_one_all_the_same(push: Decode) -> None:
    remote = registered(push, wanted(1, None))
    remote.say("local", Stopped(1, 0, 4711, "of a later protocol"))
    push.deliver()
    assert push.failed == {1: FailureCause.STOPPED}


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


def test_one_failure_asks_the_others_to_stop_and_waits_for_them() -> None:
    push = Decode(TransferMode.PUSH, memory=Memory(num_heads=2))
    remotes = [
        push.remote(address=address(tp_size=2, tp_rank=rank), memory=Memory(num_heads=1, first_head=rank))
        for rank in range(2)
    ]
    push.want(wanted(1, None, tp_size=2))
    push.deliver()
    assert [len(remote.heard()) for remote in remotes] == [1, 1]
    remotes[0].say("local", Stopped(1, 0, FailureCause.LOST, "no peer"))
    push.deliver()
    assert (push.over, push.failed) == ([], {1: FailureCause.LOST})
    assert [remote.heard() for remote in remotes] == [[], [Withdrawal(1, push.side.own)]]  # type: ignore[arg-type]
    remotes[0].say("local", Stopped(1, 0, FailureCause.LOST, "again"))
    push.deliver()
    assert push.side.dropped == {"after the end": 1}
    remotes[1].say("local", Stopped(1, 1, FailureCause.STOPPED, "withdrawn"))
    push.deliver()
    assert push.over == [1] and push.is_clean()


# --------------------------------------------------------------------------------------------------------------- staged


def staged() -> tuple[Decode, HeldCopies, Staging]:
    """Decode that stages: KV arrives in 16 of 24 slots, which are all its memory, and is copied into blocks."""
    push, copies = Decode(TransferMode.PUSH), HeldCopies()
    push.side.staging = staging_over(Slots(24, 8), copies, (BLOCK_SIZE,))
    return push, copies, push.side.staging


def test_slots_are_granted_to_nobody_but_who_was_told_of_the_attempt() -> None:
    """Another agent of prefill may answer at its address meanwhile."""
    push, _, _ = staged()
    remote = registered(push, wanted(1, None))
    push.listener.role = None
    another = Remote(remote.address, push.network.agent("another agent"))
    push.asking.answers[remote.place] = another.answer()
    push.peers.lost("remote-0")
    push.deliver()
    push.receiver.handle("remote-0", StagingRequest(1, 0, 0, TOKENS))
    push.deliver()
    assert another.heard() == [] and push.peers.dropped == {"meant for another agent": 1}


# ----------------------------------------------------------------------------------------------------------- dead peers


THERE, HERE = Process("there", "", 2, 2), Process("here", "", 3, 3)


def pass_time(push: Decode, seconds: float, *, most: float = 1.0) -> None:
    """Advances the clock in slices, and runs everything that is due after each."""
    until = push.clock.now_seconds() + seconds
    while push.clock.now_seconds() < until:
        push.clock.advance(min(most, until - push.clock.now_seconds()))
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


SIDE_CHANNELS: dict[str, Exception] = {
    "times out for ever": TimeoutError("no connection"),
    "accepts everything": TimeoutError("does not answer"),
    "no route": OSError("no route to host"),
    "refuses": ConnectionRefusedError(),
}


@pytest.mark.parametrize("how", SIDE_CHANNELS)
def test_a_writer_of_another_host_that_is_not_heard_of_is_fenced(how: str, push: Decode) -> None:
    """However its side channel fails, that is no sign that it has ended: its gate is closed after UNHEARD_SECONDS."""
    remote = registered(push, wanted(1, None), process=THERE)
    push.network.vanish(remote.transport.name)
    push.asking.answers[remote.place] = SIDE_CHANNELS[how]
    push.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    pass_time(push, UNHEARD_SECONDS - 1)
    assert not push.over and num_open(push.gates) == 1, "it may still write"
    pass_time(push, 2 * REPEAT_SECONDS)
    assert push.over == [1] and push.failed == {1: FailureCause.DEADLINE}
    assert list(push.network.gates) == ["local#2"] and "local#1" not in push.network.agents
    assert num_open(push.gates) == 1 and push.is_clean()


def test_a_side_channel_that_refuses_and_is_then_unreachable_is_no_death(push: Decode) -> None:
    """The request fails at once, but its blocks are held until the writer is fenced."""
    remote = registered(push, wanted(1, None), process=THERE)
    push.asking.answers[remote.place] = ConnectionRefusedError()
    pass_time(push, LOOK_SECONDS + 1)
    assert (push.over, push.failed) == ([], {1: FailureCause.LOST}), "the client hears at once"
    # Over NIXL it was told to stop.
    assert Withdrawal(1, push.side.own) in remote.heard()  # type: ignore[arg-type]
    push.asking.answers[remote.place] = TimeoutError("unreachable")
    pass_time(push, UNHEARD_SECONDS - 5)
    assert push.over == []
    pass_time(push, 3 * REPEAT_SECONDS)
    assert push.over == [1] and push.is_clean()


def test_what_a_process_of_this_host_has_left_is_taken_in_before_it_is_over(push: Decode) -> None:
    """If this process was suspended meanwhile, NIXL's thread was, too: DEAD_SECONDS begin when it goes on."""
    push.host.living.add(HERE)
    registered(push, wanted(1, None), process=HERE)
    push.host.living.remove(HERE)
    pass_time(push, LOOK_SECONDS)
    assert push.failed == {1: FailureCause.LOST}
    push.clock.advance(100.0)
    push.receiver.turn()
    assert push.over == []
    pass_time(push, DEAD_SECONDS + 0.1)
    assert push.over == [1]


def test_who_is_not_heard_of_costs_no_polling(push: Decode) -> None:
    """The transfer thread polls often only while a notification may arrive at any moment."""
    push.host.local.add(HERE)
    push.host.living.add(HERE)
    registered(push, wanted(1, None), process=HERE)
    assert push.receiver.is_awaiting
    push.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    assert push.receiver.is_awaiting, "it is about to say that it has stopped"
    pass_time(push, REPEAT_SECONDS)
    assert not push.receiver.is_awaiting and not push.over
    registered(push, wanted(2, None))
    assert push.receiver.is_awaiting


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
    """The blocks stay in quarantine, and opening or closing is tried again."""
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


def test_a_turn_costs_what_is_due() -> None:
    """A turn does not visit the attempts that only wait."""
    push = Decode(TransferMode.PUSH)
    push.remote()
    for number in range(1, 1001):
        push.want(wanted(number, None))
    push.deliver()
    forbid_scans(push.receiver, writers_of(push.receiver))
    for _ in range(3):
        push.receiver.turn()
        push.clock.advance(REPEAT_SECONDS)
