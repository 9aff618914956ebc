# SPDX-License-Identifier: Apache-2.0
"""Decode servers, or gateways before them, whose answers are odd: a right answer or an error, never a part with 200."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.router_under_test import UnderTest, quiet, serving, serving_before, until
from support.stub_servers import END, Asked, Fabric, Stub, stubs

pytestmark = pytest.mark.long

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Send = Callable[[bytes], Awaitable[None]]


class Odd(Stub):
    """A decode server that sends this, after a head that begins a stream of events."""

    def __init__(self, fabric: Fabric, say: Callable[[Send], Awaitable[None]], head: bytes) -> None:
        super().__init__(fabric)
        self._say, self._head = say, head

    async def answer_decode(self, fault: str, asked: Asked, writer: asyncio.StreamWriter) -> None:
        async def send(piece: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()

        writer.write(self._head)
        await self._say(send)
        await send(b"")


@asynccontextmanager
async def before(
    say: Callable[[Send], Awaitable[None]], head: bytes = HEAD, **options: Any
) -> AsyncIterator[UnderTest]:
    fabric = Fabric()
    prefill, decode = Stub(fabric), Odd(fabric, say, head)
    async with stubs(prefill, decode), serving_before([prefill], [decode], **options) as at:
        yield at


def events(*pieces: bytes) -> Callable[[Send], Awaitable[None]]:
    async def say(send: Send) -> None:
        for one in pieces:
            await send(one)

    return say


def token(text: str, reason: str | None = None, lines: bytes = b"") -> bytes:
    said = {"id": "x", "created": 1, "choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    return lines + b"data: " + json.dumps(said).encode() + b"\n\n"


def texts(answer: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in answer.split("\n\n"):
        for choice in json.loads(event.removeprefix("data: "))["choices"] if '"choices"' in event else ():
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.mark.parametrize("said", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}], ids=str)
def test_a_stream_without_the_end_of_one_of_its_choices_is_not_complete(said: dict[str, Any]) -> None:
    """vLLM skips an output without tokens, even if it is the only one of its choice."""

    async def run() -> None:
        async with before(events(token("one ", "length"), END)) as at:
            answer = await at.complete(**said, echo=True, logprobs=1, stream=True)
            assert answer.status_code == 502
        async with before(events(token("one "), token("two", "length"), END)) as at:
            answer = await at.complete(**said, echo=True, logprobs=1, stream=True)
            assert '"error"' in answer.text and "[DONE]" not in answer.text
        async with before(events(token("one ", "length"), token("two", "length"), END)) as at:
            answer = await at.complete(**said, echo=True, logprobs=1, stream=True)
            assert answer.status_code == 200 and answer.text.endswith(END.decode())

    asyncio.run(run())


@pytest.mark.parametrize("lines", [b"", b": ping\n", b"id: 7\nretry: 1\n", b"\n", b": ping\r\n"], ids=repr)
def test_lines_beside_the_data_of_an_event_cost_no_token_of_several_sequences(lines: bytes) -> None:
    async def run() -> None:
        async with before(events(token("one ", lines=lines), token("two", "length", lines), b": end\n\n", END)) as at:
            answer = await at.complete("a", n=2, stream=True)
            assert texts(answer.text) == {0: "one two", 1: "one two"}

    asyncio.run(run())


def test_an_event_that_cannot_be_merged_is_an_error() -> None:
    async def run() -> None:
        async with before(events(token("one "), b"data: two\n\n", token("three", "length"), END)) as at:
            answer = await at.complete("a", n=2, stream=True)
            assert '"error"' in answer.text and "[DONE]" not in answer.text

    asyncio.run(run())


@pytest.mark.parametrize("faults", [["", "whole"], ["whole", ""]], ids=str)
def test_of_several_sequences_one_in_one_piece_is_an_error(faults: list[str]) -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].faults.extend(faults)
            answer = await at.complete("a", n=2, stream=True, max_tokens=4)
            assert '"error"' in answer.text and "[DONE]" not in answer.text

    asyncio.run(run())


@pytest.mark.parametrize("piece", [b": ping\n\n", b"x", b"\n\n"], ids=repr)
def test_what_is_no_token_keeps_no_stream_alive(piece: bytes) -> None:
    async def say(send: Send) -> None:
        await send(token("one "))
        while True:
            await asyncio.sleep(0.05)
            await send(piece)

    async def run() -> None:
        async with before(say, inter_token_timeout_seconds=0.4) as at:
            answer = await asyncio.wait_for(at.complete("a", stream=True), 10)
            assert '"error"' in answer.text and "[DONE]" not in answer.text
            await quiet(at)

    asyncio.run(run())


def test_a_stream_whose_tokens_flow_takes_as_long_as_it_takes() -> None:
    async def say(send: Send) -> None:
        for _ in range(12):
            await asyncio.sleep(0.1)
            await send(b": ping\n\n" + token("one "))
        await send(token("two", "length") + END)

    async def run() -> None:
        async with before(say, inter_token_timeout_seconds=0.5) as at:
            answer = await at.complete("a", stream=True)
            assert texts(answer.text) == {0: 12 * "one " + "two"} and answer.text.endswith(END.decode())

    asyncio.run(run())


@pytest.mark.parametrize("said", ["²", "٣", "1.5", "-1", "99999", "soon"])
def test_a_time_to_wait_that_is_none_is_not_passed_on(said: str) -> None:
    head = f"HTTP/1.1 503 X\r\nretry-after: {said}\r\ntransfer-encoding: chunked\r\n\r\n".encode()

    async def run() -> None:
        async with before(events(), head) as at:
            answer = await at.complete("a")
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"

    asyncio.run(run())


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("odd", [b"\x01", b"\xff", "é".encode()], ids=repr)
def test_a_type_that_no_header_may_have_is_no_defect(odd: bytes, status: int) -> None:
    head = HEAD.replace(b"event-stream", b"event-stream; x=" + odd).replace(b"200", b"%d" % status)

    async def run() -> None:
        async with before(events(token("one ", "length"), END), head) as at:
            for stream in (False, True):
                answer = await at.complete("a", stream=stream)
                assert answer.status_code == status and texts(answer.text) == {0: "one "}
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize("lie", ["1e400", "1e300"])
def test_a_count_that_is_none_does_not_spoil_the_routers_own(lie: str) -> None:
    async def run() -> None:
        async with serving() as at:
            (decode,) = at.decodes
            (known,) = (one for one in at.router.app.fleet if one.name == decode.name)
            decode.metrics_text = f"kvcached_nixl:handover_failures_total {lie}\nx 1\n"
            known.suspected.set()
            await asyncio.sleep(1.5)
            decode.metrics_text = "kvcached_nixl:handover_failures_total 3\n"
            await until(lambda: known.reported_failures == 3, "it was not looked at")
            assert await at.count("reported_handover_failures_total") == 3

    asyncio.run(run())


def test_a_stream_whose_connection_stays_open_after_its_end_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proxy before the server may leave it. It is no failure of the server, and the client waits for nothing."""
    monkeypatch.setattr("kvcached_nixl.proxy.relay.END_SECONDS", 0.2)

    async def say(send: Send) -> None:
        await events(token("a"), token("b", "stop"), END)(send)
        await asyncio.sleep(3600)

    async def run() -> None:
        async with before(say, inter_token_timeout_seconds=3.0) as at:
            begun = time.monotonic()
            answer = await at.complete(max_tokens=4, stream=True)
            assert answer.text.endswith(END.decode()) and "error" not in answer.text
            assert time.monotonic() - begun < 2.5
            (known,) = (one for one in at.router.app.fleet if one.name == at.decodes[0].name)
            assert not known.is_doubted
            await until(lambda: at.decodes[0].asked[0].was_cut, "its connection is kept")
            await quiet(at)

    asyncio.run(run())
