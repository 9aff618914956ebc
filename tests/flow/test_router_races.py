# SPDX-License-Identifier: Apache-2.0
"""Things that happen in one moment, or never end: each was found by a review of the router, and was red before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest
from support.router_under_test import (
    ADMIN_KEY,
    HELLO,
    UnderTest,
    learn,
    quiet,
    request_of,
    right,
    serving,
    serving_before,
    until,
)
from support.stub_servers import HOST, Asked, Fabric, Stub, stubs, tokens_of

from kvcached_nixl.proxy.record import Recorder


class Meeting:
    """Prefill's refusal to hand over, and decode's answer, in one moment."""

    def __init__(self) -> None:
        self.is_on = False
        self.decode_waits = asyncio.Event()
        self.prefill_has_answered = asyncio.Event()
        self.status = 200


class Prefill(Stub):
    def __init__(self, fabric: Fabric, meeting: Meeting) -> None:
        super().__init__(fabric, pushes=True)
        self._meeting = meeting

    async def answer_prefill(self, fault: str, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if not self._meeting.is_on:
            return await super().answer_prefill(fault, asked, writer)
        await self._meeting.decode_waits.wait()
        choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
        await self._json(writer, self._meeting.status, {"choices": choices, "kv_transfer_params": None})
        self._meeting.prefill_has_answered.set()
        return None


class Decode(Stub):
    def __init__(self, fabric: Fabric, meeting: Meeting) -> None:
        super().__init__(fabric, pushes=True)
        self._meeting = meeting

    async def answer_decode(self, fault: str, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if not self._meeting.is_on or not asked.params.get("do_remote_prefill"):
            return await super().answer_decode(fault, asked, writer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        self._meeting.decode_waits.set()
        await self._meeting.prefill_has_answered.wait()
        tokens = tokens_of(asked.body)
        for place, token in enumerate(tokens):
            reason = "length" if place == len(tokens) - 1 else None
            choices = [{"index": 0, "text": token, "finish_reason": reason}]
            event = b"data: " + json.dumps({"id": "x", "choices": choices}).encode() + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await asyncio.sleep(0.02)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return None


@pytest.mark.parametrize("status", [200, 400])
def test_prefill_that_gives_up_in_the_moment_of_decode_s_first_token_doubles_no_answer(status: int) -> None:
    """The client has decode's answer or the other one, never both in a row."""

    async def run() -> None:
        fabric, meeting = Fabric(), Meeting()
        prefill, decode = Prefill(fabric, meeting), Decode(fabric, meeting)
        async with stubs(prefill, decode), serving_before([prefill], [decode]) as at:
            await learn(at)
            for _ in range(5):
                meeting.is_on, meeting.status = False, status
                assert right(await at.complete(max_tokens=4))
                meeting.is_on, meeting.decode_waits, meeting.prefill_has_answered = (
                    True,
                    asyncio.Event(),
                    asyncio.Event(),
                )
                answer = await at.complete(max_tokens=4, stream=True)
                if answer.status_code == 200:
                    events = [json.loads(one[6:]) for one in answer.text.split("\n\n") if one.startswith("data: {")]
                    texts = [event["choices"][0]["text"] for event in events if "choices" in event]
                    has_error = any("error" in event for event in events)
                    expected = tokens_of({"prompt": "hello", "max_tokens": 4})
                    assert texts == (expected[: len(texts)] if has_error else expected)
                else:
                    assert answer.status_code == status

    asyncio.run(run())


def unread(at: UnderTest) -> socket.socket:
    """Returns a connection of a client that reads nothing, with little room."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((HOST, at.port))
    client.setblocking(False)
    return client


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/models", "/nothing"])
def test_a_client_that_reads_nothing_of_the_router_s_own_pages_holds_nothing(path: str) -> None:
    async def run() -> None:
        async with serving(client_timeout_seconds=0.3) as at:
            client = unread(at)
            for _ in range(600):
                try:
                    client.send(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
                except OSError:
                    break
                await asyncio.sleep(0.001)
            await until(lambda: at.router.app.account.taken_bytes <= 1 << 17, "its memory is not free again")
            client.close()

    asyncio.run(run())


def test_a_long_refusal_of_a_server_is_not_offered_for_ever() -> None:
    async def run() -> None:
        async with serving(client_timeout_seconds=0.3) as at:
            at.prefills[0].faults.append("400")
            at.prefills[0].pad_bytes = 8 << 20
            client = unread(at)
            client.send(request_of(json.dumps(HELLO).encode()))
            await until(lambda: bool(at.prefills[0].asked), "prefill is not asked")
            await quiet(at)
            client.close()

    asyncio.run(run())


def test_a_client_that_leaves_behind_a_long_pipelined_body_ends_its_legs() -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].token_seconds = 3600.0
            _, writer = await asyncio.open_connection(HOST, at.port)
            writer.write(request_of(json.dumps(HELLO).encode()))
            await until(lambda: bool(at.decodes[0].asked), "decode is not asked")
            writer.write(request_of(b"x" * 900_000)[:700_000])
            await asyncio.sleep(0.1)
            writer.transport.abort()
            await until(lambda: at.decodes[0].asked[0].was_cut, "decode goes on")
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_chunk_that_is_malformed_ends_the_answer_at_once(stream: bool) -> None:
    async def run() -> None:
        async with serving(attempts=1) as at:
            at.decodes[0].faults.append("bad chunk")
            answer = await asyncio.wait_for(at.complete(max_tokens=4, stream=stream), 5)
            assert answer.status_code == 502 or '"error"' in answer.text

    asyncio.run(run())


def test_a_server_that_is_healthy_and_fails_every_request_is_left_alone_for_a_while() -> None:
    """Its health checks do not end the doubt that its answers have raised."""

    async def run() -> None:
        async with serving(1, 2) as at:
            at.decodes[0].faults.extend(["close"] * 10_000)
            for _ in range(100):
                assert right(await at.complete(max_tokens=4))
            assert len(at.decodes[0].asked) < 30
            at.decodes[0].faults.clear()

    asyncio.run(run())


def test_without_memory_for_a_request_the_router_still_says_that_it_lives() -> None:
    async def run() -> None:
        async with serving() as at:
            account = at.router.app.account
            account.hold(1 << 40)
            try:
                assert (await at.complete()).status_code == 429
                for path in ("/livez", "/readyz", "/metrics"):
                    assert (await at.http.get(f"{at.url}{path}")).status_code == 200
                assert (await at.administer("GET")).status_code == 200
            finally:
                account.hold(-(1 << 40))

    asyncio.run(run())


def test_what_prefill_takes_is_no_waiting_for_a_server() -> None:
    """A decode that refuses a connection after a long prefill costs nothing where another one is up."""

    async def run() -> None:
        async with serving(1, 2, queue_timeout_seconds=0.5, health_interval_seconds=60.0) as at:
            at.prefills[0].prefill_seconds = 1.0
            await at.decodes[0].stop()
            for _ in range(2):
                assert right(await at.complete(max_tokens=4))
            await at.decodes[0].start()

    asyncio.run(run())


def test_events_without_a_token_are_neither_kept_nor_passed_on_without_limit() -> None:
    async def run() -> None:
        async with serving(attempts=1, max_memory_bytes=4 << 20) as at:
            at.decodes[0].faults.append("comments")
            answer = await asyncio.wait_for(at.complete(max_tokens=4, stream=True), 30)
            assert answer.status_code in (429, 502)
            await quiet(at)

    asyncio.run(run())


def test_a_server_that_is_added_again_while_the_old_one_ends_keeps_its_series() -> None:
    async def run() -> None:
        async with serving(1, 2) as at:
            decode = at.decodes[0]
            (known,) = (one for one in at.router.app.fleet if one.name == decode.name)
            known.quiet.clear()
            removing = asyncio.create_task(at.administer("DELETE", f"/{decode.name}?now=true"))
            await until(lambda: known not in at.router.app.fleet, "it is not removed")
            added = await at.administer("POST", json={"role": "decode", "url": decode.url})
            assert added.status_code == 201
            known.quiet.set()
            assert (await removing).status_code == 204
            series = f'kvcached_nixl_router_ejections_total{{instance="{decode.name}",role="decode"}}'
            assert series in await at.metrics()
            assert (await at.administer("DELETE", f"/{decode.name}?now=true")).status_code == 204
            assert series not in await at.metrics()

    asyncio.run(run())


def test_what_cannot_be_recorded_is_not_in_flight_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving() as at:
            with monkeypatch.context() as broken:
                broken.delattr(Recorder, "ended")
                await at.complete(max_tokens=4)
            await quiet(at)
            assert (await at.complete(max_tokens=4)).status_code == 200

    asyncio.run(run())


def test_a_server_that_is_removed_by_a_client_that_leaves_is_removed() -> None:
    async def run() -> None:
        async with serving(1, 1) as at:
            (decode,) = at.decodes
            decode.token_seconds = 3600.0
            asking = asyncio.create_task(at.complete(max_tokens=4))
            await until(lambda: bool(decode.asked), "decode is not asked")
            _, writer = await asyncio.open_connection(HOST, at.port)
            head = f"DELETE /instances/{decode.name}?now=true HTTP/1.1\r\nHost: x\r\n"
            writer.write(f"{head}Authorization: Bearer {ADMIN_KEY}\r\n\r\n".encode())
            await writer.drain()
            writer.transport.abort()
            answer: Any = await asking
            assert answer.status_code in (502, 503) and decode.name not in await at.instances()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    asyncio.run(run())
