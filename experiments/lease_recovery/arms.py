# SPDX-License-Identifier: Apache-2.0
"""The arms: which pairs of servers are tested; and their clients, whose requests each get a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from experiments.common.client import AnswerError, Client, HandOver, Pair, answers_of, http_client
from experiments.common.device import PINNED, layout, nixl
from experiments.common.families import FAMILIES, make_family
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, Server, ServerSpec, prefill_and_decode
from kvcached_nixl.wire.messages import INTERVAL

LEASE_SECONDS = 3.0
HEARTBEAT_SECONDS = INTERVAL * LEASE_SECONDS
BLOCK_SIZE = 32
NUM_BLOCKS = 96
TOKENS = 12
PROMPT_TOKENS = (200, 640)
# A page group of kvcached holds 16 blocks of this model, so the pool has six page groups.
MODEL = ModelShape(kv_heads=8, head_size=128)
KVCACHED: Mapping[str, str] = {"ENABLE_KVCACHED": "true", **layout(), "KVCACHED_HOSTVMM_GIB": "1", **GIVES_BACK}


@dataclass(frozen=True)
class Arm:
    """A prefill and a decode server.

    Attributes:
        extra: further extra config of the connector, besides mode and lease.
        family: a model with several KV-cache groups, of `families.FAMILIES`, in place of ``MODEL``.
        num_blocks: of the pool: a few of the longest requests fill it.
        is_short: memory comes and goes, too: limits are changed, and a neighbour takes memory of the device.
    """

    name: str
    mode: str
    kvcached: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    family: str = ""
    num_blocks: int = NUM_BLOCKS
    is_short: bool = False

    def specs(self, policy: str) -> list[ServerSpec]:
        """Return the configurations of P and D; ``policy`` is ``kv_load_failure_policy``."""
        extra: dict[str, object] = {"kv_lease_duration": int(LEASE_SECONDS)}
        if self.kvcached:
            extra |= {"transfer_mode": self.mode, **self.extra}
        family = FAMILIES[self.family] if self.family else None
        arguments = ("--num-gpu-blocks-override", str(self.num_blocks))
        if family:
            arguments = (*arguments, "--no-disable-hybrid-kv-cache-manager", *family.arguments)
        return prefill_and_decode(
            self.name,
            nixl("", extra, kv_load_failure_policy=policy),
            model=make_family(self.family) if family else make_model(MODEL),
            dtype="float32",
            environment={**(KVCACHED if self.kvcached else {}), **self.environment},
            block_size=family.block_size if family else BLOCK_SIZE,
            max_model_len=1024,
            arguments=arguments,
            forks=True,
        )


PULL, PUSH = Arm("pull", "pull"), Arm("push", "push")
# kvcached looks at its limit on the thread that allocates pages in advance.
_SHORT: Any = {"environment": {"KVCACHED_PAGE_PREALLOC_ENABLED": "true"}, "is_short": True}
# Blocks of 128 tokens, and one for each request's states.
_HYBRID: Any = {"family": "nemotron-h", "num_blocks": 32}
_STAGED: Any = {"extra": {"memory_path": "device"}}
ARMS = (
    PULL,
    PUSH,
    # These two set no memory_path: the proof at start must find that registrations do not follow kvcached's pages.
    Arm("staged pull, pinned", "pull", environment=PINNED),
    Arm("staged push, pinned", "push", environment=PINNED),
    Arm("staged push", "push", **_STAGED),
    Arm("hybrid pull", "pull", **_HYBRID),
    Arm("hybrid push", "push", **_HYBRID),
    Arm("hybrid staged pull", "pull", **_STAGED, **_HYBRID),
    Arm("short of memory, pull", "pull", **_SHORT),
    Arm("short of memory, push", "push", **_SHORT),
    Arm("short of memory, staged", "push", **_STAGED, **_SHORT),
    Arm("stock pull", "pull", kvcached=False),
)


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Return different prompts, each of some full blocks and a partly filled one."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(count)]


# -------------------------------------------------------------------------------------------------------------- clients


Verdict = Literal["right", "wrong", "error", "no connection", "went away", "hangs"]
OUT_OF_DATE = "parameters out of date"
"""Value of ``fault`` for a request whose decode comes after its lease; other requests may run at the same time."""
FIRST_WEIGHTS, OTHER_WEIGHTS = "0", "5"
"""Seeds of the KV probe: for the weights that a server starts with, and for different ones."""
HANG_SECONDS = 90.0
"""Longer than any request may take, including a handshake that is retried, on a busy machine."""
PAUSE_SECONDS = 0.1
"""Pause of a client after a request without a correct answer."""
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Ended:
    """One finished request. ``fault`` is the fault being inflicted when it began."""

    verdict: Verdict
    fault: str
    began_seconds: float
    ended_seconds: float
    detail: str = ""


@dataclass
class Traffic:
    """Requests through both servers, and their results.

    Attributes:
        expected: the right answer to each prompt.
        other: the right answer to each prompt with the weights of ``OTHER_WEIGHTS``.
        other_until_seconds: a request that began before this time may have either answer, but no mixture of both.
        asking: while it is set, clients send requests.
    """

    pair: Sequence[Server]
    prompts: Sequence[list[int]]
    expected: list[list[int]] = field(default_factory=list)
    other: list[list[int]] = field(default_factory=list)
    other_until_seconds: float = -math.inf
    ended: list[Ended] = field(default_factory=list)
    fault: str = "none"
    asking: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._under_way = 0

    @contextlib.asynccontextmanager
    async def clients(self, count: int) -> AsyncIterator[None]:
        """Run clients during a ``with`` block; they send requests while `asking` is set."""

        async def client() -> None:
            while True:
                await self.asking.wait()
                self._under_way += 1
                try:
                    ended = await self.one()
                finally:
                    self._under_way -= 1
                if ended.verdict != "right":
                    await asyncio.sleep(PAUSE_SECONDS)

        tasks = [asyncio.create_task(client()) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def rest(self) -> None:
        """Clear `asking`, and wait until no client has a request under way."""
        self.asking.clear()
        while self._under_way:
            await asyncio.sleep(LOOK_SECONDS)

    async def learn(self, *, other: bool = False) -> None:
        """Get the right answers: prefill answers every prompt alone; ``other``: also with the other weights, which it
        has meanwhile."""
        url = self.pair[0].base_url
        self.expected = [one.token_ids for one in await answers_of(url, self.prompts, TOKENS, "alone")]
        if other:
            async with http_client(1) as http:
                await Client(url, http).probe("other_weights", OTHER_WEIGHTS)
                self.other = [one.token_ids for one in await answers_of(url, self.prompts, TOKENS, "other")]
                await Client(url, http).probe("other_weights", FIRST_WEIGHTS)

    async def one(self, leaves_after_seconds: float | None = None) -> Ended:
        """Send one request to P, then to D. Its client disconnects after ``leaves_after_seconds``, if given."""
        number = next(self._numbers)
        fault, began = self.fault, time.monotonic()
        try:
            async with asyncio.timeout(leaves_after_seconds or HANG_SECONDS), http_client(1) as http:
                which, name = number % len(self.prompts), f"r-{number}"
                names = {"salt": name, "request_id": name}
                asked = self._clients(http).hand_over(self.prompts[which], max_tokens=TOKENS, **names)
                verdict, detail = await self.judged(name, which, began, asked)
        except TimeoutError:
            verdict, detail = ("went away", "") if leaves_after_seconds else ("hangs", f"request {number}")
        self.ended.append(Ended(verdict, fault, began, time.monotonic(), detail))
        return self.ended[-1]

    async def stale(self, count: int, wait_seconds: float) -> list[Ended]:
        """Send ``count`` requests, each to D only after its lease has ended and other requests have used its blocks."""
        first = len(self.ended)
        async with http_client(4) as http:
            pair = self._clients(http)
            names = [f"stale-{next(self._numbers)}" for _ in range(count)]
            which = [number % len(self.prompts) for number in range(count)]
            held = [
                await pair.prefill_only(self.prompts[n], salt=name, request_id=name)
                for name, n in zip(names, which, strict=True)
            ]
            await asyncio.sleep(wait_seconds)
            for number, prompt in enumerate(self.prompts[::-1]):
                await pair.prefill.answer(prompt, max_tokens=1, salt=f"after-{names[0]}-{number}", request_id="after")
            for name, n, offer in zip(names, which, held, strict=True):
                began = time.monotonic()
                late = pair.decode_offered(offer, self.prompts[n], max_tokens=TOKENS, salt=name, request_id=name)
                verdict, detail = await self.judged(name, n, began, late)
                self.ended.append(Ended(verdict, OUT_OF_DATE, began, time.monotonic(), detail))
        return self.ended[first:]

    def _clients(self, http: httpx.AsyncClient) -> Pair:
        prefill, decode = (Client(server.base_url, http) for server in self.pair)
        return Pair(prefill, decode, keeps_blocks=False)

    async def judged(self, name: str, which: int, began: float, asked: Awaitable[HandOver]) -> tuple[Verdict, str]:
        """Return the verdict on the answer to a prompt, and what is wrong with it."""
        try:
            found = (await asked).answer.token_ids
        except AnswerError as error:
            return "error", str(error)
        except httpx.HTTPError as error:
            return "no connection", repr(error)
        right = [self.expected[which], *([self.other[which]] if began < self.other_until_seconds else [])]
        if found in right:
            return "right", ""
        return "wrong", f"{name}: found {found}; expected {' or '.join(map(str, right))}"
