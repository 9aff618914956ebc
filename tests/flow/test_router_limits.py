# SPDX-License-Identifier: Apache-2.0
"""What one client, one server or one host's limits can do to all the other requests of a router: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_under_test import HELLO, UnderTest, quiet, request_of, right, serving, until
from support.stub_servers import HOST, Fabric, Stub, stubs

from kvcached_nixl.proxy import health, listener
from kvcached_nixl.proxy.account import REQUEST_BYTES, fit_descriptors
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.retry_budget import MOST, PER_SECOND, RetryBudget

pytestmark = pytest.mark.long

BODY = json.dumps(HELLO).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)


async def opened(at: UnderTest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, at.port)


def rest_bytes(at: UnderTest) -> int:
    """Returns what the router counts as used."""
    return at.router.app.account.taken_bytes


# ---------------------------------------------------------------------------------------- heads, trailers, connections


def test_trailers_are_neither_headers_nor_without_limit() -> None:
    async def run() -> None:
        async with serving() as at:
            reader, writer = await opened(at)
            writer.write(CHUNKED + b"Authorization: Bearer x\r\ntraceparent: y\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
            for server in (*at.prefills, *at.decodes):
                assert not {"authorization", "traceparent"} & set(server.asked[0].headers)
            writer.close()
            reader, writer = await opened(at)
            writer.write(CHUNKED)
            with contextlib.suppress(ConnectionError):
                for number in range(2_000):
                    writer.write(b"X-%d: %s\r\n" % (number, b"y" * 5_000))
                    await writer.drain()
                assert b" 200 " not in await asyncio.wait_for(reader.read(), 10)
            writer.close()
            await quiet(at)
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_connections_that_say_nothing_give_way_to_those_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(max_connections=20) as at:
            silent = [await opened(at) for _ in range(60)]
            for place, (_, writer) in enumerate(silent):
                with contextlib.suppress(ConnectionError):
                    writer.write((b"", b"\r\n", b"GET / HTTP/1.1\r\nX: ")[place % 3])
            assert all(right(one) for one in await asyncio.gather(*(at.complete(max_tokens=4) for _ in range(10))))
            for _, writer in silent:
                writer.close()
            await until(lambda: rest_bytes(at) <= 20 * listener.MOST_HEAD_BYTES, "memory is counted that is free")

    asyncio.run(run())


def test_a_connection_on_which_no_whole_head_comes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.3)

    async def run() -> None:
        async with serving() as at:
            for sent in (b"", b"\r\n", b"POST /v1/completions HTTP/1.1\r\nX: ", request_of(BODY) + b"\r\n"):
                reader, writer = await opened(at)
                writer.write(sent)
                await asyncio.wait_for(reader.read(), 10)
                writer.close()

    asyncio.run(run())


def test_where_every_connection_works_one_more_is_told_so() -> None:
    async def run() -> None:
        async with serving(max_connections=4) as at:
            at.decodes[0].token_seconds = 0.2
            await at.http.aclose()
            working = [await opened(at) for _ in range(4)]
            for _, writer in working:
                writer.write(request_of(BODY))
            await until(lambda: len(at.decodes[0].asked) == 4, "they are not served")
            reader, more = await opened(at)
            said = await asyncio.wait_for(reader.read(), 10)
            assert b" 503 " in said and b"Retry-After: 1" in said and b"--max-connections" in said
            for reader, _ in working:
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
            for writer in (more, *(writer for _, writer in working)):
                writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("behind", [1, 5, 500])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_behind_pipelined_requests_ends_its_legs(behind: int, phase: str) -> None:
    async def run() -> None:
        async with serving() as at:
            (prefill,), (decode,) = at.prefills, at.decodes
            if phase == "prefill":
                prefill.prefill_seconds = 3600.0
            else:
                decode.token_seconds = 3600.0
            server = prefill if phase == "prefill" else decode
            _, writer = await opened(at)
            writer.write(request_of(BODY))
            await until(lambda: len(server.asked) == 1, "nobody is asked")
            writer.write(request_of(BODY) * behind)
            await asyncio.sleep(0.05)
            writer.close()
            await until(lambda: server.asked[0].was_cut, "the leg goes on")
            await quiet(at)
            assert len(prefill.asked) == 1

    asyncio.run(run())


# ----------------------------------------------------------------------------------------------- memory, descriptors


def test_everything_that_was_counted_is_given_back() -> None:
    async def run() -> None:
        async with serving(2, 2, max_body_bytes=1 << 20) as at:
            await at.http.aclose()
            draw = random.Random(3)
            for _ in range(60):
                reader, writer = await opened(at)
                body = json.dumps({**HELLO, "prompt": "x" * draw.randrange(200_000), "stream": draw.random() < 0.5})
                sent = request_of(body.encode())
                writer.write(sent[: draw.choice([len(sent), draw.randrange(len(sent)), 10])])
                with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
                    await asyncio.wait_for(reader.read(draw.randrange(1, 500)), 0.1)
                writer.close()
            await until(lambda: not at.router.app.in_flight, "a request is left")
            await until(lambda: rest_bytes(at) == 0, "memory is counted that is free")

    asyncio.run(run())


def test_a_long_answer_is_counted_and_refused_where_there_is_no_room() -> None:
    async def run() -> None:
        async with serving(max_memory_bytes=4 * REQUEST_BYTES) as at:
            at.decodes[0].pad_bytes = 4 << 20
            for stream in (False, True):
                answer = await at.complete(max_tokens=1, stream=stream)
                assert answer.status_code == 429 and "--max-memory-bytes" in answer.text, answer.text[:300]
            at.decodes[0].pad_bytes = 0
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_limits_fit_the_descriptors_that_the_process_may_have(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert fit_descriptors(Options(max_connections=300, max_inflight=200)).max_inflight == 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 300 + 400 and not caplog.records
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The oldest supported httpx leaves a socket open where its connection is refused.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_with_256_descriptors_nobody_is_lost(tmp_path: Path) -> None:
    """As a process: idle connections up to the limit, and as many requests as there is room for, all at once."""

    async def run() -> None:
        fabric = Fabric()
        prefill, decode = Stub(fabric), Stub(fabric)
        decode.token_seconds = 0.01
        async with stubs(prefill, decode):
            probe = await asyncio.start_server(lambda *_: None, HOST, 0)
            port = probe.sockets[0].getsockname()[1]
            probe.close()
            command = f"ulimit -n 256; exec {sys.executable} -m kvcached_nixl proxy --prefill {prefill.url}"
            command += f" --decode {decode.url} --port {port}"
            log = tmp_path / "log"
            with log.open("wb") as out:
                process = await asyncio.create_subprocess_exec("bash", "-c", command, stderr=out)
            idle: list[asyncio.StreamWriter] = []
            try:
                async with httpx.AsyncClient(trust_env=False, timeout=60, base_url=f"http://{HOST}:{port}") as http:
                    deadline = time.monotonic() + 60
                    while time.monotonic() < deadline:
                        with contextlib.suppress(httpx.TransportError):
                            if (await http.get("/health")).status_code == 200:
                                break
                        await asyncio.sleep(0.05)
                    for _ in range(300):
                        with contextlib.suppress(ConnectionError):
                            idle.append((await asyncio.open_connection(HOST, port))[1])
                    answers = await asyncio.gather(*(ask(http, number) for number in range(200)))
                    assert all(answers) and (await http.get("/health")).status_code == 200
                    assert max(len(os.listdir(f"/proc/{process.pid}/fd")) for _ in range(3)) < 256
                assert "may open 256 files" in log.read_text()
                assert "Too many open files" not in log.read_text()
            finally:
                for writer in idle:
                    writer.close()
                process.send_signal(signal.SIGINT)
                await asyncio.wait_for(process.wait(), 20)

    asyncio.run(run())


async def ask(http: httpx.AsyncClient, number: int) -> bool:
    """Asks as a client does that is told to come again. Returns whether the answer was right."""
    for _ in range(200):
        body: dict[str, Any] = {"model": "model", "prompt": f"p{number}", "max_tokens": 4}
        try:
            answer = await http.post("/v1/completions", json=body)
        except httpx.TransportError:
            await asyncio.sleep(0.1)
            continue
        if answer.status_code in (429, 503):
            assert "retry-after" in answer.headers
            await asyncio.sleep(0.1)
            continue
        return right(answer, f"p{number}")
    return False


# --------------------------------------------------------------------------------------------------- slow is not dead


@pytest.mark.parametrize(
    ("pushes", "most_delay_seconds"),
    [(False, 2.0), (True, 2.0), pytest.param(True, 20.0, marks=pytest.mark.long)],
)
def test_servers_that_are_slow_to_accept_and_to_say_that_they_live_lose_no_request(
    pushes: bool, most_delay_seconds: float
) -> None:
    """Every connection is answered only after up to 2 or 20 seconds, health checks too."""

    async def run() -> None:
        async with serving(
            2, 2, pushes=pushes, all_up=False, health_interval_seconds=0.05, queue_timeout_seconds=30.0
        ) as at:
            at.http.timeout = 120.0
            for server in (*at.prefills, *at.decodes):
                server.most_delay_seconds = most_delay_seconds
            answers = await asyncio.gather(*(at.complete(f"p{number}", max_tokens=4) for number in range(48)))
            assert all(right(one, f"p{number}") for number, one in enumerate(answers))
            assert await at.count("ejections_total") == 0

    asyncio.run(run())


def test_streams_of_a_server_whose_checks_go_unanswered_go_on() -> None:
    async def run() -> None:
        async with serving(unresponsive_timeout_seconds=0.4) as at:
            at.decodes[0].token_seconds = 0.05
            asking = asyncio.create_task(at.complete(max_tokens=40, stream=True))
            await until(lambda: bool(at.decodes[0].asked), "decode is not asked")
            at.decodes[0].answers_no_checks = True
            assert (await asking).text.endswith("data: [DONE]\n\n")
            at.decodes[0].answers_no_checks = False

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_server_has_left_without_an_end_is_tried_elsewhere(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM leaves some when it shuts down: nobody listens, the connection stays, and nothing comes."""
    monkeypatch.setattr(health, "GONE_SECONDS", 0.3)

    async def run() -> None:
        async with serving(1, 2, policy="round-robin") as at:
            first = at.decodes[0]
            first.faults.append("hang")
            asking = asyncio.create_task(at.complete(max_tokens=4, stream=stream))
            await until(lambda: bool(first.asked), "the first decode is not asked")
            first.stop_listening()
            answer = await asking
            assert right(answer) if not stream else answer.text.endswith("data: [DONE]\n\n")
            assert len(at.decodes[1].asked) == 1

    asyncio.run(run())


def test_a_request_waits_for_a_server_that_comes_back_and_not_for_ever() -> None:
    async def run() -> None:
        async with serving(queue_timeout_seconds=5.0) as at:
            (decode,) = at.decodes
            await decode.stop()
            while (await at.instances())[decode.name]["state"] == "up":
                await asyncio.sleep(0.01)
            asking = [asyncio.create_task(at.complete(max_tokens=4)) for _ in range(8)]
            await asyncio.sleep(0.3)
            await decode.start()
            assert all(right(one) for one in await asyncio.gather(*asking))
            await decode.stop()
            begun = time.monotonic()
            answer = await at.complete(max_tokens=4)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert 4.0 < time.monotonic() - begun < 15.0
            await decode.start()

    asyncio.run(run())


def test_a_server_that_reports_nonsense_is_watched_on() -> None:
    async def run() -> None:
        async with serving() as at:
            (decode,) = at.decodes
            for nonsense in ("1.2.3", "1e", "-", "e5", "NaN", "1" * 5000):
                decode.metrics_text = f"kvcached_nixl:handover_failures_total {nonsense}\n"
                await asyncio.sleep(0.15)
            await decode.stop()
            while (await at.instances())[decode.name]["state"] == "up":
                await asyncio.sleep(0.01)
            await decode.start()
            while (await at.instances())[decode.name]["state"] != "up":
                await asyncio.sleep(0.01)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------------- retries


def test_retries_are_a_fifth_of_the_requests_and_ten_a_second() -> None:
    now = [0.0]
    budget = RetryBudget(lambda: now[0])
    assert sum(budget.take() for _ in range(1000)) == MOST
    now[0] += 1.0
    assert sum(budget.take() for _ in range(1000)) == PER_SECOND
    for _ in range(100):
        budget.asked()
    assert sum(budget.take() for _ in range(1000)) in (19, 20)


def test_an_outage_is_not_multiplied_by_retries() -> None:
    async def run() -> None:
        async with serving(attempts=5) as at:
            at.prefills[0].faults.extend(["500"] * 2000)
            answers = await asyncio.gather(*(at.complete() for _ in range(200)))
            assert all(one.status_code == 502 for one in answers)
            # 200 requests, a saved hundred retries, a fifth of the requests, and ten for each second that it took.
            assert len(at.prefills[0].asked) < 200 + 100 + 40 + 200
            at.prefills[0].faults.clear()

    asyncio.run(run())
