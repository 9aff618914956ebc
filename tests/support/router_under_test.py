# SPDX-License-Identifier: Apache-2.0
"""The router on a real socket, in the test's event loop, in front of stub servers. Shared by the router's tests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from kvcached_nixl.proxy.command import Router
from kvcached_nixl.proxy.options import Options
from support.stub_servers import HOST, Fabric, Stub, stubs, tokens_of

WAIT_SECONDS = 20.0
ADMIN_KEY = "the-administrator"
QUICK: dict[str, Any] = {
    "health_interval_seconds": 0.1,
    "connect_timeout_seconds": 1.0,
    "queue_timeout_seconds": 1.0,
    "drain_delay_seconds": 0.01,
    "drain_timeout_seconds": 2.0,
    "admin_key": ADMIN_KEY,
}


class UnderTest:
    """A router, its stub servers and a client."""

    def __init__(self, router: Router, prefills: list[Stub], decodes: list[Stub], http: httpx.AsyncClient) -> None:
        self.router = router
        self.prefills = prefills
        self.decodes = decodes
        self.http = http
        self.port = router.port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def complete(
        self, prompt: Any = "hello", *, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        """Sends one completion request; it is not streamed unless ``stream`` is given."""
        return await self.http.post(
            f"{self.url}/v1/completions", json={"model": "model", "prompt": prompt, **more}, headers=headers
        )

    async def administer(self, method: str, path: str = "", **more: Any) -> httpx.Response:
        """Sends a request to ``/instances`` with the administrator's key."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return await self.http.request(method, f"{self.url}/instances{path}", headers=headers, **more)

    async def instances(self) -> dict[str, dict[str, Any]]:
        found = (await self.administer("GET")).json()["instances"]
        return {one["name"]: one for one in found}

    async def metrics(self) -> dict[str, float]:
        """Returns series, with its labels -> value."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {series: float(value) for series, _, value in lines}

    async def count(self, name: str, **labels: str) -> float:
        """Returns the sum of a counter's series that have these labels."""
        return sum(
            value
            for series, value in (await self.metrics()).items()
            if series.startswith(f"kvcached_nixl_router_{name}{{")
            and all(f'{label}="{said}"' in series for label, said in labels.items())
        )


async def until(condition: Callable[[], bool], words: str) -> None:
    """Waits until the condition holds, for at most `WAIT_SECONDS`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, words
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    prefills: int = 1, decodes: int = 1, *, pushes: bool = False, all_up: bool = True, **options: Any
) -> AsyncIterator[UnderTest]:
    """Runs a router in front of so many stub servers, and drains it at the end."""
    fabric = Fabric()
    ps = [Stub(fabric, pushes=pushes) for _ in range(prefills)]
    ds = [Stub(fabric, pushes=pushes) for _ in range(decodes)]
    async with stubs(*ps, *ds), serving_before(ps, ds, all_up=all_up, **options) as under_test:
        yield under_test


@asynccontextmanager
async def serving_before(
    ps: list[Stub], ds: list[Stub], *, all_up: bool = True, **options: Any
) -> AsyncIterator[UnderTest]:
    """Runs a router in front of stub servers that listen already."""
    router = Router(
        Options(
            **{"host": HOST, "port": 0, **QUICK, **options},
            prefill=tuple(one.url for one in ps),
            decode=tuple(one.url for one in ds),
        )
    )
    running = asyncio.create_task(router.serve())
    try:
        await asyncio.wait_for(router.started.wait(), WAIT_SECONDS)
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as http:
            under_test = UnderTest(router, ps, ds, http)
            while all_up and any(one["state"] != "up" for one in (await under_test.instances()).values()):
                await asyncio.sleep(0.01)
            yield under_test
    finally:
        router.stop()
        await asyncio.wait_for(running, WAIT_SECONDS)


def request_of(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


HELLO = {"model": "model", "prompt": "hello", "max_tokens": 4}


def check(answer: httpx.Response, body: dict[str, Any]) -> None:
    """Checks that the answer is right, or an error, or a right beginning followed by an error."""
    expected = tokens_of(body)
    if answer.status_code != 200:
        assert answer.status_code in (502, 503, 504) and answer.json()["error"]["message"]
    elif not body["stream"]:
        assert answer.json()["choices"][0]["text"] == "".join(expected)
    else:
        found = [json.loads(one.removeprefix("data: ")) for one in answer.text.split("\n\n") if one.endswith("}")]
        texts = [one["choices"][0]["text"] for one in found if "choices" in one]
        assert texts == expected[: len(texts)]
        has_error = any("error" in one for one in found)
        assert has_error or (texts == expected and answer.text.endswith("data: [DONE]\n\n"))


def right(answer: httpx.Response, prompt: str = "hello", max_tokens: int = 4) -> bool:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "".join(tokens_of(body))


async def quiet(at: UnderTest) -> None:
    """Waits until the router has no request in flight, and checks that it counts none at any server."""

    def is_quiet() -> bool:
        return not at.router.app.in_flight

    await until(is_quiet, "a request is left in the router")
    for one in (await at.instances()).values():
        assert one["requests"] == one["outstanding_tokens"] == 0


async def learn(at: UnderTest) -> None:
    """Sends requests until the router knows every prefill's incarnation, which it needs for a push."""
    while any(one["role"] == "prefill" and not one["incarnation"] for one in (await at.instances()).values()):
        assert right(await at.complete(max_tokens=4))
