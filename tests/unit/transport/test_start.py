# SPDX-License-Identifier: Apache-2.0
"""transport/listener.py, its start: real listeners, asked as peers ask them, on loopback or in their own network."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from unittest import mock

import msgspec
import psutil
import pytest
from support.transports import free_port
from support.waiting import until

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.ids import EngineId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.side_channel_address import Endpoint, SideChannelAddress
from kvcached_nixl.transport import listener as module
from kvcached_nixl.transport import side_channel
from kvcached_nixl.transport.listener import Listener
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.wire.handshake import Answer, Answers, Process, RankHandshake, Weights
from kvcached_nixl.wire.planes import GroupMemory, Planes


def answers(engine: str, incarnation: str = "0" * 16, tp_rank: int = 0) -> Answers:
    planes = Planes((0, 4096), (1, 2), 512, 128, 64, 64, 8, 4, 2, first_head=2)
    rank = RankHandshake(
        EngineId(engine), 2, tp_rank, b"nixl", 0, (GroupMemory((planes,), 2),), 0, "DRAM", False,
        Weights(), Process(), 1, 0,
    )  # fmt: skip
    told = msgspec.msgpack.encode(Answer(incarnation, msgspec.msgpack.encode(rank)))
    return {(0, tp_rank): ("kvcached_nixl/16 pull [vLLM 0.28.0]", told)}


OWN = answers("own")
Start = Callable[[SideChannelAddress], "Channel"]


def address(bound: str = "127.0.0.1", port: int = 0, advertised: str = "", to: int = 0) -> SideChannelAddress:
    port = port or free_port()
    return SideChannelAddress(Endpoint(bound, port), (bound,), Endpoint(advertised or bound, to or port), "a test")


class Channel(SideChannel):
    """Remembers that it was closed."""

    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[SideChannelAddress, Answers], Listener]]:
    """listening(address, answers): another engine's listener."""
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.02)
    with contextlib.ExitStack() as stack:

        def listen(where: SideChannelAddress, told: Answers) -> Listener:
            one = Listener(where.listening, where.bound.port, told, lambda: None, "key")
            stack.callback(one.close)
            return one

        yield listen


@pytest.fixture
def started(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """started(address): starts this engine's side channel, whose answers are `OWN`. Returns what it asked with."""
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.02)
    with contextlib.ExitStack() as stack, caplog.at_level(logging.INFO, SERVER_LOGGER):

        def start(where: SideChannelAddress) -> Channel:
            asking = Channel()
            stack.callback(asking.close)

            def listen() -> Listener:
                return Listener(where.listening, where.bound.port, OWN, lambda: None, "key")

            stack.callback(module.start(where, OWN, listen, asking).close)
            return asking

        yield start


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------------------ reaching itself


def test_an_engine_that_reaches_itself_starts(started: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Loopback serves one host only, which is said once."""
    where = address()
    channel = started(where)
    until(lambda: channel.is_closed)
    assert f"The side channel listens at {where.bound}, and peers get {where.bound}" in caplog.text
    assert f"The side channel answers at {where.bound}" in caplog.text
    (warning,) = warnings(caplog)
    assert "loopback" in warning and "Only servers on this host" in warning


# ------------------------------------------------------------------------------------------------------- another engine


@pytest.mark.parametrize(
    ("there", "who"),
    [
        (answers("another"), "engine another answers"),
        (answers("own", "1" * 16), "engine own answers"),
        ({(0, 0): ("0123abcd", b"")}, "without this package answers ('0123abcd')"),
        ({(0, 0): ("kvcached_nixl/11 pull []", b"")}, "cannot be read"),
        ({}, "without this package answers"),
    ],
    ids=["another", "an earlier start of it", "stock vLLM", "another protocol", "an engine without ranks"],
)
def test_another_engine_at_the_advertised_address_stops_the_start(
    there: Answers, who: str, started: Start, listening: Callable[[SideChannelAddress, Answers], Listener]
) -> None:
    """Two addresses of one host, one port, and a name or a NAT that leads to the other one."""
    other = address("127.0.0.2")
    listening(other, there)
    where = address(port=other.bound.port, advertised="127.0.0.2")
    with pytest.raises(SettingsError) as raised:
        started(where)
    assert who in raised.value.found and str(where.advertised) in raised.value.found
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in raised.value.remedy
    # Its own listener has ended with it.
    socket.create_server(("127.0.0.1", where.bound.port)).close()


def test_another_engine_that_answers_too_late_to_stop_the_start_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    answer: Future[tuple[str, bytes]] = Future()

    late, listener = mock.Mock(**{"ask.return_value": answer}), mock.Mock()
    assert module.start(address(), OWN, lambda: listener, late) is listener
    answer.set_result(answers("another")[0, 0])
    until(lambda: late.close.called)
    assert [one.levelname for one in caplog.records if "engine another answers" in one.getMessage()] == ["ERROR"]


# --------------------------------------------------------------------------------------------------------- no answer


def test_a_network_that_swallows_everything_does_not_hold_up_the_start(
    started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall drops packets; here, a process takes the connection and does not answer."""
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(side_channel, "_REPLY_SECONDS", 2.0)
    with socket.create_server(("127.0.0.2", 0)) as black_hole:
        begun = time.monotonic()
        channel = started(address(advertised="127.0.0.2", to=black_hole.getsockname()[1]))
        assert time.monotonic() - begun < 1.5 and not channel.is_closed
        until(lambda: channel.is_closed)
    *_, warning = warnings(caplog)
    assert "does not answer within 2 s" in warning and "doctor --peer 127.0.0.2:" in warning


def test_a_name_that_only_others_know_is_said(
    started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look_up(host: str) -> list[str]:
        raise OSError("Name or service not known")

    monkeypatch.setattr(module, "look_up", look_up)
    channel = started(address(advertised="prefill-0.example"))
    until(lambda: channel.is_closed)
    (warning,) = warnings(caplog)
    assert "prefill-0.example" in warning and "Name or service not known" in warning


# ------------------------------------------------------------------------------------------------------------- binding


def refusal_at(where: SideChannelAddress) -> SettingsError:
    channel = Channel()
    with pytest.raises(SettingsError) as raised:
        module.start(where, OWN, lambda: Listener(where.listening, where.bound.port, OWN, lambda: None, "key"), channel)
    assert channel.is_closed
    return raised.value


def test_a_port_that_is_taken_says_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = address(port=taken.getsockname()[1])
        with socket.create_connection(taken.getsockname()):
            found = refusal_at(where).found
    expected = f"process {os.getpid()} ({psutil.Process().name()}) of {psutil.Process().username()}"
    assert found == f"port {where.bound.port} of 127.0.0.1 is taken by {expected}"


@pytest.mark.parametrize("error", [PermissionError(), psutil.NoSuchProcess(1), None], ids=str)
def test_a_port_whose_process_cannot_be_seen(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_connections", mock.Mock(side_effect=error, return_value=[]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "may not see (`ss -ltnp sport" in refusal_at(address(port=taken.getsockname()[1])).found


def test_an_address_of_another_host_is_refused_with_what_nat_needs() -> None:
    found = refusal_at(address("192.0.2.250"))
    assert "192.0.2.250" in found.found and "127.0.0.1" in found.found
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0" in found.remedy
    assert "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE_HOST=192.0.2.250" in found.remedy


def test_what_else_keeps_it_from_listening_is_said() -> None:
    where = address()

    def listen() -> Listener:
        raise PermissionError(13, f"the side channel cannot listen at {where.bound}: Permission denied")

    with pytest.raises(SettingsError, match="Permission denied"):
        module.start(where, OWN, listen, Channel())
