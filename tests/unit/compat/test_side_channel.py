# SPDX-License-Identifier: Apache-2.0
"""compat/side_channel.py: against a socket that answers as vLLM's listener does, or does not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvcached_nixl.compat import side_channel as module

zmq = pytest.importorskip("zmq", reason="vLLM's side channel is a ZMQ socket: pip install pyzmq")

JOIN_SECONDS = 20.0
POLL_MS = 20
METADATA = b"\x00metadata\xff"
REPLY = {"compatibility_hash": "abc", "agent_metadata_bytes": METADATA}
CLOCK = msgspec.msgpack.encode(1234.5)


class Listener:
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
def listen() -> Iterator[Callable[..., Listener]]:
    """listen(frames, address): a listener that is closed when the test ends."""
    made: list[Listener] = []

    def make(*arguments: Any) -> Listener:
        made.append(Listener(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPLY_SECONDS", 0.2)


@pytest.mark.parametrize("further", [[], [CLOCK]], ids=["one frame", "with the clock"])
@pytest.mark.parametrize(("names_stage", "question"), [(False, [b"get_meta_msg", 3]), (True, [b"get_meta_msg", 0, 3])])
def test_a_rank_is_asked_for_as_each_vllm_expects_it(
    listen: Callable[..., Listener], names_stage: bool, question: list[Any], further: list[bytes]
) -> None:
    """By its rank, since 0.26 by its pipeline stage too; the listener's clock behind the answer is not needed."""
    listener = listen([msgspec.msgpack.encode(REPLY), *further])
    ask = module.side_channel(names_stage)
    assert ask("127.0.0.1", listener.port, 3) == ("abc", METADATA)
    assert ask("127.0.0.1", listener.port, 3) == ("abc", METADATA)
    assert listener.asked == [question, question]


def test_fields_that_are_not_needed_are_not_looked_at(listen: Callable[..., Listener]) -> None:
    listener = listen([msgspec.msgpack.encode({**REPLY, "kv_cache_layout": "NHD"})])
    assert module.side_channel(True)("127.0.0.1", listener.port, 0) == ("abc", METADATA)


def test_an_address_of_the_sixth_version_is_reached(listen: Callable[..., Listener]) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    listener = listen([msgspec.msgpack.encode(REPLY)], "::1")
    assert module.side_channel(False)("::1", listener.port, 0) == ("abc", METADATA)


def test_a_name_is_looked_up_as_the_listener_looks_it_up(
    listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM allows the sixth version for addresses of it alone, so for a name it listens on the fourth.

    ZMQ tries one address of a name. Where "localhost" is ::1 too, that would be one at which nobody listens.
    """
    allowed: list[int] = []

    class Socket(zmq.Socket):  # type: ignore[misc,name-defined]
        def setsockopt(self, option: int, value: int) -> None:
            if option == zmq.IPV6:
                allowed.append(value)
            super().setsockopt(option, value)

    listener = listen([msgspec.msgpack.encode(REPLY)])
    monkeypatch.setattr(zmq.Context, "_socket_class", Socket)
    assert module.side_channel(False)("localhost", listener.port, 0) == ("abc", METADATA)
    assert not any(allowed)


def test_nobody_listens() -> None:
    """Told at once and by this error alone, because it says that the peer is gone."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        module.side_channel(True)("127.0.0.1", port, 0)


@pytest.mark.usefixtures("impatient")
def test_a_listener_that_keeps_silent_is_not_waited_for(listen: Callable[..., Listener]) -> None:
    """It is alive, so this is no refusal."""
    listener = listen(None)
    with pytest.raises(TimeoutError, match=rf"127\.0\.0\.1:{listener.port} does not answer within 0\.2 s") as raised:
        module.side_channel(True)("127.0.0.1", listener.port, 1)
    assert not isinstance(raised.value, ConnectionRefusedError)
    assert listener.asked == [[b"get_meta_msg", 0, 1]]


@pytest.mark.usefixtures("impatient")
def test_a_process_that_hangs_holds_up_no_thread() -> None:
    """Its kernel takes the connection and nobody reads; the question that is left over does not keep the asker."""
    with socket.create_server(("127.0.0.1", 0)) as hung, pytest.raises(TimeoutError):
        module.side_channel(True)("127.0.0.1", hung.getsockname()[1], 0)


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", msgspec.msgpack.encode({"compatibility_hash": "abc"})], ids=["empty", "rubbish", "half"]
)
def test_an_answer_that_is_none_is_an_error_of_its_own(listen: Callable[..., Listener], frame: bytes) -> None:
    """Neither refused nor late: somebody else's socket may be there."""
    listener = listen([frame])
    with pytest.raises(msgspec.DecodeError):
        module.side_channel(False)("127.0.0.1", listener.port, 0)
