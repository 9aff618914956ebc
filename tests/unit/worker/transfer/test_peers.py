# SPDX-License-Identifier: Apache-2.0
"""worker/transfer/peers.py: handshakes, refusals, death of peers; one peer affects only the requests that name it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.internals import leftovers
from support.worker_fakes import OTHER_START, START, TAG, Local, Memory, Remote, address

from kvcached_nixl.ids import EngineId
from kvcached_nixl.transport.base import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Answer, Process
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.transfer.peer_link import ConnectedPeer
from kvcached_nixl.worker.transfer.peers import FORGOTTEN_SECONDS, HANDSHAKE_TRIES, LOOK_SECONDS, LOOKS


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


def test_a_peer_that_offers_the_same_is_met_once(local: Local) -> None:
    """One handshake tells agent, incarnation and memory; later callers get the peer at once."""
    remote = local.remote()
    first, second = Needing(local, remote.address), Needing(local, remote.address, START)
    assert first.known == [], "not before a turn: the answer came on another thread"
    assert local.woken > 0
    local.turn()
    assert first.known == second.known == [ConnectedPeer("remote-0", START, remote.handshake())]
    assert Needing(local, remote.address).known == first.known
    assert local.asking.asked == [remote.place]
    assert local.peers.is_known("remote-0")
    assert len(local.peers) == 1 and not first.failed


@pytest.mark.parametrize("theirs", ["abc", TAG.replace("pull", "push"), TAG + " ", "", "x" * 10_000], ids=len)
def test_a_peer_that_offers_something_else_is_refused_in_words(local: Local, theirs: str) -> None:
    """The compatibility string is compared before the metadata is decoded, which may be of another protocol."""
    remote = local.remote()
    local.asking.answers[remote.place] = theirs, b"of another protocol"
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.REFUSED
    shown = ("found kvcached_nixl/6 push;", "expected kvcached_nixl/6 pull.") if "push" in theirs else ()
    assert all(one in needing.words for one in shown or (repr(theirs)[:1000], repr(TAG)))
    assert "engine remote at 10.0.0.2:5601" in needing.words
    assert "the same dtype and transfer_mode" in needing.words and len(needing.words) < 3000
    assert len(local.peers) == 0
    Needing(local, remote.address)
    assert len(local.asking.asked) == 2, "it may have been replaced by one that fits"


def test_nobody_listens(local: Local) -> None:
    remote = local.remote()
    local.asking.answers[remote.place] = ConnectionRefusedError()
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.UNREACHABLE
    assert "nobody listens at 10.0.0.2:5601" in needing.words
    assert len(local.asking.asked) == 1


@pytest.mark.parametrize("cause", [TimeoutError("slow"), ConnectionResetError("reset"), OSError("no route to host")])
def test_who_does_not_answer_is_asked_again_and_then_given_up(local: Local, cause: Exception) -> None:
    """A busy host may answer late, as in the first handshake of vLLM 0.28 with its multiprocess executor."""
    remote = local.remote()
    local.asking.answers[remote.place] = cause
    needing = Needing(local, remote.address)
    local.peers.turn()
    assert len(local.asking.asked) == HANDSHAKE_TRIES
    assert needing.cause is FailureCause.UNREACHABLE
    assert str(cause) in needing.words
    assert len(local.peers) == 0 and local.dead == []
    # What was tried before does not count for the next one.
    local.asking.answers[remote.place] = remote.answer()
    again = Needing(local, remote.address)
    local.turn()
    assert len(again.known) == 1


def test_who_answers_at_last_is_met(local: Local) -> None:
    remote = local.remote(is_answering=False)
    needing = Needing(local, remote.address)
    for _ in range(HANDSHAKE_TRIES - 1):
        local.asking.open.pop().set_exception(TimeoutError("busy"))
        local.turn()
        assert not needing.failed
    local.asking.open.pop().set_result(remote.answer())
    local.turn()
    assert len(needing.known) == 1


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"engine_id": EngineId("q")}, FailureCause.UNREACHABLE),
        ({"tp_rank": 1, "tp_size": 2}, FailureCause.REFUSED),
        ({"tp_size": 4}, FailureCause.REFUSED),
    ],
    ids=["engine", "rank", "size"],
)
def test_another_rank_at_the_address_is_not_taken_for_the_one_asked_for(
    local: Local, changed: dict[str, Any], cause: FailureCause
) -> None:
    """An engine that was restarted has another id, and a router's ``tp_size`` may be wrong."""
    remote = local.remote()
    local.asking.answers[remote.place] = remote.answer(**changed)
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is cause
    assert "answers at 10.0.0.2:5601; expected rank 0 of 1 of engine remote" in needing.words
    assert not local.peers.is_known("remote-0")


@pytest.mark.parametrize(
    "memory",
    [Memory(block_size=6), Memory(num_heads=1, first_head=1)],
    ids=["block size", "heads"],
)
def test_memory_that_does_not_fit_is_refused_in_words(local: Local, memory: Memory) -> None:
    remote = local.remote(memory=memory)
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.REFUSED and "does not fit: " in needing.words


def spoiled(remote: Remote) -> list[bytes]:
    sound = remote.answer()[1]
    half = msgspec.msgpack.encode(Answer(START, b"\x91" * 5000))
    rank = msgspec.to_builtins(remote.handshake(), builtin_types=(bytes,)) | {"token_table_address": 2**63}
    huge = msgspec.msgpack.encode(Answer(START, msgspec.msgpack.encode(rank)))
    return [
        b"",
        sound[:-3],
        b"\xc1" + sound,
        b"\x91" * 100_000,
        half,
        huge,
        remote.answer()[1].replace(START.encode(), b"x" * 16),
    ]


@pytest.mark.parametrize("number", range(7))
def test_metadata_that_cannot_be_read_costs_the_attempt(local: Local, number: int) -> None:
    """Only the attempt fails: the engine goes on, and no peer counts as dead."""
    remote = local.remote()
    local.asking.answers[remote.place] = TAG, spoiled(remote)[number]
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.PROTOCOL
    assert local.dead == []


def test_an_agent_that_cannot_be_added_costs_the_attempt(local: Local) -> None:
    remote = local.remote()
    local.asking.answers[remote.place] = remote.answer(agent_metadata=b"nobody")
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.PROTOCOL and "found no agent" in needing.words


# ---------------------------------------------------------------------------------------------------------------- start


def met(local: Local, **more: Any) -> Remote:
    remote = local.remote(**more)
    Needing(local, remote.address)
    local.turn()
    assert local.peers.is_known(remote.transport.name)
    return remote


def test_parameters_of_an_earlier_start_are_refused(local: Local) -> None:
    """Parameters name an incarnation; for another one than the known one the handshake is repeated."""
    remote = met(local)
    stale = Needing(local, remote.address, OTHER_START)
    assert stale.known == [] and len(local.asking.asked) == 2
    local.turn()
    assert stale.cause is FailureCause.RESTARTED
    assert Needing(local, remote.address, START).known


def test_who_was_restarted_under_the_same_id_is_met_anew_and_the_old_one_is_gone(local: Local) -> None:
    remote = met(local)
    again = Remote(remote.address, local.network.agent("another agent"), incarnation=OTHER_START)
    local.asking.answers[remote.place] = again.answer()
    needing = Needing(local, remote.address, OTHER_START)
    local.turn()
    assert [(known.agent, known.incarnation) for known in needing.known] == [("another agent", OTHER_START)]
    assert local.dead == ["remote-0"]
    assert not local.peers.is_known("remote-0") and local.peers.is_known("another agent")


def test_another_engine_at_the_same_place_means_that_the_earlier_is_gone(local: Local) -> None:
    remote = met(local)
    successor = local.remote("successor", address=address("successor"))
    needing = Needing(local, successor.address)
    local.turn()
    assert len(needing.known) == 1
    assert local.dead == ["remote-0"]
    assert not local.peers.is_known("remote-0") and len(local.peers) == 1
    # The other way round the same: nobody is at two places at once.
    local.asking.answers[remote.place] = remote.answer()
    Needing(local, remote.address)
    local.turn()
    assert local.dead == ["remote-0", "successor-0"]


# ----------------------------------------------------------------------------------------------------- lost, and others


def test_a_lost_peer_is_met_again_at_once_whatever_else_is_in_flight(local: Local) -> None:
    """The handshake does not wait for transfers with other peers."""
    remote, other = met(local), met(local, name="other", address=address("other", port=5602))
    local.peers.lost("remote-0")
    assert not local.peers.is_known("remote-0") and local.peers.is_known("other-0")
    assert local.asking.asked[-1] == remote.place
    local.turn()
    assert local.peers.is_known("remote-0")
    assert local.dead == [], "it lives"
    assert Needing(local, other.address).known
    local.peers.lost("nobody")
    local.peers.lost("remote-0")
    local.peers.lost("remote-0")
    assert local.asking.asked.count(remote.place) == 3


@pytest.mark.parametrize("how", ["lost", "probe"])
def test_who_does_not_listen_is_unreachable_and_never_gone(local: Local, how: str) -> None:
    """A refused connection may be a firewall, or an engine core that was killed while its workers live on."""
    remote = met(local)
    local.peers.probe(remote.address)
    local.turn()
    assert local.unreachable == local.dead == [] and local.peers.is_known("remote-0")
    local.asking.answers[remote.place] = ConnectionRefusedError()
    if how == "lost":
        local.peers.lost("remote-0")
    else:
        local.peers.probe(remote.address)
    local.turn()
    for _ in range(5):
        local.clock.advance(60.0)
        local.peers.probe(remote.address)
        local.turn()
    assert set(local.unreachable) == {"remote-0"} and local.dead == []
    assert not local.peers.is_known("remote-0")


def test_who_may_write_keeps_its_connection_without_its_side_channel(local: Local) -> None:
    """It must still be told to stop, and answer. New callers get the error that its side channel refuses."""
    remote = met(local)
    local.listener.may_write = lambda agent: agent == "remote-0"
    local.asking.answers[remote.place] = ConnectionRefusedError()
    for _ in range(3):
        local.peers.probe(remote.address)
        local.turn()
    assert local.unreachable == ["remote-0"] * 3 and local.peers.is_known("remote-0")
    local.peers.send(remote.address, b"stop", only="remote-0")
    local.network.deliver_all()
    assert remote.transport.received() == [("local", b"stop")]
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.UNREACHABLE and not needing.known
    local.listener.may_write = lambda agent: False
    local.peers.probe(remote.address)
    local.turn()
    assert not local.peers.is_known("remote-0")


def test_a_listener_that_starts_again_is_one_that_was_never_gone(local: Local) -> None:
    remote = met(local)
    for _ in range(3):
        local.asking.answers[remote.place] = ConnectionRefusedError()
        local.peers.probe(remote.address)
        local.turn()
        local.asking.answers[remote.place] = remote.answer()
        local.peers.probe(remote.address)
        local.turn()
        local.clock.advance(60.0)
    assert local.dead == [] and local.peers.is_known("remote-0")


def test_one_address_that_answers_as_two_engines_costs_what_it_is_asked_for(local: Local) -> None:
    """Two engines answer at one address in turn; the one that answered before counts as dead."""
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
    assert len(local.peers) == 1


def test_one_that_is_named_in_two_ways_is_one(local: Local) -> None:
    """A peer known by an IP address and by a name is dead only when neither leads to it any more."""
    remote = met(local)
    where = Peer(remote.address.engine_id, "by.name", 5601, 1, 0)
    local.asking.answers["by.name", 5601, 0] = remote.answer()
    by_name = Needing(local, where)
    local.turn()
    assert [known.agent for known in by_name.known] == ["remote-0"] and len(local.peers) == 2
    local.asking.answers[remote.place] = ("another tag", b"")
    local.peers.probe(remote.address)
    local.turn()
    assert local.dead == [] and local.peers.is_known("remote-0")
    local.transport.send("remote-0", b"still there")
    local.asking.answers["by.name", 5601, 0] = ("another tag", b"")
    local.peers.probe(where)
    local.turn()
    assert local.dead == ["remote-0"] and len(local.peers) == 0


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


def test_a_connection_is_another_one_once_it_was_lost(local: Local) -> None:
    """After a loss, `connection` returns None, and another object after the next handshake."""
    met(local)
    first = local.peers.connection("remote-0")
    assert first is not None and local.peers.connection("remote-0") is first
    local.peers.lost("remote-0")
    assert local.peers.connection("remote-0") is None
    local.turn()
    again = local.peers.connection("remote-0")
    assert again is not None and again is not first, "though it is equal"
    assert local.peers.connection("nobody") is None


def test_a_connection_is_the_same_one_after_another_handshake(local: Local) -> None:
    """A repeated handshake, or one under another name, does not replace the connection."""
    remote = met(local)
    first = local.peers.connection("remote-0")
    local.peers.probe(remote.address)
    local.turn()
    assert local.peers.connection("remote-0") is first
    by_name = msgspec.structs.replace(remote.address, host="by.name")
    local.asking.answers["by.name", remote.address.port, 0] = remote.answer()
    Needing(local, by_name)
    local.turn()
    local.asking.answers[remote.place] = ConnectionRefusedError("nobody")
    local.peers.probe(remote.address)
    local.turn()
    assert local.peers.connection("remote-0") is first, "it is known by the other name still"


def test_who_was_started_again_is_looked_for_by_all_its_names(local: Local) -> None:
    remote = met(local)
    by_name = msgspec.structs.replace(remote.address, host="by.name")
    local.asking.answers["by.name", remote.address.port, 0] = remote.answer()
    Needing(local, by_name)
    local.turn()
    again = Remote(remote.address, local.network.agent("another agent"), incarnation=OTHER_START)
    local.asking.answers[remote.place] = local.asking.answers["by.name", remote.address.port, 0] = again.answer()
    local.peers.probe(remote.address)
    local.turn()
    local.turn()
    assert local.dead == ["remote-0"]


def test_a_handshake_that_meets_a_defect_costs_what_it_belongs_to(local: Local) -> None:
    remote = local.remote()
    local.asking.answers[remote.place] = IndexError("of ours")
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.cause is FailureCause.DEFECT and "IndexError: of ours" in needing.words


def test_who_does_not_answer_a_probe_loses_the_connection_and_is_not_called_gone(local: Local) -> None:
    """Its connection is taken down, which ends transfers to it; but it may still write, so it is not dead."""
    remote = met(local)
    local.network.vanish("remote-0")
    local.transport.send("remote-0", b"in flight")
    local.asking.answers[remote.place] = TimeoutError("silent")
    local.peers.probe(remote.address)
    local.turn()
    assert local.dead == []
    assert not local.peers.is_known("remote-0")
    with pytest.raises(Exception, match="no connection"):
        local.transport.send("remote-0", b"again")
    # When another agent answers at its address, the first one is dead.
    again = Remote(remote.address, local.network.agent("another agent"))
    local.asking.answers[remote.place] = again.answer()
    Needing(local, remote.address)
    local.turn()
    assert local.dead == ["remote-0"]


def test_one_that_never_answers_holds_up_nobody(local: Local) -> None:
    """Fifty handshakes without an answer do not delay another one."""
    silent = [
        local.remote(f"silent{n}", address=address(f"silent{n}", port=6000 + n), is_answering=False) for n in range(50)
    ]
    waiting = [Needing(local, remote.address) for remote in silent]
    assert len(local.asking.asked) == 50
    assert met(local)
    assert not any(one.failed or one.known for one in waiting)
    assert len(local.asking.asked) == 51


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


# ------------------------------------------------------------------------------------------------------------- messages


def test_a_message_waits_for_the_handshake(local: Local) -> None:
    remote = local.remote(is_answering=False)
    local.peers.send(remote.address, b"one")
    local.peers.send(remote.address, b"two")
    assert local.asking.asked == [remote.place]
    local.asking.open.pop().set_result(remote.answer())
    local.deliver()
    assert [said for _, said in remote.transport.received()] == [b"one", b"two"]


def test_a_message_over_a_lost_connection_is_said_once_more_over_another(local: Local) -> None:
    """The message is sent once more after another handshake; if that fails, it is counted as dropped."""
    remote = met(local)
    local.transport.lose("remote-0")
    local.peers.send(remote.address, b"one")
    local.deliver()
    local.peers.send(remote.address, b"two")
    local.deliver()
    assert [said for _, said in remote.transport.received()] == [b"one", b"two"]
    assert not local.peers.dropped
    local.asking.answers[remote.place] = ConnectionRefusedError()
    local.peers.lost("remote-0")
    local.peers.send(remote.address, b"three")
    local.turn()
    assert local.peers.dropped == {"not sent": 1}


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

NEIGHBOUR = Process("here", "", 7, 7)


def later(local: Local) -> None:
    """Let the time pass after which peers that are not used are looked after, and take the answers."""
    local.clock.advance(LOOK_SECONDS)
    local.turn()
    local.turn()


def neighbour(local: Local) -> Remote:
    """Meet a rank whose process is one of this host."""
    local.host.__dict__["living"].add(NEIGHBOUR)
    return met(local, process=NEIGHBOUR)


def test_memory_of_a_process_that_has_ended_here_is_let_go_within_seconds(local: Local) -> None:
    """Its replacement would not find the accelerator's memory free, and would not start."""
    remote = neighbour(local)
    later(local)
    assert local.peers.is_known("remote-0") and local.asking.asked == [remote.place], "the kernel is asked, nobody else"
    local.host.__dict__["living"].clear()
    later(local)
    assert local.transport.peers == set() and local.unreachable == ["remote-0"]
    for _ in range(3):
        later(local)
    assert local.unreachable == ["remote-0"] and len(local.asking.asked) == 1


@pytest.mark.parametrize("kind", [ConnectionRefusedError, TimeoutError])
def test_memory_of_one_elsewhere_is_let_go_when_nobody_is_there(local: Local, kind: type[Exception]) -> None:
    remote = met(local)
    local.asking.answers[remote.place] = kind()
    later(local)
    for _ in range(HANDSHAKE_TRIES):
        local.turn()
    assert local.transport.peers == set() and local.dead == []
    local.asking.answers[remote.place] = remote.answer()
    needing = Needing(local, remote.address)
    local.turn()
    assert needing.known, "it was there all the time"


def test_whoever_answers_in_the_place_of_another_has_proved_that_it_is_gone(local: Local) -> None:
    remote = met(local)
    again = Remote(remote.address, local.network.agent("another agent"), incarnation=OTHER_START)
    local.asking.answers[remote.place] = again.answer()
    later(local)
    assert local.dead == ["remote-0"] and local.transport.peers == {"another agent"}


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


def test_what_is_used_does_not_end_because_an_answer_is_late(local: Local) -> None:
    """Its side channel may be busy for seconds while bytes move."""
    remote = met(local)
    local.listener.used = {"remote-0"}
    local.asking.answers[remote.place] = TimeoutError()
    for _ in range(2 * HANDSHAKE_TRIES):
        later(local)
    assert local.peers.is_known("remote-0") and not local.unreachable
    local.peers.probe(remote.address)
    for _ in range(HANDSHAKE_TRIES):
        local.turn()
    assert not local.peers.is_known("remote-0"), "whoever doubts it wants to know"


def test_who_may_write_is_kept_until_it_cannot(local: Local) -> None:
    """Rule R13: its connection is how NIXL hears what it has written. Everybody who waits for it is told at once."""
    neighbour(local)
    local.listener.may_write = lambda agent: True
    local.host.__dict__["living"].clear()
    later(local)
    assert local.peers.is_known("remote-0") and local.unreachable == ["remote-0"]
    local.listener.may_write = lambda agent: False
    later(local)
    assert local.transport.peers == set()


def test_who_is_used_is_not_looked_after(local: Local) -> None:
    remote = met(local)
    for _ in range(10):
        local.clock.advance(LOOK_SECONDS / 2)
        local.peers.send(remote.address, b"")
        local.turn()
    assert local.asking.asked == [remote.place]


def test_many_are_looked_after_in_turn(local: Local) -> None:
    """At most a few handshakes a second, however many there are."""
    for number in range(4 * LOOKS):
        met(local, name=f"r{number}", address=address(f"r{number}", port=6000 + number))
    asked = len(local.asking.asked)
    for _ in range(8):
        later(local)
    assert asked < len(local.asking.asked) <= asked + 8 * LOOKS


# ----------------------------------------------------------------------------------------------------------- forgetting


def test_who_is_named_no_more_is_forgotten(local: Local) -> None:
    """A peer that was not used for FORGOTTEN_SECONDS is removed, with everything that was known of it."""
    remotes = [met(local, name=f"r{n}", address=address(f"r{n}", port=6000 + n)) for n in range(3)]
    local.clock.advance(FORGOTTEN_SECONDS - 1)
    assert Needing(local, remotes[0].address).known
    local.clock.advance(1)
    local.turn()
    assert len(local.peers) == 1
    assert local.dead == ["r1-0", "r2-0"], "whoever keeps something of them lets go of it"
    assert local.transport.peers == {"r0-0"}
    Needing(local, remotes[1].address)
    local.turn()
    assert local.peers.is_known("r1-0")
    local.clock.advance(2 * FORGOTTEN_SECONDS)
    local.turn()
    assert not leftovers(local.peers)


def test_who_is_counted_on_is_not_forgotten(local: Local) -> None:
    met(local)
    local.listener.used = {"remote-0"}
    local.clock.advance(FORGOTTEN_SECONDS)
    local.turn()
    assert len(local.peers) == 1 and not local.dead
    local.listener.used = set()
    local.clock.advance(FORGOTTEN_SECONDS)
    local.turn()
    assert len(local.peers) == 0 and local.dead == ["remote-0"]


def test_who_is_being_asked_is_not_forgotten(local: Local) -> None:
    remote = local.remote(is_answering=False)
    needing = Needing(local, remote.address)
    local.clock.advance(FORGOTTEN_SECONDS)
    local.turn()
    assert len(local.peers) == 1
    local.asking.open.pop().set_result(remote.answer())
    local.turn()
    assert len(needing.known) == 1


def test_many_that_cannot_be_met_leave_nothing(local: Local) -> None:
    """Parameters from clients may name any number of engines."""
    for number in range(100):
        where = address(f"x{number}", port=1000 + number)
        local.asking.answers[where.host, where.port, 0] = ConnectionRefusedError()
        Needing(local, where)
        local.peers.probe(where)
    local.turn()
    assert not leftovers(local.peers)
