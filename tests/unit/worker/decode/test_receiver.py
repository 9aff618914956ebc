# SPDX-License-Identifier: Apache-2.0
"""worker/decode/{receiver,attempt,read_part,write_part}.py: decode's attempts, from their blocks to the last byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.internals import forbid_scans, leftovers, writers_of
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
    wanted,
)

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.transport.base import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Process
from kvcached_nixl.wire.manifest import BlockRange, Manifest
from kvcached_nixl.wire.messages import (
    KernelBlockRange,
    Registration,
    Release,
    StagingGrant,
    StagingRequest,
    Stopped,
    Withdrawal,
    Written,
    decode,
)
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import FetchSpec, UnneededOffer
from kvcached_nixl.wire.timeline import Reported
from kvcached_nixl.worker.decode.active_writers import DEAD_SECONDS, LOOK_SECONDS, UNHEARD_SECONDS
from kvcached_nixl.worker.decode.receiver import REPEAT_SECONDS, Receiver
from kvcached_nixl.worker.decode.write_gates import AGAIN_SECONDS, DRAIN_SECONDS
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.staging.slots import Slots, Use
from kvcached_nixl.worker.staging.staging import Staging
from kvcached_nixl.worker.transfer.checksums import ChecksumRequest
from kvcached_nixl.worker.transfer.peers import HANDSHAKE_TRIES
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
        outcomes = SimpleNamespace(
            failed=self._failed,
            finished=self._finished,
            moved=self.moved.append,
            known=self.known.append,
            timed=self.timed.append,
        )
        self.receiver = Receiver(self.side, self.clock, mode, self.gates, outcomes)  # type: ignore[arg-type]
        self.listener.role, self.listener.may_write = self.receiver, self.receiver.may_be_written_by

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


def is_read(
    decode: Decode, remote: Remote, blocks: tuple[int, ...] = (7, 3, 9), theirs: tuple[int, ...] = (17, 13, 19)
) -> bool:
    return all(
        np.array_equal(decode.memory.cells[:, here], remote.memory.cells[:, there])
        for here, there in zip(blocks, theirs, strict=True)
    )


# ---------------------------------------------------------------------------------------------------------------- READ


def test_blocks_are_read_and_then_the_token_and_prefill_is_told(pull: Decode) -> None:
    remote = pull.remote()
    keep(remote)
    pull.want(wanted(1, MANIFEST))
    pull.turn()
    blocks = pull.in_flight
    assert [one.operation for one in blocks] == ["READ"]
    assert len(pull.transport.posted) == 1, "the word is read when the blocks have been, and not before"
    pull.network.deliver(blocks[0])
    pull.turn()
    assert len(pull.transport.posted) == 2 and not pull.over
    pull.deliver()
    assert (pull.over, pull.failed) == ([1], {})
    assert is_read(pull, remote)
    assert remote.heard() == [Release("p-1", "", DIGEST, 0, 1)]
    assert remote.readers == [0], "prefill was told, so that it does not take the offer back meanwhile"
    untouched = [block for block in range(32) if block not in (7, 3, 9)]
    assert not pull.memory.cells[:, untouched].any()
    assert pull.is_clean() and not pull.token_rows.any()


def test_nothing_is_read_before_the_device_has_ended_what_it_was_given(pull: Decode) -> None:
    """Rule R8: a step under way may still write these blocks."""
    remote = pull.remote()
    keep(remote)
    pull.receiver.fetch(wanted(1, MANIFEST))
    pull.deliver()
    assert pull.transport.posted == [] and pull.asking.asked == []
    pull.receiver.begin(1)
    pull.deliver()
    assert pull.over == [1]


@pytest.mark.parametrize("kept", [None, "another", "of before"])
def test_without_the_token_nothing_that_was_read_is_used(pull: Decode, kept: str | None) -> None:
    """Rule R3: prefill has never made this manifest, or does not keep its blocks any more."""
    remote = pull.remote()
    if kept == "another":
        keep(remote, msgspec.structs.replace(MANIFEST, groups=(BlockRange(0, (17, 13, 18)),)))
    elif kept == "of before":
        keep(remote)
        remote.token_table[:] = 0
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    assert (pull.over, pull.failed) == ([1], {1: FailureCause.LEASE})
    assert remote.heard() == []
    assert pull.is_clean()


def test_a_token_that_goes_while_blocks_are_read_is_seen(pull: Decode) -> None:
    remote = pull.remote()
    keep(remote)
    pull.want(wanted(1, MANIFEST))
    pull.turn()
    remote.token_table[:] = 0
    pull.deliver()
    assert pull.failed == {1: FailureCause.LEASE}


@pytest.mark.parametrize("word", [False, True], ids=["of the blocks", "of the word"])
def test_a_read_that_fails_costs_its_attempt_and_the_peer_is_met_again(pull: Decode, word: bool) -> None:
    remote = pull.remote()
    keep(remote)
    pull.want(wanted(1, MANIFEST))
    pull.turn()
    if word:
        pull.network.deliver(pull.in_flight[0])
        pull.turn()
    pull.network.fail(pull.in_flight[0])
    pull.deliver()
    assert (pull.over, pull.failed) == ([1], {1: FailureCause.LOST})
    assert pull.peers.is_known("remote-0"), "at once"
    pull.want(wanted(2, MANIFEST))
    pull.deliver()
    assert pull.over == [1, 2] and 2 not in pull.failed
    assert pull.is_clean()


@pytest.mark.parametrize("word", [False, True], ids=["while blocks are read", "while the word is"])
def test_an_aborted_read_is_over_when_nothing_is_in_flight(pull: Decode, word: bool) -> None:
    """Rule R2 (nixl#2067). Prefill is sent nothing: the lease ends, or another attempt fetches the request."""
    remote = pull.remote()
    keep(remote)
    pull.want(wanted(1, MANIFEST))
    pull.turn()
    if word:
        pull.network.deliver(pull.in_flight[0])
        pull.turn()
    pull.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "dead"))
    pull.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "again"))
    assert pull.failed == {1: FailureCause.STOPPED}
    pull.clock.advance(1)
    pull.turn()
    assert pull.over == []
    pull.network.deliver(pull.in_flight[0])
    pull.clock.advance(1)
    pull.turn()
    assert pull.over == [1]
    assert remote.heard() == []
    assert pull.is_clean()


def test_a_read_that_never_ends_is_failed_and_not_over(pull: Decode) -> None:
    """The attempt fails, its blocks stay held, and other attempts go on."""
    pull.network.vanish("remote-0")
    keep(pull.remote())
    pull.want(wanted(1, MANIFEST))
    pull.turn()
    pull.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    for _ in range(20):
        pull.clock.advance(10)
        pull.turn()
        pull.receiver.turn()
    assert (pull.over, pull.failed) == ([], {1: FailureCause.DEADLINE})
    other = pull.remote("other", address=address("other", port=5602))
    keep(other)
    one = wanted(2, MANIFEST)
    one.prefill = RemotePrefill("other", "10.0.0.2", 5602, 1)
    pull.want(one)
    pull.deliver()
    assert pull.over == [2] and 2 not in pull.failed


def test_aborted_before_anything_began_it_is_over_at_once(pull: Decode) -> None:
    pull.receiver.fetch(wanted(1, MANIFEST))
    pull.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "dead"))
    assert pull.over == [1]
    pull.receiver.begin(1)
    pull.receiver.begin(2)
    pull.deliver()
    assert pull.transport.posted == [] and pull.is_clean()


def test_aborted_while_prefill_is_met_it_is_over_at_once(pull: Decode) -> None:
    remote = pull.remote(is_answering=False)
    pull.want(wanted(1, MANIFEST))
    pull.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "dead"))
    assert pull.over == [1]
    pull.asking.open.pop().set_result(remote.answer())
    pull.deliver()
    assert pull.transport.posted == []


def test_parameters_of_an_earlier_start_are_refused_before_a_byte_moves(pull: Decode) -> None:
    keep(pull.remote(incarnation=OTHER_START))
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    assert (pull.over, pull.failed) == ([1], {1: FailureCause.RESTARTED})
    assert pull.transport.posted == []


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
    assert pull.transport.posted == [] and pull.peers.is_known("remote-0")


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


def test_blocks_of_the_prefix_cache_are_not_read(pull: Decode) -> None:
    remote = pull.remote()
    keep(remote)
    pull.want(wanted(1, MANIFEST, blocks=(3, 9), first_token=4))
    pull.deliver()
    assert pull.over == [1] and not pull.failed and len(pull.moved) == 1
    assert is_read(pull, remote, (3, 9), (13, 19))
    assert not pull.memory.cells[:, 7].any()


def test_sizes_of_blocks_may_differ() -> None:
    """Prefill has blocks of 8 tokens, decode's kernel has blocks of 2: each token arrives at its position."""
    decode = Decode(kernel_blocks_per_block=2, memory=Memory(block_size=2))
    remote = decode.remote(memory=Memory(block_size=8))
    made = manifest(5, 6, block_size=8)
    keep(remote, made)
    decode.want(wanted(1, made, blocks=(7, 3, 9)))
    decode.deliver()
    assert decode.over == [1] and not decode.failed, decode.said
    here = decode.memory.cells[:, [14, 15, 6, 7, 18]].reshape(2, TOKENS)
    there = remote.memory.cells[:, [5, 6]].reshape(2, 16)[:, :TOKENS]
    assert np.array_equal(here, there)


def test_every_rank_that_has_heads_is_read_from() -> None:
    """Prefill at tensor parallel 2, decode at 1: the ownership token of each rank must be there."""
    for missing in (None, 0, 1):
        decode = Decode(memory=Memory(num_heads=2))
        remotes = [
            decode.remote(address=address(tp_size=2, tp_rank=rank), memory=Memory(num_heads=1, first_head=rank))
            for rank in range(2)
        ]
        for rank, remote in enumerate(remotes):
            if rank != missing:
                keep(remote)
            remote.memory.cells[:] = rank + 1
        decode.want(wanted(1, MANIFEST, tp_size=2))
        decode.deliver()
        assert decode.over == [1]
        if missing is None:
            assert not decode.failed
            assert decode.memory.cells[:, [7, 3, 9], :2, 0].min() == 1
            assert decode.memory.cells[:, [7, 3, 9], :2, 1].max() == decode.memory.cells[:, 7, 0, 1].min() == 2
            assert [len(remote.heard()) for remote in remotes] == [1, 1]
        else:
            assert decode.failed == {1: FailureCause.LEASE}
        assert decode.is_clean()


def test_one_rank_that_fails_stops_the_others_and_waits_for_them() -> None:
    decode = Decode(memory=Memory(num_heads=2))
    remotes = [
        decode.remote(address=address(tp_size=2, tp_rank=rank), memory=Memory(num_heads=1, first_head=rank))
        for rank in range(2)
    ]
    for remote in remotes:
        keep(remote)
    decode.want(wanted(1, MANIFEST, tp_size=2))
    decode.turn()
    first, second = decode.in_flight
    decode.network.fail(first)
    decode.turn()
    assert (decode.over, decode.failed) == ([], {1: FailureCause.LOST})
    decode.network.deliver(second)
    decode.clock.advance(1)
    decode.turn()
    assert decode.over == [1]


def test_a_latent_is_read_from_one_rank_and_the_others_are_told() -> None:
    decode = Decode(kv_shares=1)
    remotes = [decode.remote(address=address(tp_size=2, tp_rank=rank)) for rank in range(2)]
    keep(remotes[0])
    decode.receiver.fetch(wanted(1, MANIFEST, tp_size=2))
    decode.deliver()
    assert [remote.heard() for remote in remotes] == [[], [Release("p-1", "transfer:t", DIGEST, 0, 1)]]
    decode.receiver.begin(1)
    decode.deliver()
    assert decode.over == [1] and not decode.failed
    assert [len(remote.heard()) for remote in remotes] == [1, 0]


def test_ranks_whose_latent_is_not_needed_are_told_by_name_where_prefills_id_is_not_known() -> None:
    push = Decode(TransferMode.PUSH, kv_shares=1)
    remotes = [push.remote(address=address(tp_size=2, tp_rank=rank)) for rank in range(2)]
    push.want(wanted(1, None, tp_size=2))
    push.deliver()
    (registered,), (released,) = (remote.heard() for remote in remotes)
    assert isinstance(registered, Registration) and released == Release("", "transfer:t", DIGEST, 0, 1)


def test_blocks_of_a_prefill_that_stages_are_not_read_but_written_through_a_gate(pull: Decode) -> None:
    """Its blocks may be free already, and what is in its slots is known to nobody else."""
    remote = pull.remote()
    pull.asking.answers[remote.place] = remote.answer(is_staged=True)
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    (said,) = remote.heard()
    assert isinstance(said, Registration) and said.gate == b"local#1" and not (said.is_read or said.is_verified)
    assert (said.request_id, said.groups) == ("p-1", (KernelBlockRange(0, (7, 3, 9)),))
    assert pull.transport.posted == [] and not pull.over and pull.receiver.may_be_written_by("remote-0")
    asked = len(pull.asking.asked)
    pull.clock.advance(LOOK_SECONDS)
    pull.receiver.turn()
    assert len(pull.asking.asked) == asked + 1, "it is looked after as any other writer"
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN))
    pull.deliver()
    assert pull.over == [1] and not pull.failed and pull.is_clean()


@pytest.mark.parametrize("word", [False, True], ids=["while blocks are read", "while the word is"])
def test_an_engine_that_is_distrusted_while_it_is_read_is_not_used(pull: Decode, word: bool) -> None:
    """Another hand-over from it has failed its checksum meanwhile; an earlier start of it does not count."""
    remote = pull.remote()
    keep(remote)
    pull.side.distrust(remote.address, OTHER_START)
    pull.want(wanted(1, MANIFEST))
    pull.turn()
    if word:
        pull.network.deliver(pull.in_flight[0])
        pull.turn()
    pull.side.distrust(remote.address, remote.incarnation)
    pull.deliver()
    assert (pull.over, pull.failed) == ([1], {1: FailureCause.CHECKSUM}) and remote.heard() == []
    posted = len(pull.transport.posted)
    pull.want(wanted(2, MANIFEST))
    pull.deliver()
    assert pull.over == [1, 2] and pull.failed[2] is FailureCause.CHECKSUM and len(pull.transport.posted) == posted


def test_an_offer_is_released_when_nothing_of_its_attempt_is_in_flight(pull: Decode) -> None:
    """Prefill would free blocks that are being read, and kvcached might unmap them."""
    remote = pull.remote()
    keep(remote)
    pull.want(wanted(1, MANIFEST))
    pull.turn()
    pull.receiver.release(UnneededOffer(wanted(1, MANIFEST).prefill, "p-1", "", DIGEST, 1))
    pull.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "the request has ended"))
    pull.turn()
    assert pull.in_flight and remote.heard() == []
    pull.deliver()
    # Transfers that were given up are polled from time to time.
    pull.clock.advance(1.0)
    pull.deliver()
    assert pull.over == [1] and remote.heard() == [Release("p-1", "", DIGEST, 0, 1)]
    pull.receiver.release(UnneededOffer(wanted(1, MANIFEST).prefill, "p-1", "", DIGEST, 1))
    pull.deliver()
    assert remote.heard() == [Release("p-1", "", DIGEST, 0, 1)], "at once, as nothing is known of the attempt"
    assert pull.is_clean()


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


def test_blocks_are_registered_with_everything_that_prefill_checks(push: Decode) -> None:
    remote = registered(push, wanted(1, None))
    (said,) = remote.heard()
    assert said == msgspec.structs.replace(
        said, attempt=1, decode_request_id="d1", decode=push.side.own, name="transfer:t", request_id="",
        digest=DIGEST, first_token=0, end_token=TOKENS, block_sizes=(BLOCK_SIZE,),
        groups=(KernelBlockRange(0, (7, 3, 9)),),
    )  # fmt: skip
    assert push.asking.asked == [remote.place]
    assert not push.over and len(push.receiver) == 1
    assert len(push.gates.begin().parts) == 1
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN))
    push.deliver()
    assert push.over == [1] and not push.gates.begin().parts, "a gate remembers nobody who has left"


def test_with_a_manifest_prefills_request_is_named() -> None:
    decode = Decode(TransferMode.PUSH, kernel_blocks_per_block=2, memory=Memory(block_size=2))
    remote = registered(decode, wanted(1, MANIFEST))
    (said,) = remote.heard()
    assert isinstance(said, Registration) and (said.request_id, said.block_sizes) == ("p-1", (2,))
    assert said.groups == (KernelBlockRange(0, (14, 15, 6, 7, 18, 19)),) and not said.is_staged


def test_nothing_is_registered_before_the_device_has_ended_what_it_was_given(push: Decode) -> None:
    """A step under way could overwrite what prefill has written."""
    remote = push.remote()
    push.receiver.fetch(wanted(1, None))
    push.deliver()
    assert remote.heard() == [] and push.asking.asked == []


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
    assert push.receiver.dropped == {"unknown attempt": 1}


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


def test_where_both_are_asked_at_once_any_request_of_that_prompt_will_do(push: Decode) -> None:
    remote = registered(push, wanted(1, None))
    remote.say("local", Written(1, 0, 0, manifest(request_id="whatever")))
    push.deliver()
    assert push.over == [1] and not push.failed


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


@pytest.mark.parametrize("cause", [FailureCause.DIGEST, FailureCause.LEASE, FailureCause.DEADLINE])
def test_a_rank_that_has_stopped_says_why(push: Decode, cause: FailureCause) -> None:
    remote = registered(push, wanted(1, None))
    remote.say("local", Stopped(1, 0, cause, "x" * 5000))
    push.deliver()
    assert (push.over, push.failed) == ([1], {1: cause})
    assert "rank 0 of prefill stopped: xxx" in push.said[1] and len(push.said[1]) < 600


def test_a_cause_that_nobody_knows_is_one_all_the_same(push: Decode) -> None:
    remote = registered(push, wanted(1, None))
    remote.say("local", Stopped(1, 0, 4711, "of a later protocol"))
    push.deliver()
    assert push.failed == {1: FailureCause.STOPPED}


def test_an_aborted_request_is_withdrawn_and_waited_for(push: Decode) -> None:
    """The withdrawal is repeated from time to time, because a message may get lost."""
    remote = registered(push, wanted(1, None))
    remote.heard()
    push.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "dead"))
    push.deliver()
    assert remote.heard() == [Withdrawal(1, push.side.own)]  # type: ignore[arg-type]
    assert not push.over
    for _ in range(3):
        push.clock.advance(REPEAT_SECONDS)
        assert push.receiver.turn() == push.clock.now_seconds() + REPEAT_SECONDS
        push.deliver()
        assert remote.heard() == [Withdrawal(1, push.side.own)]  # type: ignore[arg-type]
    remote.say("local", Written(1, 0, 0))
    push.deliver()
    assert not push.over, "more may follow"
    remote.say("local", Stopped(1, 0, FailureCause.STOPPED, "withdrawn"))
    push.deliver()
    assert push.over == [1]
    assert push.receiver.turn() is None and push.is_clean()


def test_what_arrives_whole_although_it_was_withdrawn_is_over(push: Decode) -> None:
    remote = registered(push, wanted(1, None))
    push.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN))
    push.deliver()
    assert push.over == [1] and push.failed == {1: FailureCause.DEADLINE}


def test_aborted_before_it_was_registered_it_is_over_at_once(push: Decode) -> None:
    remote = push.remote(is_answering=False)
    push.want(wanted(1, None))
    push.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "dead"))
    assert push.over == [1]
    push.asking.open.pop().set_result(remote.answer())
    push.deliver()
    assert remote.heard() == [] and push.is_clean()


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


def test_a_contributor_that_was_started_again_since_it_was_met_is_told(push: Decode) -> None:
    remote = push.remote()
    push.peers.probe(remote.address)
    push.turn()
    push.transport.lose("remote-0")
    push.want(wanted(1, None))
    push.deliver()
    assert len(remote.heard()) == 1
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN))
    push.deliver()
    assert push.over == [1] and not push.failed


@pytest.mark.parametrize(
    ("agent", "message", "counted"),
    [
        ("remote-0", Written(9, 0, 0), "unknown attempt"),
        ("remote-0", Stopped(9, 0, 1, ""), "unknown attempt"),
        ("remote-0", Written(1, 1, 0, ALL_WRITTEN), "not a contributor"),
        ("stranger-0", Written(1, 0, 0, ALL_WRITTEN), "not a contributor"),
        ("stranger-0", Stopped(1, 0, 1, ""), "not a contributor"),
    ],
    ids=["attempt", "stopped attempt", "rank", "agent", "agent that stops"],
)
def test_what_does_not_fit_is_dropped_and_counted(push: Decode, agent: str, message: Any, counted: str) -> None:
    registered(push, wanted(1, None))
    push.receiver.handle(agent, message)
    assert push.receiver.dropped == {counted: 1}
    assert not push.over and not push.failed


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
    assert push.receiver.dropped == {"after the end": 1}
    remotes[1].say("local", Stopped(1, 1, FailureCause.STOPPED, "withdrawn"))
    push.deliver()
    assert push.over == [1] and push.is_clean()


# ------------------------------------------------------------------------------------------------------------- verified


def checksum_of_blocks(remote: Remote, verified: Decode) -> str:
    """The checksum of what decode has in the blocks that it wants, as the worker itself computes it."""
    found: list[str] = []
    asked = ChecksumRequest("remote-0", remote.handshake().groups, lambda: True)
    blocks = KernelBlocks([KernelBlock(block) for block in (7, 3, 9)])
    verified.side.checksums.of_sent(asked, ([(blocks, 0)], TOKENS), lambda digest, failed: found.append(digest))
    verified.side.checksums.turn()
    return found[0]


@pytest.mark.parametrize("is_same", [True, False])
def test_what_was_written_is_used_when_its_checksum_is_compared(is_same: bool) -> None:
    """Nothing ends meanwhile: the blocks are being read. An engine whose KV differs is not used again."""
    push = Decode(TransferMode.PUSH, verify_fraction=1.0)
    remote = registered(push, wanted(1, None))
    (said,) = remote.heard()
    assert isinstance(said, Registration) and said.is_verified and not said.is_read
    digest = checksum_of_blocks(remote, push) if is_same else "0" * 32
    push.awaiting_checksum.held = True
    for _ in range(2):
        # A notification may come twice.
        remote.say("local", Written(1, 0, 0, ALL_WRITTEN, TOKENS, digest))
        push.deliver()
        assert push.over == [] and push.failed == {} and len(push.awaiting_checksum.asked) == 1
    push.awaiting_checksum.held = False
    push.deliver()
    assert push.over == [1] and push.failed == ({} if is_same else {1: FailureCause.CHECKSUM})
    push.want(wanted(2, None))
    push.deliver()
    assert push.over == ([1] if is_same else [1, 2]) and push.failed.get(2) is (
        None if is_same else FailureCause.CHECKSUM
    )


def test_an_engine_that_is_distrusted_while_a_checksum_is_compared_is_not_used() -> None:
    """Although this checksum is right, and whatever is repeated meanwhile."""
    push = Decode(TransferMode.PUSH, verify_fraction=1.0)
    remote = registered(push, wanted(1, None))
    digest = checksum_of_blocks(remote, push)
    push.awaiting_checksum.held = True
    for _ in range(2):
        remote.say("local", Written(1, 0, 0, ALL_WRITTEN, TOKENS, digest))
        push.deliver()
    push.side.distrust(remote.address, remote.incarnation)
    push.awaiting_checksum.held = False
    push.deliver()
    assert push.over == [1] and push.failed == {1: FailureCause.CHECKSUM} and push.is_clean()


@pytest.mark.parametrize("why", ["no checksum", "not all", "more than all"])
def test_without_the_checksums_that_were_asked_for_nothing_is_used(why: str) -> None:
    push = Decode(TransferMode.PUSH, verify_fraction=1.0)
    remote = registered(push, wanted(1, None))
    end_token = {"no checksum": TOKENS, "not all": 8, "more than all": TOKENS + 1}[why]
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN, end_token, None if why == "no checksum" else "0" * 32))
    push.deliver()
    assert push.over == [1] and push.failed == {1: FailureCause.PROTOCOL} and push.is_clean()
    assert push.side.distrust_of(remote.address, remote.incarnation) is None


def test_a_checksum_that_cannot_be_computed_fails_the_request_and_nothing_else() -> None:
    push = Decode(TransferMode.PUSH, verify_fraction=1.0)
    remote = registered(push, wanted(1, None))
    push.awaiting_checksum.fails = 1
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN, TOKENS, "0" * 32))
    push.deliver()
    assert push.over == [1] and push.failed == {1: FailureCause.DEFECT} and push.is_clean()


def test_a_request_that_ends_while_its_checksum_is_computed_is_over_afterwards() -> None:
    push = Decode(TransferMode.PUSH, verify_fraction=1.0)
    remote = registered(push, wanted(1, None))
    push.awaiting_checksum.held = True
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN, TOKENS, "0" * 32))
    push.deliver()
    push.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    push.deliver()
    assert push.over == [] and push.failed == {1: FailureCause.DEADLINE}, "its blocks are being read"
    push.awaiting_checksum.held = False
    push.deliver()
    assert push.over == [1] and push.failed == {1: FailureCause.DEADLINE} and push.is_clean()


def test_what_was_read_is_verified_by_checksums_that_prefill_sends() -> None:
    """It is told that nothing is to be written, and of no gate, so its end is not waited for."""
    pull = Decode(verify_fraction=1.0)
    remote = pull.remote()
    keep(remote)
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    (said,) = remote.heard()
    assert isinstance(said, Registration) and said.is_read and said.is_verified and said.gate == b""
    assert said.groups == (KernelBlockRange(0, ()),) and is_read(pull, remote) and not pull.over
    assert not pull.receiver.may_be_written_by("remote-0") and len(pull.gates) == 0
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN, TOKENS, checksum_of_blocks(remote, pull)))
    pull.deliver()
    assert pull.over == [1] and not pull.failed and pull.is_clean()


def test_what_was_read_and_is_not_wanted_any_more_is_over_without_prefills_answer() -> None:
    pull = Decode(verify_fraction=1.0)
    keep(pull.remote())
    pull.want(wanted(1, MANIFEST))
    pull.deliver()
    pull.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "dead"))
    assert pull.over == [1] and pull.is_clean()


# --------------------------------------------------------------------------------------------------------------- staged


def staged() -> tuple[Decode, HeldCopies, Staging]:
    """Decode that stages: KV arrives in 16 of 24 slots, which are all its memory, and is copied into blocks."""
    push, copies = Decode(TransferMode.PUSH), HeldCopies()
    push.side.staging = Staging(Slots(24, 8), copies, (BLOCK_SIZE,))
    return push, copies, push.side.staging


def test_slots_are_granted_for_what_is_ready_and_copied_when_it_is_written() -> None:
    """The attempt is over when the last copy has ended."""
    push, copies, staging = staged()
    remote = registered(push, wanted(1, None))
    (said,) = remote.heard()
    assert isinstance(said, Registration) and said.is_staged and said.groups == (KernelBlockRange(0, ()),)
    assert staging.slots.used(Use.RECEIVING) == 0
    slots: list[int] = []
    for index, (begin, end, made) in enumerate(((0, 8, None), (8, TOKENS, ALL_WRITTEN))):
        remote.say("local", StagingRequest(1, 0, begin, end + 100))
        remote.say("local", StagingRequest(1, 0, begin, end))
        push.deliver()
        grants = [one for one in remote.heard() if isinstance(one, StagingGrant)]
        if begin == 0:
            (grant,) = grants
            assert (grant.first_token, grant.end_token) == (0, TOKENS)
            slots += grant.groups[0].block_ids
        else:
            assert grants == [], "it has the slots already"
        remote.say("local", Written(1, 0, index, made, end))
        push.deliver()
        assert len(copies.asked) == (made is not None) and not push.over
    assert copies.slots == [slots] and copies.blocks == [[7, 3, 9]] and staging.slots.used(Use.RECEIVING) == 3
    copies.end()
    assert push.over == [1] and not push.failed and staging.slots.used(Use.RECEIVING) == 0 and push.is_clean()


def test_a_copy_out_of_the_slab_that_fails_fails_its_request() -> None:
    push, copies, staging = staged()
    remote = registered(push, wanted(1, None))
    remote.say("local", StagingRequest(1, 0, 0, TOKENS))
    push.deliver()
    remote.say("local", Written(1, 0, 0, ALL_WRITTEN, TOKENS))
    push.deliver()
    copies.end("no room")
    assert push.failed == {1: FailureCause.DEFECT} and push.said[1] == "no room"
    push.deliver()
    remote.say("local", Stopped(1, 0, FailureCause.STOPPED, "withdrawn"))
    push.deliver()
    assert push.over == [1] and staging.slots.used(Use.RECEIVING) == 0 and push.is_clean()


def test_slots_that_a_peer_may_write_are_kept_until_it_has_stopped() -> None:
    push, copies, staging = staged()
    remote = registered(push, wanted(1, None))
    remote.say("local", StagingRequest(1, 0, 0, TOKENS))
    push.deliver()
    push.receiver.fail(1, HandOverFailed(FailureCause.STOPPED, "dead"))
    remote.say("local", StagingRequest(1, 0, 0, TOKENS))
    remote.say("local", Written(1, 0, 0, None, 8))
    push.deliver()
    assert staging.slots.used(Use.RECEIVING) == 3 and not push.over and not copies.asked
    other = staging.take(Use.RECEIVING, [0], 0, 100, BLOCK_SIZE, owner="another engine")
    assert other is not None and len(other.slots) == (16 - 3) // 4, "another engine has a part of what is left"
    staging.give_back(other)
    remote.say("local", Stopped(1, 0, FailureCause.STOPPED, "withdrawn"))
    push.deliver()
    assert push.over == [1] and staging.slots.used(Use.RECEIVING) == 0 and push.is_clean()


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
    assert not push.over and len(push.gates) == 1, "it may still write"
    pass_time(push, 2 * REPEAT_SECONDS)
    assert push.over == [1] and push.failed == {1: FailureCause.DEADLINE}
    assert list(push.network.gates) == ["local#2"] and "local#1" not in push.network.agents
    assert len(push.gates) == 1 and push.is_clean()


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


@pytest.mark.parametrize("how", SIDE_CHANNELS)
@pytest.mark.parametrize("said", ["stopped", "written"])
def test_a_writer_that_lost_its_side_channel_alone_says_when_it_has_stopped(said: str, how: str, push: Decode) -> None:
    """It answers over the NIXL connection, so its gate is not closed."""
    remote = registered(push, wanted(1, None), process=THERE)
    push.asking.answers[remote.place] = SIDE_CHANNELS[how]
    pass_time(push, LOOK_SECONDS * (1 if how == "refuses" else HANDSHAKE_TRIES + 1) + 1)
    if how != "refuses":
        assert not push.failed, "it may still finish"
    push.receiver.fail(1, HandOverFailed(FailureCause.DEADLINE, "late"))
    pass_time(push, 1)
    assert Withdrawal(1, push.side.own) in remote.heard()  # type: ignore[arg-type]
    remote.say("local", Stopped(1, 0, 1, "withdrawn") if said == "stopped" else Written(1, 0, 0, ALL_WRITTEN))
    pass_time(push, 1)
    assert push.over == [1] and push.is_clean() and push.network.num_opened == 1


def test_a_process_of_this_host_is_waited_for_as_long_as_it_lives(
    push: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    """It could write through shared memory, which cannot be closed. That is logged once."""
    push.host.living.add(HERE)
    push.host.local.add(HERE)
    remote = registered(push, wanted(1, None), process=HERE)
    push.asking.answers[remote.place] = ConnectionRefusedError()
    pass_time(push, 600)
    assert push.over == [] and push.network.num_opened == 1
    assert caplog.text.count("shared memory") == 1
    remote.heard()
    push.host.living.remove(HERE)
    pass_time(push, LOOK_SECONDS + DEAD_SECONDS + 1)
    assert push.over == [1] and push.is_clean()


def test_a_process_of_this_host_that_has_ended_is_found_though_its_address_answers(push: Decode) -> None:
    """What answers may be an engine core whose worker was killed, or a sidecar."""
    push.host.living.add(HERE)
    push.host.local.add(HERE)
    registered(push, wanted(1, None), process=HERE)
    push.host.living.remove(HERE)
    pass_time(push, LOOK_SECONDS)
    assert (push.over, push.failed) == ([], {1: FailureCause.LOST})
    pass_time(push, DEAD_SECONDS + 1)
    assert push.over == [1] and push.is_clean() and push.network.num_opened == 1


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


@pytest.mark.parametrize("place", ["there", "here, and it lives", "here, and it has ended"])
def test_another_engine_in_its_place_does_not_mean_that_a_writer_has_ended(place: str, push: Decode) -> None:
    """An engine core may be restarted while its old workers live on and cannot be asked any more."""
    process = THERE if place == "there" else HERE
    if process is HERE:
        push.host.living.add(HERE)
        push.host.local.add(HERE)
    remote = registered(push, wanted(1, None), process=process)
    again = Remote(address("another"), push.network.agent("another agent"))
    push.asking.answers[remote.place] = again.answer()
    if place == "here, and it has ended":
        push.host.living.remove(HERE)
    pass_time(push, LOOK_SECONDS + 1)
    assert (push.over, push.failed) == ([], {1: FailureCause.LOST})
    pass_time(push, DEAD_SECONDS + 1)
    assert push.over == ([] if place == "here, and it lives" else [1])
    assert push.network.num_opened == (2 if place == "there" else 1)


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
    assert push.over == [] and len(push.gates) == 2
    later = registered_with(push, "later", 4)
    assert [gate_of(one) for one in (other, slow, later)] == [b"local#1", b"local#1", b"local#2"]
    other.say("local#1", Written(2, 0, 0, ALL_WRITTEN))
    pass_time(push, 1)
    assert push.over == [2] and push.failed == {1: FailureCause.DEADLINE}
    pass_time(push, DRAIN_SECONDS)
    assert push.over == [2, 1, 3] and push.failed == {1: FailureCause.DEADLINE, 3: FailureCause.LOST}
    assert len(push.gates) == 1
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
    assert push.over == [1] and push.is_clean() and len(push.gates) == 1


def test_who_is_probed_is_who_is_waited_for(push: Decode) -> None:
    """One probe every few seconds, however many attempts wait for the rank; none if no attempt does."""
    remote = registered(push, wanted(1, None))
    for number in range(2, 50):
        push.want(wanted(number, None))
    push.deliver()
    asked = len(push.asking.asked)
    push.clock.advance(REPEAT_SECONDS)
    push.receiver.turn()
    assert len(push.asking.asked) == asked + 1
    push.deliver()
    for number in range(1, 50):
        remote.say("local", Written(number, 0, 0, ALL_WRITTEN))
    push.deliver()
    assert len(push.over) == 49 and push.is_clean()
    assert push.receiver.turn() is None


def test_nothing_is_needed_so_every_rank_is_told() -> None:
    push = Decode(TransferMode.PUSH)
    remotes = [push.remote(address=address(tp_size=2, tp_rank=rank)) for rank in range(2)]
    push.receiver.release(UnneededOffer(RemotePrefill("remote", "10.0.0.2", 5601, 2), "", "transfer:t", DIGEST))
    push.deliver()
    assert [remote.heard() for remote in remotes] == [[Release("", "transfer:t", DIGEST, 0, 1)]] * 2


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
