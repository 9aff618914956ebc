# SPDX-License-Identifier: Apache-2.0
"""The role of a server, through vLLM's own application and its client of the engine."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.over_sockets import vllm_application
from support.patches import applied
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from kvcached_nixl.patching import Registry
from kvcached_nixl.vllm.adapter.asked_prompts import sent_prompt
from kvcached_nixl.vllm.patches import admission, answering, leaving, patches_in
from kvcached_nixl.wire.question import ASKED_PATH, AskFailed, encode_prompt, read_answer

KEY = {"Authorization": "Bearer key"}
ROLE = "/v1/kvcached_nixl/role"
GENERATION_ERROR = admission.generation_error()
HIDDEN = 8
CLIENT: Any = None
QUESTION = {"do_remote_decode": True, "do_remote_prefill": False}
ROUTED = {"do_remote_decode": False, "do_remote_prefill": True}
Http = httpx.AsyncClient


class Engine:
    """In place of what vLLM's client gives requests to: it answers what it has got when ``go_on`` is set."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.aborted: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    def add(self, request_id: str) -> RequestOutputCollector:
        self.got.append(request_id)
        queue = RequestOutputCollector(RequestOutputKind.DELTA, request_id)
        asyncio.ensure_future(self._answer(queue))
        return queue

    async def _answer(self, queue: RequestOutputCollector) -> None:
        from vllm.outputs import RequestOutput

        await self.go_on.wait()
        queue.put(RequestOutput(queue.request_id, None, [1], None, [], finished=True, kv_transfer_params={"a": 1}))


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    async def add_request(self: Any, request_id: str, prompt: Any, params: Any, **_: Any) -> RequestOutputCollector:
        await asyncio.sleep(0)
        return vars(self)["engine"].add(request_id)  # type: ignore[no-any-return]

    async def abort(self: Any, request_id: str, internal: bool = False) -> None:
        assert internal
        vars(self)["engine"].aborted.append(request_id)

    assert {"prompt", "params"} <= set(inspect.signature(AsyncLLM.add_request).parameters)
    assert "internal" in inspect.signature(AsyncLLM.abort).parameters
    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    monkeypatch.setattr(AsyncLLM, "abort", abort)
    with applied((*patches_in(answering), *patches_in(leaving), *patches_in(admission))) as registry:
        yield registry


class Several:
    """An endpoint that gives several prompts to the engine, one after the other."""

    def __init__(self, client: AsyncLLM) -> None:
        self._client = client

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        if body["stream"]:
            return StreamingResponse(self._streamed(body))
        return JSONResponse([one async for one in self._outputs(body)])

    async def _outputs(self, body: Any) -> AsyncIterator[str]:
        for place, prompt in enumerate(body["prompts"]):
            params = SamplingParams(extra_args={"kv_transfer_params": body["params"]} if body["params"] else None)
            async for one in self._client.generate(prompt, params, f"{body['name']}{place}"):
                yield f"data: {one.request_id}\n\n"

    async def _streamed(self, body: Any) -> AsyncIterator[str]:
        for one in ("created", "in progress") if body["begins"] else ():
            yield f"data: {one}\n\n"
            await asyncio.sleep(0)
        try:
            async for one in self._outputs(body):
                yield one
        except GENERATION_ERROR as error:
            if body["begins"]:
                raise
            yield f'data: {{"error": "{error}"}}\n\n'
        yield "data: [DONE]\n\n"


def served(engine: Engine, *arguments: str, kv_role: str = "kv_both", **extra: Any) -> Any:
    """vLLM's application, with that endpoint."""
    client = object.__new__(AsyncLLM)
    transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_connector_extra_config": extra}
    app, kv_transfer_config = vllm_application(transfer, *arguments)
    vars(client).update(
        engine=engine,
        log_requests=False,
        vllm_config=SimpleNamespace(kv_transfer_config=kv_transfer_config),
        engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=False), shutdown=lambda timeout: None),
        output_handler=None,
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        renderer=SimpleNamespace(_mm_executor=None, shutdown=lambda: None),
        model_config=SimpleNamespace(
            max_model_len=64,
            get_hidden_size=lambda: HIDDEN,
            get_vocab_size=lambda: 9,
            dtype=torch.bfloat16,
            enable_prompt_embeds=True,
        ),
    )

    app.router.routes.append(Route("/v1/several", Several(client).answer, methods=["POST"]))
    app.state.engine_client = client
    return app


def run(app: Any, test: Callable[[Http], Awaitable[None]]) -> None:
    async def with_client() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=KEY) as http:
            await test(http)

    asyncio.run(with_client())


async def take(http: Http, role: str) -> int:
    """Returns how many requests of the other role are under way."""
    reply = await http.post(ROLE, json={"role": role})
    assert reply.status_code == 200 and reply.json()["role"] == role, reply.text
    assert (await http.get(ROLE)).json() == reply.json()
    return int(reply.json()["under_way"])


def send(
    http: Http, params: Any, name: str = "r", *prompts: Any, stream: bool = False, begins: bool = False
) -> Awaitable[httpx.Response]:
    """``begins``: as ``/v1/responses`` does before it gives anything to the engine, and it breaks off at an error."""
    body = {"prompts": prompts or ("a",), "params": params, "name": name, "stream": stream, "begins": begins}
    return http.post("/v1/several", json=body)


def is_refused(reply: httpx.Response) -> bool:
    if reply.status_code == 200:
        return False
    error = reply.json()["error"]
    assert reply.status_code == error["code"] == 503 and "its role is" in error["message"], reply.text
    return reply.headers["Retry-After"] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_role_says_whose_new_requests_are_served(stream: bool) -> None:
    engine = Engine()

    async def test(http: Http) -> None:
        for role, refused in (
            ("prefill", [True, True, False]),
            ("decode", [False, False, True]),
            ("both", [False, False, False]),
        ):
            await take(http, role)
            replies = [await send(http, params, stream=stream) for params in (CLIENT, ROUTED, QUESTION)]
            if stream and role == "decode":
                # Nobody asks with a stream: its answer begins at once, as those of clients do, who are served.
                assert replies[2].status_code == 200 and "its role is decode" in replies[2].text
                replies[2:] = [await send(http, QUESTION)]
            assert [is_refused(one) for one in replies] == refused, role
        assert len(engine.got) == 6, "what is refused costs the engine nothing"

    run(served(engine), test)


def test_a_stream_that_would_begin_before_the_engine_is_asked_is_refused_as_well() -> None:
    """Whole, or not at all."""
    engine = Engine()

    async def test(http: Http) -> None:
        await take(http, "prefill")
        assert is_refused(await send(http, CLIENT, stream=True, begins=True))
        reply = await send(http, QUESTION, stream=True, begins=True)
        expected = "".join(f"data: {one}\n\n" for one in ("created", "in progress", "r0", "[DONE]"))
        assert reply.status_code == 200 and reply.text == expected

    run(served(engine), test)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_under_way_ends_as_it_would_have(stream: bool) -> None:
    """Also its prompts that the engine gets later; and it is counted until it has ended."""
    engine = Engine()

    async def test(http: Http) -> None:
        engine.go_on.clear()
        one = asyncio.ensure_future(send(http, CLIENT, "c", "a", "b", "c", stream=stream))
        other = asyncio.ensure_future(send(http, QUESTION, "q"))
        while len(engine.got) < 2:
            await asyncio.sleep(0.01)
        assert [await take(http, role) for role in ("both", "prefill", "decode")] == [0, 1, 1]
        assert await take(http, "prefill") == 1
        assert is_refused(await send(http, CLIENT, stream=stream))
        engine.go_on.set()
        replies = await asyncio.gather(one, other)
        assert [reply.status_code for reply in replies] == [200, 200]
        assert [f"c{place}" in replies[0].text for place in range(3)] == [True] * 3 and "error" not in replies[0].text
        assert sorted(engine.got) == ["c0", "c1", "c2", "q0"]
        assert await take(http, "prefill") == 0

    run(served(engine), test)


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_consumer"])
def test_what_is_under_way_gets_all_its_steps_while_its_server_is_shut_down(kv_role: str) -> None:
    engine = Engine()
    app = served(engine, kv_role=kv_role)

    async def test(http: Http) -> None:
        engine.go_on.clear()
        one = asyncio.ensure_future(send(http, CLIENT, "c", "a", "b", "c"))
        while not engine.got:
            await asyncio.sleep(0.01)
        vars(app.state.engine_client)["_kvcached_nixl_leaving"] = time.monotonic()
        engine.go_on.set()
        assert (await one).status_code == 200 and engine.got == ["c0", "c1", "c2"]
        assert (await send(http, CLIENT)).status_code == 503

    run(app, test)


def test_a_request_that_is_still_read_counts_for_both() -> None:
    """Nobody knows yet whose it is, and it will be served."""
    engine = Engine()

    async def body(rest: asyncio.Event) -> AsyncIterator[bytes]:
        whole = json.dumps({"prompts": ["a"], "params": None, "name": "r", "stream": False, "begins": False}).encode()
        yield whole[:5]
        await rest.wait()
        yield whole[5:]

    async def test(http: Http) -> None:
        rest = asyncio.Event()
        sent = asyncio.ensure_future(http.post("/v1/several", content=body(rest)))
        await asyncio.sleep(0.05)
        assert [await take(http, role) for role in ("prefill", "decode")] == [1, 1]
        await take(http, "prefill")
        rest.set()
        assert (await sent).status_code == 200
        assert await take(http, "prefill") == 0

    run(served(engine), test)


def test_media_that_the_api_server_has_noted_reach_the_engine_and_are_aborted() -> None:
    engine = Engine()

    async def test(http: Http) -> None:
        await take(http, "prefill")
        media = {"type": "multimodal", "prompt_token_ids": [1], "mm_kwargs": {}}
        for stream in (False, True):
            assert is_refused(await send(http, CLIENT, "m", media, stream=stream))
        assert engine.got == engine.aborted == ["m0", "m0"]

    run(served(engine), test)


def test_the_endpoint_for_images_is_refused_as_busy() -> None:
    engine = Engine()
    prompt = SimpleNamespace(
        prompt_token_ids=None,
        mm_features=[],
        prompt_embeds=torch.zeros((3, HIDDEN), dtype=torch.bfloat16),
        prompt_is_token_ids=None,
        cache_salt=None,
        priority=0,
    )
    asked = sent_prompt(prompt, "r", "")
    assert asked is not None

    async def test(http: Http) -> None:
        for role, served_here in (("prefill", True), ("decode", False), ("both", True)):
            await take(http, role)
            reply = await http.post(f"/{ASKED_PATH}", content=encode_prompt(asked))
            if served_here:
                assert read_answer(reply.status_code, reply.headers, reply.content) == {"a": 1}
                continue
            assert is_refused(reply)
            with pytest.raises(AskFailed) as found:
                read_answer(reply.status_code, reply.headers, reply.content)
            outcome = found.value.outcome
            assert outcome.is_of_server and not outcome.is_busy and outcome.retry_after_seconds == 1

    run(served(engine), test)


READY = ("/kvcached_nixl/ready/clients", "/kvcached_nixl/ready/questions")


async def ready(http: Http) -> list[int]:
    return [(await http.get(path, headers={"Authorization": ""})).status_code for path in READY]


def test_probes_follow_the_role_and_need_no_key() -> None:
    app = served(Engine())

    async def test(http: Http) -> None:
        assert await ready(http) == [200, 200]
        for role, expected in (("prefill", [503, 200]), ("decode", [200, 503]), ("both", [200, 200])):
            await take(http, role)
            assert await ready(http) == expected
            assert (await http.get("/health")).status_code == 200, "a liveness probe would restart the server"
        vars(app.state.engine_client)["_kvcached_nixl_leaving"] = time.monotonic() + 60
        assert await ready(http) == [503, 503], "the server is shut down, and still serves for a while"
        vars(app.state.engine_client)["_kvcached_nixl_leaving"] = time.monotonic()
        assert await ready(http) == [503, 503]
        vars(app.state.engine_client)["_kvcached_nixl_leaving"] = None
        app.state.engine_client.engine_core.resources.engine_dead = True
        assert await ready(http) == [503, 503]

    run(app, test)


@pytest.mark.parametrize(
    ("kv_role", "arguments", "role", "expected"),
    [
        ("kv_producer", (), "prefill", [503, 200]),
        ("kv_consumer", (), "decode", [200, 503]),
        ("kv_both", ("--api-server-count", "2"), "both", [200, 200]),
        ("kv_both", ("--api-key", ""), "both", [200, 200]),
    ],
)
def test_a_role_that_cannot_change(kv_role: str, arguments: tuple[str, ...], role: str, expected: list[int]) -> None:
    engine = Engine()

    async def test(http: Http) -> None:
        assert await ready(http) == expected
        assert (await http.get(ROLE)).json() == {"role": role, "under_way": 0}
        for wanted in ("prefill", "decode", "both"):
            reply = await http.post(ROLE, json={"role": wanted})
            message = reply.json()["error"]["message"]
            assert reply.status_code == 409 and "expected" in message and "unchanged" in message
        for params in (CLIENT, ROUTED, QUESTION):
            assert (await send(http, params)).status_code == 200, "requests are the engine's matter"

    run(served(engine, *arguments, kv_role=kv_role), test)


BODIES = (b"", b"prefill", b'"prefill"', b"{}", b'{"role": "PREFILL"}', b'{"role": "both", "more": 1}', b'{"role": 1}')


def test_other_calls_change_nothing() -> None:
    async def test(http: Http) -> None:
        await take(http, "prefill")
        for body in (*BODIES, b"\xff", b"[" * 5000):
            reply = await http.post(ROLE, content=body)
            message = reply.json()["error"]["message"]
            assert reply.status_code == 400 and "found" in message and "still prefill" in message, message
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer other"}):
            assert (await http.post(ROLE, json={"role": "decode"}, headers=headers)).status_code == 401
            assert (await http.get(ROLE, headers=headers)).status_code == 401
        assert (await http.put(ROLE, json={"role": "decode"})).status_code == 405
        assert (await http.get(ROLE)).json() == {"role": "prefill", "under_way": 0}

    run(served(Engine()), test)


def test_a_server_without_a_connector_has_none() -> None:
    app = served(Engine())
    del app.state.kvcached_nixl_roles

    async def test(http: Http) -> None:
        assert await ready(http) == [404, 404]
        assert (await send(http, CLIENT)).status_code == 200

    run(app, test)
