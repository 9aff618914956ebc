# SPDX-License-Identifier: Apache-2.0
"""The router with real servers that have two data-parallel ranks behind one URL, compared with one stock instance.

Pages are freed with each request and mapped again for the next, so a rank that maps another rank's pages would show,
and so would a push to the rank that does not compute.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.routed_answers import Said, client_of, close, complete, counted, openai, spec

from experiments.common.router import ADMINISTRATOR, routed
from experiments.common.servers import Running, Server, ServerSpec

REQUESTS, AT_ONCE = 48, 6
PROMPTS = [[3 + (11 * place + 5 * place * number) % 500 for place in range(90 + 37 * number)] for number in range(12)]


def parallel(name: str, mode: str, ranks: int) -> ServerSpec:
    one = spec(name, mode)
    more = ("--data-parallel-size", str(ranks)) if ranks > 1 else ()
    return ServerSpec(**{**vars(one), "arguments": (*one.arguments, *more)})


async def all_of(url: str) -> list[Said | str]:
    """Returns the answer to each request, several at a time, or the error's message."""
    turns = asyncio.Semaphore(AT_ONCE)
    async with client_of(url) as client:

        async def one(number: int) -> Said | str:
            async with turns:
                try:
                    return await complete(client, PROMPTS[number % len(PROMPTS)], stream=number % 2 == 1)
                except openai.APIError as error:
                    return str(error)

        return await asyncio.gather(*map(one, range(REQUESTS)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    """What one stock instance says to each prompt."""

    async def ask(server: Server) -> list[Said]:
        async with client_of(server.base_url) as client:
            return [await complete(client, prompt, stream=False) for prompt in PROMPTS]

    with Running([spec("alone", None)], tmp_path_factory.mktemp("alone")) as launched:
        return asyncio.run(ask(launched.ready()[0]))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "prefill_ranks", "decode_ranks"), [("push", 2, 1), ("push", 2, 2), ("push", 1, 2), ("pull", 2, 2)]
)
def test_two_ranks_behind_one_url(
    mode: str, prefill_ranks: int, decode_ranks: int, expected: list[Said], tmp_path: Path
) -> None:
    sides = [parallel("prefill", mode, prefill_ranks), parallel("decode", mode, decode_ranks)]
    with Running(sides, tmp_path) as launched:
        prefill, decode = launched.ready()
        with routed([prefill], [decode], tmp_path / "router.log") as url:
            found = asyncio.run(all_of(url))
            metrics = httpx.get(f"{url}/metrics", trust_env=False).text
            instances = httpx.get(f"{url}/instances", headers=ADMINISTRATOR, trust_env=False).json()["instances"]
        wrong: list[Any] = [
            (number, one)
            for number, one in enumerate(found)
            if isinstance(one, str) or not close(one, expected[number % len(PROMPTS)])
        ]
        assert not wrong, f"{len(wrong)} of {REQUESTS}: {wrong[:3]}; {instances}"
        assert counted(metrics, "handovers") and not counted(metrics, "retries")
        ranks = next(one for one in instances if one["role"] == "prefill")["ranks"]
        if mode == "push" and prefill_ranks > 1:
            assert len({one["engine_id"] for one in ranks if one["engine_id"]}) == prefill_ranks
        else:
            assert ranks is None
        (directions,) = [line for line in metrics.splitlines() if f'handovers_total{{direction="{mode}"}}' in line]
        # What has to be learnt first, of all that came at the same time.
        assert float(directions.split()[-1]) > REQUESTS - 4 * AT_ONCE
