# SPDX-License-Identifier: Apache-2.0
"""Sends requests with malformed parameters to a pair of servers, and judges the answers and the servers."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import socket
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import httpx

from experiments.common.client import Client, Pair, http_client
from experiments.common.counted import samples
from experiments.common.device import layout, nixl
from experiments.common.model import PADDED, make_model
from experiments.common.servers import HOST, Server, ServerSpec, free_ports, prefill_and_decode
from kvcached_nixl.wire.params import MANIFEST_KEY
from support.endpoints import ENDPOINTS, TEMPLATE, TOKENS, Endpoint, Failed, Prompt, read
from support.waiting import until

AT_A_TIME = 16
HANG_SECONDS = 60.0
REST_SECONDS = 30.0
KEPT_ANSWERS = 24
RENEWED_EVERY = 50
"""Requests between two valid prefills. Malformed parameters are made from the answers of these."""
LENGTHS = (33, 64, 100, 150, 200)


def specs(mode: str, policy: str) -> list[ServerSpec]:
    """Return the configurations of P and D."""
    extra = {"transfer_mode": mode, "handover_timeout": 5, "kv_lease_duration": 6}
    return prefill_and_decode(
        mode,
        nixl("", extra, kv_load_failure_policy=policy),
        model=make_model(PADDED),
        dtype="float32",
        environment={"ENABLE_KVCACHED": "true", **layout(), "KVCACHED_HOSTVMM_GIB": "2"},
        max_model_len=1024,
        arguments=("--chat-template", TEMPLATE),
        forks=True,
    )


class Asked(NamedTuple):
    """One request, before it is sent; ``changes`` names its faults."""

    endpoint: Endpoint
    body: dict[str, Any]
    headers: dict[str, str]
    prompt: Prompt
    changes: list[str]


class Fuzz:
    """One pair of servers, which gets malformed requests and, between and after them, valid ones.

    Attributes:
        verdicts: how many requests came to each.
        bad: descriptions of those with wrong answers, and of those that hang.
    """

    def __init__(self, pair: Sequence[Server], mode: str, seed: int) -> None:
        self.servers = pair
        self.mode = mode
        self.random = random.Random(seed)
        self.prompts: list[Prompt] = []
        self.endpoints: list[Endpoint] = []
        self.answers: list[tuple[int, str, dict[str, Any]]] = []
        self.verdicts: Counter[str] = Counter()
        self.bad: list[str] = []
        self.numbers = itertools.count()

    async def run(self, count: int) -> None:
        """Send ``count`` malformed requests; raises AssertionError unless valid ones are handed over correctly."""
        async with http_client(AT_A_TIME) as http:
            pair = Pair(*(Client(server.base_url, http) for server in self.servers))
            paths = (await http.get(f"{pair.decode.base_url}/openapi.json")).json()["paths"]
            self.endpoints = [one for one in ENDPOINTS if one.path in paths]
            letters = random.Random(7)
            self.prompts = [await self._prompt(pair, letters, length) for length in LENGTHS]
            # It accepts connections and never answers.
            with socket.create_server((HOST, free_ports(1)[0])) as silent:
                prefill_port = int(str(self.servers[0].coordinates["remote_port"]))
                ports = [*free_ports(1), silent.getsockname()[1], prefill_port]
                places, tasks = asyncio.Semaphore(AT_A_TIME), []
                for number in range(count):
                    if number % RENEWED_EVERY == 0:
                        await self._valid(pair)
                    await places.acquire()
                    tasks.append(asyncio.create_task(self._one(pair, ports, places)))
                await asyncio.gather(*tasks)
            await self._valid(pair)
            for client in (pair.prefill, pair.decode):
                await self._rest(client)

    async def _prompt(self, pair: Pair, letters: random.Random, length: int) -> Prompt:
        """Return a prompt whose answer is printable text without an end token: endpoints without ``ignore_eos`` must
        give the same answer."""
        url, http = pair.prefill.base_url, pair.prefill.http
        while True:
            text = "".join(letters.choices(string.ascii_lowercase, k=length))
            ids = (await http.post(f"{url}/tokenize", json={"model": "model", "prompt": text})).json()["tokens"]
            name = f"alone-{next(self.numbers)}"
            answer = await pair.prefill.complete(ids, max_tokens=TOKENS, salt=name, request_id=name)
            # This answer's text has token names instead of text, so /detokenize is needed.
            expected = answer["choices"][0]["token_ids"]
            reply = await http.post(f"{url}/detokenize", json={"model": "model", "tokens": expected})
            said = str(reply.json()["prompt"])
            if said.isascii() and said.isprintable() and said == said.strip() and min(expected) > 1:
                return Prompt(text, ids, expected, said)

    async def _one(self, pair: Pair, ports: Sequence[int], places: asyncio.Semaphore) -> None:
        try:
            asked = self._draw(ports)
            client = pair.decode if self.random.random() < 0.8 else pair.prefill
            verdict, detail = await self._ask(client, asked)
        finally:
            places.release()
        self.verdicts[verdict] += 1
        if verdict in ("wrong", "hangs"):
            said = f"{asked.endpoint.name}, {'+'.join(asked.changes)}: {detail} {json.dumps(asked.body)[:1500]}"
            self.bad.append(f"{verdict}: {said}")

    def _draw(self, ports: Sequence[int]) -> Asked:
        """Return a request, most often with faults in its parameters."""
        which, salt, answer = self.random.choice(self.answers)
        others = [one for *_, one in self.random.sample(self.answers, min(4, len(self.answers)))]
        source = Source(self.random, [answer, answer, answer, *others], ports)
        is_wrong = self.random.random() < 0.7
        params, changes = source.params() if is_wrong else (copy.deepcopy(answer), ["as prefill answered"])
        # In most requests, the prompt that the parameters were made for.
        is_another = is_wrong and self.random.random() < 0.3
        prompt = self.random.choice(self.prompts) if is_another else self.prompts[which]
        endpoint = self.random.choice(self.endpoints)
        body = endpoint.ask(prompt, salt, params, source.one_of(1, 1, 1, 2) if endpoint.takes_n else 1)
        if endpoint.can_stream and self.random.random() < 0.4:
            body["stream"] = True
        if self.random.random() < 0.3:
            # Also ids of requests that prefill keeps, or kept until recently: prefill's own and those of clients.
            kept = [name for _, own, one in self.answers for name in (one[MANIFEST_KEY]["request_id"], own)]
            body["request_id"] = source.one_of(*kept, *IDS)
        headers = {"X-Request-Id": f"fuzz-{next(self.numbers)}", "Content-Type": "application/json"}
        return Asked(endpoint, body, headers, prompt, changes)

    async def _ask(self, client: Client, asked: Asked) -> tuple[str, str]:
        url, content = f"{client.base_url}{asked.endpoint.path}", json.dumps(asked.body)
        try:
            reply = await asyncio.wait_for(client.http.post(url, content=content, headers=asked.headers), HANG_SECONDS)
        except asyncio.TimeoutError:
            return "hangs", ""
        except httpx.HTTPError as error:
            # /v1/responses closes the connection on an error in a stream. Valid requests show whether the server lives.
            return "no answer", repr(error)
        if reply.status_code != httpx.codes.OK:
            return f"HTTP {reply.status_code}", ""
        try:
            return judge(asked, read(asked.endpoint, reply.headers["content-type"], reply.text))
        except Failed:
            return "failed in its stream", ""
        except (ValueError, LookupError, TypeError) as error:
            return "wrong", f"no answer: {error!r} {reply.text[:500]}"

    async def _rest(self, client: Client) -> None:
        """Wait until no request runs or waits in a server; raises after ``REST_SECONDS``."""
        counted = partial(samples, f"{client.base_url}/metrics", "vllm:num_requests_")
        await asyncio.to_thread(until, lambda: not any(counted().values()), counted, REST_SECONDS)

    async def _valid(self, pair: Pair) -> None:
        """Hand over one request of each prompt as a router does; raises unless both servers still serve correctly."""
        for which, prompt in enumerate(self.prompts):
            # Unused parameters, which malformed ones are made from.
            kept, name = (f"{word}-{next(self.numbers)}" for word in ("kept", "valid"))
            self.answers = [*self.answers, (which, kept, await self._prefilled(pair, prompt, kept))][-KEPT_ANSWERS:]
            params = await self._prefilled(pair, prompt, name)
            names: dict[str, Any] = {"salt": name, "request_id": name, "kv_transfer_params": params}
            decoded = await pair.decode.complete(list(prompt.token_ids), max_tokens=TOKENS, **names)
            assert prompt.is_answered_by(decoded["choices"][0]["token_ids"]), name

    async def _prefilled(self, pair: Pair, prompt: Prompt, name: str) -> dict[str, Any]:
        more = {"transfer_id": name} if self.mode == "push" else {}
        return await pair.prefill.offer(list(prompt.token_ids), salt=name, request_id=name, **more)


def judge(asked: Asked, found: list[list[int] | str]) -> tuple[str, str]:
    """Return the verdict on an answer with HTTP 200, and a description of what is wrong with it."""
    if found and all(map(asked.prompt.is_answered_by, found)):
        return "right", ""
    return "wrong", f"found {found}, expected {asked.prompt.expected_ids}, {asked.prompt.expected_text!r}"


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**9, 1e308, 0.5),
    *("", "0", "true", "x" * 5000, "a,b", "\ud800", "\x00"),
    *([], [[]], [[[[]]]], {}, {"a": {"b": {}}}, [0, 0, 0], [1, "1", None]),
)
HOSTS = ("127.0.0.1", "127.0.0.2", "::1", "", "no such host", "127.0.0.1:1", "[::1]")
IDS: tuple[Any, ...] = ("", "a", "a,b", "0", "x" * 900, "x" * 5000, "HB:a", "\x00", "\ud800", "é", 7, None, [])
"""Request ids that a client may send, beside those of existing requests."""


@dataclass
class Source:
    """What faults are drawn from: parameters that prefill answered, also to other requests; ports of loopback, where no
    process listens, or a listener never answers, or prefill's."""

    random: random.Random
    answers: Sequence[dict[str, Any]]
    ports: Sequence[int]

    def one_of(self, *values: Any) -> Any:
        return copy.deepcopy(self.random.choice(values))

    def params(self) -> tuple[Any, list[str]]:
        """Return malformed parameters, and the names of their one to three faults."""
        params, names = self.one_of(*self.answers), []
        for _ in range(self.one_of(1, 1, 1, 2, 3)):
            change = self.random.choice(CHANGES)
            names.append(change.__name__)
            params = change(self, params)
            if not isinstance(params, dict):
                break
        return params, names

    def somewhere(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters themselves, or the manifest in them, or its first group."""
        manifest = params.get(MANIFEST_KEY)
        places = [params or {"": None}, manifest, manifest, _group_of(params)]
        return self.random.choice([one for one in places if isinstance(one, dict) and one])


def _group_of(params: dict[str, Any]) -> Any:
    manifest = params.get(MANIFEST_KEY)
    groups = manifest.get("groups") if isinstance(manifest, dict) else None
    return groups[0] if isinstance(groups, list) and groups else None


# ----------------------------------------------------------------------------------------------- faults of parameters


def _drop_a_key(source: Source, params: dict[str, Any]) -> Any:
    where = source.somewhere(params)
    where.pop(source.one_of(*where), None)
    return params


def _set_a_key(source: Source, params: dict[str, Any]) -> Any:
    where = source.somewhere(params)
    key = source.one_of(*where, "do_remote_decode", "dcp_size", "pp_size", "remote_num_tokens")
    where[key] = source.one_of(*HOSTILE)
    return params


def _another_requests_value(source: Source, params: dict[str, Any]) -> Any:
    other, where = source.random.choice(source.answers), params
    if source.random.random() < 0.5 and isinstance(params.get(MANIFEST_KEY), dict):
        other, where = other[MANIFEST_KEY], params[MANIFEST_KEY]
    key = source.one_of(*other)
    where[key] = copy.deepcopy(other[key])
    return params


def _other_blocks(source: Source, params: dict[str, Any]) -> Any:
    group = _group_of(params)
    blocks = group.get("block_ids") if isinstance(group, dict) else None
    if isinstance(blocks, list) and blocks:
        place = source.random.randrange(len(blocks))
        group["block_ids"] = source.one_of(
            [*blocks[:place], source.random.randrange(-2, 5000), *blocks[place + 1 :]],
            source.random.sample(blocks, len(blocks)),
            blocks[:place],
            [*blocks, source.random.randrange(5000)],
        )
        if source.random.random() < 0.2:
            params[MANIFEST_KEY]["groups"].append(copy.deepcopy(group))
    return params


def _other_numbers(source: Source, params: dict[str, Any]) -> Any:
    where = source.somewhere(params)
    numbers = [key for key, value in where.items() if type(value) in (int, float)]
    if numbers:
        where[source.one_of(*numbers)] += source.one_of(-64, -32, -1, 1, 32, 64, 10**6)
    return params


def _elsewhere(source: Source, params: dict[str, Any]) -> Any:
    return {**params, "remote_host": source.one_of(*HOSTS), "remote_port": source.one_of(*source.ports)}


def _only_a_role(source: Source, params: dict[str, Any]) -> Any:
    if source.random.random() < 0.5:
        return {"do_remote_decode": True, "transfer_id": source.one_of(None, "t", 1, "\udfff", {"a": 1})}
    return {source.one_of("do_remote_prefill", "do_remote_decode"): source.one_of(True, 1, "true", [], {})}


def _rebuilt_field_by_field(_: Source, params: dict[str, Any]) -> Any:
    """Keep vLLM's own fields only, as a router does that copies known fields one by one."""
    return {key: value for key, value in params.items() if key != MANIFEST_KEY}


def _deep(source: Source, params: dict[str, Any]) -> Any:
    deep: Any = 1
    for _ in range(source.one_of(10, 100, 400)):
        deep = source.random.choice([[deep], {"a": deep}])
    return {**params, source.one_of(*params, "more"): deep}


def _again(_: Source, params: dict[str, Any]) -> Any:
    """Use parameters unchanged that were used before."""
    return params


def _sets(key: str, *values: Any) -> Callable[[Source, Any], Any]:
    """Return a change that sets a key of the parameters to one of these values."""

    def change(source: Source, changed: Any) -> Any:
        changed[key] = source.one_of(*values)
        return changed

    change.__name__ = key
    return change


CHANGES: tuple[Callable[[Source, dict[str, Any]], Any], ...] = (
    *(_drop_a_key, _set_a_key, _set_a_key, _another_requests_value, _other_blocks, _other_blocks, _other_numbers),
    *(_elsewhere, _only_a_role, _only_a_role, _rebuilt_field_by_field, _deep, _again),
    _sets("tp_size", 0, 2, 3, 4, 1024, 1025, 10**9, -1, "1"),
    _sets("do_remote_decode", True, 1, "yes"),
    _sets("transfer_id", "a", "a,b", "x" * 1024, "x" * 1025, "\ud800", 7, ["a"]),
)
