# SPDX-License-Identifier: Apache-2.0
"""docs/load-balancing.md: decode servers that ask prefill themselves, behind a Service, nginx and vllm-router at once.

The tests are one story, in this order: conversations, a decode server that is killed, one that is added, one that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.balancers import Balancer, nginx, service, vllm_router

from experiments.common.client import REQUEST_TIMEOUT_SECONDS, AnswerError, Client, http_client
from experiments.common.counted import count, samples
from experiments.common.device import with_extra
from experiments.common.servers import GIVES_BACK, HOST, Running, Server, ServerSpec
from experiments.stacks.measure import spec

TOKENS, MANY = 12, 250
AT_EACH = 2
"""Conversations at each server, behind each balancer."""
MOST = 40
NOTICED_SECONDS = 10.0


class Conversation:
    """One client behind a balancer. What it is answered has to be what prefill alone says."""

    def __init__(self, fleet: Fleet, balancer: Balancer, number: int) -> None:
        self.name, self.fleet, self.balancer = f"of-{balancer.url.rpartition(':')[2]}-{number}", fleet, balancer
        self.prompt: list[int] = []
        self.home: Server | None = None
        self.number = number

    def http(self) -> httpx.AsyncClient:
        """A client that says by a header, or by its address, which conversation it is."""
        named, number = self.balancer.names_by_header, self.number
        address = HOST if named else f"127.0.{1 + number // 250}.{1 + number % 250}"
        return httpx.AsyncClient(
            headers={"X-Session-ID": self.name} if named else {},
            transport=httpx.AsyncHTTPTransport(local_address=address),
            timeout=REQUEST_TIMEOUT_SECONDS,
        )

    async def right(self, tokens: int) -> list[int]:
        async with http_client(1) as http:
            alone, name = Client(self.fleet.prefill.base_url, http), f"alone-{self.name}"
            found = await alone.answer(self.prompt, max_tokens=tokens, salt=name, request_id=name)
            return found.token_ids

    async def turn(self) -> int:
        """Say something. Returns how many tokens of the prompt decode had; ``home`` is who answered."""
        first = 3 + sum(map(ord, self.name)) % 100
        self.prompt += [first, *(3 + (7 * place + 31 * len(self.prompt) + first) % 500 for place in range(200))]
        before = [prompt_tokens(one) for one in self.fleet.decodes]
        async with self.http() as http:
            asks = Client(self.balancer.url, http)
            found = await asks.answer(self.prompt, max_tokens=TOKENS, salt=self.name, request_id=self.name)
        assert found.token_ids == await self.right(TOKENS)
        self.prompt += found.token_ids
        after = [prompt_tokens(one) for one in self.fleet.decodes]
        pairs = list(enumerate(zip(before, after, strict=True)))
        # One that has stopped to listen gives no metrics.
        silent = [place for place, (_, other) in pairs if not other]
        (place,) = [place for place, (one, other) in pairs if other and one != other] or silent
        self.home = self.fleet.decodes[place]
        return after[place].get("local_cache_hit", 0) - before[place].get("local_cache_hit", 0)

    def asks_for(self, tokens: int, *, stream: bool) -> dict[str, Any]:
        body = {"model": "model", "prompt": self.prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"cache_salt": self.name, "return_token_ids": True, "stream": stream}
        return {"url": f"{self.balancer.url}/v1/completions", "json": body}

    async def stream(self, begun: asyncio.Event) -> tuple[str, list[int]]:
        """How a stream of many tokens ends, and its tokens."""
        ids: list[int] = []
        reason, done = None, False
        with contextlib.suppress(httpx.TransportError):
            async with self.http() as http, http.stream("POST", **self.asks_for(MANY, stream=True)) as reply:
                async for line in reply.aiter_lines():
                    done = done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        ids, reason = [*ids, *choice["token_ids"]], choice["finish_reason"]
                        begun.set()
            return ("complete" if done and reason == "length" else "looks complete, and is not"), ids
        return "broken off", ids

    async def whole(self) -> tuple[str, list[int]]:
        """The status of an answer of many tokens in one piece, and its tokens."""
        try:
            async with self.http() as http:
                reply = await http.post(**self.asks_for(MANY, stream=False))
        except httpx.TransportError:
            return "broken off", []
        return str(reply.status_code), reply.json()["choices"][0]["token_ids"] if reply.is_success else []


@dataclass
class Fleet:
    """``stack`` ends what is started later, too."""

    prefill: Server
    decodes: list[Server]
    balancers: Mapping[str, Balancer]
    stack: contextlib.ExitStack
    logs: Path
    talks: dict[str, list[Conversation]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1000)))

    def serve(self, *untold: str) -> None:
        """Tell the balancers which decode servers there are."""
        for name, balancer in self.balancers.items():
            if name not in untold:
                balancer.serve([one.base_url for one in self.decodes])

    async def talk(self, name: str, servers: list[Server]) -> list[Conversation]:
        """New conversations behind a balancer, until each of these servers has some of them."""
        found: list[Conversation] = []
        while not all(sum(one.home is server for one in found) >= AT_EACH for server in servers):
            assert len(found) < MOST, f"{name} does not use all of {[one.spec.name for one in servers]}"
            found.append(Conversation(self, self.balancers[name], next(self.numbers)))
            await found[-1].turn()
        return found


def prompt_tokens(server: Server) -> dict[str, int]:
    """Source -> tokens of prompts that came from there; nothing of a server that has been killed."""
    with contextlib.suppress(httpx.TransportError):
        found = samples(f"{server.base_url}/metrics", "vllm:prompt_tokens_by_source_total{")
        return {labels.partition('source="')[2].partition('"')[0]: int(value) for labels, value in found.items()}
    return {}


def configuration(name: str) -> ServerSpec:
    """Prefix caches keep what they have, and a server drains."""
    found = spec(name, "pull")
    return dataclasses.replace(
        found,
        environment={key: value for key, value in found.environment.items() if key not in GIVES_BACK}
        | {"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
        http_arguments=(*found.http_arguments, "--shutdown-timeout", "60"),
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("balancers")
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(Running([configuration("prefill")], logs))
        asks = configuration("decode1")
        assert asks.kv_transfer is not None
        asks = dataclasses.replace(
            asks, kv_transfer=with_extra(asks.kv_transfer, {"prefill": prefill.servers[0].base_url})
        )
        decode = stack.enter_context(Running([asks, dataclasses.replace(asks, name="decode2")], logs))
        (first,), both = prefill.ready(), decode.ready()
        urls = [one.base_url for one in both]
        kinds = {"Service": service, "nginx": nginx, "vllm-router": vllm_router}
        balancers = {name: stack.enter_context(kind(urls, logs)) for name, kind in kinds.items()}
        yield Fleet(first, [*both], balancers, stack, logs)


def test_a_conversation_stays_where_its_kv_is(fleet: Fleet) -> None:
    """And all servers are used."""

    async def run() -> None:
        for name in fleet.balancers:
            fleet.talks[name] = await fleet.talk(name, fleet.decodes)
            for one in fleet.talks[name]:
                home, had = one.home, len(one.prompt)
                cached = await one.turn()
                assert one.home is home, name
                assert cached >= had - 2 * 32, f"{name}: {cached} of {had} tokens were there"

    asyncio.run(run())


def test_a_stored_response_is_found_by_the_name_of_its_conversation(fleet: Fleet) -> None:
    """Not behind vllm-router, which sends what has no body to any server."""

    async def run() -> None:
        for name in ("Service", "nginx"):
            for one in fleet.talks[name]:
                url, asked = f"{one.balancer.url}/v1/responses", {"model": "model", "max_output_tokens": 4}
                async with one.http() as http:
                    first = (await http.post(url, json={**asked, "input": "a b c"})).raise_for_status().json()["id"]
                async with one.http() as http:
                    assert (await http.get(f"{url}/{first}")).status_code == 200, name
                    following = {**asked, "input": "d", "previous_response_id": first}
                    assert (await http.post(url, json=following)).status_code == 200, name

    asyncio.run(run())


HOW_A_WHOLE_ANSWER_ENDS = {"Service": ("broken off",), "nginx": ("502",), "vllm-router": ("200", "500")}
"""One whose server is killed: only vllm-router sends a request again that a server has had, for a second, and to the
same server until its health check has noticed."""


def test_a_decode_server_is_killed(fleet: Fleet) -> None:
    """Its streams break off, and nobody takes them for complete. Other streams, and new requests, are not concerned."""
    lost, left = fleet.decodes

    async def run() -> None:
        begun = [asyncio.Event() for _ in range(2 * len(fleet.balancers))]
        events = iter(begun)
        under_way: list[tuple[str, tuple[str, ...], Conversation, asyncio.Task[tuple[str, list[int]]]]] = []
        for name, talks in fleet.talks.items():
            (first, second, *_), (other, *_) = ([one for one in talks if one.home is server] for server in (lost, left))
            for how, one, asked in (
                (("broken off",), first, first.stream(next(events))),
                (HOW_A_WHOLE_ANSWER_ENDS[name], second, second.whole()),
                (("complete",), other, other.stream(next(events))),
            ):
                under_way.append((name, how, one, asyncio.create_task(asked)))
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.wait() for one in begun))
            while count([lost], "vllm:num_requests_running{") < 2 * len(fleet.balancers):
                await asyncio.sleep(0.05)
        lost.kill()
        fleet.decodes.remove(lost)
        # A container that has ended is no endpoint of a Service any more; nobody tells the others.
        fleet.serve("nginx", "vllm-router")
        for name, how, one, task in under_way:
            (found, ids), right = await task, await one.right(MANY)
            assert found in how, name
            assert ids == right[: len(ids)] and (ids == right or found not in ("complete", "200")), (name, found)
        for name, talks in fleet.talks.items():
            for one in talks:
                await soon_answered(one, NOTICED_SECONDS if fleet.balancers[name].checks_health else 0.0)
                assert one.home is left, name

    asyncio.run(run())


async def soon_answered(conversation: Conversation, seconds: float) -> None:
    """Ask until there is a right answer; errors are allowed for a while."""
    deadline = time.monotonic() + seconds
    while True:
        conversation.prompt = conversation.prompt[:200]
        with contextlib.suppress(AnswerError):
            await conversation.turn()
            return
        assert time.monotonic() < deadline, "a server that is dead still gets requests"


def test_a_decode_server_is_added(fleet: Fleet) -> None:
    (left,) = fleet.decodes
    newcomer = fleet.stack.enter_context(Running([dataclasses.replace(left.spec, name="decode3")], fleet.logs))
    fleet.decodes += newcomer.ready()
    fleet.serve()

    async def run() -> None:
        for name in fleet.balancers:
            fleet.talks[name] = await fleet.talk(name, fleet.decodes)

    asyncio.run(run())


def test_a_decode_server_is_told_to_end(fleet: Fleet) -> None:
    """Its streams go on to their end, and new requests are served; no client gets an error.

    A Service is told when its pod is to end, and vllm-router notices. nginx tries the other server when this one takes
    no connections any more.
    """
    server = fleet.decodes[0]

    async def run() -> None:
        streams = {name: next(one for one in talks if one.home is server) for name, talks in fleet.talks.items()}
        begun = {name: asyncio.Event() for name in streams}
        tasks = {name: asyncio.create_task(one.stream(begun[name])) for name, one in streams.items()}
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.wait() for one in begun.values()))
        fleet.balancers["Service"].serve([one.base_url for one in fleet.decodes if one is not server])
        server.process.send_signal(signal.SIGTERM)
        listens = True
        while listens:
            listens = bool(prompt_tokens(server))
            for name, talks in fleet.talks.items():
                for one in talks:
                    if one is not streams[name]:
                        await one.turn()
                        assert (listens and name != "Service") or one.home is not server, name
        for name, task in tasks.items():
            assert await task == ("complete", await streams[name].right(MANY)), name

    asyncio.run(run())
    assert server.process.wait(60.0) == 0, server.tail()
