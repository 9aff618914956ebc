# SPDX-License-Identifier: Apache-2.0
"""Push between real servers when one of them dies or a client leaves.

The byte-equivalence harness covers runs without faults. Here every request ends as ``kv_load_failure_policy`` says
within a stated time, both sides continue to serve, and the memory of both becomes free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.common import model as models
from experiments.common.client import Answer, AnswerError, Client, Pair, answers_of, http_client, read_answer
from experiments.common.counted import PageWatch
from experiments.common.device import layout, nixl
from experiments.common.servers import GIVES_BACK, Server, ServerSpec, running

KVCACHED = {"ENABLE_KVCACHED": "true", **layout(), "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK}
PREFILL, DECODE = 0, 1
LEASE_SECONDS = 5.0
# A handshake every 5 s while decode waits, and up to 5 s for its answer; the rest is for a busy machine.
DEATH_IS_NOTICED_SECONDS = 30.0
MEMORY_COMES_BACK_SECONDS = LEASE_SECONDS + 20.0
TOKENS = 16
# Some eighty steps, so that there is time to die in the middle; and more blocks than the page group that is always
# mapped has, so that memory that is kept shows.
CHUNK = 64
PROMPT = [3 + (7 * place + place * place) % 500 for place in range(5000)]
STEP_SECONDS = 150.0
"""The longest that anything may take before a test gives up: longer than push_registration_timeout, so that the server
has said why."""


def spec(name: str, policy: str = "fail") -> ServerSpec:
    # Two names of the same.
    by_class = name.startswith("prefill")
    extra = {"kv_lease_duration": LEASE_SECONDS, **({} if by_class else {"transfer_mode": "push"})}
    connector = nixl(name, extra, kv_load_failure_policy=policy)
    return ServerSpec(
        name=name,
        model=models.make_model(models.ModelShape(max_positions=16384)),
        dtype="float32",
        max_model_len=8192,
        max_num_batched_tokens=CHUNK,
        kv_transfer={**connector, "kv_connector": "NixlPushConnector"} if by_class else connector,
        environment=KVCACHED,
        forks=True,
    )


class Router:
    """Both requests of a transfer, decode's first."""

    def __init__(self, prefill: Server, decode: Server, pair: Pair) -> None:
        self.servers = (prefill, decode)
        self.pair = pair
        self.watches = [PageWatch(server.identity) for server in self.servers]
        self.rest = [watch.mapped_bytes() for watch in self.watches]
        assert all(watch.count().samples for watch in self.watches)

    def decode(self, name: str) -> asyncio.Task[dict[str, Any]]:
        params = {**self.pair.coordinates, "transfer_id": name, "do_remote_prefill": True}
        return self._ask(self.pair.decode, f"{name}-decode", TOKENS, params)

    def prefill(self, name: str) -> asyncio.Task[dict[str, Any]]:
        return self._ask(self.pair.prefill, f"{name}-prefill", 1, {"transfer_id": name, "do_remote_decode": True})

    async def registered(self, name: str) -> None:
        """Decode has handed its blocks to the connector."""
        await self._seen(self.pair.decode, "pending", name)

    async def computing(self, name: str) -> None:
        """Prefill has computed some of it, and is not through."""
        await self._seen(self.pair.prefill, "offered", name)

    async def writing(self, name: str, since: int) -> None:
        """Prefill has computed some of it and is not through, and has posted a WRITE of it."""
        await self.computing(name)
        await self._until(self.pair.prefill, lambda found: found["posted"] > since, f"nothing of {name} is written")

    async def posted(self) -> int:
        """How many WRITEs prefill has posted."""
        return int((await self.pair.prefill.probe("pending"))["posted"])

    async def _seen(self, client: Client, where: str, name: str) -> None:
        await self._until(client, lambda found: f"transfer:{name}" in found[where], f"{name} is not {where}")

    @staticmethod
    async def _until(client: Client, condition: Callable[[dict[str, Any]], bool], otherwise: str) -> None:
        deadline = time.monotonic() + STEP_SECONDS
        while not condition(found := await client.probe("pending")):
            assert time.monotonic() < deadline, f"{otherwise}: {found}"
            await asyncio.sleep(0.02)

    async def memory_comes_back(self, *sides: int) -> None:
        deadline = time.monotonic() + MEMORY_COMES_BACK_SECONDS
        for side in sides:
            while (level := self.watches[side].mapped_bytes()) > self.rest[side]:
                assert time.monotonic() < deadline, f"{self.servers[side].spec.name} keeps {level} bytes mapped"
                await asyncio.sleep(0.05)

    async def succeeds(self, name: str, expected: Answer) -> None:
        decoding = self.decode(name)
        await self.registered(name)
        for side, answer in (("prefill", self.prefill(name)), ("decode", decoding)):
            try:
                found = await asyncio.wait_for(answer, STEP_SECONDS)
            except asyncio.TimeoutError:
                logs = "\n".join(f"{server.spec.name}:\n{server.tail()}" for server in self.servers)
                pytest.fail(f"{side} does not answer {name} within {STEP_SECONDS} s. The logs end with\n{logs}")
        assert read_answer(found, TOKENS).token_ids == expected.token_ids

    async def ends(self, decoding: asyncio.Task[dict[str, Any]], policy: str, expected: Answer) -> None:
        """The client has an error or the right tokens, as the policy says."""
        answer = asyncio.wait_for(decoding, DEATH_IS_NOTICED_SECONDS)
        if policy == "fail":
            with pytest.raises(AnswerError, match="answered 5"):
                await answer
        else:
            assert read_answer(await answer, TOKENS).token_ids == expected.token_ids

    @staticmethod
    def _ask(client: Client, name: str, tokens: int, params: dict[str, Any]) -> asyncio.Task[dict[str, Any]]:
        # What the KV follows from is the same on both sides, a salt as well.
        salt = str(params["transfer_id"])
        return asyncio.create_task(
            client.complete(PROMPT, max_tokens=tokens, salt=salt, request_id=name, kv_transfer_params=params)
        )


@asynccontextmanager
async def router(prefill: Server, decode: Server) -> AsyncIterator[Router]:
    async with http_client(4) as http:
        pair = Pair(Client(prefill.base_url, http), Client(decode.base_url, http), prefill.coordinates)
        for side in (pair.prefill, pair.decode):
            await side.probe("arm")
        yield Router(prefill, decode, pair)


def alone(server: Server) -> Answer:
    """What the server answers by itself."""
    (found,) = asyncio.run(answers_of(server.base_url, [PROMPT], TOKENS, "alone"))
    return found


async def afterwards(prefill: Server, decode: Server, expected: Answer) -> None:
    async with router(prefill, decode) as route:
        await route.succeeds("after", expected)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_clients_that_go_away_and_a_prefill_that_dies(policy: str, tmp_path: Path) -> None:
    """Decode lives through it all, and another prefill server takes the place of the dead one."""

    async def until_prefill_dies(prefill: Server, decode: Server, expected: Answer) -> None:
        async with router(prefill, decode) as route:
            await route.succeeds("first", expected)

            # Decode's client goes away: nothing is written for it any more, and nothing kept.
            decoding = route.decode("decode-aborted")
            await route.registered("decode-aborted")
            decoding.cancel()
            await route.memory_comes_back(DECODE)
            await route.prefill("decode-aborted")
            await route.memory_comes_back(PREFILL)

            # Prefill's client goes away while prefill computes.
            decoding = route.decode("prefill-aborted")
            await route.registered("prefill-aborted")
            prefilling = route.prefill("prefill-aborted")
            await route.computing("prefill-aborted")
            prefilling.cancel()
            await route.ends(decoding, policy, expected)
            await route.memory_comes_back(PREFILL, DECODE)
            await route.succeeds("in-between", expected)

            # Prefill dies: one request waits for it, another is being written.
            posted = await route.posted()
            waiting, writing = route.decode("waiting"), route.decode("writing")
            await route.registered("waiting")
            await route.registered("writing")
            prefilling = route.prefill("writing")
            await route.writing("writing", posted)
            prefill.kill()
            with pytest.raises(httpx.TransportError):
                await prefilling
            for one in (waiting, writing):
                await route.ends(one, policy, expected)
            await route.memory_comes_back(DECODE)

    sides = [spec("prefill"), spec("decode", policy), spec("prefill-2")]
    with running(sides, tmp_path) as (prefill, decode, successor):
        expected = alone(prefill)
        asyncio.run(until_prefill_dies(prefill, decode, expected))
        asyncio.run(afterwards(successor, decode, expected))
        decode.check_alive()


def test_a_decode_that_dies(tmp_path: Path) -> None:
    """Prefill lives on: what it held for decode comes back when the lease ends, what it was writing at once."""

    async def until_decode_dies(prefill: Server, decode: Server) -> None:
        async with router(prefill, decode) as route:
            held, writing = route.decode("held"), route.decode("writing")
            await route.registered("held")
            await route.registered("writing")
            prefilling = route.prefill("writing")
            await route.writing("writing", 0)
            decode.kill()
            for one in (held, writing):
                with pytest.raises(httpx.TransportError):
                    await one
            await prefilling
            await route.prefill("held")
            await route.memory_comes_back(PREFILL)

    with running([spec("prefill"), spec("decode"), spec("decode-2")], tmp_path) as (prefill, decode, successor):
        expected = alone(prefill)
        asyncio.run(until_decode_dies(prefill, decode))
        asyncio.run(afterwards(prefill, successor, expected))
        prefill.check_alive()
