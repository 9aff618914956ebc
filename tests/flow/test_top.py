# SPDX-License-Identifier: Apache-2.0
"""`kvcached-nixl top` over real HTTP on loopback, and in a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from support.metrics_servers import HOST, MetricsServer, engine_text

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "kvcached_nixl", "top")
WAIT_SECONDS = 30.0
TAKE, GIVE_BACK = b"\x1b[?1049h", b"\x1b[?1049l"


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", "LANG": "C.UTF-8", **more}


def top(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = (*COMMAND, "--once", "--interval", "0.5", *arguments)
    return subprocess.run(
        command, env=environ(**more), capture_output=True, text=True, check=False, timeout=WAIT_SECONDS, cwd=REPOSITORY
    )


@pytest.fixture
def pair() -> Iterator[tuple[MetricsServer, MetricsServer]]:
    """A prefill and a decode server."""
    with ExitStack() as stack:
        prefill, decode = (
            MetricsServer(engine_text(**{f"state_{one}": 0.5})) for one in ("prefill_queued", "decode_held")
        )
        yield stack.enter_context(prefill.running()), stack.enter_context(decode.running())


def test_one_table_of_two_looks(pair: tuple[MetricsServer, MetricsServer]) -> None:
    """With no more than GET /metrics, two times each, and no credentials."""
    prefill, decode = pair
    texts = iter([engine_text(handovers=10.0), engine_text(handovers=20.0, failed_lease=2.0)])

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = next(texts).encode()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    decode.behave = answer
    done = top(prefill.url, f"{decode.url}/base/metrics")
    assert (done.returncode, done.stderr) == (0, "")
    titles, one, other = done.stdout.splitlines()
    assert titles.split()[:2] == ["server", "role"]
    assert one.split()[:2] == [prefill.url, "prefill"] and other.split()[0] == f"{decode.url}/base"
    rate = float(other.split()[7])
    assert 0 < rate <= 20 and other.rstrip().endswith("lease 2 +2")
    assert (prefill.asked, decode.asked) == (["/metrics"] * 2, ["/base/metrics"] * 2)
    sent = {name.lower() for one in pair for headers in one.sent_headers for name in headers}
    assert not sent & {"authorization", "cookie"}


def refuse(server: MetricsServer) -> None:
    server.status = 503


def redirect(server: MetricsServer) -> None:
    server.status, server.headers = 302, {"Location": "http://127.0.0.1:1/metrics"}


def page(server: MetricsServer) -> None:
    server.text = "<html>"


def raw(answer: bytes) -> Callable[[MetricsServer], None]:
    def behave(server: MetricsServer) -> None:
        server.behave = lambda handler: handler.wfile.write(answer) and None

    return behave


def flood(server: MetricsServer) -> None:
    server.behave = server.flood


def stand_still(server: MetricsServer) -> None:
    server.behave = server.stand_still


TROUBLE: dict[str, tuple[Callable[[MetricsServer], None], str]] = {
    "an error": (refuse, "HTTP status 503"),
    "a redirect": (redirect, "HTTP status 302"),
    "another program": (page, "no metrics of vLLM"),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), "Error: "),
    "half an answer": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:"), "ClientPayloadError"),
    "an answer without an end": (flood, "more than 16 MiB"),
    "no answer": (stand_still, "no whole answer within 5 s"),
}


@pytest.mark.parametrize("what", ["an error", *(pytest.param(one, marks=pytest.mark.long) for one in [*TROUBLE][1:])])
def test_a_server_with_trouble_makes_status_one(what: str, pair: tuple[MetricsServer, MetricsServer]) -> None:
    """And the others are shown."""
    prefill, decode = pair
    trouble, words = TROUBLE[what]
    trouble(decode)
    done = top(decode.url, prefill.url, COLUMNS="300")
    assert (done.returncode, done.stderr) == (1, "")
    _, one, other, why = done.stdout.splitlines()
    assert one.split()[:2] == [decode.url, "-"] and other.split()[:2] == [prefill.url, "prefill"]
    assert why.startswith(f"{decode.url} does not answer: ") and words in why


def test_nobody_there_makes_status_one() -> None:
    with socket.create_server((HOST, 0)) as one:
        port = one.getsockname()[1]
    done = top(f"http://{HOST}:{port}")
    assert done.returncode == 1 and "does not answer: Connect call failed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prefill:8000",), "expected http"),
        (("http://user:secret@prefill",), "expected http"),
        ((), "usage:"),
        (("http://a:1", "--interval", "0"), "expected seconds"),
    ],
)
def test_wrong_usage_has_status_two(arguments: tuple[str, ...], words: str) -> None:
    done = top(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr


class Terminal:
    """A process whose terminal the test is."""

    def __init__(self, *arguments: str, **more: str) -> None:
        self.all = b""
        self.fd, inner = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 160, 0, 0))
        self.settings = termios.tcgetattr(self.fd)
        command = ["setsid", "--ctty", *COMMAND, *arguments]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environ(**more), cwd=REPOSITORY
        )
        os.close(inner)

    def until(self, words: bytes, after: int = 0) -> int:
        """Reads until it has shown this. Returns where that ends."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (place := self.all.find(words, after)) < 0:
            assert time.monotonic() < deadline, f"{words!r} is not in {self.all[after:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.all += os.read(self.fd, 65_536)
        return place + len(words)


@contextmanager
def terminal(*arguments: str, **more: str) -> Iterator[Terminal]:
    one = Terminal(*arguments, **more)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        os.close(one.fd)


@pytest.mark.parametrize(
    "leave", [b"\x03", *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGTERM, signal.SIGHUP))], ids=str
)
def test_the_screen_is_live_until_it_is_left_and_the_terminal_is_as_before(
    leave: bytes | signal.Signals, pair: tuple[MetricsServer, MetricsServer]
) -> None:
    """A server that stands still holds nobody up."""
    prefill, decode = pair
    prefill.behave = prefill.stand_still
    with terminal("--interval", "0.5", prefill.url, decode.url) as screen:
        begun = screen.until(b"3.0 GiB")
        assert screen.all.index(TAKE) < begun
        decode.text = engine_text(failed_lease=77.0)
        screen.until(b"lease 77 +77", begun)
        if isinstance(leave, bytes):
            os.write(screen.fd, leave)
        else:
            screen.process.send_signal(leave)
        screen.until(GIVE_BACK)
        assert screen.process.wait(WAIT_SECONDS) == 0
        assert termios.tcgetattr(screen.fd) == screen.settings
        assert screen.all.count(TAKE) == screen.all.count(GIVE_BACK) == 1
        assert b"Traceback" not in screen.all


@pytest.mark.long
def test_a_terminal_without_cursor_gets_one_table(pair: tuple[MetricsServer, MetricsServer]) -> None:
    with terminal("--interval", "0.5", pair[0].url, TERM="dumb") as screen:
        screen.until(b"25%")
        assert screen.process.wait(WAIT_SECONDS) == 0
        assert TAKE not in screen.all
