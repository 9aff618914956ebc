# SPDX-License-Identifier: Apache-2.0
"""The router with real servers: two of each role, through the official client, compared byte for byte with one server.

One is killed and brought back, and one is drained, while requests run: each has the right tokens or an error.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.routed_answers import (
    ENDPOINTS,
    STEP_SECONDS,
    TOKENS,
    Said,
    client_of,
    close,
    complete,
    counted,
    of_endpoint,
    openai,
    several,
    spec,
)

from experiments.common.router import ADMINISTRATOR, routed
from experiments.common.servers import Running, Server

PROMPTS = [[3 + (7 * place + number) % 500 for place in range(100 + 40 * number)] for number in range(6)]


async def chat(client: Any, prompt: list[int], *, stream: bool) -> Said:
    """The same, of a chat about the prompt's numbers."""
    messages = [{"role": "user", "content": " ".join(map(str, prompt[:60]))}]
    asked = {
        "model": "model",
        "messages": messages,
        "max_completion_tokens": TOKENS,
        "temperature": 0,
        "logprobs": True,
    }
    answer = await client.chat.completions.create(**asked, stream=stream, extra_body={"ignore_eos": True})
    choices = [part.choices[0] async for part in answer if part.choices] if stream else [answer.choices[0]]
    text = "".join((one.delta if stream else one.message).content or "" for one in choices)
    return text, [one.logprob for choice in choices if choice.logprobs for one in choice.logprobs.content]


async def answers(url: str) -> list[Said]:
    """Of every prompt: completions and chats. Of two: several sequences, and the other endpoints. Streamed and not."""
    async with client_of(url) as client:
        found = [
            await ask(client, prompt, stream=stream)
            for ask in (complete, chat)
            for stream in (False, True)
            for prompt in PROMPTS
        ]
        found += [await several(client, PROMPTS[:2], stream=stream) for stream in (False, True)]
    return found + [
        await of_endpoint(url, path, prompt, stream=stream)
        for path in ENDPOINTS
        for stream in (False, True)
        for prompt in PROMPTS[:2]
    ]


async def under_load(url: str, expected: list[Said], trouble: Any) -> tuple[int, int]:
    """Ask on and on while ``trouble`` goes on. Returns how many were right, and how many had an error."""
    right = errors = 0
    troubled = asyncio.create_task(asyncio.to_thread(trouble))

    async def one(client: Any, number: int) -> None:
        nonlocal right, errors
        place = number
        while not troubled.done():
            place = (place + 1) % len(PROMPTS)
            is_streamed = place % 2 == 1
            try:
                found = await asyncio.wait_for(complete(client, PROMPTS[place], stream=is_streamed), STEP_SECONDS)
            except openai.APIError:
                errors += 1
                await asyncio.sleep(0.2)
            else:
                said = f"{len(found[1])} tokens, {'streamed' if is_streamed else 'whole'}"
                assert found[0] == expected[place][0], f"a wrong answer to prompt {place}, {said}"
                right += 1

    async with client_of(url) as client:
        await asyncio.gather(*(one(client, number) for number in range(4)))
    await troubled
    return right, errors


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    """What one stock instance says."""
    with Running([spec("alone", None)], tmp_path_factory.mktemp("alone")) as launched:
        found = asyncio.run(answers(launched.ready()[0].base_url))
    assert all(text for text, _ in found) and not any(text.startswith("status") for text, _ in found), found[-12:]
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("mode", "extra"),
    [
        pytest.param("pull", {}, id="pull"),
        # With the first requests pulled: the router learns from them that its servers push.
        pytest.param("push", {}, id="push"),
        pytest.param("pull", {"memory_path": "host"}, id="pull, staged"),
    ],
)
def test_two_of_each(mode: str, extra: dict[str, object], expected: list[Said], tmp_path: Path) -> None:
    """Servers are killed, brought back, drained and added: no answer is wrong, and none is missing without an error."""
    names = ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    with Running([spec(name, mode, **extra) for name in names], tmp_path) as launched:
        servers = launched.ready()
        with routed(servers[:2], servers[2:], tmp_path / "router.log", "--attempts", "3") as url:
            for _ in range(2):
                found = asyncio.run(answers(url))
                assert all(map(close, found, expected))
            metrics = httpx.get(f"{url}/metrics", trust_env=False).text
            assert counted(metrics, "handovers") and not counted(metrics, "decode_alone")
            without = re.findall(r"prefills_without_parameters_total\{.*\} (.+)", metrics)
            assert without and not any(map(float, without))
            admin = httpx.Client(base_url=url, headers=ADMINISTRATOR, trust_env=False, timeout=STEP_SECONDS)

            def state(server: Server) -> Any:
                listed = admin.get("/instances").json()["instances"]
                return next((one for one in listed if one["url"] == server.base_url), None)

            def until(condition: Any) -> None:
                deadline = time.monotonic() + STEP_SECONDS
                while not condition():
                    assert time.monotonic() < deadline, admin.get("/instances").text
                    time.sleep(0.1)

            def trouble() -> None:
                for place in (0, 2):
                    time.sleep(2.0)
                    launched.servers[place].kill()
                    successor = launched.replace(place)
                    until(successor.is_ready)
                    until(lambda one=successor: state(one)["state"] == "up")
                leaving = launched.servers[3]
                name = leaving.base_url.removeprefix("http://")
                assert admin.post(f"/instances/{name}/drain").status_code == 200
                until(lambda: state(leaving)["drained"])
                assert admin.delete(f"/instances/{name}").status_code == 204
                added = admin.post("/instances", json={"role": "decode", "url": leaving.base_url})
                assert added.status_code == 201
                until(lambda: state(leaving)["state"] == "up")

            right, errors = asyncio.run(under_load(url, expected, trouble))
            assert right > errors
            assert all(map(close, asyncio.run(answers(url)), expected))
            directions = [one["transfer_mode"] for one in admin.get("/instances").json()["instances"]]
            assert directions.count(mode) == 2
            admin.close()
