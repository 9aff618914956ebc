# SPDX-License-Identifier: Apache-2.0
"""Real servers: conversations whose turns arrive at any of three servers behind a plain balancer."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.balancers import Balancer, service

from experiments.bench.conversations import Peers
from experiments.common.client import Client, is_up
from experiments.common.counted import samples
from experiments.common.device import with_extra
from experiments.common.families import FAMILIES
from experiments.common.servers import GIVES_BACK, Running, Server
from experiments.common.servers import running as running_servers
from experiments.lease_recovery.arms import BLOCK_SIZE, PULL, PUSH, Arm

TOKENS = 12
CONVERSATIONS, TURNS = 4, 4
FIRST_TOKENS, NEW_TOKENS = 320, 150
VOCABULARY = range(10, 500)
Ask = Callable[[int, int, list[int]], Awaitable[list[int]]]
"""The numbers of a conversation and of its turn, and the turn's prompt -> its answer."""


@contextlib.contextmanager
def peers(arm: Arm, logs: Path, **extra: object) -> Iterator[tuple[Running, Server]]:
    """Three servers that ask each other, and a stock one."""
    one, _ = arm.specs("recompute")
    assert one.kv_transfer is not None
    keeps = {name: value for name, value in one.environment.items() if name not in GIVES_BACK}
    transfer = {**with_extra(one.kv_transfer, extra), "kv_role": "kv_both"}
    both = replace(one, kv_transfer=transfer, environment=keeps)
    several = [replace(both, name=f"{arm.name}-peer{number}") for number in range(3)]
    plain = {name: value for name, value in one.environment.items() if "KVCACHED" not in name}
    stock = replace(one, name="stock", kv_transfer=None, environment=plain)
    with running_servers([stock], logs) as (alone,), Peers(several, logs) as launched:
        launched.ready()
        yield launched, alone
        for server in launched.servers:
            server.check_alive()


def total(servers: Sequence[Server], counter: str, label: str = "") -> int:
    """Of all servers, by one of vLLM's own counters."""
    found = [samples(f"{one.base_url}/metrics", counter) for one in servers]
    return sum(int(value) for one in found for key, value in one.items() if label in key)


async def converse(stock: Server, http: httpx.AsyncClient, ask: Ask, seed: int) -> None:
    """Conversations, a turn of each at a time: every answer is that of the stock server."""
    dice = random.Random(seed)
    alone = Client(stock.base_url, http)
    histories = [dice.choices(VOCABULARY, k=FIRST_TOKENS) for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for number, history in enumerate(histories):
            name = f"conversation{number}"
            expected = await alone.answer(history, max_tokens=TOKENS, salt=name, request_id=f"{name}-{turn}")
            assert await ask(number, turn, history) == expected.token_ids, f"{name}, turn {turn}"
            history += expected.token_ids + dice.choices(VOCABULARY, k=NEW_TOKENS)


STAGED = Arm("staged", "push", extra={"memory_path": "device"})
# With room for all conversations: each group of layers has blocks of its own.
WINDOWS, STATES = (Arm(name, "pull", family=name, num_blocks=256) for name in ("gemma4", "nemotron-h"))


@pytest.mark.parametrize("arm", [PULL, PUSH, STAGED, WINDOWS, STATES], ids=lambda arm: arm.name)
def test_turns_are_computed_at_home_and_elsewhere_their_history_is_fetched_from_there(arm: Arm, tmp_path: Path) -> None:
    async def run(servers: Sequence[Server], stock: Server) -> None:
        async with httpx.AsyncClient(timeout=180) as http:
            clients = [Client(one.base_url, http) for one in servers]

            async def ask(number: int, turn: int, prompt: list[int]) -> list[int]:
                client = clients[(number + (turn == TURNS - 1)) % len(clients)]
                name = f"conversation{number}"
                answer = await client.answer(prompt, max_tokens=TOKENS, salt=name, request_id=f"{name}-{turn}")
                return answer.token_ids

            await converse(stock, http, ask, seed=7)
        new_tokens = CONVERSATIONS * (FIRST_TOKENS + (TURNS - 1) * (NEW_TOKENS + TOKENS))
        turns = CONVERSATIONS * TURNS
        sources = ('"local_compute"', '"external_kv_transfer"')
        computed, fetched = (total(servers, "vllm:prompt_tokens_by_source_total", one) for one in sources)
        # A state can only be used at the end of its block, and vLLM keeps few of those; of windows, not all either.
        assert arm is STATES or computed <= new_tokens + turns * 2 * BLOCK_SIZE, "what is new, on two servers at most"
        last = CONVERSATIONS * FIRST_TOKENS + new_tokens
        assert arm.family or fetched <= last, "the first turns, and the last ones elsewhere"
        # Beside those of clients.
        questions = total(servers, "vllm:request_success_total") - turns
        assert arm.family or questions == CONVERSATIONS, "only the first turns are computed by another server"

    if arm.family and (reason := FAMILIES[arm.family].reason_to_skip()):
        pytest.skip(reason)
    # What is measured differs from run to run.
    with peers(arm, tmp_path, max_local_prefill_tokens=NEW_TOKENS + TOKENS + 4 * BLOCK_SIZE) as (running, stock):
        asyncio.run(run(running.servers, stock))


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=["pull", "push"])
def test_behind_a_plain_balancer_conversations_go_on_when_a_server_is_killed(arm: Arm, tmp_path: Path) -> None:
    async def run(running: Running, stock: Server, balancer: Balancer) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=180, limits=limits) as http:
            client = Client(balancer.url, http)

            async def ask(number: int, turn: int, prompt: list[int]) -> list[int]:
                if (number, turn) == (0, 1):
                    running.servers[0].kill()
                    running.replace(0)
                balancer.serve([one.base_url for one in running.servers if is_up(f"{one.base_url}/health")])
                name = f"conversation{number}"
                answer = await client.answer(prompt, max_tokens=TOKENS, salt=name, request_id=f"{name}-{turn}")
                return answer.token_ids

            await converse(stock, http, ask, seed=8)

    with peers(arm, tmp_path) as (running, stock), contextlib.ExitStack() as stack:
        urls = [one.base_url for one in running.servers]
        asyncio.run(run(running, stock, stack.enter_context(service(urls, tmp_path, is_sticky=False))))
        assert len(running.ready()) == 3
