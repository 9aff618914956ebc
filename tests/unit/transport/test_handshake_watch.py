# SPDX-License-Identifier: Apache-2.0
"""transport/handshake_watch.py, with real side channels: each change is told once, with the answers of all ranks."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from kvcached_nixl.side_channel_address import Endpoint
from kvcached_nixl.transport import handshake_watch
from kvcached_nixl.transport.handshake_watch import HandshakeWatch
from kvcached_nixl.transport.side_channel import Listener, SideChannel

Answers = dict[int, tuple[str, bytes]]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.Queue[tuple[int, list[tuple[str, bytes]]]]]:
    monkeypatch.setattr(handshake_watch, "INTERVAL_SECONDS", 0.02)
    yield queue.Queue()


def answers(letter: bytes, ranks: int = 2) -> Answers:
    return {rank: ("tag", letter + b"%d" % rank) for rank in range(ranks)}


def test_each_change_is_told_once(told: queue.Queue[tuple[int, list[tuple[str, bytes]]]]) -> None:
    ports = free_port(), free_port()
    engines = {index: Endpoint("127.0.0.1", port) for index, port in enumerate(ports)}
    watch = HandshakeWatch(SideChannel(names_stage=True), engines, 2, lambda index, said: told.put((index, said)))
    try:
        listeners = [
            Listener(["127.0.0.1"], port, answers(letter), lambda: None, "key")
            for port, letter in zip(ports, (b"a", b"b"), strict=True)
        ]
        first = sorted(told.get(timeout=10) for _ in range(2))
        assert first == [(0, [*answers(b"a").values()]), (1, [*answers(b"b").values()])]
        # Hidden while weights are changed, then with other weights.
        listeners[1].answer({})
        with pytest.raises(queue.Empty):
            told.get(timeout=0.3)
        listeners[1].answer(answers(b"c"))
        assert told.get(timeout=10) == (1, [*answers(b"c").values()])
        for one in listeners:
            one.close()
        with pytest.raises(queue.Empty):
            told.get(timeout=0.3)
    finally:
        watch.close()
