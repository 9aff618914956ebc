# SPDX-License-Identifier: Apache-2.0
"""The router through the official client: its answers and errors are those that the client expects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.router_under_test import UnderTest, learn, serving
from support.stub_servers import tokens_of

openai = pytest.importorskip("openai", reason="the official client is not installed")

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def client_of(at: UnderTest, key: str = "none") -> Any:
    return openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=key, max_retries=0, timeout=20)


async def say(client: Any, *, chat: bool, stream: bool) -> str:
    """The text of one answer."""
    if chat:
        answer = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_completion_tokens=5, stream=stream
        )
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([part.choices[0].delta.content or "" async for part in answer])
    answer = await client.completions.create(model="m", prompt="hello", max_tokens=5, stream=stream)
    return "".join([part.choices[0].text async for part in answer]) if stream else str(answer.choices[0].text)


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
def test_answers(pushes: bool) -> None:
    async def run() -> None:
        async with serving(2, 2, pushes=pushes) as at:
            await learn(at)
            async with client_of(at) as client:
                for chat in (False, True):
                    prompt: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": "hello"}
                    expected = "".join(tokens_of({**prompt, "max_tokens": 5}))
                    for stream in (False, True):
                        assert await say(client, chat=chat, stream=stream) == expected
                assert [one.id async for one in await client.models.list()] == ["model"]

    asyncio.run(run())


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_that_breaks_off_is_an_error_for_the_client(chat: bool) -> None:
    """The official client must not take half an answer for a complete one."""

    async def run() -> None:
        async with serving() as at, client_of(at) as client:
            for fault in ("die 2", "inside 2", "no done", "error 2"):
                at.decodes[0].faults.append(fault)
                with pytest.raises(openai.APIError):
                    await say(client, chat=chat, stream=True)
            assert await say(client, chat=chat, stream=True)

    asyncio.run(run())


def test_errors_are_those_that_the_client_knows() -> None:
    async def run() -> None:
        async with serving(api_key="right", attempts=1, all_up=False) as at:
            async with client_of(at, "wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await say(client, chat=False, stream=False)
            async with client_of(at, "right") as client:
                while (await at.http.get(f"{at.url}/health")).status_code != 200:
                    await asyncio.sleep(0.01)
                with pytest.raises(openai.BadRequestError, match="one by one"):
                    await client.completions.create(model="m", prompt="a", extra_body={"use_beam_search": True})
                with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
                    extra = {"kv_transfer_params": {"do_remote_prefill": True}}
                    await client.completions.create(model="m", prompt="a", extra_body=extra)
                for fault, kind in (("404", openai.NotFoundError), ("500", openai.InternalServerError)):
                    at.prefills[0].faults.append(fault)
                    with pytest.raises(kind):
                        await say(client, chat=True, stream=True)

    asyncio.run(run())
