# SPDX-License-Identifier: Apache-2.0
"""Every endpoint of a decode server that asks prefill, beside one stock instance; and clients that leave.

`test_features.py` has sampling, structured output and adapters, `test_asking.py` what a server's death costs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support import feature_asks as asks
from support import waiting
from support.endpoint_asks import LEAVING, NUMBERED, Body, Row, chat, completion, ids, joined, plain, response
from support.feature_models import CHAT_TEMPLATE, chat_model, spec
from vllm.entrypoints.scale_out import factories

from experiments.common.counted import count
from experiments.common.servers import Asking, Running, Server, ServerSpec

SCRIPT = Path(__file__).parents[1] / "support" / "batch_script.py"
SECONDS = 90.0
until = partial(waiting.until, seconds=SECONDS)
CLEAN_SECONDS = 20.0
"""Less than a lease: what was computed for a client that left is given back, and not kept until its lease ends."""
MOST_RUNNING = 4
PROMPT_TOKENS = "vllm:prompt_tokens_total"


async def said(http: httpx.AsyncClient, server: Server, path: str, body: Body | None = None) -> tuple[int, Any]:
    """Asks, or looks if there is no body."""
    method = "GET" if body is None else "POST"
    sent = None if body is None else {"model": "model", **body}
    reply = await http.request(method, f"{server.base_url}/{path}", json=sent)
    is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
    return reply.status_code, joined(reply.text) if is_stream else reply.json()


# ------------------------------------------------------------------------------------------------------------- servers


class Servers(NamedTuple):
    prefill: Server
    decode: Server
    alone: Server


@pytest.fixture(scope="module", params=["pull", "push"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model, logs = chat_model(tmp_path_factory.mktemp("models") / "chat"), tmp_path_factory.mktemp("logs")

    def serving(name: str, mode: str | None) -> ServerSpec:
        http = ("--enable-scale-out",) if "enable_scale_out" in Path(factories.__file__).read_text() else ()
        arguments = (
            *("--chat-template", CHAT_TEMPLATE, "--reasoning-parser", "qwen3", "--enable-prompt-embeds"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        )
        made = spec(name, model, mode, *arguments, VLLM_ENABLE_RESPONSES_API_STORE="1")
        return dataclasses.replace(made, max_num_seqs=MOST_RUNNING, http_arguments=http)

    with (
        Running([serving("alone", None)], logs) as alone,
        Asking([serving(name, request.param) for name in ("prefill", "decode")], logs) as asked,
    ):
        prefill, decode = asked.ready()
        yield Servers(prefill, decode, alone.ready()[0])


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=SECONDS, trust_env=False)


async def both(servers: Servers, path: str, body: Body | None = None) -> tuple[tuple[int, Any], tuple[int, Any]]:
    async with client() as http:
        asked = (said(http, one, path, body) for one in (servers.decode, servers.alone))
        found, expected = await asyncio.gather(*asked)
    return found, expected


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("row", "number", "streamed"), [one[1:] for one in NUMBERED], ids=[one[0] for one in NUMBERED])
def test_an_endpoint_answers_as_one_instance(servers: Servers, row: Row, number: int, streamed: bool) -> None:
    body = {**row.body(number), **({"stream": True} if streamed else {})}
    before = count([servers.prefill], PROMPT_TOKENS)
    found, expected = asyncio.run(both(servers, row.path, body))
    assert found[0] == expected[0] and (expected[0] == 200 or not row.is_served), (found, expected)
    assert not asks.differences(plain(found[1]), plain(expected[1]))
    if row.is_served and row.is_asked:
        until(lambda: count([servers.prefill], PROMPT_TOKENS) > before, "prefill has computed it", seconds=10)
    elif row.is_served:
        assert count([servers.prefill], PROMPT_TOKENS) == before
    assert not count([servers.decode], "kvcached_nixl:handover_failures_total")


def test_responses_that_are_stored_continued_and_computed_in_the_background(servers: Servers) -> None:
    async def run(server: Server) -> list[Any]:
        async with client() as http:
            first = await said(http, server, "v1/responses", response(600, store=True))
            more = {"store": True, "previous_response_id": first[1]["id"]}
            found = [first, await said(http, server, "v1/responses", response(601, **more))]
            found.append(await said(http, server, f"v1/responses/{first[1]['id']}"))
            background = {"store": True, "background": True}
            found.append(await said(http, server, "v1/responses", response(603, stream=True, **background)))
            begun = await said(http, server, "v1/responses", response(602, **background))
            path = f"v1/responses/{begun[1]['id']}"
            async with asyncio.timeout(SECONDS):
                while (last := await said(http, server, path))[1]["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(0.05)
            return [*found, last, await said(http, server, "v1/responses/none")]

    found, expected = (asyncio.run(run(one)) for one in (servers.decode, servers.alone))
    assert not asks.differences(plain(found), plain(expected))
    assert found[-2][1]["status"] in ("completed", "incomplete")


# ------------------------------------------------------------------------------------------------- clients that leave

BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
NOTHING = (
    *BUSY,
    *("kvcached_nixl:used_tokens", "kvcached_nixl:queued_tokens", "kvcached_nixl:kept_offers"),
    *("kvcached_nixl:waiting_fetches", "kvcached_nixl:quarantined_blocks"),
)
COUNTED = (
    *("kvcached_nixl:handover_failures_total", "kvcached_nixl:revoked_offers_total"),
    *("vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_failed_transfers_total"),
)


def held(servers: Servers, name: str) -> int:
    return count([servers.decode], name)


def computed(servers: Servers) -> None:
    """Of what is on its way to a client that leaves, prefill hears nothing: it would be kept for a lease."""
    until(lambda: not any(count([servers.prefill], one) for one in BUSY), "answers")


def wait(servers: Servers) -> None:
    """Some are asked for, the others wait for their turn."""


def answer(servers: Servers) -> None:
    # The cache cannot be cleared while prefill, which stands still, may write into blocks.
    httpx.post(f"{servers.decode.base_url}/pause?mode=keep&clear_cache=false").raise_for_status()
    servers.prefill.go_on()
    until(lambda: held(servers, "kvcached_nixl:waiting_fetches") > 0, "an answer")
    computed(servers)


def fetch(servers: Servers) -> None:
    answer(servers)
    servers.prefill.stand_still()
    httpx.post(f"{servers.decode.base_url}/resume").raise_for_status()
    until(lambda: held(servers, "kvcached_nixl:used_tokens") > 0, "blocks")


def generate(servers: Servers) -> None:
    before = held(servers, "vllm:generation_tokens_total")
    servers.prefill.go_on()
    until(lambda: held(servers, "vllm:generation_tokens_total") > before + 20, "tokens")
    computed(servers)


STAGES = (wait, answer, fetch, generate)


@pytest.mark.parametrize("place", range(len(STAGES)), ids=[one.__name__ for one in STAGES])
def test_clients_that_leave_leave_nothing(servers: Servers, place: int) -> None:
    """Of every endpoint, streamed and not, at every stage."""
    both_sides, first = (servers.prefill, servers.decode), 700 + 40 * place

    async def run() -> None:
        async with client() as http:
            servers.prefill.stand_still()
            sent = [
                asyncio.create_task(said(http, servers.decode, path, {**body(first + 2 * n), "stream": bool(n % 2)}))
                for n, (path, body) in enumerate([one for one in LEAVING.items() for _ in range(2)])
            ]
            try:
                await asyncio.to_thread(
                    until, lambda: held(servers, "vllm:num_requests_waiting{") >= len(sent) + 2 * 3, "requests"
                )
                await asyncio.to_thread(STAGES[place], servers)
                assert not any(one.done() for one in sent)
            finally:
                for one in sent:
                    one.cancel()
                await asyncio.gather(*sent, return_exceptions=True)
                await asyncio.to_thread(until, lambda: not held(servers, "vllm:num_requests_waiting{"), "they left")
                servers.prefill.go_on()
                httpx.post(f"{servers.decode.base_url}/resume")

    before = [count(both_sides, name) for name in COUNTED]
    asyncio.run(run())
    until(lambda: not any(count(both_sides, name) for name in NOTHING), "nothing is left", seconds=CLEAN_SECONDS)
    assert [count(both_sides, name) for name in COUNTED] == before
    found, expected = asyncio.run(both(servers, "v1/completions", completion(900 + place)))
    assert not asks.differences(plain(found[1]), plain(expected[1]))
    for one in both_sides:
        one.check_alive()


def test_a_response_in_the_background_is_cancelled_before_prefill_has_answered(servers: Servers) -> None:
    async def run() -> Any:
        async with client() as http:
            begun = await said(http, servers.decode, "v1/responses", response(950, store=True, background=True))
            await asyncio.to_thread(until, lambda: held(servers, "vllm:num_requests_waiting{") == 1, "it waits")
            return await said(http, servers.decode, f"v1/responses/{begun[1]['id']}/cancel", {})

    servers.prefill.stand_still()
    try:
        status, found = asyncio.run(run())
        until(lambda: held(servers, "vllm:num_requests_waiting{") == 0, "it has left")
    finally:
        servers.prefill.go_on()
    assert status == 200 and found["status"] == "cancelled"


# ----------------------------------------------------------------------------------------------------- without a server


@dataclasses.dataclass(frozen=True)
class Offline(ServerSpec):
    """An engine without a server."""

    run: tuple[str, ...] = ()

    def command(self, port: int, engine_id: str) -> list[str]:
        return [*self.run, "--model", str(self.model), *self.engine_arguments(engine_id)]


def run_offline(servers: Servers, folder: Path, name: str, *command: str, **environment: str) -> None:
    fields = {one.name: getattr(servers.decode.spec, one.name) for one in dataclasses.fields(ServerSpec)}
    fields |= {"name": name, "environment": {**servers.decode.spec.environment, **environment}}
    with Running([Offline(**fields, run=command)], folder) as running:
        assert running.servers[0].process.wait(300) == 0, running.servers[0].tail()


def test_vllm_without_a_server_asks_prefill(servers: Servers, tmp_path: Path) -> None:
    """``LLM`` with its engine in its own process, and ``vllm run-batch``."""
    prompts = [ids(number) for number in range(960, 966)]
    before = count([servers.prefill], PROMPT_TOKENS)
    script = (sys.executable, str(SCRIPT), json.dumps(prompts), str(tmp_path / "llm.json"))
    run_offline(servers, tmp_path, "llm-decode", *script, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    chats = {f"r{number}": {"model": "model", **chat(number)} for number in range(970, 974)}
    path = "v1/chat/completions"
    lines = [{"custom_id": name, "method": "POST", "url": f"/{path}", "body": body} for name, body in chats.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    batch = (str(Path(sys.prefix) / "bin" / "vllm"), "run-batch", "-i", "in.jsonl", "-o", "out.jsonl")
    run_offline(servers, tmp_path, "batch-decode", *batch)

    async def expected() -> tuple[list[Any], dict[str, Any]]:
        async with client() as http:
            bodies = [completion(0, prompt=one, return_token_ids=True) for one in prompts]
            alone = [await said(http, servers.alone, "v1/completions", one) for one in bodies]
            return alone, {name: await said(http, servers.alone, path, body) for name, body in chats.items()}

    alone, alone_chats = asyncio.run(expected())
    assert json.loads((tmp_path / "llm.json").read_text()) == [one[1]["choices"][0]["token_ids"] for one in alone]
    done = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(done) == len(chats)
    for one in done:
        assert not asks.differences(plain(one["response"]["body"]), plain(alone_chats[one["custom_id"]][1]))
    tokens = sum(map(len, prompts)) + sum(one[1]["usage"]["prompt_tokens"] for one in alone_chats.values())
    assert count([servers.prefill], PROMPT_TOKENS) - before == tokens, "prefill has computed all of them"
