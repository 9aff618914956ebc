# SPDX-License-Identifier: Apache-2.0
"""`kvcached-nixl top` over real HTTP on loopback, and in a real terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.metrics_servers import HOST, MetricsServer, engine_text, router_text
from support.router_under_test import serving

from kvcached_nixl.cli.top.fleet import Fleet
from kvcached_nixl.cli.top.look import Look
from kvcached_nixl.cli.top.scrape import Scraper, Unanswered
from kvcached_nixl.cli.top.target import target_of_url

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "kvcached_nixl", "top")
WAIT_SECONDS = 30.0
Servers = tuple[MetricsServer, MetricsServer, MetricsServer]
"""A router, a prefill and a decode engine."""


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", "LANG": "C.UTF-8", **more}


def top(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = (*COMMAND, "--once", "--interval", "0.5", *arguments)
    return subprocess.run(
        command, env=environ(**more), capture_output=True, text=True, check=False, timeout=WAIT_SECONDS, cwd=REPOSITORY
    )


def shown(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = top("--json", *arguments)
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def fleet() -> Iterator[Servers]:
    """A router, and a prefill and a decode engine that it names."""
    with ExitStack() as stack:
        prefill, decode, router = (MetricsServer(engine_text()) for _ in range(3))
        stack.enter_context(prefill.running())
        stack.enter_context(decode.running())
        router.text = router_text({prefill.name: ("prefill", 1.0), decode.name: ("decode", 1.0)}, {"ok": 3.0})
        stack.enter_context(router.running())
        yield router, prefill, decode


def test_the_fleet_is_found_from_the_router(fleet: Servers) -> None:
    """With no more than GET /metrics, two times each, and no credentials."""
    router, prefill, decode = fleet
    done = top(router.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 router, 2 engines up   nothing to look at")
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines if " prefill " in line or " decode " in line][-2:] == [
        [prefill.name, "prefill", "1/1"],
        [decode.name, "decode", "1/1"],
    ]
    assert [one.asked for one in fleet] == [["/metrics", "/metrics"]] * 3
    sent = {name.lower() for one in fleet for headers in one.sent_headers for name in headers}
    assert not sent & {"authorization", "cookie"}


@pytest.mark.long
def test_engines_alone_and_beside_a_router(fleet: Servers) -> None:
    router, prefill, decode = fleet
    status, found = shown(prefill.url, decode.url)
    assert status == 0 and not found["routers"]
    assert [(one["name"], one["role"]) for one in found["engines"]] == sorted(
        ((prefill.name, None), (decode.name, None)), key=lambda pair: int(str(pair[0]).rpartition(":")[2])
    )
    with MetricsServer(engine_text(weights_id=1.0)).running() as other:
        status, found = shown(router.url, other.url)
        assert status == 0 and len(found["routers"]) == 1
        assert [one["role"] for one in found["engines"]] == ["prefill", "decode", None]


def test_rates_are_of_the_time_between_two_looks(fleet: Servers) -> None:
    router, _, decode = fleet
    texts = iter([engine_text(handovers=10.0), engine_text(handovers=20.0)])

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = next(texts).encode()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    decode.behave = answer
    _, found = shown(router.url)
    (engine,) = [one for one in found["engines"] if one["role"] == "decode"]
    assert 0.5 <= engine["seconds"] < 10
    assert engine["handovers_per_second"] == pytest.approx(10 / engine["seconds"])


@pytest.mark.long
def test_the_routers_own_metrics(tmp_path: Path) -> None:
    """Of a real router, which knows two stubs; they have little to say."""

    async def run() -> subprocess.CompletedProcess[str]:
        async with serving() as at:
            for server in (*at.prefills, *at.decodes):
                server.metrics_text = engine_text()
            assert (await at.complete("hello")).status_code == 200
            return await asyncio.to_thread(top, "--json", at.url)

    done = asyncio.run(run())
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (router,) = found["routers"]
    assert router["in_flight_legs"] == {"prefill": 0.0, "decode": 0.0} and router["waiting_requests"] == 0.0
    assert [one["role"] for one in found["engines"]] == ["prefill", "decode"]
    assert all(one["gets_requests"] and one["running_requests"] == 0.0 for one in found["engines"])


def test_a_server_that_does_not_answer_makes_status_one(fleet: Servers) -> None:
    """And the others are shown."""
    router, prefill, decode = fleet
    decode.status = 503
    done = top(router.url)
    assert done.returncode == 1
    assert f"! {decode.name}" in done.stdout and "does not answer: HTTP status 503" in done.stdout
    assert f"  {prefill.name}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("router:8000",), "expected:"),
        (("http://user:secret@router",), "no user"),
        ((), "usage:"),
        (("http://a:1", "--interval", "0"), "expected seconds"),
    ],
)
def test_wrong_usage_has_status_two(arguments: tuple[str, ...], words: str) -> None:
    done = top(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr


def refuse(server: MetricsServer) -> None:
    server.status, server.headers = 302, {"Location": "http://169.254.169.254/\x07"}


def compress(server: MetricsServer) -> None:
    server.headers = {"Content-Encoding": "gzip"}


def raw(answer: bytes) -> Callable[[MetricsServer], None]:
    def behave(server: MetricsServer) -> None:
        server.behave = lambda handler: handler.wfile.write(answer) and None

    return behave


def page(server: MetricsServer) -> None:
    server.text, server.headers = "<html>Grafana</html>", {"Content-Type": "text/html"}


def huge_line(server: MetricsServer) -> None:
    server.text = 'vllm:num_requests_running{engine="' + "0" * 100_000 + '"} 1\n'


def slow(behaviour: str) -> Callable[[MetricsServer], None]:
    def behave(server: MetricsServer) -> None:
        server.behave = getattr(server, behaviour)

    return behave


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
UNANSWERED = {
    "stands still": (slow("stand_still"), "no whole answer within 1 s"),
    "drips": (slow("drip"), "no whole answer within 1 s"),
    "floods": (slow("flood"), "larger than 16 MiB"),
    "closes": (raw(b""), "closed without an answer"),
    "not HTTP": (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "not HTTP"),
    "cut": (raw(HEAD + b"Content-Length: 100\r\n\r\nx"), "ended too early"),
    "redirects": (refuse, "HTTP status 302, to http://169.254.169.254/"),
    "compressed": (compress, "encoded as gzip"),
    "page": (page, "(text/html) has no metrics"),
    "huge line": (huge_line, "has no metrics"),
}


@pytest.mark.parametrize("what", UNANSWERED)
def test_a_server_with_trouble_is_an_error_in_words(what: str) -> None:
    prepare, words = UNANSWERED[what]

    async def look(url: str) -> str:
        async with Scraper(timeout_seconds=1.0) as scraper:
            with pytest.raises(Unanswered) as caught:
                await asyncio.wait_for(scraper.look(url), 10.0)
            return str(caught.value)

    with MetricsServer(engine_text()).running() as server:
        prepare(server)
        assert words in asyncio.run(look(f"{server.url}/metrics"))


def why(url: str) -> str:
    async def look() -> str:
        async with Scraper(timeout_seconds=5.0) as scraper:
            try:
                await scraper.look(url)
            except Unanswered as error:
                return str(error)
            return "answered"

    return asyncio.run(look())


def test_nobody_there_is_an_error_in_words() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        assert why(f"http://{HOST}:{taken.getsockname()[1]}/metrics") == "connection refused"
    assert why("http://nobody.invalid:80/metrics") in ("no such host", "no whole answer within 5 s")


def test_pieces_of_any_size_are_put_together() -> None:
    """A line may come in two, and the last one without an end."""
    text = engine_text(running=5.0).encode().rstrip()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for place in range(0, len(text), 7):
            piece = text[place : place + 7]
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    async def look(url: str) -> Mapping[str, Any]:
        async with Scraper() as scraper:
            return (await scraper.look(url)).series

    with MetricsServer().running() as server:
        server.behave = answer
        found = asyncio.run(look(f"{server.url}/metrics"))
    assert [*found["vllm:num_requests_running"].values()] == [5.0]
    assert [*found["kvcached_nixl:free_bytes"].values()] == [float(3 << 30)]


@pytest.mark.long
def test_ipv6_and_a_base_path() -> None:
    server = MetricsServer(engine_text())
    server.host = "::1"
    with ExitStack() as stack:
        try:
            stack.enter_context(server.running())
        except OSError:
            pytest.skip("this machine has no IPv6 on loopback")
        status, found = shown(f"{server.url}/kv/one/")
    assert (status, {*server.asked}) == (0, {"/kv/one/metrics"})
    assert found["engines"][0]["name"] == f"{server.name}/kv/one"


@pytest.mark.long
def test_https_is_checked_and_a_known_authority_is_believed(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2"]
        + ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{HOST}"],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl is not there, or cannot make a certificate")
    with MetricsServer(engine_text()).running((certificate, key)) as server:
        done = top(server.url)
        assert done.returncode == 1 and "does not answer: TLS: " in done.stdout
        done = top(server.url, SSL_CERT_FILE=certificate)
        assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_two_hundred_engines_some_of_which_stand_still_take_no_longer_than_one() -> None:
    """All are asked at once, each for a second at most."""

    async def look(url: str) -> Fleet:
        found = Fleet([target_of_url(url)])
        async with Scraper(timeout_seconds=1.0) as scraper:
            await asyncio.wait(found.ask(scraper))
            assert found.follow()
            await asyncio.wait(found.ask(scraper, only_new=True))
        return found

    with ExitStack() as stack:
        servers = [stack.enter_context(MetricsServer(engine_text()).running()) for _ in range(100)]
        for one in servers[:50]:
            one.behave = one.stand_still
        dead = [f"127.0.0.2:{port}" for port in range(1, 101)]
        names = {one.name: ("decode", 1.0) for one in servers} | dict.fromkeys(dead, ("prefill", 0.0))
        router = MetricsServer(router_text(names))
        stack.enter_context(router.running())
        begun = time.monotonic()
        engines = asyncio.run(look(router.url)).engines
        assert time.monotonic() - begun < 10, "one after the other it would take 50 seconds"
    assert len(engines) == 200
    assert sum(not one.server.error for one in engines) == 50


@pytest.mark.parametrize("how", [pytest.param("--once", marks=pytest.mark.long), "--json"])
def test_a_reader_that_has_enough_is_no_crash(how: str, fleet: Servers) -> None:
    command = f'"$@" {how} --interval 0.5 {fleet[0].url} | true'
    done = subprocess.run(
        ["bash", "-c", command, "x", *COMMAND],
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.stderr == ""


@pytest.mark.long
def test_an_output_that_takes_ascii_only_gets_it(fleet: Servers) -> None:
    fleet[1].text = engine_text(failed_lease=1.0)
    done = top(fleet[0].url, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C", COLUMNS="60")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii() and fleet[1].name in done.stdout
    assert "##" in top(fleet[0].url, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C").stdout


def test_what_is_parsed_of_one_answer_is_bounded() -> None:
    """The rest is told as lines that cannot be read."""
    many = "".join(f'kvcached_nixl:kept_offers{{engine="0",x="{one}"}} 1\n' for one in range(50_000))

    async def look(url: str) -> Look:
        async with Scraper() as scraper:
            return await scraper.look(url)

    with MetricsServer(engine_text() + many).running() as server:
        found = asyncio.run(look(f"{server.url}/metrics"))
    assert len(found.series["kvcached_nixl:kept_offers"]) + found.unread_lines == 50_001
    assert found.unread_lines > 20_000


# ------------------------------------------------------------------------------------------------------------ terminal

TAKE, GIVE_BACK = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A process whose terminal the test is."""

    def __init__(self, *arguments: str, **more: str) -> None:
        self.all = b""
        self.fd, inner = pty.openpty()
        self.resize(100, 20)
        self.settings = termios.tcgetattr(self.fd)
        command = ["setsid", "--ctty", *COMMAND, *arguments]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environ(**more), cwd=REPOSITORY
        )
        os.close(inner)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, words: bytes, after: int = 0) -> int:
        """Reads until it has shown this. Returns where that ends."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (place := self.all.find(words, after)) < 0:
            assert time.monotonic() < deadline, f"{words!r} is not in {self.all[after:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.all += os.read(self.fd, 65_536)
        return place + len(words)

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def ended(self) -> int:
        """Returns its exit status."""
        self.until(GIVE_BACK)
        return self.process.wait(WAIT_SECONDS)


@contextmanager
def terminal(*arguments: str, **more: str) -> Iterator[Terminal]:
    one = Terminal(*arguments, **more)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        os.close(one.fd)


def plain(shown_bytes: bytes) -> str:
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown_bytes).decode()


@pytest.mark.parametrize(
    "leave",
    [b"q", *(pytest.param(one, marks=pytest.mark.long) for one in (b"\x03", signal.SIGTERM, signal.SIGHUP))],
    ids=str,
)
def test_the_screen_is_live_until_it_is_left_and_the_terminal_is_as_before(
    leave: bytes | signal.Signals, fleet: Servers
) -> None:
    router, _, decode = fleet
    with terminal("--interval", "0.5", router.url) as screen:
        begun = screen.until(b"nothing to look at")
        assert screen.all.index(TAKE) < begun
        assert not termios.tcgetattr(screen.fd)[3] & termios.ECHO
        decode.text = engine_text(quarantined_blocks=77.0)
        screen.until(b"blocks in quarantine: 77", begun)
        if isinstance(leave, bytes):
            screen.type(leave)
        else:
            screen.process.send_signal(leave)
        assert screen.ended() == 0
        assert termios.tcgetattr(screen.fd) == screen.settings
        assert screen.all.count(TAKE) == screen.all.count(GIVE_BACK) == 1
        assert b"Traceback" not in screen.all


@pytest.mark.long
def test_a_slow_server_holds_nobody_up(fleet: Servers) -> None:
    router, prefill, decode = fleet
    prefill.behave = prefill.stand_still
    with terminal("--interval", "0.5", router.url) as screen:
        place = screen.until(decode.name.encode())
        decode.text = engine_text(quarantined_blocks=78.0)
        begun = time.monotonic()
        screen.until(b"blocks in quarantine: 78", place)
        assert time.monotonic() - begun < 4
        screen.type(b"q")
        assert screen.ended() == 0


@pytest.mark.long
def test_many_engines_are_scrolled_and_those_that_need_attention_are_picked() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(MetricsServer(engine_text()).running())
        engines = [engine_text(str(one), quarantined_blocks=float(one == 31)) for one in range(40)]
        server.text = "".join(engines)
        with terminal("--interval", "60", server.url) as screen:
            place = screen.until(b"of 40")
            assert f"{server.name} #0 " in plain(screen.all) and f"{server.name} #39" not in plain(screen.all)
            screen.type(b"G")
            place = screen.until(f"{server.name} #39".encode(), place)
            screen.until(b"to 40 of 40", place)
            screen.type(b"\x1b[A")
            place = screen.until(b"to 39 of 40", place)
            screen.type(b"!")
            screen.until(b"! all engines", place)
            last = plain(screen.all[place:])
            assert f"{server.name} #31" in last and f"{server.name} #30" not in last
            screen.type(b"!g")
            place = screen.until(b"engines 1 to ", place)
            screen.resize(60, 12)
            place = screen.until(b"engines 1 to 5 of 40", place)
            assert max(map(len, plain(screen.all[place:]).split("\n")[:3])) <= 60
            screen.type(b"q")
            assert screen.ended() == 0


@pytest.mark.long
def test_a_terminal_without_cursor_gets_one_table(fleet: Servers) -> None:
    with terminal("--interval", "0.5", fleet[0].url, TERM="dumb") as screen:
        screen.until(b"nothing to look at")
        assert screen.process.wait(WAIT_SECONDS) == 0
        assert TAKE not in screen.all
