# SPDX-License-Identifier: Apache-2.0
"""``n`` > 1 and lists of prompts: one answer of several hand-overs, or an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.router_under_test import UnderTest, learn, quiet, right, serving, until
from support.stub_servers import tokens_of

ASKED: list[dict[str, Any]] = [
    {"prompt": "a", "n": 3},
    {"prompt": ["a", "b", "c"]},
    {"prompt": [[1, 2], [3]], "n": 2},
]


def expected(said: dict[str, Any]) -> list[str]:
    prompts = said["prompt"] if isinstance(said["prompt"], list) else [said["prompt"]]
    return ["".join(tokens_of({"prompt": one, "max_tokens": 4})) for one in prompts for _ in range(said.get("n", 1))]


def told(text: str) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Returns each choice's text, and the events."""
    events = [json.loads(one[6:]) for one in text.split("\n\n") if one.startswith("data: {")]
    found: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", []):
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found, events


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("said", ASKED, ids=str)
def test_every_sequence_is_handed_over_and_numbered(said: dict[str, Any], stream: bool, pushes: bool) -> None:
    async def run() -> None:
        async with serving(2, 2, pushes=pushes) as at:
            await learn(at)
            answer = await at.complete(**said, max_tokens=4, stream=stream, seed=7)
            assert answer.status_code == 200, answer.text
            texts = expected(said)
            if stream:
                found, events = told(answer.text)
                assert [found[place] for place in range(len(texts))] == texts and len(found) == len(texts)
                assert len({event["id"] for event in events}) == 1
                assert answer.text.count("[DONE]") == 1 and answer.text.endswith("data: [DONE]\n\n")
            else:
                choices = answer.json()["choices"]
                assert [one["index"] for one in choices] == list(range(len(texts)))
                assert [one["text"] for one in choices] == texts
            asked = [leg for server in at.decodes for leg in server.asked if "seed" in leg.body]
            assert len(asked) == len(texts) and not any(leg.was_computed for leg in asked)
            assert sorted(leg.body["seed"] for leg in asked) == sorted(
                7 + place for _ in range(len(texts) // said.get("n", 1)) for place in range(said.get("n", 1))
            )
            ids = [leg.headers["x-request-id"] for server in (*at.prefills, *at.decodes) for leg in server.asked]
            assert len(set(ids)) == len(ids)
            await quiet(at)

    asyncio.run(run())


def test_the_first_sequence_of_a_prompt_goes_ahead_and_the_others_to_the_same_prefill() -> None:
    async def run() -> None:
        async with serving(3, 3) as at:
            assert (await at.complete("a", n=6, max_tokens=4)).status_code == 200
            assert sorted(len(one.asked) for one in at.prefills) == [0, 0, 6]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_one_sequence_that_fails_fails_all(stream: bool) -> None:
    async def run() -> None:
        async with serving(attempts=1) as at:
            at.decodes[0].token_seconds = 0.02
            at.decodes[0].faults.extend(["", "reset 2" if stream else "500"])
            answer = await at.complete("a", n=3, max_tokens=20, stream=stream)
            if stream:
                assert '"error"' in answer.text and "[DONE]" not in answer.text
            else:
                assert answer.status_code == 502
            await until(lambda: not at.router.app.in_flight, "a sequence goes on")
            await quiet(at)
            at.decodes[0].token_seconds = 0.0
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_a_client_that_leaves_ends_every_sequence() -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].token_seconds = 0.05
            asking = asyncio.create_task(at.complete(["a", "b", "c"], max_tokens=1000, stream=True))
            await until(lambda: len(at.decodes[0].asked) == 3, "not all are asked")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: all(one.was_cut for one in at.decodes[0].asked), "a sequence goes on")
            await quiet(at)
            await until(lambda: at.router.app.account.taken_bytes < 1 << 20, "memory is counted that is free")

    asyncio.run(run())


def test_sequences_count_as_requests_in_flight() -> None:
    async def run() -> None:
        async with serving(max_inflight=4) as at:
            refused = await at.complete("a", n=5)
            assert refused.status_code == 429 and "retry-after" in refused.headers
            assert (await at.complete("a", n=4)).status_code == 200
            assert at.router.app.in_flight == 0

    asyncio.run(run())


def test_what_is_measured_of_several_sequences() -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].token_seconds = 0.2
            assert (await at.complete("a", n=2, max_tokens=6, stream=True)).status_code == 200
            said = at.router.app.recorder.latest()[0]
            assert said["ms"] > 1200 and said["first_ms"] < 700, "the first piece is the first sequence's"
            at.decodes[0].token_seconds = 0.0
            assert (await at.complete(["a", "b"], n=4, max_tokens=4)).status_code == 200
            assert at.router.app.recorder.latest()[0]["attempts"] == 8

    asyncio.run(run())


def test_a_copy_for_each_sequence_is_counted() -> None:
    """Of a long body each one's two legs have what is not the prompt."""

    async def run() -> None:
        async with serving(max_memory_bytes=64 << 20) as at:
            refused = await at.complete([f"p{place}" for place in range(100)], suffix="s" * (1 << 20))
            assert refused.status_code == 429 and not at.prefills[0].asked
            answer = await at.complete([f"p{place}" * 10_000 for place in range(100)], max_tokens=1)
            assert answer.status_code == 200, "each has one of the prompts only"
            await quiet(at)
            await until(lambda: at.router.app.account.taken_bytes < 1 << 20, "memory is counted that is free")

    asyncio.run(run())


async def usage(at: UnderTest, **said: Any) -> dict[str, int]:
    answer = await at.complete(max_tokens=4, stream=True, stream_options={"include_usage": True}, **said)
    (found,) = [event["usage"] for event in told(answer.text)[1] if event.get("usage")]
    return dict(found)


def test_usage_counts_each_prompt_once_and_each_completion() -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].usage = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
            total = {"prompt_tokens": 20, "completion_tokens": 24, "total_tokens": 44}
            assert await usage(at, prompt=["a", "b"], n=3) == total
            whole = (await at.complete(["a", "b"], n=3, max_tokens=4)).json()["usage"]
            assert whole == total

    asyncio.run(run())
