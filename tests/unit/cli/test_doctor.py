# SPDX-License-Identifier: Apache-2.0
"""``doctor``: what is said of prefill servers, over real connections, and of the kernel's limits."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvcached_nixl.__main__ import main
from kvcached_nixl.cli import ask
from kvcached_nixl.cli.doctor import FILES, LOCKED, MAPPINGS, SHARED, UNLIMITED, Limits, limits, shortfalls
from kvcached_nixl.ids import LogicalBlock
from kvcached_nixl.scheduler.asking.settings import KEY_VARIABLE
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.transport.listener import Listener
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.params import MANIFEST_KEY, RemotePrefill, prefill_params

HOST = "127.0.0.1"
TAG = f"kvcached_nixl/{PROTOCOL} pull [vLLM 1.2.3; cache dtype auto; group 0: 2 planes of cells of 64 bytes]"
Certificate = tuple[str, str]
"""Files with a certificate and its key."""


def free_port() -> int:
    with socket.create_server((HOST, 0)) as one:
        return int(one.getsockname()[1])


class Prefill:
    """A prefill server.

    Attributes:
        status, answer: of its completions.
        api_key: what it expects.
        questions: what it was asked.
    """

    def __init__(self) -> None:
        self.side_channel_port = free_port()
        manifest = Manifest(
            PROTOCOL, "a" * 16, "cmpl-1", "d" * 32, 4, (16,), (1, 1), (BlockRange(0, (LogicalBlock(7),)),), 30.0, 0
        )
        there = RemotePrefill("engine-1", HOST, self.side_channel_port, 2)
        self.params = prefill_params(
            there, manifest, transfer_id=None, transfer_mode=TransferMode.PULL, cached_tokens=0
        )
        self.status, self.api_key = 200, ""
        self.answer: dict[str, Any] = {"kv_transfer_params": self.params}
        self.questions: list[Any] = []
        self.url = ""

    def run(self, stack: ExitStack, tag: str = TAG, certificate: Certificate | None = None) -> None:
        said = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(200, b"")

            def do_POST(self) -> None:
                said.questions.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                is_known = not said.api_key or self.headers["Authorization"] == f"Bearer {said.api_key}"
                self._say(said.status if is_known else 401, json.dumps(said.answer if is_known else {}).encode())

            def _say(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing: the test looks at ``questions``."""

        server = ThreadingHTTPServer((HOST, 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        for end in (thread.join, server.server_close, server.shutdown):
            stack.callback(end)
        if tag:
            listener = Listener([HOST], self.side_channel_port, {(0, 0): (tag, b"rank")}, lambda: None, "key")
            stack.callback(listener.close)
        self.url = f"http://{HOST}:{server.server_address[1]}"


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr(ask, "found_version", lambda library: "1.2.3+cpu")
    with ExitStack() as found:
        yield found


@pytest.fixture
def prefill(stack: ExitStack) -> Prefill:
    found = Prefill()
    found.run(stack)
    return found


def why_not(*urls: str, api_key_file: str | None = None) -> list[str]:
    return [one.why_not for one in ask.examine(urls, api_key_file)]


def test_one_that_serves_says_what_it_is(prefill: Prefill, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--prefill", prefill.url]) == 0
    said = capsys.readouterr().out
    for words in (f"{prefill.url}: serves", "pull", "engine-1", f"{HOST}:{prefill.side_channel_port}", "vLLM 1.2.3"):
        assert words in said
    (question,) = prefill.questions
    assert question["max_tokens"] == 1 and question["kv_transfer_params"]["do_remote_decode"] is True
    assert main(["doctor", "--prefill", prefill.url, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["why_not"], found["transfer_mode"], found["must be equal"]) == (None, "pull", TAG)


def test_one_that_would_not_serve_makes_status_one(prefill: Prefill, capsys: pytest.CaptureFixture[str]) -> None:
    """And the others are asked all the same."""
    nobody = f"http://{HOST}:{free_port()}"
    assert main(["doctor", "--prefill", nobody, prefill.url]) == 1
    said = capsys.readouterr().out
    assert f"{nobody}: would not serve" in said and f"{prefill.url}: serves" in said and "Connect" in said


def test_one_without_this_package_is_named(prefill: Prefill, capsys: pytest.CaptureFixture[str]) -> None:
    """Its parameters are whole, and no router was there to cut them. And --json may stand before the command."""
    del prefill.answer["kv_transfer_params"][MANIFEST_KEY]
    assert main(["--json", "doctor", "--prefill", prefill.url]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert "without this package" in found["why_not"] and "outer" not in found["why_not"]


@pytest.mark.parametrize(
    ("options", "found"),
    [(["--prefill", "prefill:8001"], "--prefill ['prefill:8001']"), (["--prefill-api-key-file", "/none"], "/none")],
)
def test_an_option_that_cannot_be_used_is_named(
    prefill: Prefill, options: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [] if "--prefill" in options else ["--prefill", prefill.url]
    assert main(["doctor", *urls, *options]) == 2
    said = capsys.readouterr().err
    assert found in said and f"Correct {options[0]}." in said and "kv_connector_extra_config" not in said


def test_each_address_of_a_name_is_asked(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "addresses_of", lambda url: (HOST, "127.0.0.2"))
    url = prefill.url.replace(HOST, "prefill.invalid")
    one, other = ask.examine([url], None)
    assert (one.server, one.why_not) == (f"{url} ({HOST})", "")
    assert other.server == f"{url} (127.0.0.2)" and "127.0.0.2" in other.why_not


def test_a_name_without_addresses(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "addresses_of", lambda url: ())
    assert "no address" in why_not("http://prefill.invalid:8000")[0]


def test_a_key_is_sent_and_a_missing_one_is_named(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefill.api_key = "secret"
    (refused,) = why_not(prefill.url)
    assert "HTTP 401" in refused and KEY_VARIABLE in refused
    (tmp_path / "key").write_text("secret\n")
    assert why_not(prefill.url, api_key_file=str(tmp_path / "key")) == [""]
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert why_not(prefill.url) == [""]


@pytest.mark.long
@pytest.mark.parametrize(("name", "status"), [("localhost", 0), ("prefill.example", 1)])
def test_the_certificate_is_that_of_the_name(name: str, status: int, stack: ExitStack, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2"]
        + ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl is not there, or cannot make a certificate")
    prefill = Prefill()
    prefill.run(stack, TAG.replace("[vLLM 1.2.3; ", "["), (certificate, key))
    url = prefill.url.replace(f"http://{HOST}", "https://localhost")
    # In a process of its own: aiohttp reads the authorities when it is imported.
    environ = {**os.environ, "SSL_CERT_FILE": certificate, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = (sys.executable, "-m", "kvcached_nixl", "doctor", "--prefill", url)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("name that one" in done.stdout) == bool(status)


def no_params(prefill: Prefill) -> None:
    prefill.answer = {"choices": []}


def another_protocol(prefill: Prefill) -> None:
    prefill.params[MANIFEST_KEY]["protocol"] += 1


def refuses(prefill: Prefill) -> None:
    prefill.status = 500


@pytest.mark.parametrize(
    ("change", "words"),
    [(no_params, "kv_role kv_producer"), (another_protocol, f"protocol {PROTOCOL}"), (refuses, "HTTP 500")],
)
def test_what_decode_could_not_use(change: Callable[[Prefill], None], words: str, prefill: Prefill) -> None:
    change(prefill)
    assert words in why_not(prefill.url)[0]


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (TAG.replace("1.2.3", "1.2.4"), "vLLM 1.2.4"),
        ("of stock vLLM", "expected this package"),
        ("", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    ],
    ids=["another vLLM", "no tag", "nobody listens"],
)
def test_its_side_channel_is_asked(tag: str, words: str, stack: ExitStack) -> None:
    prefill = Prefill()
    prefill.run(stack, tag)
    assert words in why_not(prefill.url)[0]


def test_one_that_does_not_answer_is_waited_for_a_while(
    prefill: Prefill, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "ANSWER_SECONDS", 0.0)
    assert "no answer within" in why_not(prefill.url)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prefill", "prefill:8000"),
        ("--prefill", "http://prefill:8000", "--peer", "127.0.0.1:5600"),
        ("--prefill-api-key-file", "key"),
        ("--prefill",),
    ],
)
def test_wrong_usage_has_status_two(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["doctor", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and capsys.readouterr().err


ENOUGH: Limits = {LOCKED: UNLIMITED, FILES: 65_536, MAPPINGS: 65_530, SHARED: 4 << 30}


def test_this_host_has_them_all() -> None:
    assert {*limits()} == {*ENOUGH}


@pytest.mark.parametrize(
    ("changed", "pins", "word"),
    [
        ({LOCKED: 65_536}, True, "ulimit -l"),
        ({LOCKED: 65_536}, False, ""),
        ({MAPPINGS: 65_529}, True, "vm.max_map_count"),
        ({SHARED: 64 << 20}, True, "--shm-size"),
        ({SHARED: "not known: no such file"}, True, ""),
        ({}, True, ""),
    ],
)
def test_what_is_too_low_is_said(changed: Limits, pins: bool, word: str) -> None:
    found = [*shortfalls({**ENOUGH, **changed}, pins=pins)]
    assert len(found) == bool(word) and all(word in one for one in found)
