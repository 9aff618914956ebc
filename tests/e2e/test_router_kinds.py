# SPDX-License-Identifier: Apache-2.0
"""The router before real servers of two models: each answer is one model's, and no hand-over between them is tried."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.looked_at import looked_at
from support.routed_answers import STEP_SECONDS, TEMPLATE, client_of, complete, counted, spec

from experiments.common import model as models
from experiments.common.router import ADMINISTRATOR, routed
from experiments.common.servers import Running, Server, ServerSpec

PROMPTS = [[3 + (7 * place + number) % 500 for place in range(100 + 40 * number)] for number in range(6)]
OLD, NEW = (models.ModelShape(max_positions=4096, seed=seed) for seed in (20260, 20261))


def of_model(shape: models.ModelShape, one: ServerSpec) -> ServerSpec:
    return dataclasses.replace(one, model=models.make_model(shape), arguments=("--chat-template", TEMPLATE))


async def texts(url: str) -> list[str]:
    async with client_of(url) as client:
        return [(await complete(client, prompt, stream=False))[0] for prompt in PROMPTS]


def expected_of(shape: models.ModelShape, folder: Path) -> list[str]:
    with Running([of_model(shape, spec("alone", None))], folder) as launched:
        return asyncio.run(texts(launched.ready()[0].base_url))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """What stock instances of the two models say."""
    old, new = (expected_of(shape, tmp_path_factory.mktemp("alone")) for shape in (OLD, NEW))
    assert all(one != other for one, other in zip(old, new, strict=True))
    return old, new


async def ask_on(url: str, expected: tuple[list[str], list[str]], until: Callable[[], bool]) -> list[int]:
    """Asks until a condition holds. Returns how many answers were the old model's, and how many the new one's."""
    counts = [0, 0]

    async def one(client: Any, number: int) -> None:
        while not until():
            number = (number + 1) % len(PROMPTS)
            text, _ = await complete(client, PROMPTS[number], stream=number % 2 == 1)
            found = [answers[number] for answers in expected]
            assert text in found, f"an answer to prompt {number} that is neither model's"
            counts[found.index(text)] += 1

    async with client_of(url) as client:
        await asyncio.wait_for(asyncio.gather(*(one(client, number) for number in range(4))), 4 * STEP_SECONDS)
    return counts


def failures(server: Server) -> float:
    said = httpx.get(f"{server.base_url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in said if line.startswith("kvcached_nixl:handover_failures"))


def check_top(status: int, found: dict[str, Any], *, url: str, moves: str) -> None:
    """What ``top`` has shown of the four servers under load; ``moves`` is the role that moves the bytes."""
    assert (status, found["attention"]) == (0, [])
    (router,) = found["routers"]
    assert router["name"] == url.removeprefix("http://") and router["ok_per_second"] > 0
    assert 0 < router["ttft_p50_seconds"] <= router["ttft_p99_seconds"]
    engines = found["engines"]
    assert [one["role"] for one in engines] == ["prefill", "prefill", "decode", "decode"]
    # Each fits the one of the other role that has its model.
    assert [(one["fits_peers"], one["peers"]) for one in engines] == [(1, 2)] * 4
    assert all(one["gets_requests"] and one["tokens"]["free"] > 0 for one in engines)
    assert all((one["bytes_per_second"] > 0) is (one["role"] == moves) for one in engines)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_models_behind_one_router(mode: str, expected: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """At first both at once. Then the old one's servers are replaced by the new one's, one by one, under load."""
    shapes = [OLD, NEW, OLD, NEW]
    specs = [of_model(shape, spec(f"{role}-{number}", mode)) for number, (role, shape) in enumerate(
        zip(["prefill", "prefill", "decode", "decode"], shapes, strict=True)
    )]  # fmt: skip
    with Running(specs, tmp_path) as launched:
        servers = launched.ready()
        with routed(servers[:2], servers[2:], tmp_path / "router.log") as url:
            admin = httpx.Client(base_url=url, headers=ADMINISTRATOR, trust_env=False, timeout=STEP_SECONDS)

            def state(server: Server) -> dict[str, Any]:
                listed = admin.get("/instances").json()["instances"]
                return next((one for one in listed if one["url"] == server.base_url), {})

            def wait_for(condition: Callable[[], bool]) -> None:
                deadline = time.monotonic() + STEP_SECONDS
                while not condition():
                    assert time.monotonic() < deadline, admin.get("/instances").text
                    time.sleep(0.1)

            wait_for(lambda: all(state(one)["kind"] for one in servers))
            kinds = [state(one)["kind"].split("-") for one in servers]
            # Versions and configuration are equal, files and weights are those of two models.
            assert len({compatibility for compatibility, _, _ in kinds}) == 1
            assert [one[1:] for one in kinds[:2]] == [one[1:] for one in kinds[2:]]
            assert kinds[0][1] != kinds[1][1] and kinds[0][2] != kinds[1][2]

            with ThreadPoolExecutor(1) as beside:
                begun = time.monotonic()
                looking = beside.submit(looked_at, url, interval_seconds=8.0)
                counts = asyncio.run(ask_on(url, expected, lambda: time.monotonic() > begun + 15))
                check_top(*looking.result(), url=url, moves="decode" if mode == "pull" else "prefill")
            assert min(counts) > 5

            def replace_all() -> None:
                for place in (0, 2):
                    name = launched.servers[place].base_url.removeprefix("http://")
                    assert admin.post(f"/instances/{name}/drain").status_code == 200
                    wait_for(lambda place=place: state(launched.servers[place])["drained"])  # type: ignore[misc]
                    assert admin.delete(f"/instances/{name}").status_code == 204
                    launched.servers[place].kill()
                    successor = launched.replace(place, of_model(NEW, specs[place]))
                    wait_for(successor.is_ready)
                    added = {"role": specs[place].name.partition("-")[0], "url": successor.base_url}
                    assert admin.post("/instances", json=added).status_code == 201
                    wait_for(lambda one=successor: state(one).get("kind") is not None)  # type: ignore[misc]

            async def both() -> list[int]:
                replacing = asyncio.create_task(asyncio.to_thread(replace_all))
                counts = await ask_on(url, expected, replacing.done)
                await replacing
                return counts

            assert asyncio.run(both())[1] > 20
            assert asyncio.run(texts(url)) == expected[1]
            metrics = httpx.get(f"{url}/metrics", trust_env=False).text
            assert counted(metrics, "handovers")
            assert not counted(metrics, "decode_alone") and not counted(metrics, "retries")
            assert all(failures(one) == 0 for one in launched.servers)
            admin.close()
