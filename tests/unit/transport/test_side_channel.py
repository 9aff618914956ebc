# SPDX-License-Identifier: Apache-2.0
"""transport/{listener,side_channel,zmtp}.py: both sides, against ZMQ's sockets, or something else."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, repeat
from typing import Any

import msgspec
import pytest
import zmq
from support.transports import free_port
from support.waiting import until

from kvcached_nixl.transport import listener as listening
from kvcached_nixl.transport import side_channel as module
from kvcached_nixl.transport.side_channel import SideChannel

JOIN_SECONDS = 20.0
POLL_MS = 20
METADATA = b"\x00metadata\xff"
REPLY = {"compatibility_hash": "abc", "agent_metadata_bytes": METADATA}
CLOCK = msgspec.msgpack.encode(1234.5)
ASK = b"get_meta_msg"


class Stock:
    """A ROUTER in a thread, as ``_nixl_handshake_listener`` is one. ``frames``: what it replies; None: nothing.

    Attributes:
        asked: every question, decoded.
    """

    def __init__(self, frames: list[bytes] | None, address: str = "127.0.0.1") -> None:
        self.frames = frames
        self.asked: list[Any] = []
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self.port = self._socket.bind_to_random_port(f"tcp://[{address}]" if ":" in address else f"tcp://{address}")
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(POLL_MS):
                identity, empty, question = self._socket.recv_multipart()
                self.asked.append(msgspec.msgpack.decode(question))
                if self.frames is not None:
                    self._socket.send_multipart([identity, empty, *self.frames])

    def close(self) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)
        self._context.destroy(linger=0)


@pytest.fixture
def listen() -> Iterator[Callable[..., Stock]]:
    """listen(frames, address): a listener that is closed when the test ends."""
    made: list[Stock] = []

    def make(*arguments: Any) -> Stock:
        made.append(Stock(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPLY_SECONDS", 0.2)


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    one = SideChannel()
    yield one
    one.close()


# --------------------------------------------------------------------------------------------------------------- asking


@pytest.mark.parametrize("further", [[], [CLOCK]], ids=["one frame", "with the clock"])
def test_a_rank_is_asked_for_as_vllm_expects_it(
    listen: Callable[..., Stock], channel: SideChannel, further: list[bytes]
) -> None:
    """By its pipeline stage and its rank; the listener's clock behind the answer is not needed."""
    listener = listen([msgspec.msgpack.encode(REPLY), *further])
    assert channel.ask("127.0.0.1", listener.port, 3).result(JOIN_SECONDS) == ("abc", METADATA)
    assert channel.ask("127.0.0.1", listener.port, 3).result(JOIN_SECONDS) == ("abc", METADATA)
    assert listener.asked == [[ASK, 0, 3]] * 2


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def named(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    """Host name -> addresses. Resolving any other name blocks for a while."""

    def look_up(host: str) -> list[str]:
        if host not in addresses:
            time.sleep(1.0)
            raise OSError("no answer")
        return addresses[host]

    monkeypatch.setattr(module, "look_up", look_up)


@pytest.mark.usefixtures("impatient")
def test_an_address_that_does_not_answer_may_be_the_one_that_lives(
    channel: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(address: str, port: int) -> Any:
        if address == "127.0.0.2":
            await asyncio.sleep(60)
        raise ConnectionRefusedError(f"nobody at {address}")

    named(monkeypatch, peer=["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(TimeoutError, match=r"no connection to 127\.0\.0\.2"):
        channel.ask("peer", free_port(), 0).result(JOIN_SECONDS)


@pytest.mark.usefixtures("impatient")
def test_names_that_nobody_knows_hold_up_no_other_name(
    listen: Callable[..., Stock], channel: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up cannot be called back; and one that has once succeeded serves when the next one does not."""
    listener = listen([msgspec.msgpack.encode(REPLY)])
    named(monkeypatch, peer=["127.0.0.1"])
    lost = [channel.ask(f"lost-{number}", listener.port, 0) for number in range(module._LOOKED_UP_AT_ONCE - 1)]
    assert channel.ask("peer", listener.port, 0).result(JOIN_SECONDS) == ("abc", METADATA)
    named(monkeypatch)
    assert channel.ask("peer", listener.port, 0).result(JOIN_SECONDS) == ("abc", METADATA)
    for future in lost:
        with pytest.raises(OSError, match="no address of lost-"):
            future.result(JOIN_SECONDS)


def test_nobody_listens(channel: SideChannel) -> None:
    """Reported at once and with this error only, because it means that the peer has ended."""
    with pytest.raises(ConnectionRefusedError):
        channel.ask("127.0.0.1", free_port(), 0).result(JOIN_SECONDS)


@pytest.mark.parametrize(
    "host", ["no such host", "a\0b", "x" * 300, "\ud800", "*", "127.0.0.1;tcp://127.0.0.1", "", "."]
)
def test_an_address_that_is_none_is_an_error_and_nobody_is_gone(channel: SideChannel, host: str) -> None:
    """Whatever a client writes into ``remote_host``; these errors are the ones that `Peers` takes in."""
    with pytest.raises((OSError, ValueError)) as raised:
        channel.ask(host, free_port(), 0).result(JOIN_SECONDS)
    # Asyncio takes an empty name for this machine.
    assert not isinstance(raised.value, ConnectionRefusedError) or host == ""


@pytest.mark.usefixtures("impatient")
def test_a_listener_that_keeps_silent_is_not_waited_for(listen: Callable[..., Stock], channel: SideChannel) -> None:
    """It is alive, so this is no refusal."""
    listener = listen(None)
    with pytest.raises(TimeoutError, match=rf"127\.0\.0\.1:{listener.port} does not answer within 0\.2 s") as raised:
        channel.ask("127.0.0.1", listener.port, 1).result(JOIN_SECONDS)
    assert isinstance(raised.value, OSError) and not isinstance(raised.value, ConnectionRefusedError)
    assert listener.asked == [[ASK, 0, 1]]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"compatibility_hash": "abc"}),
        msgspec.msgpack.encode({**REPLY, "compatibility_hash": 5}),
        b"\x91" * 100_000,
        b"\x81\xb2compatibility_hash\xa1\xff",
    ],
    ids=["empty", "rubbish", "half", "number", "nested", "no text"],
)
def test_an_answer_that_is_none_is_an_error_of_its_own(
    listen: Callable[..., Stock], channel: SideChannel, frame: bytes
) -> None:
    """It is neither a refusal nor a timeout: another program's socket may be there."""
    listener = listen([frame])
    with pytest.raises(ValueError, match="the answer of the side channel at .* cannot be read"):
        channel.ask("127.0.0.1", listener.port, 0).result(JOIN_SECONDS)


GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\4\x06\5READY"
MIB = 1 << 20
HOSTILE: dict[str, tuple[Iterable[bytes], str]] = {
    "HTTP": ([b"HTTP/1.1 400 Bad Request"], "HTTP"),
    "an older ZMTP": ([GREETING[:10] + b"\1" + GREETING[11:]], "version 1"),
    "another mechanism": ([GREETING.replace(b"NULL", b"CURV")], "CURV"),
    "an error": ([GREETING, b"\4\7\5ERROR\0"], "ERROR.* is ready"),
    "an answer before the connection is ready": ([GREETING, b"\1\0\0\1x"], "is ready"),
    "no empty frame": ([GREETING, READY, b"\0\1x"], "1 frames"),
    "an empty frame only": ([GREETING, READY, b"\0\0"], "1 frames"),
    "flags that are none": ([GREETING, READY, b"\x08\0"], "flags 0x8"),
    "a frame without end": ([GREETING, READY, b"\2" + b"\xff" * 8, *[bytes(MIB)] * 999], "frame of .* bytes"),
    "frames without end": (chain([GREETING, READY], repeat(b"\1\xff" + bytes(255))), "no end of a message"),
    "commands without end": (chain([GREETING], repeat(READY)), "no end of a message"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_host_that_a_client_has_named_says_no_more_than_an_answer(channel: SideChannel, kind: str) -> None:
    """ZMQ itself would take in frames until memory is full."""
    sent, words = HOSTILE[kind]
    taken = 0

    def serve() -> None:
        nonlocal taken
        with suppress(OSError), server.accept()[0] as peer:
            for piece in sent:
                peer.sendall(piece)
                taken += len(piece)
            peer.recv(MIB)
            peer.recv(MIB)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ValueError, match=f"cannot be read: found .*{words}"):
            channel.ask("127.0.0.1", server.getsockname()[1], 0).result(JOIN_SECONDS)
        thread.join(JOIN_SECONDS)
    assert not thread.is_alive() and taken < 32 * MIB


def test_a_proxy_that_closes_is_asked_again_until_its_side_channel_is_there(
    channel: SideChannel,
) -> None:
    answer = msgspec.msgpack.encode(REPLY)
    answers = b"".join((GREETING, READY, b"\1\0", bytes((0, len(answer))), answer))

    def serve() -> None:
        for _ in range(2):
            server.accept()[0].close()
        with server.accept()[0] as peer:
            peer.sendall(answers)
            peer.recv(MIB)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        assert channel.ask("127.0.0.1", server.getsockname()[1], 0).result(JOIN_SECONDS) == ("abc", METADATA)


def test_connections_that_end_are_no_refusal(channel: SideChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPLY_SECONDS", 0.6)

    def serve() -> None:
        with suppress(OSError):
            while True:
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(OSError, match="has closed the connection") as raised:
            channel.ask("127.0.0.1", server.getsockname()[1], 0).result(JOIN_SECONDS)
    assert not isinstance(raised.value, ConnectionRefusedError)


def test_many_that_do_not_answer_hold_up_nobody(listen: Callable[..., Stock], channel: SideChannel) -> None:
    """C5: eight black holes occupied the pool of handshakes for 50 s."""
    silent, sound = listen(None), listen([msgspec.msgpack.encode(REPLY)])
    waiting = [channel.ask("127.0.0.1", silent.port, 0) for _ in range(100)]
    assert channel.ask("127.0.0.1", sound.port, 0).result(JOIN_SECONDS) == ("abc", METADATA)
    assert not any(future.done() for future in waiting)


def test_closing_waits_for_no_answer(listen: Callable[..., Stock]) -> None:
    """Open questions are not answered any more, and their callers get an error."""
    silent = listen(None)
    asking = SideChannel()
    waiting = [asking.ask("127.0.0.1", silent.port, 0) for _ in range(5)]
    begun = time.monotonic()
    asking.close()
    assert time.monotonic() - begun < module._REPLY_SECONDS / 2
    for future in waiting:
        with pytest.raises((CancelledError, OSError)):
            future.result(0)
    asking.close()


# ------------------------------------------------------------------------------------------------------------ answering


class Own:
    """Our `Listener`, and peers' sockets to it: a new one for each message, as peers have it."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.port = free_port()
        answers = {(0, 0): ("tag 0", b"rank 0"), (0, 1): ("tag 1", b"rank 1"), (1, 0): ("tag 0", b"stage 1")}
        self.listener = listening.Listener(["127.0.0.1"], self.port, answers, self.woken.set, "key")
        self._context = zmq.Context()

    def _sent(self, *frames: bytes) -> Any:
        one = self._context.socket(zmq.DEALER)
        one.setsockopt(zmq.LINGER, 1000)
        one.connect(f"tcp://127.0.0.1:{self.port}")
        one.send_multipart(frames)
        return one

    def say(self, *frames: bytes) -> None:
        self._sent(*frames).close()

    def ask(self, question: Any) -> list[bytes]:
        with self._sent(b"", msgspec.msgpack.encode(question)) as one:
            assert one.poll(JOIN_SECONDS * 1000), "no answer"
            empty, *frames = one.recv_multipart()
        assert empty == b""
        return list(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.listener.close()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    monkeypatch.setattr(listening, "_WATCH_SECONDS", 0.02)
    made = Own()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("question", "compatibility", "metadata"),
    [
        ((ASK, 0), "tag 0", b"rank 0"),
        ((ASK, 1), "tag 1", b"rank 1"),
        ((ASK, 0, 1), "tag 1", b"rank 1"),
        ((ASK, 1, 0), "tag 0", b"stage 1"),
    ],
    ids=str,
)
def test_each_vllms_question_is_answered(own: Own, question: Any, compatibility: str, metadata: bytes) -> None:
    """Those that name a stage expect the listener's clock behind the answer."""
    reply, *further = own.ask(question)
    assert msgspec.msgpack.decode(reply) == {"compatibility_hash": compatibility, "agent_metadata_bytes": metadata}
    assert [type(msgspec.msgpack.decode(frame)) for frame in further] == ([float] if len(question) == 3 else [])


@pytest.mark.parametrize(
    "question",
    [(ASK, 2), (ASK, -1), (ASK, "0"), (ASK, None), (ASK, [0]), (ASK, 1, 1), (ASK, [1], 0), (ASK, 0, 7), (ASK, 2**63)],
    ids=str,
)
def test_a_rank_that_is_not_here_is_answered_in_words(own: Own, question: Any) -> None:
    """B7: it ended the listener. The message is in the field that the asker compares and shows."""
    found = msgspec.msgpack.decode(own.ask(question)[0])
    assert (
        "this engine has [(0, 0), (0, 1), (1, 0)]; correct the router's pp_size and tp_size"
        in found["compatibility_hash"]
    )
    assert found["agent_metadata_bytes"] == b"" and len(found["compatibility_hash"]) < 200
    assert msgspec.msgpack.decode(own.ask((ASK, 1))[0])["compatibility_hash"] == "tag 1"


RUBBISH = {
    "nothing": (b"", b""),
    "no msgpack": (b"", b"\xc1"),
    "a bomb": (b"", b"\x91" * 1000),
    "a larger bomb": (b"", b"\x91" * 60_000),
    "no question": (b"", msgspec.msgpack.encode([b"other", 0])),
    "a number": (b"", msgspec.msgpack.encode(7)),
    "a long list": (b"", msgspec.msgpack.encode([ASK, 0, 0, 0])),
    "one frame": (b"x",),
    "many frames": (b"", b"", b"", b"x"),
    "too long": (b"", b"x" * 5000),
    "half a character": (b"", b"\x92\xa1\xff\x00"),
    "a map as a key": (b"", b"\x81\x80\x01"),
    "another key": (b"", msgspec.msgpack.encode([module.WAKE, b"yek"])),
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_what_cannot_be_read_ends_nothing(own: Own, kind: str) -> None:
    """B7: 1,000 nested arrays, and no handshake any more."""
    for _ in range(3):
        own.say(*RUBBISH[kind])
    assert msgspec.msgpack.decode(own.ask((ASK, 1))[0])["compatibility_hash"] == "tag 1"
    assert not own.woken.is_set()


def test_what_fails_for_one_message_ends_nothing(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the listener's thread no peer would get an answer any more."""
    monkeypatch.setattr(own.listener, "_woken", lambda: [][0])
    own.say(b"", msgspec.msgpack.encode([module.WAKE, b"key"]))
    assert msgspec.msgpack.decode(own.ask((ASK, 1))[0])["compatibility_hash"] == "tag 1"


def test_a_question_of_any_depth_ends_nothing(own: Own) -> None:
    """Just as deep as can be read may be deeper than can be shown."""
    for depth in (*range(1, 60, 7), *range(800, 1010, 1)):
        own.say(b"", b"\x92\xac" + ASK + b"\x91" * depth + b"\xc0")
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline:
        found = msgspec.msgpack.decode(own.ask((ASK, 1))[0])["compatibility_hash"]
        if found == "tag 1":
            break
    assert found == "tag 1"


@pytest.mark.parametrize("kind", [*HOSTILE, "what is no question"])
def test_whoever_reaches_it_says_no_more_than_a_question(own: Own, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """ZMQ itself would take in frames until memory is full. Others are answered, and the log is not filled."""
    sent = HOSTILE[kind][0] if kind in HOSTILE else [GREETING, READY, b"\1\0", b"\0\1x"]
    if kind == "frames without end":
        sent = chain([GREETING, READY], repeat(b"\1\0"))
    taken = 0
    with socket.create_connection(("127.0.0.1", own.port)) as peer:
        with suppress(OSError):
            for piece in sent:
                peer.sendall(piece)
                taken += len(piece)
        with suppress(ConnectionError):
            while peer.recv(MIB):
                pass
    assert taken < 32 * MIB
    assert msgspec.msgpack.decode(own.ask((ASK, 1))[0])["compatibility_hash"] == "tag 1"
    assert not caplog.records


def test_who_says_nothing_is_disconnected_and_our_workers_are_not(
    own: Own, channel: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_IDLE_SECONDS", 0.2)
    channel.wake("127.0.0.1", own.port, "key")
    for sent in ([], [GREETING, READY], [GREETING, READY, b"\1"]):
        with socket.create_connection(("127.0.0.1", own.port)) as peer, suppress(ConnectionError):
            peer.sendall(b"".join(sent))
            while peer.recv(MIB):
                pass
    assert own.woken.wait(JOIN_SECONDS)
    until(lambda: len(own.listener._open) == 1)


def test_connections_are_no_more_than_can_be_served(channel: SideChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait."""
    monkeypatch.setattr(listening, "_CONNECTIONS", 2)
    with closing(Own()) as own, ExitStack() as stack:
        for _ in range(2):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", own.port)))
            assert peer.recv(1)
        waiting = channel.ask("127.0.0.1", own.port, 0)
        with pytest.raises(NotYet):
            waiting.result(0.2)
        stack.pop_all().close()
        assert waiting.result(JOIN_SECONDS) == ("tag 0", b"rank 0")


def test_an_answer_that_is_not_read_ends_its_connection(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_IDLE_SECONDS", 0.2)
    own.listener.answer({(0, 0): ("tag 0", bytes(16 * MIB))})
    question = msgspec.msgpack.encode((ASK, 0))
    with socket.create_connection(("127.0.0.1", own.port)) as peer:
        peer.sendall(GREETING + READY + b"\1\0" + bytes((0, len(question))) + question)
        until(lambda: own.listener._open)
        until(lambda: not own.listener._open)


def test_its_own_workers_wake_it(own: Own, channel: SideChannel) -> None:
    """With the key; again and again, over one connection."""
    for _ in range(3):
        channel.wake("127.0.0.1", own.port, "key")
        assert own.woken.wait(JOIN_SECONDS)
        own.woken.clear()
    assert len(channel._own) == 1 and len(own.listener._open) == 1


def test_a_worker_wakes_an_engine_again_whose_connection_was_lost(own: Own, channel: SideChannel) -> None:
    channel.wake("127.0.0.1", own.port, "yek")
    until(lambda: (("127.0.0.1", own.port) in channel._own) and channel._own["127.0.0.1", own.port][0].at_eof())
    channel.wake("127.0.0.1", own.port, "key")
    assert own.woken.wait(JOIN_SECONDS)


def test_wakes_that_nobody_takes_do_not_pile_up(channel: SideChannel) -> None:
    async def num_tasks() -> int:
        return len(asyncio.all_tasks())

    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(100):
            channel.wake("127.0.0.1", server.getsockname()[1], "key")
        assert asyncio.run_coroutine_threadsafe(num_tasks(), channel._loop).result(JOIN_SECONDS) <= 3


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_lack_of_descriptors_costs_what_is_asked_then(own: Own, channel: SideChannel) -> None:
    """It ended the thread, and each later handshake waited for ever."""
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files") as raised:
            channel.ask("127.0.0.1", own.port, 0).result(JOIN_SECONDS)
        channel.wake("127.0.0.1", own.port, "key")
        with pytest.raises(OSError, match="Too many open files"):
            channel.ask("127.0.0.1", own.port, 0).result(JOIN_SECONDS)
    assert not isinstance(raised.value, ConnectionRefusedError)
    assert channel.ask("127.0.0.1", own.port, 0).result(JOIN_SECONDS) == ("tag 0", b"rank 0")
    channel.wake("127.0.0.1", own.port, "key")
    assert own.woken.wait(JOIN_SECONDS)


def test_a_connection_that_cannot_be_accepted_is_accepted_later(
    own: Own, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "_AGAIN_SECONDS", 0.05)
    with socket.socket() as peer, caplog.at_level(logging.DEBUG, listening.logger.name):
        with no_descriptors():
            peer.connect(("127.0.0.1", own.port))
            until(lambda: "cannot accept a connection" in caplog.text)
        assert peer.recv(1)
    assert {one.levelno for one in caplog.records} == {logging.DEBUG}


@pytest.mark.parametrize(
    ("addresses", "reached"),
    [
        (["127.0.0.1", "127.0.0.2"], ["127.0.0.1", "127.0.0.2"]),
        (["192.0.2.250", "127.0.0.2"], ["127.0.0.2"]),
        pytest.param(
            ["127.0.0.1", "::1"],
            ["127.0.0.1", "::1"],
            marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"),
        ),
    ],
    ids=["both", "one is another host's", "both versions"],
)
def test_it_listens_at_each_address_of_a_name_that_this_host_has(
    addresses: list[str], reached: list[str], monkeypatch: pytest.MonkeyPatch, channel: SideChannel
) -> None:
    monkeypatch.setattr(listening, "_WATCH_SECONDS", 0.02)
    port, woken = free_port(), threading.Event()
    listener = listening.Listener(addresses, port, {(0, 0): ("tag", b"rank")}, woken.set, "key")
    try:
        for one in reached:
            assert channel.ask(one, port, 0).result(JOIN_SECONDS) == ("tag", b"rank")
            channel.wake(one, port, "key")
            assert woken.wait(JOIN_SECONDS)
            woken.clear()
    finally:
        listener.close()


def test_when_it_is_closed_nobody_listens(own: Own, channel: SideChannel) -> None:
    own.listener.close()
    with pytest.raises(ConnectionRefusedError):
        channel.ask("127.0.0.1", own.port, 0).result(JOIN_SECONDS)
