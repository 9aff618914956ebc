# SPDX-License-Identifier: Apache-2.0
"""worker/transfer/peers.py: handshakes, refusals, death of peers; one peer affects only the requests that name it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.internals import gates_of, links_of
from support.worker_fakes import OTHER_START, START, TAG, Local, Remote

from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Answer, Process
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.transfer.peers import FORGOTTEN_SECONDS, LOOK_SECONDS
from kvcached_nixl.worker.transfer.topology import ConnectedPeer


class Needing:
    """Calls `Peers.need`, and records which callback was called."""

    def __init__(self, local: Local, where: Peer, start: str = "", *, is_doubted: bool = False) -> None:
        self.known: list[ConnectedPeer] = []
        self.failed: list[HandOverFailed] = []
        local.peers.need(where, start, self.known.append, self.failed.append, is_doubted=is_doubted)

    @property
    def cause(self) -> FailureCause:
        (failed,) = self.failed
        assert self.known == []
        return failed.cause

    @property
    def words(self) -> str:
        return str(self.failed[0])


@pytest.fixture
def local() -> Local:
    return Local()


def spoiled(remote: Remote) -> list[bytes]:
    sound = remote.answer()[1]
    half = msgspec.msgpack.encode(Answer(START, b"\x91" * 5000))
    rank = msgspec.to_builtins(remote.handshake(), builtin_types=(bytes,)) | {"token_table_address": 2**63}
    huge = msgspec.msgpack.encode(Answer(START, msgspec.msgpack.encode(rank)))
    other = sound.replace(START.encode(), b"x" * 16)
    return [b"", sound[:-3], b"\xc1" + sound, b"\x91" * 100_000, half, huge, other]


@pytest.mark.parametrize("number", range(7))
def test_metadata_that_cannot_be_read_costs_the_attempt(local: Local, number: int) -> None:
    remote = local.remote()
    local.asking.answers[remote.place] = TAG, spoiled(remote)[number]
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.PROTOCOL
    assert local.dead == []


# ---------------------------------------------------------------------------------------------------------------- start


def met(local: Local, **more: Any) -> Remote:
    remote = local.remote(**more)
    Needing(local, remote.address)
    local.turn()
    assert local.transport.connection(remote.transport.name)
    return remote


# ----------------------------------------------------------------------------------------------------- lost, and others


def test_one_address_that_answers_as_two_engines_costs_what_it_is_asked_for(local: Local) -> None:
    one = local.remote("one", is_answering=False)
    other = local.remote("other", is_answering=False)
    assert one.place == other.place
    first, second = Needing(local, one.address), Needing(local, other.address)
    local.asking.open[0].set_result(one.answer())
    local.turn()
    assert first.known
    # Behind one address are two engines: the wanted one is asked again, and either may answer.
    again = Needing(local, one.address, is_doubted=True)
    local.asking.open[1].set_result(other.answer())
    local.turn()
    assert second.known and local.dead == ["one-0"]
    local.asking.open[2].set_result(one.answer())
    local.turn()
    assert again.known and local.dead == ["one-0", "other-0"]
    local.asking.answers[one.place] = one.answer()
    local.peers.lost("one-0")
    local.turn()
    local.peers.send(one.address, b"on")
    local.turn()
    assert len(links_of(local.peers)) == 1


def test_a_message_that_is_meant_for_one_agent_is_told_to_no_other(local: Local) -> None:
    """Another engine may answer at the address of one that has died; it is not sent the message."""
    remote = met(local)
    local.peers.send(remote.address, b"for you", only="remote-0")
    local.peers.send(remote.address, b"for another", only="another agent")
    local.deliver()
    assert [said for _, said in remote.transport.received()] == [b"for you"]
    assert local.peers.dropped == {"meant for another agent": 1}
    again = Remote(remote.address, local.network.agent("another agent"), incarnation=OTHER_START)
    local.asking.answers[remote.place] = again.answer()
    local.peers.send(remote.address, b"for another", only="another agent")
    local.deliver()
    assert [said for _, said in again.transport.received()] == [b"for another"], "it was started since it was met"


def test_a_handshake_that_meets_a_defect_costs_what_it_belongs_to(local: Local) -> None:
    remote = local.remote()
    local.asking.answers[remote.place] = IndexError("of ours")
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.DEFECT and "IndexError: of ours" in needing.words


def test_a_callback_that_raises_fails_what_it_belongs_to(local: Local, caplog: pytest.LogCaptureFixture) -> None:
    remote = local.remote()
    failed: list[HandOverFailed] = []

    def defect(known: ConnectedPeer) -> None:
        raise IndexError("of ours")

    local.peers.need(remote.address, "", defect, failed.append)
    sound = Needing(local, remote.address)
    local.turn()
    assert [one.cause for one in failed] == [FailureCause.DEFECT]
    assert "IndexError: of ours" in str(failed[0]) and "internal error in kvcached_nixl" in caplog.text
    assert len(sound.known) == 1


def test_a_gate_that_cannot_be_reached_or_is_another_ranks_costs_the_hand_over(local: Local) -> None:
    remote = met(local)
    known, gate = local.side.gate_connections, local.network.open_gate("remote-0").metadata()
    owner, other = (ConnectedPeer(name, START, remote.handshake()) for name in ("remote-0", "other-0"))
    assert known.use(owner, gate) == gate.decode()
    for peer, metadata, cause in ((owner, b"nobody", FailureCause.LOST), (other, gate, FailureCause.PROTOCOL)):
        with pytest.raises(HandOverFailed) as caught:
            known.use(peer, metadata)
        assert caught.value.cause is cause and len(gates_of(known)) == 1


# ------------------------------------------------------------------------------------------------------------- messages


def test_a_connection_that_is_lost_again_and_again_is_given_up(local: Local) -> None:
    """Every handshake succeeds, but no message can be sent."""
    remote = met(local)

    def refuse(peer: str, notification: bytes) -> None:
        raise TransportError("no way")

    local.transport.send = refuse  # type: ignore[method-assign]
    local.peers.send(remote.address, b"one")
    for _ in range(5):
        local.turn()
    assert local.peers.dropped == {"not sent": 1}
    assert len(local.asking.asked) == 3


# --------------------------------------------------------------------------------------------------------- looked after


def later(local: Local) -> None:
    """Let the time pass after which peers that are not used are looked after, and take the answers."""
    local.clock.advance(LOOK_SECONDS)
    local.turn()
    local.turn()


NEIGHBOUR = Process("here", "", 7, 7)


def neighbour(local: Local) -> Remote:
    """Meet a rank whose process is one of this host."""
    local.host.__dict__["living"].add(NEIGHBOUR)
    return met(local, process=NEIGHBOUR)


def test_memory_of_a_process_that_has_ended_here_is_let_go_within_seconds(local: Local) -> None:
    """Its replacement would not find the accelerator's memory free, and would not start."""
    remote = neighbour(local)
    later(local)
    assert local.transport.connection("remote-0"), "the kernel is asked, nobody else"
    assert local.asking.asked == [remote.place]
    local.host.__dict__["living"].clear()
    later(local)
    assert local.transport.peers == set() and local.unreachable == ["remote-0"]
    for _ in range(3):
        later(local)
    assert local.unreachable == ["remote-0"] and len(local.asking.asked) == 1


def test_who_answers_as_before_is_not_added_again(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL keeps queue pairs of each time (nixl#2025). Who is asked for by somebody is examined all the same."""
    remote = met(local)
    added: list[bytes] = []
    add_peer = local.transport.add_peer
    monkeypatch.setattr(local.transport, "add_peer", lambda *all: [added.append(all[0]), add_peer(*all)][1])
    for _ in range(5):
        later(local)
    assert len(local.asking.asked) == 6 and not added
    local.peers.probe(remote.address)
    local.turn()
    assert len(added) == 1
    local.asking.answers[remote.place] = remote.answer(incarnation=OTHER_START)
    later(local)
    assert len(added) == 2 and Needing(local, remote.address, OTHER_START).known, "it has other weights now"


def test_who_may_write_is_kept_until_it_cannot(local: Local) -> None:
    """Rule R13: its connection is how NIXL hears what it has written. Everybody who waits for it is told at once."""
    neighbour(local)
    local.listener.may_write = lambda agent: True
    local.host.__dict__["living"].clear()
    later(local)
    assert local.transport.connection("remote-0") and local.unreachable == ["remote-0"]
    local.listener.may_write = lambda agent: False
    later(local)
    assert local.transport.peers == set()


# ----------------------------------------------------------------------------------------------------------- forgetting


def test_who_is_being_asked_is_not_forgotten(local: Local) -> None:
    remote = local.remote(is_answering=False)
    needing = Needing(local, remote.address)
    local.clock.advance(FORGOTTEN_SECONDS)
    local.turn()
    assert len(links_of(local.peers)) == 1
    local.asking.open.pop().set_result(remote.answer())
    local.turn()
    assert len(needing.known) == 1


def test_a_gate_that_was_used_without_a_connection_to_its_rank_is_forgotten_with_it(local: Local) -> None:
    """A registration goes on while decode's side channel does not answer, and its process may end then."""
    remote = met(local)
    rank = ConnectedPeer("remote-0", START, remote.handshake())
    local.asking.answers[remote.place] = ConnectionRefusedError()
    local.peers.probe(remote.address)
    local.turn()
    local.side.gate_connections.use(rank, local.network.open_gate("remote-0").metadata())
    assert len(local.transport.peers) == 1
    local.clock.advance(FORGOTTEN_SECONDS)
    local.turn()
    assert local.transport.peers == set() and not gates_of(local.side.gate_connections)
