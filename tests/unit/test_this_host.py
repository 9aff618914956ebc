# SPDX-License-Identifier: Apache-2.0
"""this_host.py: who has a port, as the kernel tells it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvcached_nixl import this_host as module
from kvcached_nixl.this_host import own_addresses, port_holders

LISTENING = """
import socket, sys
held = open(sys.argv[2]) if sys.argv[2] else None
listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[Callable[..., tuple[int, int]]]:
    """listener(address, file, *arguments): another process that listens and keeps a file open. Returns (pid, port)."""
    made: list[subprocess.Popen[str]] = []

    def make(address: str = "127.0.0.1", file: object = "", *arguments: str) -> tuple[int, int]:
        command = [sys.executable, "-c", LISTENING, address, str(file), *arguments]
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        made.append(one)
        assert one.stdout is not None
        return one.pid, int(one.stdout.readline())

    yield make
    for one in made:
        one.communicate()


def test_a_process_that_listens_is_named(listener: Callable[..., tuple[int, int]]) -> None:
    """With what it serves of its command line: the rest may be secret."""
    secrets = ("--api-key", "sk-1", "sk-2", "--hf-token=sk-3", '{"api_key":"sk-4"}', "Bearer sk-5", "https://u:sk-6@h/")
    pid, port = listener("127.0.0.1", "", "--served-model-name", "m", *secrets, "--port=8000")
    (found,) = port_holders(port, ["127.0.0.1"])
    assert found.address == "127.0.0.1" and not found.is_engine
    assert f"process {pid} (" in found.process and psutil.Process().username() in found.process
    assert found.process.endswith(f"{sys.executable} --served-model-name m --port=8000 ...")
    assert "sk-" not in found.process


def test_the_program_is_shown_without_a_password() -> None:
    class Process:
        @staticmethod
        def cmdline() -> list[str]:
            return ["python", "-m", "vllm.serve", "https://user:sk-1@host/model", "sk-2", "--host", "h"]

    assert module._command(Process) == "python -m vllm.serve https://***@host/model --host h ..."


@pytest.mark.parametrize(
    ("listening", "wished", "is_in_the_way"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "::", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.1", "::1", False),
    ],
)
def test_only_a_socket_that_is_in_the_way_is_named(
    listening: str, wished: str, is_in_the_way: bool, listener: Callable[..., tuple[int, int]]
) -> None:
    _, port = listener(listening)
    assert len(port_holders(port, [wished])) == is_in_the_way


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        *(("0.0.0.0", "127.0.0.1", True), ("0.0.0.0", "::", True), ("0.0.0.0", "::1", False)),
        *(("::", "10.0.0.1", True), ("::", "::1", True), ("::ffff:10.0.0.1", "10.0.0.1", True)),
        *(("10.0.0.1", "10.0.0.2", False), ("::1", "127.0.0.1", False)),
    ],
)
def test_addresses_meet_as_the_kernel_has_them_meet(
    one: str, other: str, meet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same table as with ZMQ's sockets: SO_REUSEADDR, which it sets, lets no two of them listen."""
    socket_there = SimpleNamespace(laddr=SimpleNamespace(ip=one, port=5600), status="LISTEN", pid=None)
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [socket_there])
    assert bool(port_holders(5600, [other])) is meet


def test_this_process_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        (found,) = port_holders(own.getsockname()[1], ["127.0.0.1"])
    assert f"this process itself ({os.getpid()})" in found.process


def test_a_connection_is_told_from_a_listener(listener: Callable[..., tuple[int, int]]) -> None:
    """A connection's own port is as much in the way, and comes from the system's range of them."""
    _, port = listener()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        found = port_holders(connection.getsockname()[1], ["127.0.0.1"])
    # Another process may have a connection to elsewhere from the same port.
    assert any("for a connection of its own (ESTABLISHED)" in one.process for one in found)


@pytest.mark.parametrize(
    ("folder", "is_engine"), [("kvcached-tp-n-1a2b3c4d-ff", True), ("kvcached", False), ("other-tp", False)]
)
def test_an_engine_with_this_package_is_known_by_the_lock_on_its_name(
    folder: str, is_engine: bool, tmp_path: Path, listener: Callable[..., tuple[int, int]]
) -> None:
    file = tmp_path / folder / "owner"
    file.parent.mkdir()
    file.touch()
    _, port = listener("127.0.0.1", file)
    assert [one.is_engine for one in port_holders(port, ["127.0.0.1"])] == [is_engine]


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), PermissionError("no")])
def test_what_this_process_may_not_know_is_no_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(psutil, "net_connections", refuse)
    assert port_holders(5600, ["0.0.0.0"]) == []


def test_this_hosts_addresses_have_no_scope() -> None:
    found = own_addresses()
    assert "127.0.0.1" in found and not [one for one in found if "%" in one]
