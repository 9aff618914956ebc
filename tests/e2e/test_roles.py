# SPDX-License-Identifier: Apache-2.0
"""Real ``kv_both`` servers whose roles change while they serve."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
from support.endpoints import TEMPLATE

from experiments.common.client import http_client
from experiments.common.counted import count
from experiments.common.servers import Running, Server, asks
from experiments.lease_recovery.arms import PULL, prompts

LONG_TOKENS = 700
QUESTION = {"do_remote_decode": True, "do_remote_prefill": False}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "completions": {},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "messages": {"messages": [{"role": "user", "content": "a"}]},
    "responses": {"input": "a"},
}


def post(server: Server, http: httpx.AsyncClient, path: str, **body: Any) -> Awaitable[httpx.Response]:
    return http.post(f"{server.base_url}/v1/{path}", json={"model": "model", "temperature": 0.0, **body})


async def answer(server: Server, http: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    reply = await post(server, http, "completions", prompt=prompt, max_tokens=12, return_token_ids=True)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


async def take(server: Server, http: httpx.AsyncClient, role: str) -> int:
    """Returns how many requests of the other role are under way."""
    reply = await http.post(f"{server.base_url}/v1/kvcached_nixl/role", json={"role": role})
    assert reply.status_code == 200, reply.text
    ready = [(await http.get(f"{server.base_url}/kvcached_nixl/ready/{one}")).status_code for one in READY]
    assert ready == READY_IN[role] and (await http.get(f"{server.base_url}/health")).status_code == 200
    return int(reply.json()["under_way"])


READY = ("clients", "questions")
READY_IN = {"prefill": [503, 200], "decode": [200, 503], "both": [200, 200]}


def require_refused(reply: httpx.Response) -> None:
    assert reply.status_code == 503 and "while its role is" in reply.json()["error"]["message"], reply.text
    assert reply.headers["Retry-After"] == "1"


def prompt_tokens(*servers: Server) -> int:
    """How many tokens of prompts servers have computed, or fetched."""
    return count(servers, "vllm:prompt_tokens_total")


async def clients_are_refused_and_a_stream_ends(asking: Server, http: httpx.AsyncClient) -> None:
    prompt = prompts(1, seed=1)[0]
    alone = {"prompt": prompt, "max_tokens": LONG_TOKENS, "ignore_eos": True, "return_token_ids": True}
    body = {"model": "model", "temperature": 0.0, "stream": True, **alone}
    parts: list[Any] = []
    async with http.stream("POST", f"{asking.base_url}/v1/completions", json=body) as stream:
        lines = (one async for one in stream.aiter_lines() if one)
        parts.append(await anext(lines))
        assert await take(asking, http, "prefill") == 1
        for path, more in ENDPOINTS.items():
            fields = more or {"prompt": prompt}
            for is_stream in (False, True):
                require_refused(await post(asking, http, path, max_tokens=4, stream=is_stream, **fields))
        for more in ({"n": 2, "temperature": 1.0}, {"prompt": [prompt, prompt[1:]]}):
            for is_stream in (False, True):
                require_refused(await post(asking, http, "completions", stream=is_stream, **{"prompt": prompt, **more}))
        question = await post(asking, http, "completions", prompt=prompt, max_tokens=1, kv_transfer_params=QUESTION)
        assert question.status_code == 200 and question.json()["kv_transfer_params"]["do_remote_prefill"] is True
        assert (await http.get(f"{asking.base_url}/v1/kvcached_nixl/role")).json()["under_way"] == 1
        parts += [one async for one in lines]
    assert parts.pop() == "data: [DONE]"
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in parts]
    assert await take(asking, http, "both") == 0
    whole = (await post(asking, http, "completions", **alone)).json()["choices"][0]
    assert [token for one in choices for token in one["token_ids"]] == whole["token_ids"]
    assert len(whole["token_ids"]) == LONG_TOKENS and choices[-1]["finish_reason"] == "length"


async def a_server_that_takes_no_questions_costs_time_alone(
    asking: Server, one: Server, other: Server, http: httpx.AsyncClient
) -> None:
    texts = prompts(9, seed=6)
    await take(other, http, "decode")
    expected = [await answer(one, http, text) for text in texts]
    before = [prompt_tokens(server) for server in (one, other)]
    assert await asyncio.gather(*(answer(asking, http, text) for text in texts)) == expected
    assert [prompt_tokens(server) - was for server, was in zip((one, other), before, strict=True)] == [
        sum(map(len, texts)),
        0,
    ]
    assert await answer(other, http, texts[0]) == expected[0], "it serves clients"

    await take(one, http, "decode")
    late = prompts(1, seed=7)[0]
    before = prompt_tokens(one, other)
    found = await answer(asking, http, late)
    assert prompt_tokens(one, other) == before, "nobody takes questions: it is computed where it is"
    assert found == await answer(one, http, late)


def test_roles_change_while_servers_serve(tmp_path: Path) -> None:
    base, _ = PULL.specs("recompute")
    base = dataclasses.replace(
        base,
        http_arguments=("--chat-template", TEMPLATE, "--api-key", "key"),
        environment={**base.environment, "KVCACHED_NIXL_PREFILL_API_KEY": "key"},
    )
    assert base.kv_transfer is not None
    both = {**base.kv_transfer, "kv_role": "kv_both"}
    one, other, asking = (dataclasses.replace(base, name=name, kv_transfer=both) for name in ("one", "other", "asking"))

    async def test(asking: Server, one: Server, other: Server) -> None:
        async with http_client(32) as http:
            http.headers["Authorization"] = "Bearer key"
            await clients_are_refused_and_a_stream_ends(asking, http)
            await a_server_that_takes_no_questions_costs_time_alone(asking, one, other, http)
        for server in (asking, one, other):
            server.check_alive()

    with Running([one, other], tmp_path) as asked:
        last = asks(asking, asked.servers)
        with Running([last], tmp_path) as asks_them:
            asked.ready()
            asyncio.run(test(asks_them.ready()[0], *asked.servers))
