# SPDX-License-Identifier: Apache-2.0
"""Real servers: decode asks prefill for the KV of its prompts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.waiting import until

from experiments.common import client
from experiments.common.client import http_client
from experiments.common.counted import count
from experiments.common.device import with_extra
from experiments.common.servers import Asking, Running, Server
from experiments.lease_recovery.arms import PULL, PUSH, Arm, prompts

TOKENS = 12
REQUESTS = 8


@contextlib.contextmanager
def asked(
    arm: Arm, logs: Path, *, policy: str = "recompute", prefills: int = 1, **extra: Any
) -> Iterator[tuple[Running, Server]]:
    prefill, decode = arm.specs(policy)
    assert decode.kv_transfer is not None
    decode = dataclasses.replace(decode, kv_transfer=with_extra(decode.kv_transfer, extra))
    names = [dataclasses.replace(prefill, name=f"{prefill.name}{number}") for number in range(prefills)]
    with Asking([*names, decode], logs) as found:
        yield found, found.ready()[-1]


def prompt_tokens(server: Server) -> int:
    """How many tokens of prompts a server has computed, or fetched."""
    return count([server], "vllm:prompt_tokens_total")


async def answers_of(server: Server, texts: Sequence[list[int]], name: str) -> list[list[int]]:
    """What a server answers, one request after another."""
    return [one.token_ids for one in await client.answers_of(server.base_url, texts, TOKENS, name)]


def each_asked(server: Server, texts: Sequence[list[int]]) -> list[asyncio.Task[list[list[int]]]]:
    """All at once."""
    return [asyncio.create_task(answers_of(server, [text], f"asked{n}")) for n, text in enumerate(texts)]


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=["pull", "push"])
@pytest.mark.parametrize(("prefills", "policy"), [(1, "recompute"), (2, "fail")], ids=["the only", "one of two"])
def test_a_killed_prefill_costs_clients_no_errors(arm: Arm, prefills: int, policy: str, tmp_path: Path) -> None:
    async def run(prefills: Running, decode: Server) -> None:
        texts = prompts(2 * REQUESTS, seed=8)
        expected = await answers_of(prefills.servers[0], texts, "alone")
        under_way = each_asked(decode, texts)
        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        prefills.servers[0].kill()
        assert [found[0] for found in await asyncio.gather(*under_way)] == expected
        prefills.replace(0)
        prefills.ready()
        before = prompt_tokens(prefills.servers[0])
        for attempt in range(60):
            assert await answers_of(decode, texts[:2], f"again{attempt}") == expected[:2]
            if prompt_tokens(prefills.servers[0]) > before:
                break
        else:
            raise AssertionError("the new server is never asked")
        decode.check_alive()

    with asked(arm, tmp_path, policy=policy, prefills=prefills) as (running, decode):
        asyncio.run(run(running, decode))


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=["pull", "push"])
def test_a_killed_decode_asks_again_when_it_is_back(arm: Arm, tmp_path: Path) -> None:
    async def run(launched: Running) -> None:
        prefill, decode = launched.ready()
        texts = prompts(2 * REQUESTS, seed=7)
        expected = await answers_of(prefill, texts, "alone")
        under_way = each_asked(decode, texts)
        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        decode.kill()
        found = await asyncio.gather(*under_way, return_exceptions=True)
        for one, right in zip(found, expected, strict=True):
            assert isinstance(one, httpx.TransportError) or one == [right]
        launched.replace(1)
        _, decode = launched.ready()
        before = prompt_tokens(prefill)
        assert await answers_of(decode, texts, "again") == expected
        assert prompt_tokens(prefill) - before == sum(map(len, texts)), "prefill has computed all of them"

    with Asking(arm.specs("fail"), tmp_path) as launched:
        asyncio.run(run(launched))


@pytest.mark.parametrize(
    ("arm", "prefill_ranks", "decode_ranks"),
    [(PULL, 2, 2), (PUSH, 2, 2), (PUSH, 2, 1), (PUSH, 1, 2)],
    ids=["pull", "push", "push to fewer", "push to more"],
)
def test_data_parallel_ranks_and_two_api_servers(
    arm: Arm, prefill_ranks: int, decode_ranks: int, tmp_path: Path
) -> None:
    async def run(prefill: Server, decode: Server) -> None:
        texts = prompts(2 * REQUESTS, seed=4)
        expected = await answers_of(prefill, texts, "alone")
        before = prompt_tokens(prefill)
        found = await asyncio.gather(*each_asked(decode, texts))
        assert [one[0] for one in found] == expected
        assert prompt_tokens(prefill) - before == sum(map(len, texts)), "prefill has computed all of them"

    prefill, decode = arm.specs("fail")
    prefill, decode = (
        dataclasses.replace(one, arguments=(*one.arguments, *(("--data-parallel-size", "2") if ranks == 2 else ())))
        for one, ranks in ((prefill, prefill_ranks), (decode, decode_ranks))
    )
    decode = dataclasses.replace(decode, http_arguments=("--api-server-count", "2"))
    with Asking([prefill, decode], tmp_path) as running:
        asyncio.run(run(*running.ready()))


def test_a_request_that_waits_too_long_is_refused_before_its_answer_begins(tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "model", "prompt": prompts(1, seed=2)[0], "max_tokens": 4}

    async def run(prefill: Server, decode: Server) -> None:
        async with http_client(REQUESTS) as http:
            assert await answers_of(decode, [body["prompt"]], "first")
            prefill.kill()
            prompt = {"prompt": prompts(1, seed=3)[0]}
            for more in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
                reply = await http.post(f"{decode.base_url}/v1/completions", json={**body, **prompt, **more})
                error = reply.json()["error"]
                assert reply.status_code == error["code"] == 503 and "cause=queue_timeout" in error["message"]
                assert 1 <= int(reply.headers["Retry-After"]) <= 60
            await asyncio.to_thread(until, lambda: not count([decode], "vllm:num_requests_waiting{"), seconds=60.0)
            short = {**body, "prompt": body["prompt"][:8], "stream": True}
            streamed = await http.post(f"{decode.base_url}/v1/completions", json=short)
            assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n"), "nobody is asked for it"
        decode.check_alive()

    with asked(PULL, tmp_path, prefill_required=True, queue_timeout=2) as (prefill, decode):
        asyncio.run(run(prefill.servers[0], decode))
