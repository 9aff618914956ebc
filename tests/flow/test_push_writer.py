# SPDX-License-Identifier: Apache-2.0
"""The writer thread: what it does for the engine's thread, and that one peer never holds up another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from push_pair import BLOCK_SIZE, LEASE_SECONDS, TIMEOUT_SECONDS, Pool, make_receiver, make_sender

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.transport.memory import MemoryTransport, Network
from kvcached_nixl.wire.lease import EXTENSION
from kvcached_nixl.wire.push import Peer, Registration, draw_attempt
from kvcached_nixl.worker.push_commands import (
    Connected,
    Decline,
    Finish,
    Offer,
    Outcome,
    PeerGone,
    Refuse,
    Register,
    Renew,
    Restart,
    Stop,
    Withdraw,
)
from kvcached_nixl.worker.push_connections import HANDSHAKE_TRIES
from kvcached_nixl.worker.push_writer import (
    BUSY_POLL_SECONDS,
    IDLE_POLL_SECONDS,
    POLL_SECONDS,
    PROBE_SECONDS,
    Push,
)

WAIT_SECONDS = 20.0
TOKENS = 10


class Engine:
    """An engine's push, and everything it did, taken by a test that plays the engine's thread."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.address = Peer(EngineId(name), "127.0.0.1", 1, 1, 0)
        self.pool = Pool(32)
        self.transport: MemoryTransport = cluster.network.agent(name)
        sender = make_sender(self.transport, cluster.clock, self.pool)
        receiver = make_receiver(self.transport, cluster.clock)
        self.push = Push(self.transport, cluster.clock, sender, receiver, cluster.connect)
        self.seen = Outcome()

    def look(self) -> Outcome:
        outcome = self.push.take_outcome()
        self.seen.received |= outcome.received
        self.seen.failed |= outcome.failed
        self.seen.done |= outcome.done
        self.seen.quiet |= outcome.quiet
        return self.seen

    def register(self, name: str, prefill: Engine, transfer: str = "t") -> list[int]:
        blocks = self.pool.take(-(-TOKENS // BLOCK_SIZE))
        registration = Registration(
            transfer, draw_attempt(), DecodeRequestId(name), self.address, 0, TOKENS, BLOCK_SIZE, (tuple(blocks),)
        )
        self.push.submit(Register(registration, (prefill.address,)))
        return blocks

    def compute(self, name: str, transfer: str = "t", is_computed: Callable[[], bool] = lambda: True) -> None:
        request_id = PrefillRequestId(name)
        blocks = self.pool.take(-(-TOKENS // BLOCK_SIZE))
        self.pool.fill(1, blocks, range(TOKENS))
        self.push.submit(Offer(transfer, request_id, (blocks,), TOKENS, is_computed))
        self.push.submit(Finish(request_id))


class Cluster:
    """Engines that find each other by name.

    ``hung`` holds back the handshake with an engine; ``gone`` names those that nobody answers for; ``silent`` says how
    often an engine does not answer.
    """

    def __init__(self) -> None:
        self.network, self.clock = Network(immediate=True), ManualClock()
        self.engines: dict[str, Engine] = {}
        self.hung: dict[str, threading.Event] = {}
        self.gone: set[str] = set()
        self.silent: dict[str, int] = {}

    def engine(self, name: str) -> Engine:
        self.engines[name] = Engine(self, name)
        return self.engines[name]

    def connect(self, address: Peer) -> Connected:
        if address.engine_id in self.hung:
            self.hung[address.engine_id].wait(WAIT_SECONDS)
        if address.engine_id in self.gone:
            raise PeerGone(f"nobody listens at {address.host}:{address.port}")
        if self.silent.get(address.engine_id):
            self.silent[address.engine_id] -= 1
            raise TimeoutError(f"{address.engine_id} does not answer")
        engine = self.engines[address.engine_id]
        return Connected(engine.transport.metadata(), 0, engine.pool.planes)

    def until(self, found: Callable[[], object]) -> None:
        """Turn every engine's wheel until ``found``; handshakes run on real threads."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not found():
            assert time.monotonic() < deadline, "nothing came of it"
            for engine in list(self.engines.values()):
                engine.push.turn()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for event in made.hung.values():
        event.set()
    for engine in made.engines.values():
        engine.push.close()


def test_two_threads_push_a_request(cluster: Cluster) -> None:
    """Each engine's thread only hands over commands and takes outcomes."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    for engine in (prefill, decode):
        engine.push.start()
    blocks = decode.register("d1", prefill)
    prefill.compute("p1")
    deadline = time.monotonic() + WAIT_SECONDS
    while not (decode.look().received and prefill.look().done):
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)
    assert decode.pool.holds(1, blocks, 0, TOKENS)
    assert (decode.seen.received, prefill.seen.done) == ({"d1"}, {"p1"})
    assert not decode.push.dropped
    assert not prefill.push.dropped


def test_a_step_is_offered_when_the_device_has_ended_it_and_its_end_waits_for_it(cluster: Cluster) -> None:
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    computed = threading.Event()
    decode.register("d1", prefill)
    prefill.compute("p1", is_computed=computed.is_set)
    cluster.until(lambda: "d" in prefill.transport._peers)
    for _ in range(5):
        assert prefill.push.turn() == POLL_SECONDS
        decode.push.turn()
    assert prefill.transport.posted == []
    computed.set()
    cluster.until(lambda: decode.look().received and prefill.look().done)


def test_a_handshake_that_hangs_holds_up_nobody_else(cluster: Cluster) -> None:
    hung, lively, decode = cluster.engine("hung"), cluster.engine("p"), cluster.engine("d")
    cluster.hung["hung"] = threading.Event()
    decode.register("stuck", hung, "t1")
    decode.register("fine", lively, "t2")
    lively.compute("p1", "t2")
    cluster.until(lambda: decode.look().received)
    assert decode.seen.received == {"fine"}
    hung.compute("p2", "t1")
    cluster.hung["hung"].set()
    cluster.until(lambda: len(decode.look().received) == 2)


def test_a_request_whose_prefill_is_gone_fails(cluster: Cluster) -> None:
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    cluster.gone.add("p")
    decode.register("d1", prefill)
    cluster.until(lambda: decode.look().failed)
    assert "nobody listens" in decode.seen.failed[DecodeRequestId("d1")]


@pytest.mark.parametrize("silent", ["p", "d"])
@pytest.mark.parametrize("times", [HANDSHAKE_TRIES - 1, HANDSHAKE_TRIES])
def test_a_peer_that_does_not_answer_at_once_is_asked_again(cluster: Cluster, silent: str, times: int) -> None:
    """It stands still for a while, on either side; one that never answers fails the request, on both."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    cluster.silent[silent] = times
    decode.register("d1", prefill)
    prefill.compute("p1")
    if times < HANDSHAKE_TRIES:
        cluster.until(lambda: decode.look().received and prefill.look().done)
        assert not decode.seen.failed
    elif silent == "p":
        cluster.until(lambda: decode.look().failed)
        assert "does not answer" in decode.seen.failed[DecodeRequestId("d1")]
    else:
        # Prefill cannot write, and asks again to say so.
        cluster.until(lambda: decode.look().failed)
    assert cluster.silent[silent] == 0


def test_a_request_withdrawn_before_its_handshake_is_over_at_once(cluster: Cluster) -> None:
    """Nobody was told of it, so nobody writes."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    cluster.hung["p"] = threading.Event()
    decode.register("d1", prefill)
    decode.push.turn()
    decode.push.submit(Withdraw(DecodeRequestId("d1"), "aborted"))
    decode.push.turn()
    assert decode.look().failed == {"d1": "aborted"}
    cluster.hung["p"].set()
    prefill.compute("p1")
    cluster.until(lambda: not decode.push._connections.is_asking)
    assert prefill.transport.posted == []


def test_a_prefill_that_dies_in_silence_is_found_out(cluster: Cluster) -> None:
    """Decode asks it to stop, hears nothing, and another handshake shows that it is gone."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    decode.register("d1", prefill)
    cluster.until(lambda: len(decode.push._receiver))
    cluster.network.kill("p")
    del cluster.engines["p"]
    cluster.clock.advance(TIMEOUT_SECONDS)
    cluster.hung["p"] = threading.Event()
    for _ in range(3):
        decode.push.turn()
        cluster.clock.advance(PROBE_SECONDS)
    assert not decode.look().failed, "it may still write"
    cluster.gone.add("p")
    cluster.hung["p"].set()
    cluster.until(lambda: decode.look().failed)


def test_a_prefill_that_dies_while_decode_waits_is_found_out_before_the_timeout(cluster: Cluster) -> None:
    """However long prefill may take for a request, its death is noticed at once."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    decode.register("d1", prefill)
    cluster.until(lambda: len(decode.push._receiver))
    decode.push.turn()
    cluster.network.kill("p")
    del cluster.engines["p"]
    cluster.gone.add("p")
    cluster.clock.advance(PROBE_SECONDS)
    assert PROBE_SECONDS < TIMEOUT_SECONDS
    cluster.until(lambda: decode.look().failed)


def test_a_prefill_that_was_restarted_at_its_address_is_a_new_one(cluster: Cluster) -> None:
    """Its predecessor's requests fail; the next one handshakes again."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    decode.register("d1", prefill)
    cluster.until(lambda: len(decode.push._receiver))
    cluster.network.kill("p")
    cluster.engines["p"] = successor = Engine(cluster, "p2")
    cluster.clock.advance(TIMEOUT_SECONDS)
    cluster.until(lambda: decode.look().failed)
    decode.register("d2", prefill, "t2")
    successor.compute("p1", "t2")
    cluster.until(lambda: decode.look().received)
    assert decode.seen.received == {"d2"}


def test_aborted_and_preempted_requests_of_prefill_are_let_go(cluster: Cluster) -> None:
    """What the device has not finished of them is not offered any more."""
    prefill = cluster.engine("p")
    prefill.compute("aborted", "t1", is_computed=lambda: False)
    prefill.compute("preempted", "t2", is_computed=lambda: False)
    prefill.push.submit(Stop(PrefillRequestId("aborted"), "aborted"))
    prefill.push.submit(Restart(PrefillRequestId("preempted"), 7))
    cluster.until(lambda: prefill.look().done and prefill.look().quiet)
    assert (prefill.seen.done, prefill.seen.quiet) == ({"aborted"}, {7})
    assert prefill.push.turn() == IDLE_POLL_SECONDS


@pytest.mark.parametrize("computed", [True, False])
def test_decode_is_told_at_once_of_a_prefill_that_was_aborted(cluster: Cluster, computed: bool) -> None:
    """Even if the device had not finished the first step of it, so that nothing had been offered."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    decode.register("d1", prefill)
    cluster.until(lambda: len(decode.push._receiver) and len(prefill.push._sender))
    blocks = prefill.pool.take(1)
    prefill.push.submit(Offer("t", PrefillRequestId("p1"), (blocks,), 4, lambda: computed))
    prefill.push.turn()
    prefill.push.submit(Stop(PrefillRequestId("p1"), "aborted"))
    cluster.until(lambda: prefill.look().done and decode.look().failed)


def test_prefill_looks_often_while_it_has_what_decode_will_ask_for(cluster: Cluster) -> None:
    """NIXL has no event for a registration that arrives, and the client waits for its first token meanwhile."""
    prefill = cluster.engine("prefill")
    assert prefill.push.turn() == IDLE_POLL_SECONDS
    prefill.compute("p")
    assert prefill.push.turn() == POLL_SECONDS


def test_it_leaves_the_interpreter_to_an_engine_that_computes(cluster: Cluster) -> None:
    """Unless a request has finished and its last WRITE is in flight: its client waits for nothing else."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    ended = threading.Event()
    for engine in (prefill, decode):
        engine.push.engine_computes = True
        assert engine.push.turn() == IDLE_POLL_SECONDS
    cluster.network.immediate = False
    decode.register("d1", prefill)
    prefill.compute("p1", is_computed=ended.is_set)

    def deliver(writes: bool) -> None:
        for one in [one for one in cluster.network.pending if one.is_write is writes]:
            cluster.network.deliver(one)

    cluster.until(lambda: deliver(False) or "d" in prefill.transport._peers)
    assert (prefill.push.turn(), decode.push.turn()) == (BUSY_POLL_SECONDS, BUSY_POLL_SECONDS)
    ended.set()
    cluster.until(lambda: prefill.transport.posted)
    assert prefill.push.turn() == POLL_SECONDS
    deliver(True)
    cluster.until(lambda: decode.look().received and prefill.look().done)
    assert (prefill.push.turn(), decode.push.turn()) == (IDLE_POLL_SECONDS, IDLE_POLL_SECONDS)


def test_a_request_that_decode_declines_is_let_go_when_it_ends(cluster: Cluster) -> None:
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    decode.push.submit(Decline("t", (prefill.address,)))
    prefill.compute("p1")
    cluster.until(lambda: prefill.look().done)


def test_rubbish_and_what_vllm_says_to_those_that_pull_is_counted(cluster: Cluster) -> None:
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    decode.transport.add_peer(b"p")
    for notification in (b"HB:a,b", b"HB:\xff", b"KVNX1:rubbish", b"req:1"):
        decode.transport.send("p", notification)
    prefill.push.turn()
    assert prefill.push.dropped == {"malformed": 3}


@pytest.mark.parametrize("name", ["p1", "t"], ids=["prefill's id for it", "the transfer's name"])
def test_a_beat_keeps_what_waits_for_decode(name: str, cluster: Cluster) -> None:
    """It goes out when the handshake is done, and a request that nobody names is let go."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    prefill.compute("p1", "t")
    prefill.compute("p2", "another")
    prefill.push.turn()
    cluster.clock.advance(LEASE_SECONDS - 1)
    decode.push.submit(Renew([PrefillRequestId(name), PrefillRequestId("unknown")], (prefill.address,)))
    cluster.until(lambda: prefill.push._sender._leases[PrefillRequestId("p1")] > LEASE_SECONDS)
    cluster.clock.advance(1)
    cluster.until(lambda: prefill.look().done)
    assert prefill.look().done == {"p2"}
    cluster.clock.advance(EXTENSION * LEASE_SECONDS - 1)
    cluster.until(lambda: prefill.look().done == {"p1", "p2"})


def test_beats_to_a_prefill_that_does_not_answer_are_dropped(cluster: Cluster) -> None:
    decode = cluster.engine("d")
    address = Peer(EngineId("p"), "127.0.0.1", 1, 1, 0)
    cluster.gone.add("p")
    decode.push.submit(Renew([PrefillRequestId("p1")], (address,)))
    cluster.until(lambda: not decode.push._unconnected and not decode.push._connections.is_asking)
    assert decode.look() == Outcome()


def test_a_defect_of_the_thread_is_raised_where_the_engine_can_see_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push never goes on half alive."""
    prefill = cluster.engine("p")

    def broken() -> list[tuple[str, bytes]]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(prefill.transport, "received", broken)
    prefill.push.start()
    assert prefill.push._thread is not None
    prefill.push._thread.join(WAIT_SECONDS)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="planted"):
        prefill.push.take_outcome(WAIT_SECONDS)
    assert time.monotonic() - begun < WAIT_SECONDS
    with pytest.raises(RuntimeError, match="planted"):
        prefill.push.submit(Finish(PrefillRequestId("p")))


def test_who_waits_for_an_outcome_has_it_as_soon_as_there_is_one(cluster: Cluster) -> None:
    """Received, failed without a handshake, or free: each ends the wait, once."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    cluster.gone.add("nobody")
    nobody = cluster.engine("nobody")

    def awaited(engine: Engine) -> Outcome:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(engine.push.take_outcome, WAIT_SECONDS)
            cluster.until(waiting.done)
            return waiting.result()

    begun = time.monotonic()
    decode.register("d1", nobody)
    assert set(awaited(decode).failed) == {"d1"}
    decode.register("d2", prefill)
    prefill.compute("p")
    assert awaited(decode).received == {"d2"}
    assert awaited(prefill).done == {"p"}
    assert time.monotonic() - begun < WAIT_SECONDS
    assert decode.push.take_outcome(POLL_SECONDS) == Outcome()


@pytest.mark.parametrize("side", ["decode's registration", "prefill's answer"])
def test_a_connection_that_was_lost_is_made_anew(side: str, cluster: Cluster) -> None:
    """Both engines live: one request fails, and it is said so at once; the next ones are served."""
    prefill, decode = cluster.engine("p"), cluster.engine("d")
    decode.register("d1", prefill)
    prefill.compute("p1")
    cluster.until(lambda: decode.look().received and prefill.look().done)
    if side == "decode's registration":
        decode.transport.lose("p")
        decode.register("d2", prefill, "again")
    else:
        # Prefill's request ends before it was computed: decode is told.
        decode.register("d2", prefill, "again")
        cluster.until(lambda: len(prefill.push._sender))
        prefill.transport.lose("d")
        prefill.push.submit(Refuse("again", "gone"))
    cluster.until(lambda: "d2" in decode.look().failed)
    cluster.until(lambda: not (prefill.push._connections.is_asking or decode.push._connections.is_asking))
    blocks = decode.register("d3", prefill, "third")
    prefill.compute("p3", "third")
    cluster.until(lambda: "d3" in decode.look().received)
    assert decode.pool.holds(1, blocks, 0, TOKENS)
