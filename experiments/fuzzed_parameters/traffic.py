# SPDX-License-Identifier: Apache-2.0
"""Ask a pair of servers with wrong parameters, and see what becomes of each request and of the servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from experiments.common.client import Client, Pair, http_client
from experiments.common.servers import HOST, Server, free_ports
from experiments.fuzzed_parameters.sets import Drawn, draw

TOKENS = 4
AT_A_TIME = 16
HANG_SECONDS = 60.0
KEPT_ANSWERS = 24
RENEWED_EVERY = 50
"""Requests between two honest prefills, whose answers wrong ones are made of."""


@dataclass
class Found:
    """What became of the requests: ``wrong`` and ``hangs`` say which."""

    verdicts: Counter[str] = field(default_factory=Counter)
    by_change: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)


class Fuzz:
    """One pair of servers. ``count`` requests with wrong parameters, then an honest one each way."""

    def __init__(self, pair: Sequence[Server], mode: str, seed: int, progress: Callable[[str], None]) -> None:
        self.servers = pair
        self.mode = mode
        self.random = random.Random(seed)
        self.progress = progress
        draw_prompt = random.Random(7)
        self.prompts = [[draw_prompt.randrange(3, 500) for _ in range(length)] for length in (33, 64, 100, 150, 200)]
        self.expected: list[list[int]] = []
        self.answers: list[tuple[int, str, dict[str, Any]]] = []
        self.found = Found()
        self.numbers = itertools.count()

    async def run(self, count: int) -> Found:
        async with http_client(AT_A_TIME) as http:
            pair = Pair(*(Client(server.base_url, http) for server in self.servers))
            for number, prompt in enumerate(self.prompts):
                names = {"salt": f"alone-{number}", "request_id": f"alone-{number}"}
                self.expected.append((await pair.prefill.answer(prompt, max_tokens=TOKENS, **names)).token_ids)
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
        return self.found

    async def _one(self, pair: Pair, ports: Sequence[int], places: asyncio.Semaphore) -> None:
        try:
            which, salt, answer = self.random.choice(self.answers)
            others = [one for *_, one in self.random.sample(self.answers, min(4, len(self.answers)))]
            drawn = draw(self.random, [answer, answer, answer, *others], ports)
            # Mostly the prompt that the parameters were made for.
            prompt = which if self.random.random() < 0.7 else self.random.randrange(len(self.prompts))
            client = pair.decode if self.random.random() < 0.85 else pair.prefill
            verdict, detail = await self._ask(client, prompt, salt, drawn)
            self.found.verdicts[verdict] += 1
            self.found.by_change.update(f"{change}: {verdict}" for change in set(drawn.change.split("+")))
            said = f"{drawn.change} n={drawn.n} prompt {prompt}: {detail} {json.dumps(drawn.params)[:1500]}"
            if verdict == "wrong":
                self.found.wrong.append(said)
            elif verdict == "hangs":
                self.found.hangs.append(said)
        finally:
            places.release()

    async def _ask(self, client: Client, which: int, salt: str, drawn: Drawn) -> tuple[str, str]:
        number = next(self.numbers)
        body = {
            "model": "model",
            "prompt": self.prompts[which],
            "max_tokens": TOKENS,
            # vLLM takes no n above 1 with a temperature of 0; the best token is the best one all the same.
            "temperature": 1.0,
            "top_k": 1,
            "ignore_eos": True,
            "n": drawn.n,
            "cache_salt": salt,
            "return_token_ids": True,
            "kv_transfer_params": drawn.params,
        }
        headers = {"X-Request-Id": f"fuzz-{number}", "Content-Type": "application/json"}
        content = json.dumps(body, ensure_ascii=True)
        try:
            reply = await asyncio.wait_for(
                client.http.post(f"{client.base_url}/v1/completions", content=content, headers=headers), HANG_SECONDS
            )
        except asyncio.TimeoutError:
            return "hangs", ""
        except httpx.HTTPError as error:
            return "no connection", repr(error)
        if reply.status_code != httpx.codes.OK:
            return f"HTTP {reply.status_code}", reply.text[:200]
        tokens = [choice["token_ids"] for choice in reply.json()["choices"]]
        if all(one == self.expected[which] for one in tokens):
            return "right", ""
        return "wrong", f"found {tokens}, expected {self.expected[which]}"

    async def _honest(self, pair: Pair) -> None:
        """One request of each prompt as a router sends them; raises unless both servers still serve rightly."""
        for which, prompt in enumerate(self.prompts):
            # Parameters that wrong ones are made of; nobody has used them.
            kept = f"kept-{next(self.numbers)}"
            self.answers = [*self.answers, (which, kept, await self._prefilled(pair, prompt, kept))][-KEPT_ANSWERS:]
            name = f"honest-{next(self.numbers)}"
            decoded = await pair.decode.complete(
                prompt,
                max_tokens=TOKENS,
                salt=name,
                request_id=name,
                kv_transfer_params=await self._prefilled(pair, prompt, name),
            )
            tokens = decoded["choices"][0]["token_ids"]
            if tokens != self.expected[which]:
                raise AssertionError(f"{name}: found {tokens}; expected {self.expected[which]}")

    async def _prefilled(self, pair: Pair, prompt: list[int], name: str) -> dict[str, Any]:
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.mode == "push":
            params["transfer_id"] = name
        prefilled = await pair.prefill.complete(
            prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=params
        )
        answer: dict[str, Any] | None = prefilled["kv_transfer_params"]
        if answer is None:
            raise AssertionError(f"prefill answered {name} without kv_transfer_params")
        return answer


@contextmanager
def silent_listener() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server((HOST, free_ports(1)[0])) as silent:
        yield silent.getsockname()[1]
