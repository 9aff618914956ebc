# SPDX-License-Identifier: Apache-2.0
"""transport/side_channel.py, the watch, with real side channels: each change is told once, with all ranks' answers."""

from __future__ import annotations

import queue
import threading

import pytest
from support.transports import free_port

from kvcached_nixl.side_channel_address import Endpoint
from kvcached_nixl.transport import side_channel
from kvcached_nixl.transport.listener import Listener
from kvcached_nixl.transport.side_channel import HandshakeWatch, SideChannel
from kvcached_nixl.wire.handshake import Answers


class Told:
    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[int, list[tuple[str, bytes]]]] = queue.Queue()
        self.headroom: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self.failures = 0

    def say_headroom(self, index: int, said: bytes) -> None:
        self.headroom.put((index, said))

    def say_kind(self, index: int, said: list[tuple[str, bytes]]) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no room for a metric")
        self.queue.put((index, said))

    def get(self) -> tuple[int, list[tuple[str, bytes]]]:
        return self.queue.get(timeout=10)

    def is_silent(self) -> bool:
        with pytest.raises(queue.Empty):
            self.queue.get(timeout=0.3)
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "WATCH_SECONDS", 0.02)


def answers(letter: bytes, ranks: int = 2) -> Answers:
    return {(0, rank): ("tag", letter + b"%d" % rank) for rank in range(ranks)}


def listener(port: int, said: Answers) -> Listener:
    return Listener(["127.0.0.1"], port, said, lambda: None, "key")


def test_each_change_is_told_once() -> None:
    told, ports = Told(), (free_port(), free_port())
    engines = {index: Endpoint("127.0.0.1", port) for index, port in enumerate(ports)}
    watch = HandshakeWatch(SideChannel(), engines, 2, 1, told)
    try:
        listeners = [listener(port, answers(letter)) for port, letter in zip(ports, (b"a", b"b"), strict=True)]
        first = sorted(told.get() for _ in range(2))
        assert first == [(0, [*answers(b"a").values()]), (1, [*answers(b"b").values()])]
        # Hidden while weights are changed, then with other weights.
        listeners[1].answer({})
        assert told.is_silent()
        listeners[1].answer(answers(b"c"))
        assert told.get() == (1, [*answers(b"c").values()])
        for one in listeners:
            one.close()
        assert told.is_silent()
    finally:
        watch.close()


def test_an_engines_headroom_is_asked_again_and_again() -> None:
    """As it is at that moment; one that cannot be read, or is not known, is left out."""
    told, port, said = (
        Told(),
        free_port(),
        iter([b"first", RuntimeError("changed size during iteration"), b"", b"last"]),
    )

    def headroom() -> bytes:
        found = next(said, b"last")
        if isinstance(found, Exception):
            raise found
        return found

    one = Listener(["127.0.0.1"], port, answers(b"a", 1), lambda: None, "key", headroom)
    watch = HandshakeWatch(SideChannel(), {3: Endpoint("127.0.0.1", port)}, 1, 1, told)
    try:
        assert [told.headroom.get(timeout=10) for _ in range(2)] == [(3, b"first"), (3, b"last")]
    finally:
        watch.close()
        one.close()


def test_a_failure_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    told, port = Told(), free_port()
    told.failures = 2
    watch = HandshakeWatch(SideChannel(), {0: Endpoint("127.0.0.1", port)}, 1, 1, told)
    one = listener(port, answers(b"a", 1))
    try:
        assert told.get() == (0, [("tag", b"a0")])
        assert sum("not in the metrics" in message for message in caplog.messages) == 2
    finally:
        watch.close()
        one.close()


def test_it_ends_with_whom_it_tells() -> None:
    told = Told()
    watch = HandshakeWatch(SideChannel(), {}, 1, 1, told)
    (thread,) = (one for one in threading.enumerate() if one.name == "kvcached-nixl-handshake-watch")
    del told
    thread.join(10)
    assert not thread.is_alive()
    watch.close()
