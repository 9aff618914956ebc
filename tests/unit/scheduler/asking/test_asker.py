# SPDX-License-Identifier: Apache-2.0
"""What a prefill server may answer, over real connections."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from support.internals import leftovers
from support.waiting import until

from kvcached_nixl.scheduler.asking import asker as module
from kvcached_nixl.scheduler.asking.asker import Asker, taken
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.wire.question import (
    ASKED_PATH,
    LOOK_UP_PATH,
    PATH,
    ROLE_HEADER,
    Outcome,
    Prompt,
    Question,
    Tensor,
    decode_prompt,
)

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p"}
NESTED = b'{"a":' * 10_000 + b"1" + b"}" * 10_000
ODD_JSON = (
    *(NESTED, b"[" * 10_000 + b"]" * 10_000, b"1" + b"0" * 5000),
    *(b"NaN", b"1e999", b'"\\ud800"', b'"\xed\xa0\x80"'),
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Prefill:
    """A server on a thread of its own, which answers as ``handler`` does."""

    def __init__(self, handler: Handler) -> None:
        self.asked: list[tuple[dict[str, str], Any]] = []
        self.queries: list[dict[str, str]] = []
        self.left = threading.Event()
        self._handler = handler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> Server:
        app = web.Application(client_max_size=1 << 26)
        for path in (PATH, ASKED_PATH, LOOK_UP_PATH):
            app.router.add_post(f"/{path}", self._answer)
        app.router.add_get("/health", self._handler)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return Server(f"http://127.0.0.1:{self._runner.addresses[0][1]}")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        is_json = request.content_type == "application/json"
        self.queries.append(dict(request.query))
        self.asked.append((dict(request.headers), await (request.json() if is_json else request.read())))
        try:
            return await self._handler(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Decode:
    def __init__(self, key: str = "secret") -> None:
        self._woken = threading.Event()
        self.asker = Asker(key, self._woken.set)

    def wait(self) -> None:
        assert self._woken.wait(10)
        self._woken.clear()

    def answer(self) -> Any:
        self.wait()
        ((_, found),) = taken(self.asker.answers)
        return found


Serve = Callable[[Handler], Prefill]


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    made.asker.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    found: list[Prefill] = []

    def start(handler: Handler) -> Prefill:
        found.append(Prefill(handler))
        return found[-1]

    yield start
    for one in found:
        one.close()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def asked_by(decode: Decode, listening: socket.socket, question: Question) -> socket.socket:
    """The connection by which a question comes."""
    decode.asker.ask(1, Server(f"http://127.0.0.1:{listening.getsockname()[1]}"), question)
    connection, _ = listening.accept()
    connection.settimeout(10)
    return connection


def answering(**response: Any) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(**response)

    return handler


async def hanging(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


def test_the_prompt_is_sent_and_the_parameters_come_back(decode: Decode, serve: Serve) -> None:
    prefill = serve(answering(text=json.dumps({"kv_transfer_params": PARAMS, "choices": [{"token_ids": [1]}]})))
    question = Question("r", [5, 6, 7], "adapter", "salt", -3, {"traceparent": "00-1-2-01"})
    decode.asker.ask(1, prefill.server, question)
    assert decode.answer() == PARAMS
    ((headers, body),) = prefill.asked
    assert headers["Authorization"] == "Bearer secret" and headers["traceparent"] == "00-1-2-01"
    assert body["prompt"] == [5, 6, 7] and body["max_tokens"] == 1
    assert (body["model"], body["cache_salt"], body["priority"]) == ("adapter", "salt", -3)
    assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}


TOLD = {"remote_prefill_cached_tokens": 3}


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        (answering(text=json.dumps({"kv_transfer_params": TOLD})), TOLD),
        (answering(text="{"), {}),
        (answering(status=404), {}),
        (answering(status=503), {}),
        (hanging, None),
    ],
)
def test_what_is_cached_is_told_or_not_known_or_not_said_in_time(
    decode: Decode, serve: Serve, handler: Handler, found: Any
) -> None:
    prefill = serve(handler)
    decode.asker.look_up(prefill.server, Question("r", [5, 6, 7], "adapter", "salt"), 2, 0.5)
    decode.wait()
    assert decode.asker.has_answers and [*decode.asker.cached] == [("r", prefill.server, found)]
    ((headers, body),) = prefill.asked
    assert headers["Authorization"] == "Bearer secret"
    asked = decode_prompt(body)
    assert (bytes(asked.token_ids), asked.adapter, asked.salt) == (
        bytes((5, *[0] * 3, 6, *[0] * 3, 7, *[0] * 3)),
        "adapter",
        "salt",
    )
    assert prefill.queries == [{"least_tokens": "2", "most_seconds": "0.5"}]


def test_a_prompt_of_embeddings_is_sent_to_an_endpoint_of_ours(decode: Decode, serve: Serve) -> None:
    """Of more than a megabyte, of which aiohttp takes no bytes at once."""
    sent = Prompt("r", b"", [], Tensor("uint8", (1 << 21, 1), memoryview(bytes(1 << 21))))
    prefill = serve(answering(text=json.dumps({"kv_transfer_params": PARAMS})))
    decode.asker.ask(1, prefill.server, Question("r", None, trace_headers={"tracestate": "a=1"}, prompt=sent))
    assert decode.answer() == PARAMS
    ((headers, body),) = prefill.asked
    assert decode_prompt(body) == sent and headers["Content-Type"] == "application/msgpack"
    assert headers["Authorization"] == "Bearer secret" and headers["tracestate"] == "a=1"


ENVOY = "upstream connect error or disconnect/reset before headers. retried and the latest reset reason: "


@pytest.mark.parametrize(
    ("response", "reason", "is_final", "is_busy"),
    [
        ({"text": json.dumps({"kv_transfer_params": None})}, "expected kv_transfer_params", False, False),
        ({"text": "{"}, "cannot be read", False, False),
        ({"body": b"\xff\xfe"}, "cannot be read", False, False),
        ({"text": json.dumps({"kv_transfer_params": [1]})}, "cannot be read", False, False),
        ({"text": json.dumps([1])}, "cannot be read", False, False),
        *(({"body": b'{"kv_transfer_params":{"a":%s}}' % one}, "cannot be read", False, False) for one in ODD_JSON),
        ({"body": b'{"ignored":' + NESTED + b"}"}, "cannot be read", False, False),
        ({"status": 307, "headers": {"Location": "http://127.0.0.1:1/"}}, "HTTP 307", False, False),
        ({"status": 401}, "HTTP 401", False, False),
        ({"status": 404, "text": "no such model"}, "no such model", True, False),
        ({"status": 413}, "HTTP 413", True, False),
        ({"status": 500}, "HTTP 500", False, False),
        ({"status": 502}, "HTTP 502", False, False),
        ({"status": 503}, "HTTP 503", False, True),
        ({"status": 503, "text": "no healthy upstream"}, "no healthy", False, True),
        *(
            ({"status": 503, "text": ENVOY + one}, one, False, True)
            for one in ("remote connection failure", "overflow")
        ),
        *(
            ({"status": 503, "text": ENVOY + one}, one, False, False)
            for one in ("connection termination", "remote reset")
        ),
        ({"status": 503, "headers": {ROLE_HEADER: "decode"}}, "HTTP 503", False, False),
    ],
)
def test_an_answer_without_parameters(
    decode: Decode, serve: Serve, response: Any, reason: str, is_final: bool, is_busy: bool
) -> None:
    decode.asker.ask(1, serve(answering(**response)).server, Question("r", [1]))
    found = decode.answer()
    assert isinstance(found, Outcome) and reason in found.reason
    assert (found.is_final, found.is_busy) == (is_final, is_busy)
    assert found.is_of_adapter is (response.get("status") == 404)
    of_all = ROLE_HEADER in response.get("headers", ())
    assert found.has_prompt is (response.get("status") in (502, 503, 504) and not (is_busy or of_all))


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7.0), ("-1", 0.0), ("soon", 0.0), ("9999", 60.0), ("1" * 400, 60.0), ("٣", 0.0)]
)
def test_what_a_busy_server_says(decode: Decode, serve: Serve, said: str, seconds: float) -> None:
    decode.asker.ask(1, serve(answering(status=503, headers={"Retry-After": said})).server, Question("r", [1]))
    assert decode.answer().retry_after_seconds == seconds


def test_the_key_is_shown_to_nobody(decode: Decode, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Not even if the server repeats it, or anything fails: what is said of an answer comes into the log."""
    caplog.set_level(0)

    async def repeats(request: web.Request) -> web.StreamResponse:
        told = request.headers["Authorization"]
        return web.Response(status=int(request.headers["X-Status"]), reason=told, text=f"{told} {'x' * 280}{told}")

    said = [repr(decode.asker)]
    prefill = serve(repeats)
    for number, status in enumerate((400, 401, 429, 500, 503)):
        decode.asker.ask(number, prefill.server, Question("r", [1], trace_headers={"X-Status": str(status)}))
        said.append(decode.answer().reason)
    for token in (1, object()):
        decode.asker.ask(9, Server("http://127.0.0.1:1"), Question("r", [token]))  # type: ignore[list-item]
        said.append(decode.answer().reason)
    assert prefill.asked[0][0]["Authorization"] == "Bearer secret"
    assert not [one for one in (*said, caplog.text) if "secre" in one]


OK = b"HTTP/1.1 200 OK\r\nX-Echo: Bearer secret\r\n"


@pytest.mark.parametrize(
    "said",
    [
        b"Bearer secret",
        b"HTTP/1.1 401 Bearer secret\r\n",
        b"HTTP/1.1 401 no\r\nX-Echo: Bearer secret\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        OK + b"Content-Length: 50\r\n\r\nab",
        OK + b"Content-Encoding: gzip\r\nContent-Length: 13\r\n\r\nBearer secret",
    ],
)
def test_the_key_is_not_shown_of_an_answer_that_is_cut_off(
    decode: Decode, listening: socket.socket, said: bytes
) -> None:
    """The server had the whole prompt, which may be the reason."""
    with asked_by(decode, listening, Question("r", [1])) as connection:
        while b'"prompt"' not in connection.recv(1 << 16):
            """The rest comes."""
        connection.sendall(said)
    found = decode.answer()
    assert "secret" not in found.reason and found.is_of_server and found.has_prompt


def test_a_key_that_json_writes_otherwise_is_not_shown(serve: Serve) -> None:
    decode = Decode('se"cret')
    said = json.dumps({"error": 'unknown key se"cret'})
    decode.asker.ask(1, serve(answering(status=401, text=said)).server, Question("r", [1]))
    reason = decode.answer().reason
    decode.asker.close()
    assert "cret" not in reason and "unknown key" in reason


def endless(piece: bytes, pause_seconds: float) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(piece)
            await asyncio.sleep(pause_seconds)

    return handler


def test_an_answer_without_end_is_cut_off(decode: Decode, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER_BYTES", 1 << 16)
    decode.asker.ask(1, serve(endless(b"x" * 4096, 0.0)).server, Question("r", [1]))
    assert "more than 65536 bytes" in decode.answer().reason


def test_an_answer_that_never_ends(decode: Decode, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps every connection alive."""
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    prefill = serve(endless(b" ", 0.01))
    decode.asker.ask(1, prefill.server, Question("r", [1]))
    found = decode.answer()
    assert "not ended it within" in found.reason and found.is_of_server
    assert prefill.left.wait(10), "the connection is closed"


def test_an_answer_that_unpacks_to_far_more(decode: Decode, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER_BYTES", 1 << 20)
    packed = gzip.compress(bytes(1 << 27), 1)
    decode.asker.ask(1, serve(answering(body=packed, headers={"Content-Encoding": "gzip"})).server, Question("r", [1]))
    tracemalloc.start()
    assert "more than 1048576 bytes" in decode.answer().reason
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_a_redirect_is_not_followed(decode: Decode, serve: Serve) -> None:
    """Nobody but the servers that the operator names hears prompts, or the key."""
    other = serve(answering(text=json.dumps({"kv_transfer_params": PARAMS})))
    moved = {"status": 308, "headers": {"Location": f"{other.server.url}/{PATH}"}}
    decode.asker.ask(1, serve(answering(**moved)).server, Question("r", [1]))
    assert "HTTP 308" in decode.answer().reason and not other.asked


def test_no_cookie_chooses_the_next_server(decode: Decode, serve: Serve) -> None:
    """What balances connections may name its choice in a cookie, and would send all questions there."""
    prefill = serve(answering(text=json.dumps({"kv_transfer_params": PARAMS}), headers={"Set-Cookie": "route=p1"}))
    server = Server(prefill.server.url.replace("127.0.0.1", "localhost"))
    for number in (1, 2):
        decode.asker.ask(number, server, Question("r", [1]))
        assert decode.answer() == PARAMS
    assert len(prefill.asked) == 2 and not any("Cookie" in headers for headers, _ in prefill.asked)


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"\x16\x03\x01", b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000),
        *(b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n{}" % length for length in (b"-1", b"3", b"x")),
        b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"kv_transfer_params"',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n{}",
        # It repeats what it was sent.
        *(b"Bearer secret HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: Bearer secret\x01\r\n\r\n"),
    ],
    ids=lambda said: repr(said[:60]),
)
def test_what_is_no_http(decode: Decode, listening: socket.socket, said: bytes) -> None:
    with asked_by(decode, listening, Question("r", [1])) as connection:
        connection.recv(1 << 16)
        connection.sendall(said)
    found = decode.answer()
    assert isinstance(found, Outcome) and "a defect" not in found.reason and "secret" not in found.reason


def test_a_server_that_closes_before_it_has_read_all_is_not_to_blame_for_other_prompts(
    decode: Decode, listening: socket.socket
) -> None:
    """What it has answered may be lost: it may refuse this prompt for its size."""
    with asked_by(decode, listening, Question("r", [123_456] * 4_000_000)) as connection:
        connection.recv(1 << 16)
    found = decode.answer()
    assert not found.is_of_server and "while the prompt was sent" in found.reason


def test_a_name_whose_look_up_hangs_costs_others_nothing(
    decode: Decode, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.2)
    hangs = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hangs.wait(30) and [])
    prefill = serve(answering(text=json.dumps({"kv_transfer_params": PARAMS})))
    for number in range(20):
        decode.asker.ask(number, Server(f"http://prefill{number}:8000"), Question("r", [1]))
    decode.asker.ask(99, prefill.server, Question("r", [1]))
    found: dict[int, Any] = {}
    while len(found) < 21:
        decode.wait()
        found |= dict(taken(decode.asker.answers))
    assert next(iter(found)) == 99 and found.pop(99) == PARAMS
    assert all(isinstance(one, Outcome) and one.is_of_server for one in found.values())
    decode.asker.close()
    hangs.set()


def test_nobody_listens(decode: Decode) -> None:
    nobody = Server("http://127.0.0.1:1")
    decode.asker.ask(1, nobody, Question("r", [1]))
    assert "Cannot connect" in decode.answer().reason
    decode.asker.look_up(nobody, Question("r", [5]), 0, 0.5)
    decode.wait()
    assert [*decode.asker.cached] == [("r", nobody, None)]
    decode.asker.check(nobody)
    decode.wait()
    assert [*decode.asker.checked] == [(nobody, False)]


def asked_in_vain(decode: Decode, serve: Serve) -> Prefill:
    """A server that has been asked, and never answers."""
    begun = threading.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        begun.set()
        return await hanging(request)

    prefill = serve(never)
    decode.asker.ask(1, prefill.server, Question("r", [1]))
    assert begun.wait(10)
    return prefill


@pytest.mark.parametrize("ends", [lambda asker: asker.cancel(1), Asker.close], ids=["cancelled", "closed"])
def test_prefill_notices_that_nobody_waits_any_more(
    decode: Decode, serve: Serve, ends: Callable[[Asker], None]
) -> None:
    prefill = asked_in_vain(decode, serve)
    ends(decode.asker)
    assert prefill.left.wait(10)
    assert not decode.asker.has_answers


@pytest.mark.parametrize("is_answered", [True, False])
def test_what_a_server_has_answered_by_then_is_taken(
    decode: Decode, listening: socket.socket, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """Its answer is on its way when it hears that nobody waits for it: its KV can be given back."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 10.0 if is_answered else 0.05)
    body = json.dumps({"kv_transfer_params": PARAMS}).encode()
    with asked_by(decode, listening, Question("r", [1])) as connection:
        while not connection.recv(1 << 16).endswith(b"}"):
            pass
        decode.asker.cancel(1)
        assert connection.recv(1) == b""
        if is_answered:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert decode.answer() == PARAMS
        else:
            # Nothing is sent on a connection that is closed.
            while not is_closed(connection):
                pass
            assert not decode.asker.has_answers


def is_closed(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"H")
    except OSError:
        return True
    return False


def test_one_that_is_cancelled_before_it_begins_leaves_nothing(decode: Decode, serve: Serve) -> None:
    prefill = asked_in_vain(decode, serve)
    for number in range(2, 50):
        decode.asker.ask(number, prefill.server, Question("r", [1]))
        decode.asker.cancel(number)
    decode.asker.cancel(1)
    assert prefill.left.wait(10)
    until(lambda: not leftovers(decode.asker, but=("_headers",)))


def test_one_of_the_addresses_of_a_name_is_asked_by_its_name(decode: Decode, serve: Serve) -> None:
    prefill = serve(answering(text=json.dumps({"kv_transfer_params": PARAMS})))
    port = prefill.server.url.rpartition(":")[2]
    decode.asker.ask(1, Server(f"http://prefill.invalid:{port}", "127.0.0.1"), Question("r", [1]))
    assert decode.answer() == PARAMS
    assert prefill.asked[0][0]["Host"] == f"prefill.invalid:{port}"


def test_a_name_that_does_not_resolve(decode: Decode) -> None:
    decode.asker.ask(1, Server("http://prefill.invalid:8000"), Question("r", [1]))
    assert isinstance(decode.answer(), Outcome)


@pytest.mark.parametrize("status", [200, 503])
def test_whether_a_server_is_well(decode: Decode, serve: Serve, status: int) -> None:
    server = serve(answering(status=status)).server
    decode.asker.check(server)
    decode.wait()
    assert decode.asker.has_answers and [*decode.asker.checked] == [(server, status == 200)]


def test_nobody_is_asked_after_the_end(decode: Decode) -> None:
    decode.asker.close()
    decode.asker.ask(1, Server("http://127.0.0.1:1"), Question("r", [1]))
    assert not [one for one in threading.enumerate() if one.name == "kvcached_nixl-asker"]


def test_an_error_that_nobody_has_thought_of_is_an_answer_too(decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise its request would wait for ever."""
    decode.asker.ask(1, Server("http://127.0.0.1:1"), Question("r", [object()]))  # type: ignore[list-item]
    assert "a defect" in decode.answer().reason and "could not be asked" in caplog.text


def test_an_error_of_a_check_that_nobody_has_thought_of_is_a_result(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the server would be waited for without an end."""
    server = Server("http://127.0.0.1:1", "no address")
    for _ in range(2):
        decode.asker.check(server)
        decode.wait()
        assert taken(decode.asker.checked) == [(server, False)]
    assert "could not be checked" in caplog.text
