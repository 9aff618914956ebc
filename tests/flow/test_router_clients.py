# SPDX-License-Identifier: Apache-2.0
"""The router and its clients: clients that leave, do not read, send malformed requests, or lack a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from support.router_under_test import ADMIN_KEY, HELLO, UnderTest, learn, quiet, request_of, right, serving, until
from support.stub_servers import END, HOST, Asked, Fabric, Stub, stubs, tokens_of

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.command import Router
from kvcached_nixl.proxy.options import Options

pytestmark = pytest.mark.long

# -------------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("when", ["in prefill", "in decode", "in the stream", "half closed"])
def test_a_client_that_leaves_ends_both_legs(when: str, pushes: bool) -> None:
    """The servers see their connections close, which is what has vLLM abort; and nothing is tried again."""

    async def run() -> None:
        async with serving(pushes=pushes) as at:
            await learn(at)
            (prefill,), (decode,) = at.prefills, at.decodes
            if when == "in prefill":
                prefill.prefill_seconds = 3600.0
            else:
                decode.token_seconds = 0.05
            asked = len(prefill.asked) + len(decode.asked)
            body = json.dumps({**HELLO, "max_tokens": 10_000, "stream": when != "in decode"})
            reader, writer = await asyncio.open_connection(HOST, at.port)
            writer.write(request_of(body.encode()))
            if when == "in prefill":
                await until(lambda: len(prefill.asked) + len(decode.asked) > asked + pushes, "nobody is asked")
            elif when == "in decode":
                await until(lambda: len(decode.asked) == 2, "decode is not asked")
                await asyncio.sleep(0.05)
            else:
                await reader.readuntil(b"data: ")
            if when == "half closed":
                writer.write_eof()
            else:
                writer.close()
            await quiet(at)
            if when == "in prefill":
                await until(lambda: prefill.asked[-1].was_cut, "prefill goes on")
            if when != "in prefill" or pushes:
                await until(lambda: decode.asked[-1].was_cut, "decode goes on")
            assert await at.count("requests_total", outcome="client_left") == 1
            writer.close()
            prefill.prefill_seconds = decode.token_seconds = 0.0
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_a_client_that_closes_behind_its_answer_has_not_left() -> None:
    """In push prefill may answer later than decode, whose answer is all that the client gets."""

    async def run() -> None:
        async with serving(pushes=True) as at:
            await learn(at)
            (prefill,) = at.prefills
            answer = prefill.answer_prefill

            async def answer_late(fault: str, asked: Asked, writer: asyncio.StreamWriter) -> None:
                prefill.offer(asked)
                await until(lambda: has_closed, "the client has no answer")
                await asyncio.sleep(0.1)
                await answer(fault, asked, writer)

            has_closed = False
            prefill.answer_prefill = answer_late  # type: ignore[method-assign]
            before = await at.count("requests_total", outcome="ok")
            reader, writer = await asyncio.open_connection(HOST, at.port)
            writer.write(request_of(json.dumps({**HELLO, "stream": True}).encode()))
            await reader.readuntil(END + b"\r\n0\r\n\r\n")
            writer.close()
            has_closed = True
            await quiet(at)
            assert await at.count("requests_total", outcome="client_left") == 0
            assert await at.count("requests_total", outcome="ok") == before + 1

    asyncio.run(run())


def test_a_client_that_does_not_read_holds_nothing_for_ever_and_fills_no_memory() -> None:
    """The server is not read ahead of the client; in the end the connection is closed."""

    async def run() -> None:
        async with serving(client_timeout_seconds=0.5) as at:
            body = json.dumps({**HELLO, "max_tokens": 2_000, "stream": True})
            at.decodes[0].pad_bytes = 1 << 20
            reader, writer = await asyncio.open_connection(HOST, at.port, limit=1024)
            writer.write(request_of(body.encode()))
            await until(lambda: len(at.decodes[0].asked) == 1, "decode is not asked")
            await until(lambda: at.decodes[0].asked[0].was_cut, "decode is read on and on")
            await quiet(at)
            assert at.router.app.recorder.latest()[0]["bytes"] < 100 << 20
            last = b""
            with contextlib.suppress(ConnectionError):
                while heard := await asyncio.wait_for(reader.read(1 << 20), 10):
                    last = heard
            # The connection ends, and not as if that were all.
            assert not last.endswith(b"0\r\n\r\n")
            writer.close()
            at.decodes[0].pad_bytes = 0
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_two_thousand_mutated_bodies_are_answered_rightly_or_refused() -> None:
    """Never a 500, never a server that hears what is no request, never a wrong token."""
    draw = random.Random(9)
    whole = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 2, "stream": False, "n": 1, "seed": 3}).encode()
    pieces = [
        b"",
        b'"',
        b"{",
        b"}",
        b"[",
        b"\\",
        b"\xff",
        b"\x00",
        b"1e999",
        b"NaN",
        b"null",
        b",",
        b"9" * 30,
        b"true",
        b"-",
    ]

    def mutated() -> bytes:
        body = bytearray(whole)
        for _ in range(draw.randrange(1, 3)):
            place = draw.randrange(len(body))
            body[place : place + draw.randrange(3)] = draw.choice(pieces)
        return bytes(body)

    async def run() -> None:
        async with serving() as at:
            seen: set[int] = set()

            async def one(body: bytes) -> None:
                answer = await at.http.post(
                    f"{at.url}/v1/completions", content=body, headers={"content-type": "application/json"}
                )
                seen.add(answer.status_code)
                assert answer.status_code in (200, 400), (body, answer.text)
                if answer.status_code == 200 and not json.loads(body).get("stream"):
                    assert answer.json()["choices"][0]["text"] == "".join(tokens_of(json.loads(body)))

            for _ in range(100):
                await asyncio.gather(*(one(mutated()) for _ in range(20)))
            assert seen == {200, 400}
            assert right(await at.complete(max_tokens=4))
            await quiet(at)

    asyncio.run(run())


def test_more_than_may_be_in_flight_are_told_to_come_again() -> None:
    async def run() -> None:
        async with serving(max_inflight=2) as at:
            at.decodes[0].token_seconds = 0.1
            running = [asyncio.create_task(at.complete(max_tokens=4)) for _ in range(2)]
            await until(lambda: at.router.app.in_flight == 2, "they are not in flight")
            answer = await at.complete(max_tokens=4)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "RateLimitError"
            assert all(right(one) for one in await asyncio.gather(*running))
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_bodies_that_have_no_room_together_are_told_to_come_again() -> None:
    async def run() -> None:
        async with serving(max_memory_bytes=(1 << 20) + 150_000) as at:
            at.decodes[0].token_seconds = 0.1
            long = "x" * 30_000
            running = asyncio.create_task(at.complete(long, max_tokens=4))
            await until(lambda: bool(at.decodes[0].asked), "decode is not asked")
            answer = await at.complete(long, max_tokens=4)
            assert answer.status_code == 429 and "retry-after" in answer.headers
            assert right(await running, long)
            assert right(await at.complete(long, max_tokens=4), long)

    asyncio.run(run())


def test_a_prefill_whose_kv_is_still_to_be_read_is_not_drained() -> None:
    """Prefill's request has finished, but stopping the server now would fail the request."""

    async def run() -> None:
        async with serving() as at:
            at.decodes[0].token_seconds = 0.3
            running = asyncio.create_task(at.complete(max_tokens=4, stream=True))
            await until(lambda: bool(at.decodes[0].asked), "decode is not asked")
            name = at.prefills[0].name
            assert (await at.administer("POST", f"/{name}/drain")).json()["keeping"] == 1
            assert not (await at.instances())[name]["drained"]
            assert (await at.administer("DELETE", f"/{name}")).status_code == 409
            while not (await at.instances())[name]["drained"]:
                await asyncio.sleep(0.02)
            # Decode has begun, and is not through.
            assert not running.done()
            assert (await running).text.endswith("data: [DONE]\n\n")

    asyncio.run(run())


def test_a_router_that_ends_refuses_new_requests_and_finishes_others() -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].token_seconds = 0.1
            running = asyncio.create_task(at.complete(max_tokens=4, stream=True))
            await until(lambda: bool(at.decodes[0].asked), "decode is not asked")
            at.router.stop()
            await until(lambda: at.router.app.is_draining, "it does not drain")
            answer = await at.complete()
            assert answer.status_code == 503 and "retry-after" in answer.headers
            assert (await at.http.get(f"{at.url}/health")).status_code == 503
            done = await running
            assert done.text.endswith("data: [DONE]\n\n")
            await until(lambda: at.router.app.quiet.is_set(), "it does not end")

    asyncio.run(run())


def test_what_does_not_end_in_time_is_broken_off_with_an_error_event() -> None:
    async def run() -> None:
        async with serving(drain_timeout_seconds=0.3) as at:
            at.decodes[0].token_seconds = 0.05
            running = asyncio.create_task(at.complete(max_tokens=10_000, stream=True))
            await until(lambda: bool(at.decodes[0].asked), "decode is not asked")
            at.router.stop()
            done = await running
            assert '"error"' in done.text and "[DONE]" not in done.text
            await until(lambda: at.decodes[0].asked[0].was_cut, "decode goes on")

    asyncio.run(run())


async def raw(at: UnderTest, sent: bytes) -> bytes:
    """What a connection hears that says this."""
    reader, writer = await asyncio.open_connection(HOST, at.port)
    writer.write(sent)
    try:
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(1 << 16), 10)
        return b""
    finally:
        writer.close()


BODY = json.dumps(HELLO).encode()
JSON = b"Host: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\n" + JSON + LENGTH + b"\r\n" + BODY, b"200"),
        (b"POST /v1/completions HTTP/1.0\r\n" + JSON + LENGTH + b"\r\n" + BODY, b"200"),
        (b"POST http://evil.example/v1/completions HTTP/1.1\r\n" + JSON + LENGTH + b"\r\n" + BODY, b"200"),
        (
            b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
            b"200",
        ),
        (b"POST /v1/completions?url=http://evil HTTP/1.1\r\n" + JSON + LENGTH + b"\r\n" + BODY, b"200"),
        (b"POST /v1/..%2fcompletions HTTP/1.1\r\n" + JSON + LENGTH + b"\r\n" + BODY, b"404"),
        (b"POST /v1/%2e%2e/metrics HTTP/1.1\r\n" + JSON + LENGTH + b"\r\n" + BODY, b"404"),
        (b"POST /v1/completions/ HTTP/1.1\r\n" + JSON + LENGTH + b"\r\n" + BODY, b"404"),
        (b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
        (b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Content-Length: 99999999\r\n\r\n", b"413"),
        (b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Content-Encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY, b"415"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n" + LENGTH + b"\r\n" + BODY, b"415"),
        (
            b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"X: " + b"y" * 40_000 + b"\r\n" + LENGTH + b"\r\n" + BODY,
            b"431",
        ),
        (b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Content-Length: -1\r\n\r\n", b"400"),
        (b"no http at all\r\n\r\n", b"400"),
    ],
)
def test_what_a_connection_says_is_answered_and_no_part_of_it_chooses_a_server(sent: bytes, status: bytes) -> None:
    async def run() -> None:
        async with serving(max_body_bytes=1 << 20) as at:
            heard = await raw(at, sent)
            assert heard.split(b" ")[1] == status, heard[:300]
            assert {one.path for server in (*at.prefills, *at.decodes) for one in server.asked} <= {"/v1/completions"}
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("framing", ["length", "chunked", "empty"])
@pytest.mark.parametrize("cut", [None, 1, 60], ids=["in one piece", "byte by byte", "in pieces"])
def test_an_offer_of_another_protocol_is_passed_over_and_not_the_body(
    offer: bytes, framing: str, cut: int | None
) -> None:
    """Java's client makes one. The connection ends after the answer, so a client sends again what it sent behind."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer
    lengths = {
        "length": LENGTH + b"\r\n" + BODY,
        "chunked": b"Transfer-Encoding: chunked\r\n\r\n4\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (BODY[:4], len(BODY) - 4, BODY[4:]),
        "empty": b"Content-Length: 0\r\n\r\n",
    }
    sent = head + b"\r\n" + lengths[framing]

    async def run() -> None:
        async with serving() as at:
            for behind in (b"",) if cut else (b"", sent, sent[:30]):
                reader, writer = await asyncio.open_connection(HOST, at.port)
                whole = sent + behind
                for place in range(0, len(whole), cut or len(whole)):
                    writer.write(whole[place : place + (cut or len(whole))])
                    await asyncio.sleep(0)
                heard = await asyncio.wait_for(reader.read(), 10)
                assert heard.startswith(b"HTTP/1.1 400 " if framing == "empty" else b"HTTP/1.1 200 ")
                assert heard.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in heard
                writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("PUT", "/", 405)]
)
def test_a_path_or_a_method_that_is_none_is_an_error_as_clients_know_it(method: str, path: str, status: int) -> None:
    async def run() -> None:
        async with serving() as at:
            answer = await at.http.request(method, f"{at.url}{path}")
            assert answer.status_code == status and path in answer.json()["error"]["message"]
            assert ("allow" in answer.headers) == (status == 405)

    asyncio.run(run())


def test_a_chunked_body_that_is_too_large_is_refused_while_it_comes() -> None:
    async def run() -> None:
        async with serving(max_body_bytes=1 << 16) as at:
            chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
            head = b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
            assert b" 413 " in await raw(at, head + chunk * 4)
            await quiet(at)

    asyncio.run(run())


def test_a_body_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async def run() -> None:
        async with serving(client_timeout_seconds=0.2) as at:
            assert b" 408 " in await raw(at, b"POST /v1/completions HTTP/1.1\r\n" + JSON + LENGTH + b'\r\n{"a"')
            await quiet(at)

    asyncio.run(run())


def test_a_head_without_an_end_is_cut_off() -> None:
    async def run() -> None:
        async with serving() as at:
            assert b" 431 " in await raw(at, b"POST /v1/completions HTTP/1.1\r\nX: " + b"y" * 300_000)
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


HOSTILE = [
    b"", b"[]", b"null", b'"x"', b"{", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "seed": 123456789012345678901234567890}', b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"prompt": "x", "n": 0}', b'{"prompt": "x", "n": "2"}',
    b'{"prompt": "x", "stream": "yes"}', b'{"prompt": "x", "max_tokens": 1.5}', b'{"prompt": "x"} trailing',
    b'{"prompt": "x", "kv_transfer_params": {"do_remote_prefill": true}}',
    b'{"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}', b'{"prompt": "x", "kv_transfer_params": []}',
    b'{"prompt": "x", "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": true}}',
    b'{"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}', b'{"prompt": "x", "ec_transfer_params": {"a": 1}}',
    b'{"prompt": "x", "prefix_prompt_ids": [-1]}', b'{"prompt": "x", "prefix_prompt_ids": "x"}',
    b'{"prompt": "x", "kv_transfer_params": {}, "kv_transfer_params": {"transfer_id": "t"}}',
]  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: repr(body[:60]))
def test_a_body_that_is_no_request_is_refused_before_any_server_hears_of_it(body: bytes) -> None:
    async def run() -> None:
        async with serving() as at:
            answer = await at.http.post(
                f"{at.url}/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert not at.prefills[0].asked and not at.decodes[0].asked

    asyncio.run(run())


# -------------------------------------------------------------------------------------------- keys


def test_keys() -> None:
    """Asked for, replaced, never logged; health and metrics need none."""

    async def run() -> None:
        async with serving(api_key="client-key", upstream_key="server-key", admin_key="admin-key", all_up=False) as at:
            admin = {"Authorization": "Bearer admin-key"}
            for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "client-key"}, admin):
                assert (await at.complete(headers=headers)).status_code == 401
                assert (await at.http.get(f"{at.url}/v1/models", headers=headers)).status_code == 401
            while (await at.http.get(f"{at.url}/health")).status_code != 200:
                await asyncio.sleep(0.01)
            assert right(await at.complete(max_tokens=4, headers={"Authorization": "Bearer client-key"}))
            for server in (*at.prefills, *at.decodes):
                assert server.asked[-1].headers["authorization"] == "Bearer server-key"
            assert (await at.administer("GET")).status_code == 401
            assert (await at.http.get(f"{at.url}/instances", headers=admin)).status_code == 200
            assert (await at.http.get(f"{at.url}/metrics")).status_code == 200
            at.decodes[0].faults.append("401")
            refused = await at.complete(headers={"Authorization": "Bearer client-key"})
            assert refused.status_code == 502 and "key" in refused.text

    asyncio.run(run())


def test_without_a_key_instances_answer_nobody_over_tcp() -> None:
    """A balancer, a sidecar or a tunnel on this machine looks like a program of this machine."""

    async def run() -> None:
        async with serving(admin_key="", all_up=False) as at:
            for method, path in (("GET", ""), ("POST", ""), ("POST", f"/{at.decodes[0].name}/drain")):
                answer = await at.http.request(method, f"{at.url}/instances{path}", json={"role": "decode", "url": "x"})
                assert answer.status_code == 403 and "--admin-socket" in answer.text

    asyncio.run(run())


def test_this_user_administers_over_the_unix_socket_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"

    async def run() -> None:
        async with serving(admin_key="", admin_socket=str(path), all_up=False) as at:
            assert path.stat().st_mode & 0o777 == 0o600
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                name = at.decodes[0].name
                assert (await http.post(f"/instances/{name}/drain")).json()["draining"]
                assert not (await http.post(f"/instances/{name}/undrain")).json()["draining"]
                assert len((await http.get("/instances")).json()["instances"]) == 2
                # It would have none any more.
                with pytest.raises(SettingsError, match="another process listens"):
                    await asyncio.wait_for(Router(Options(port=0, admin_socket=str(path))).serve(), 10)
                assert (await http.get("/instances")).status_code == 200
        # A socket that an earlier router has left is replaced.
        with socket.socket(socket.AF_UNIX) as left:
            path.unlink(missing_ok=True)
            left.bind(str(path))
        async with serving(admin_socket=str(path)):
            pass

    asyncio.run(run())


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_changes_nothing(site: str) -> None:
    """Not even where its browser has the key."""

    async def run() -> None:
        async with serving() as at:
            headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Sec-Fetch-Site": site}
            answer = await at.http.post(f"{at.url}/instances/{at.decodes[0].name}/drain", headers=headers)
            assert answer.status_code == 403
            assert not any(one["draining"] for one in (await at.instances()).values())

    asyncio.run(run())


def test_a_client_s_own_parameters_go_where_they_say_only_if_it_may() -> None:
    async def run() -> None:
        async with serving(client_params=True) as at:
            first = await at.complete(kv_transfer_params={"do_remote_decode": True})
            assert not at.decodes[0].asked
            params = first.json()["kv_transfer_params"]
            assert right(await at.complete(max_tokens=4, kv_transfer_params=params))
            assert at.decodes[0].asked[0].params == params and len(at.prefills[0].asked) == 1

    asyncio.run(run())


def test_ten_thousand_is_not_the_number_of_series() -> None:
    """Nothing that a client says is a label."""

    async def run() -> None:
        async with serving() as at:
            assert right(await at.complete(max_tokens=4))
            before = len(await at.metrics())
            for number in range(20):
                await at.complete(prompt=f"p{number}", model=f"m{number}", headers={"X-Request-Id": f"r{number}"})
                await at.http.get(f"{at.url}/no/{number}")
            assert len(await at.metrics()) == before

    asyncio.run(run())


def test_no_prompt_and_no_key_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(api_key="the-key", log_json=True, all_up=False) as at:
            while (await at.http.get(f"{at.url}/health")).status_code != 200:
                await asyncio.sleep(0.01)
            key = {"Authorization": "Bearer the-key", "X-Request-Id": "id-1"}
            for fault in ("", "400", "500", "garbage"):
                at.prefills[0].faults.append(fault)
                await at.complete("a secret prompt", headers=key)
            lines = [json.loads(r.getMessage()) for r in caplog.records if r.name.endswith("proxy.requests")]
            assert [one["client_id"] for one in lines] == ["id-1"] * 4
            assert lines[0]["outcome"] == "ok" and lines[0]["prefill"] == at.prefills[0].name
            assert "secret" not in caplog.text and "the-key" not in caplog.text

    caplog.set_level(logging.DEBUG)
    asyncio.run(run())


def test_a_server_that_is_both_or_twice_is_refused() -> None:
    async def run() -> None:
        async with serving() as at:
            for role in ("prefill", "decode"):
                answer = await at.administer("POST", json={"role": role, "url": at.decodes[0].url})
                assert answer.status_code == 409
            for url in ("ftp://x", "http://x/path", "http://u:p@x:1", "x", "http://x:99999"):
                answer = await at.administer("POST", json={"role": "decode", "url": url})
                assert answer.status_code == 400 and "url" in answer.text

    asyncio.run(run())


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
def test_the_command_serves_and_ends_in_order(pushes: bool, tmp_path: Path) -> None:
    """As a process: requests, SIGTERM, status 0."""

    async def run() -> None:
        fabric = Fabric()
        prefill, decode = Stub(fabric, pushes=pushes), Stub(fabric, pushes=pushes)
        async with stubs(prefill, decode):
            servers = tmp_path / "servers.json"
            servers.write_text(json.dumps({"prefill": [prefill.url], "decode": [decode.url]}))
            probe = await asyncio.start_server(lambda *_: None, HOST, 0)
            port = probe.sockets[0].getsockname()[1]
            probe.close()
            command = ["-m", "kvcached_nixl", "proxy", "--servers", str(servers), "--port", str(port), "--log-json"]
            process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
            try:
                async with httpx.AsyncClient(trust_env=False, timeout=20, base_url=f"http://{HOST}:{port}") as http:
                    await up(http)
                    assert right(await http.post("/v1/completions", json=HELLO))
                    decode.token_seconds = 0.05
                    asking = [
                        asyncio.create_task(http.post("/v1/completions", json={**HELLO, "stream": stream}))
                        for stream in (False, True, False, True)
                    ]
                    await until(lambda: len(decode.asked) == 5, "decode is not asked")
                    process.send_signal(signal.SIGTERM)
                    whole, streamed, *_ = await asyncio.gather(*asking)
                    assert right(whole) and streamed.text.endswith("data: [DONE]\n\n")
                _, said = await asyncio.wait_for(process.communicate(), 20)
                assert process.returncode == 0, said
                lines = [json.loads(line) for line in said.splitlines() if line.startswith(b"{")]
                assert [one["outcome"] for one in lines] == ["ok"] * 5
                assert lines[-1]["direction"] == ("push" if pushes else "pull")
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    asyncio.run(run())


async def up(http: httpx.AsyncClient) -> None:
    """The router answers, and so do its servers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/health")).status_code == 200:
                return
        await asyncio.sleep(0.05)
    pytest.fail("the router does not come up")


def test_without_its_libraries_the_command_says_what_to_install(tmp_path: Path) -> None:
    """The rest of the package needs none of them."""
    (tmp_path / "aiohttp.py").write_text("raise ImportError('no aiohttp here')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "kvcached_nixl", "proxy"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install '.[proxy]'" in done.stderr
