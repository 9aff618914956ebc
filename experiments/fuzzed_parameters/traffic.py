# SPDX-License-Identifier: Apache-2.0
"""Sends requests with malformed parameters and bodies to pairs of servers, and judges the answers and the servers."""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import random
import socket
import string
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from experiments.common.client import AnswerError, Client, Pair, http_client
from experiments.common.command_line import MODES
from experiments.common.counted import samples
from experiments.common.device import layout, nixl
from experiments.common.model import PADDED, make_model
from experiments.common.report import Narrator, Verdict, begin, conclude, last_name
from experiments.common.servers import HOST, Server, ServerError, ServerSpec, free_ports, prefill_and_decode, running
from experiments.fuzzed_parameters.endpoints import ENDPOINTS, TEMPLATE, TOKENS, Endpoint, Failed, Prompt, read
from experiments.fuzzed_parameters.faults import Asked, change_body, draw
from kvcached_nixl.wire.params import MANIFEST_KEY

RESULTS = Path(__file__).resolve().parent / "results"
AT_A_TIME = 16
HANG_SECONDS = 60.0
REST_SECONDS = 30.0
KEPT_ANSWERS = 24
RENEWED_EVERY = 50
"""Requests between two valid prefills. Malformed parameters are made from the answers of these."""
LENGTHS = (33, 64, 100, 150, 200)


@dataclass
class Found:
    """Results of the requests: counts, and descriptions of those with ``wrong`` answers and of those that hang."""

    verdicts: Counter[str] = field(default_factory=Counter)
    by_change: Counter[str] = field(default_factory=Counter)
    by_endpoint: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)


class Fuzz:
    """One pair of servers, which gets ``count`` malformed requests and, between and after them, valid ones."""

    def __init__(self, pair: Sequence[Server], mode: str, seed: int, progress: Callable[[str], None]) -> None:
        self.servers = pair
        self.mode = mode
        self.random = random.Random(seed)
        self.progress = progress
        self.prompts: list[Prompt] = []
        self.endpoints: list[Endpoint] = []
        self.answers: list[tuple[int, str, dict[str, Any]]] = []
        self.found = Found()
        self.numbers = itertools.count()

    async def run(self, count: int) -> Found:
        async with http_client(AT_A_TIME) as http:
            pair = Pair(*(Client(server.base_url, http) for server in self.servers))
            paths = (await http.get(f"{pair.decode.base_url}/openapi.json")).json()["paths"]
            self.endpoints = [one for one in ENDPOINTS if one.path in paths]
            letters = random.Random(7)
            self.prompts = [await self._prompt(pair, letters, length) for length in LENGTHS]
            with silent_listener() as silent:
                ports = [*free_ports(1), silent, int(str(self.servers[0].coordinates["remote_port"]))]
                places = asyncio.Semaphore(AT_A_TIME)
                asked: set[asyncio.Task[None]] = set()
                for number in range(count):
                    if number % RENEWED_EVERY == 0:
                        await self._honest(pair)
                        self.progress(f"{number} of {count}: {dict(self.found.verdicts)}")
                    await places.acquire()
                    task = asyncio.create_task(self._one(pair, ports, places))
                    asked.add(task)
                    task.add_done_callback(asked.discard)
                await asyncio.gather(*asked)
            await self._honest(pair)
            for client in (pair.prefill, pair.decode):
                await self._rest(client)
        return self.found

    async def _prompt(self, pair: Pair, letters: random.Random, length: int) -> Prompt:
        """Return a prompt whose answer is printable text without an end token: endpoints without ``ignore_eos`` must
        give the same answer."""
        while True:
            text = "".join(letters.choices(string.ascii_lowercase, k=length))
            asked = {"model": "model", "prompt": text}
            ids = (await pair.prefill.http.post(f"{pair.prefill.base_url}/tokenize", json=asked)).json()["tokens"]
            name = f"alone-{next(self.numbers)}"
            answer = await pair.prefill.complete(ids, max_tokens=TOKENS, salt=name, request_id=name)
            # This answer's text has token names instead of text, so /detokenize is needed.
            expected = answer["choices"][0]["token_ids"]
            asked = {"model": "model", "tokens": expected}
            reply = await pair.prefill.http.post(f"{pair.prefill.base_url}/detokenize", json=asked)
            said = str(reply.json()["prompt"])
            if said.isascii() and said.isprintable() and said == said.strip() and min(expected) > 1:
                return Prompt(text, ids, expected, said)

    async def _one(self, pair: Pair, ports: Sequence[int], places: asyncio.Semaphore) -> None:
        try:
            asked = self._draw(ports)
            client = pair.decode if self.random.random() < 0.8 else pair.prefill
            verdict, detail = await self._ask(client, asked)
            self.found.verdicts[verdict] += 1
            self.found.by_change.update(f"{one}: {verdict}" for one in set(asked.changes))
            self.found.by_endpoint[f"{asked.endpoint.name}: {verdict}"] += 1
            said = f"{asked.endpoint.name}, {'+'.join(asked.changes)}: {detail} {json.dumps(asked.body)[:1500]}"
            if verdict == "wrong":
                self.found.wrong.append(said)
            elif verdict == "hangs":
                self.found.hangs.append(said)
        finally:
            places.release()

    def _draw(self, ports: Sequence[int]) -> Asked:
        """Return a request with faults in its parameters, or in the rest of the request, or both."""
        which, salt, answer = self.random.choice(self.answers)
        others = [one for *_, one in self.random.sample(self.answers, min(4, len(self.answers)))]
        params, n, changes = copy.deepcopy(answer), 1, ["as prefill answered"]
        is_wrong = self.random.random() < 0.6
        if is_wrong:
            params, n, changes = draw(self.random, [answer, answer, answer, *others], ports)
        # In most requests, the prompt that the parameters were made for.
        is_another = is_wrong and self.random.random() < 0.3
        prompt = self.random.choice(self.prompts) if is_another else self.prompts[which]
        endpoint = self.random.choice(self.endpoints)
        body = endpoint.ask(prompt, salt, params, n if endpoint.takes_n else 1)
        if endpoint.can_stream and self.random.random() < 0.4:
            body["stream"] = True
        headers = {"X-Request-Id": f"fuzz-{next(self.numbers)}", "Content-Type": "application/json"}
        asked = Asked(endpoint, body, headers, [prompt], changes=changes)
        if not is_wrong or self.random.random() < 0.4:
            change_body(self.random, asked, self._ids(), self.prompts)
        return asked

    def _ids(self) -> list[str]:
        """Return ids of requests that prefill keeps, or kept until recently: prefill's own and those of clients."""
        kept = [answer[MANIFEST_KEY]["request_id"] for *_, answer in self.answers]
        return [*kept, *(salt for _, salt, _ in self.answers)]

    async def _ask(self, client: Client, asked: Asked) -> tuple[str, str]:
        content = json.dumps(asked.body, ensure_ascii=True)
        try:
            reply = await asyncio.wait_for(
                client.http.post(f"{client.base_url}{asked.endpoint.path}", content=content, headers=asked.headers),
                HANG_SECONDS,
            )
        except asyncio.TimeoutError:
            return "hangs", ""
        except httpx.RemoteProtocolError:
            # /v1/responses closes the connection on an error in a stream. Valid requests show whether the server lives.
            return "broken off", ""
        except httpx.HTTPError as error:
            return "no connection", repr(error)
        if reply.status_code != httpx.codes.OK:
            return f"HTTP {reply.status_code}", reply.text[:200]
        try:
            return judge(asked, read(asked.endpoint, reply.headers["content-type"], reply.text))
        except Failed:
            return "failed in its stream", ""
        except (ValueError, LookupError, TypeError) as error:
            return "wrong", f"no answer: {error!r} {reply.text[:500]}"

    async def _rest(self, client: Client) -> None:
        """Wait until no request runs or waits in a server; raises after ``REST_SECONDS``."""
        until = time.monotonic() + REST_SECONDS
        while True:
            pages = (f"{client.base_url}/metrics", "vllm:num_requests_")
            counted = {name: value for name, value in (await asyncio.to_thread(samples, *pages)).items() if value}
            if not counted:
                return
            if time.monotonic() > until:
                raise AssertionError(f"{client.base_url} has requests that do not end: {counted}")
            await asyncio.sleep(0.5)

    async def _honest(self, pair: Pair) -> None:
        """Hand over one request of each prompt as a router does; raises unless both servers still serve correctly."""
        for which, prompt in enumerate(self.prompts):
            # Unused parameters, which malformed ones are made from.
            kept = f"kept-{next(self.numbers)}"
            self.answers = [*self.answers, (which, kept, await self._prefilled(pair, prompt, kept))][-KEPT_ANSWERS:]
            name = f"honest-{next(self.numbers)}"
            decoded = await pair.decode.complete(
                list(prompt.token_ids),
                max_tokens=TOKENS,
                salt=name,
                request_id=name,
                kv_transfer_params=await self._prefilled(pair, prompt, name),
            )
            tokens = decoded["choices"][0]["token_ids"]
            if not prompt.is_answered_by(tokens):
                raise AssertionError(f"{name}: found {tokens}; expected {prompt.expected_ids}")

    async def _prefilled(self, pair: Pair, prompt: Prompt, name: str) -> dict[str, Any]:
        more = {"transfer_id": name} if self.mode == "push" else {}
        return await pair.prefill.offer(list(prompt.token_ids), salt=name, request_id=name, **more)


def judge(asked: Asked, found: list[list[int] | str]) -> tuple[str, str]:
    """Return the verdict on an answer with HTTP 200, and a description of what is wrong with it."""
    if asked.prompts is None:
        return "not judged", ""
    prompts = [asked.prompts[place * len(asked.prompts) // len(found)] for place in range(len(found))]
    pairs = zip(found, prompts, strict=True)
    if found and all(prompt.is_answered_by(one, as_far_as_it_goes=asked.is_cut) for one, prompt in pairs):
        return "right", ""
    return "wrong", f"found {found}, expected {[(one.expected_ids, one.expected_text) for one in prompts]}"


@contextmanager
def silent_listener() -> Iterator[int]:
    """Yield a port that accepts connections and never answers."""
    with socket.create_server((HOST, free_ports(1)[0])) as silent:
        yield silent.getsockname()[1]


# -------------------------------------------------------------------------------------------------------- a whole run


def main(options: argparse.Namespace) -> int:
    """Run the modes and return the exit status."""
    began, stamp = begin(options.vllm)
    verdicts: list[Verdict] = []
    told = []
    with Narrator(f"malformed parameters, vLLM {options.vllm}") as narrator:
        for mode in (options.mode,) if options.mode else MODES:
            narrator.say(f"{mode}: starting")
            reached, found = fuzz_mode(mode, options, RESULTS / stamp, narrator.update)
            narrator.say(f"{mode}: {found['verdicts']}")
            verdicts += reached
            told.append(found)
    path = RESULTS / f"{stamp if options.mode else last_name(options.vllm)}.json"
    content = {"began": began, "policy": options.policy, "seed": options.seed, "modes": told}
    return conclude([], verdicts, path, content)


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


def verdicts_of(mode: str, found: Found, alive: bool) -> list[Verdict]:
    """Return the targets of one mode."""
    return [
        Verdict(f"{mode}: no HTTP 200 with wrong tokens", f"{len(found.wrong)}", not found.wrong),
        Verdict(f"{mode}: no request hangs", f"{len(found.hangs)}", not found.hangs),
        Verdict(f"{mode}: both servers are alive and serve correctly", "yes" if alive else "no", alive),
    ]


def fuzz_mode(
    mode: str, options: argparse.Namespace, logs: Path, progress: Callable[[str], None]
) -> tuple[list[Verdict], dict[str, Any]]:
    """Run one mode; returns its verdicts and its part of the results file."""
    with running(specs(mode, options.policy), logs) as servers:
        fuzz = Fuzz(servers, mode, options.seed, progress)
        alive, detail = True, ""
        try:
            asyncio.run(fuzz.run(options.count))
            for server in servers:
                server.check_alive()
        except (AssertionError, AnswerError, ServerError) as error:
            alive, detail = False, str(error)
        found = fuzz.found
    return verdicts_of(mode, found, alive), {
        "mode": mode,
        "requests": found.verdicts.total(),
        "verdicts": dict(found.verdicts),
        "by change": dict(sorted(found.by_change.items())),
        "by endpoint": dict(sorted(found.by_endpoint.items())),
        "wrong": found.wrong,
        "hangs": found.hangs,
        "not served": detail,
    }
