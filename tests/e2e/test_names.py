# SPDX-License-Identifier: Apache-2.0
"""Engines that share a host, a name in the environment or a server map their own pages only, and leave nothing behind.

The pools are small and many prompts run at a time, so that pages are mapped again and again while others run: pages
that were mapped when a server started are never in the wrong worker. Every engine has workers in separate processes,
which it tells through sockets what to map. In float32 an answer does not depend on the rest of its batch, so every
answer is compared with a stock server's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import FOLDER
from support.waiting import until

from experiments.common import device
from experiments.common.client import Client, at_a_time, http_client, read_answer
from experiments.common.counted import own_names
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import (
    ENVIRONMENT,
    GIVES_BACK,
    INHERITED_PREFIXES_DROPPED,
    REPOSITORY,
    SERVER_SIDE,
    Server,
    ServerSpec,
    running,
)
from kvcached_nixl.wire.params import MANIFEST_KEY

PROMPTS = 24
AT_A_TIME = 12
PROMPT_TOKENS = (1200, 1600)
TOKENS = 8
NUM_BLOCKS = 320
"""A page group holds 16 of them. Six prompts fit."""
DEAD_SECONDS = 15.0
KVCACHED = {"ENABLE_KVCACHED": "true", **device.layout(), "KVCACHED_HOSTVMM_GIB": "1", **GIVES_BACK}
MODEL = ModelShape(kv_heads=8, head_size=128)
Ask = Callable[[int, list[int]], Awaitable[dict[str, Any]]]


def prompts() -> list[list[int]]:
    numbers = random.Random(21)
    return [[numbers.randrange(3, 500) for _ in range(numbers.randint(*PROMPT_TOKENS))] for _ in range(PROMPTS)]


def spec(name: str, *, ranks: int = 1, mode: str = "", kvcached: bool = True, wish: str = "") -> ServerSpec:
    ranked = ("--data-parallel-size", str(ranks)) if ranks > 1 else ()
    return ServerSpec(
        name=name,
        model=make_model(MODEL),
        dtype="float32",
        executor="mp",
        kv_transfer=device.nixl("", {"transfer_mode": mode}, kv_load_failure_policy="fail") if mode else None,
        environment={**(KVCACHED if kvcached else {}), **({"KVCACHED_IPC_NAME": wish} if wish else {})},
        arguments=("--num-gpu-blocks-override", str(NUM_BLOCKS), *ranked),
        forks=True,
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What a stock server alone answers."""
    with running([spec("stock", kvcached=False)], tmp_path_factory.mktemp("stock")) as (stock,):
        return asyncio.run(asked(lambda client: directly(client), [stock]))[0]


def directly(client: Client, headers: int | None = None) -> Ask:
    async def ask(number: int, prompt: list[int]) -> dict[str, Any]:
        return await client.complete(prompt, max_tokens=TOKENS, salt=str(number), request_id=f"alone-{number}")

    return ask


async def asked(via: Callable[[Client], Ask], servers: Sequence[Server]) -> list[list[list[int]]]:
    """The same prompts at each of these servers at once, so many at a time at each; returns the tokens."""
    async with http_client(AT_A_TIME * len(servers)) as http:

        async def one(ask: Ask, number: int, prompt: list[int]) -> list[int]:
            return read_answer(await ask(number, prompt), TOKENS).token_ids

        asks = [via(Client(server.base_url, http)) for server in servers]
        each = [[one(ask, *asked) for asked in enumerate(prompts())] for ask in asks]
        return await asyncio.gather(*(at_a_time(AT_A_TIME, calls) for calls in each))


def wrong(answers: Sequence[list[int]], expected: Sequence[list[int]]) -> list[int]:
    return [number for number, (found, right) in enumerate(zip(answers, expected, strict=True)) if found != right]


def handed_over(prefill: Client, decode: Client) -> Ask:
    """Prefill's rank is whichever vLLM's balancer takes; its answer says where decode finds it."""

    async def ask(number: int, prompt: list[int]) -> dict[str, Any]:
        names = {"salt": str(number), "request_id": f"{decode.base_url}-{number}"}
        offered = await prefill.offer(prompt, **names)
        assert MANIFEST_KEY in offered
        return await decode.complete(prompt, max_tokens=TOKENS, kv_transfer_params=offered, **names)

    return ask


async def through(prefill: Server, decodes: Sequence[Server]) -> list[list[list[int]]]:
    async with http_client(AT_A_TIME * len(decodes)) as http:
        client = Client(prefill.base_url, http)
        return await asked(lambda decode: handed_over(client, decode), decodes)


def test_the_ranks_of_one_server_without_a_connector(tmp_path: Path, expected: list[list[int]]) -> None:
    """Both ranks compute, each in pages of its own."""
    with running([spec("alone", ranks=2)], tmp_path) as (server,):
        names = own_names(server.identity)
        (answers,) = asyncio.run(asked(directly, [server]))
    assert wrong(answers, expected) == []
    assert len(names) == 2


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_ranks_on_both_sides(mode: str, tmp_path: Path, expected: list[list[int]]) -> None:
    """Prefill with two ranks, decode with two."""
    sides = [spec("prefill", ranks=2, mode=mode), spec("decode", ranks=2, mode=mode)]
    with running(sides, tmp_path) as (prefill, decode):
        names = {name for side in (prefill, decode) for name in own_names(side.identity)}
        (answers,) = asyncio.run(through(prefill, [decode]))
    assert wrong(answers, expected) == []
    assert len(names) == 4


def test_two_decode_servers_with_one_name(tmp_path: Path, expected: list[list[int]]) -> None:
    """As the replicas of one Ray Serve deployment have: nothing but one KVCACHED_IPC_NAME in common."""
    wish = f"kvx{uuid.uuid4().hex[:10]}"
    sides = [spec("prefill", mode="pull"), *(spec(name, mode="pull", wish=wish) for name in ("decode-1", "decode-2"))]
    with running(sides, tmp_path) as (prefill, *decodes):
        names = own_names(wish)
        answers = asyncio.run(through(prefill, decodes))
    assert [wrong(one, expected) for one in answers] == [[], []]
    assert len(names) == 2


def run_script(what: str, name: str = "") -> dict[str, Any]:
    """One script whose engines have nothing but its environment; without a name that is none at all."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED_PREFIXES_DROPPED)}
    own_device = f"kvx{uuid.uuid4().hex}"
    environment |= {
        **ENVIRONMENT,
        "PYTHONPATH": f"{SERVER_SIDE}{os.pathsep}{REPOSITORY}",
        "KVCACHED_HOSTVMM_DEVICE": own_device,
    }
    environment |= device.environment(KVCACHED, 1, forks=False) | ({"KVCACHED_IPC_NAME": name} if name else {})
    model = str(make_model(MODEL))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "one_script.py"), model, what],
        input=json.dumps([prompts(), TOKENS]),
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert left_by(own_device) == []
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_two_engines_of_one_script(expected: list[list[int]]) -> None:
    """Without a name: kvcached would make one from the process group."""
    assert [wrong(one, expected) for one in run_script("two")["answers"]] == [[], []]


def test_an_engine_inside_a_script(expected: list[list[int]]) -> None:
    """A second one beside it would have the first one's pages; the first is not disturbed, and leaves nothing."""
    name = f"kvx{uuid.uuid4().hex[:10]}"
    found = run_script("inside", name)
    assert [wrong(one, expected) for one in found["answers"]] == [[]]
    assert "an engine in this process already" in found["refused"]
    assert found["left"] == left_by(name) == []


def left_by(wish: str) -> list[str]:
    """What lies under names that begin with this, and the emulated device's account."""
    found = [*Path("/dev/shm").glob(f"*{wish}*"), *Path("/tmp").glob(f"kvcached-tp-{wish}*")]
    return sorted(str(path) for path in found)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running([spec("ranks", ranks=2)], tmp_path) as (one,):
        assert len(left_by(one.identity)) > 2
        yield one


@pytest.mark.parametrize("group", [False, True], ids=["the server alone", "its process group"])
def test_nothing_is_left_after_sigterm(server: Server, group: bool) -> None:
    """Of the server itself, as systemd and Kubernetes do, or of every process, as a terminal and these tests do."""
    (os.killpg if group else os.kill)(server.process.pid, signal.SIGTERM)
    until(lambda: not server.processes(), server.tail, DEAD_SECONDS)
    assert left_by(server.identity) == []


def test_the_next_engine_clears_what_a_killed_one_left(server: Server, tmp_path: Path) -> None:
    """And touches nothing of one that lives."""
    server.kill()
    until(lambda: not server.processes(), server.tail, DEAD_SECONDS)
    assert left_by(server.identity) != []
    with running([spec("living"), spec("next")], tmp_path) as others:
        assert left_by(server.identity) == []
        assert [len(own_names(other.identity)) for other in others] == [1, 1]
        assert asyncio.run(asked(directly, others))
