# SPDX-License-Identifier: Apache-2.0
"""Shutting vLLM's API server down, through its own client of the engine: its requests end first, then the engine."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient
from support import over_sockets
from support.patches import applied
from support.waiting import until
from vllm.entrypoints.serve.elastic_ep.middleware import ScalingMiddleware
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from kvcached_nixl.patching import Registry
from kvcached_nixl.vllm.patches import admission, leaving, patches_in
from kvcached_nixl.vllm.patches.admission import ROLES, Role, Roles


@pytest.fixture(autouse=True)
def patched() -> Iterator[Registry]:
    with applied((*patches_in(leaving), *patches_in(admission))) as registry:
        yield registry


class Outputs:
    """In place of the output processor: the requests that have no end yet."""

    def __init__(self, *requests: str) -> None:
        self.request_states = dict.fromkeys(requests)
        self.errors: list[Exception] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def propagate_error(self, error: Exception) -> None:
        self.errors += [error] * len(self.request_states)
        self.request_states.clear()


class Engine:
    """In place of the client of the engine core's process."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self.stopped_with: list[tuple[float | None, int]] = []
        self.resources = SimpleNamespace(engine_dead=False)

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped_with.append((timeout, len(self.outputs.request_states)))


def client(*requests: str, connector: bool = True, delay: object = 0.001, extra: Any = None) -> Any:
    made = object.__new__(AsyncLLM)
    transfer = SimpleNamespace(kv_connector_extra_config={"drain_delay": delay} if extra is None else extra)
    outputs = Outputs(*requests)
    vars(made).update(
        vllm_config=SimpleNamespace(kv_transfer_config=transfer if connector else None),
        output_processor=outputs,
        engine_core=Engine(outputs),
        output_handler=None,
    )
    return made


def served(made: Any) -> FastAPI:
    app = FastAPI()
    app.state.engine_client = made
    setattr(app.state, ROLES, Roles(Role.BOTH, None))
    app.add_middleware(ScalingMiddleware)
    return app


async def shut_down(made: Any, timeout: float) -> None:
    """As vLLM's HTTP server does: on a thread beside its loop."""
    made.output_handler = asyncio.ensure_future(asyncio.sleep(30))
    await asyncio.get_running_loop().run_in_executor(None, made.shutdown, timeout)
    await asyncio.sleep(0.01)


def test_requests_end_before_the_engine_is_stopped_and_new_ones_are_refused() -> None:
    made = client("one", "two")

    async def run() -> None:
        await made.check_health()
        leaving = asyncio.create_task(shut_down(made, 20.0))
        while not vars(made).get("_kvcached_nixl_leaving"):
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError):
            await made.check_health()
        await asyncio.sleep(0.01)
        with pytest.raises(EngineGenerateError, match="shutting down"):
            await made.add_request("three", None, None)
        await asyncio.sleep(0.1)
        assert not made.engine_core.stopped_with
        made.output_processor.request_states.clear()
        await leaving
        ((timeout, unfinished),) = made.engine_core.stopped_with
        assert unfinished == 0 and 1.0 <= timeout < 20.0 and not made.output_processor.errors

    asyncio.run(run())


def test_an_idle_server_waits_until_routers_have_noticed() -> None:
    made, begun = client(delay=0.5), time.monotonic()
    asyncio.run(shut_down(made, 20.0))
    assert 0.5 <= time.monotonic() - begun < 10.0
    made, begun = client(delay=60.0), time.monotonic()
    asyncio.run(shut_down(made, 1.0))
    assert 0.5 <= time.monotonic() - begun < 10.0, "at most half of the time that there is"


def test_new_http_requests_get_503_and_metrics_are_served_to_the_end() -> None:
    made = client("one")
    app = served(made)
    app.get("/metrics")(lambda: "m")
    app.post("/v1/completions")(lambda: "text")
    with TestClient(app) as http:
        assert http.post("/v1/completions").status_code == 200
        vars(made)["_kvcached_nixl_leaving"] = time.monotonic() + 60
        assert http.post("/v1/completions").status_code == 200, "routers have to notice first"
        vars(made)["_kvcached_nixl_leaving"] = time.monotonic()
        answer = http.post("/v1/completions")
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        assert answer.json()["error"]["code"] == 503 and "shutting down" in answer.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200
        app.state.engine_client = None
        assert http.post("/v1/completions").status_code == 200


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["refused", "served for a while"])
def test_a_connection_that_a_client_keeps_ends_with_its_next_answer(seconds: float) -> None:
    """Behind a balancer that chooses a server for each connection, a client would try no other one."""
    made = client()
    app = served(made)
    app.post("/v1/completions")(lambda: "text")
    app.get("/metrics")(lambda: "m")
    with over_sockets.served_by_uvicorn(app) as port:
        for method, path in (("POST", "/v1/completions"), ("GET", "/metrics")):
            kept, ends = http.client.HTTPConnection("127.0.0.1", port), []
            for since_seconds in (None, time.monotonic() + seconds):
                if since_seconds is not None:
                    vars(made)["_kvcached_nixl_leaving"] = since_seconds
                kept.request(method, path)
                answer = kept.getresponse()
                answer.read()
                ends.append(answer.will_close)
            assert ends == [False, True]
            vars(made).pop("_kvcached_nixl_leaving")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_waits_to_be_accepted_is_answered_when_connections_are_refused(loop: str) -> None:
    """The loop may have been busy with a large body, or a long prompt."""
    made = client()
    app = served(made)
    app.post("/v1/completions")(lambda: "text")
    with over_sockets.served_by_uvicorn(app, loop=loop) as port:
        busy, _ = vars(made)["_kvcached_nixl_listening"]
        goes_on = threading.Event()
        busy.call_soon_threadsafe(goes_on.wait, 20)
        waiting = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(8)]
        for one in waiting:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        asyncio.run(shut_down(made, 0.0))
        goes_on.set()
        assert [one.recv(12) for one in waiting] == [b"HTTP/1.1 503"] * 8
        for one in waiting:
            one.close()
        until(lambda: _is_refused(port))


def _is_refused(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("timeout", [0.0, 5.0])
def test_connections_are_refused_though_another_process_has_the_socket(timeout: float) -> None:
    """A forked engine has, and the parent of several API servers: they would take connections and never answer."""
    made = client()
    app = served(made)
    app.post("/v1/completions")(lambda: "text")
    with over_sockets.served_by_uvicorn(app) as port:
        other = os.dup(app.state.server.servers[0].sockets[0].fileno())
        assert over_sockets.status_of(port, "/v1/completions", b"") == 200
        asyncio.run(shut_down(made, timeout))
        with pytest.raises(ConnectionRefusedError):
            over_sockets.status_of(port, "/v1/completions", b"")
        os.close(other)


@pytest.mark.parametrize("timeout", [0.0, 5.0])
def test_several_api_servers_refuse_connections(timeout: float) -> None:
    """From 0.32 on they accept by themselves, from a socket that their parent has, too."""
    kind = pytest.importorskip("vllm.entrypoints.launchers.launcher").NoSignalServer
    if not hasattr(kind, "_accept"):
        pytest.skip("they accept as one alone does")
    made = client()
    app = served(made)
    app.post("/v1/completions")(lambda: "text")
    with socket.create_server(("127.0.0.1", 0)) as shared:
        config = uvicorn.Config(app, log_level="critical", lifespan="on")
        server = app.state.server = kind(config, peer_loads=([0, 2**31 - 1], 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [shared.dup()]})
        thread.start()
        port = shared.getsockname()[1]
        assert over_sockets.status_of(port, "/v1/completions", b"") == 200
        asyncio.run(shut_down(made, timeout))
        with pytest.raises(ConnectionRefusedError):
            over_sockets.status_of(port, "/v1/completions", b"")
        server.should_exit = True
        thread.join(20)


def test_connections_are_refused_though_uvicorn_has_closed_a_socket_meanwhile() -> None:
    """A connection waits, so the sockets are looked at again."""

    async def run() -> None:
        closed, noted = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        other, port = noted.dup(), noted.getsockname()[1]
        with socket.create_connection(closed.getsockname()), other:
            server = SimpleNamespace(
                servers=[], _kvcached_nixl_accepting=[(one, lambda: None) for one in (closed, noted)]
            )
            leaving._close_all(server)
            closed.close()
            await asyncio.sleep(2 * leaving._LOOK_SECONDS)
            assert _is_refused(port)
        noted.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("lasts_seconds", "timeout", "ended"), [(0.5, 20.0, ["request", "engine"]), (1.5, 0.2, ["engine", "request"])]
)
def test_an_engine_is_kept_for_a_request_between_two_of_its_steps(
    lasts_seconds: float, timeout: float, ended: list[str]
) -> None:
    """As of a beam search: the engine has nothing of it meanwhile."""
    made, found, begun = client(), list[str](), threading.Event()
    app = served(made)
    made.engine_core.shutdown = lambda timeout: found.append("engine")

    @app.post("/v1/completions")
    async def steps() -> None:
        begun.set()
        await asyncio.sleep(lasts_seconds)
        found.append("request")

    with over_sockets.served_by_uvicorn(app) as port, ThreadPoolExecutor(1) as clients:
        status = clients.submit(over_sockets.status_of, port, "/v1/completions", b"")
        assert begun.wait(10.0)
        asyncio.run(shut_down(made, timeout))
        assert status.result(20.0) == 200 and found == ended


@pytest.mark.parametrize("timeout", [0.0, 0.2])
def test_what_has_no_end_in_time_ends_with_an_error(timeout: float) -> None:
    made = client("one", "two")
    asyncio.run(shut_down(made, timeout))
    ((given, unfinished),) = made.engine_core.stopped_with
    assert (given, unfinished) == (timeout and 1.0, 2)
    assert [type(one) for one in made.output_processor.errors] == [EngineDeadError] * 2
