# SPDX-License-Identifier: Apache-2.0
"""The load, drawn from a seed before a run, so that every arm gets the same requests; and clients that stream answers,
give up when they have waited too long, and compare what they get with what is right."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from experiments.common.client import Answer as Alone
from experiments.common.client import answers_of
from experiments.common.model import CACHE, make_model
from experiments.common.servers import Running, Server, ServerError, ServerSpec
from experiments.shared_device.arms import BLOCK_SIZE, MAX_MODEL_LEN, MODELS
from kvcached_nixl.vllm.adapter.versions import found_version

LENGTHS = (256, 512, 512, 768, 1024, 1536)
"""Of prompts, in tokens: whole blocks, so that the bytes of a hand-over say how many tokens it moved."""
MAX_TOKENS = (32, 64, 96, 128)
"""Of answers."""


@dataclass(frozen=True)
class Arrival:
    """A request that comes whether earlier ones have been answered or not (open loop).

    Attributes:
        at_seconds: after the begin of the load.
        model: name of the model.
        prompt: number of its prompt, among those of the model.
        max_tokens: of its answer.
    """

    at_seconds: float
    model: str
    prompt: int
    max_tokens: int


@dataclass(frozen=True)
class Swell:
    """A rate in requests a second that swells from ``low`` to ``high`` and ebbs, once in each period.

    ``phase``: what part of a period it is ahead; two loads that differ by 0.5 swell at opposite times.
    """

    low: float
    high: float
    period_seconds: float = 18.0
    phase: float = 0.0

    def at(self, seconds: float) -> float:
        """Return the rate at a time; it is lowest at 0 if ``phase`` is 0."""
        turn = math.cos(2 * math.pi * (seconds / self.period_seconds + self.phase))
        return self.low + (self.high - self.low) * (1 - turn) / 2


def arrivals(model: str, swell: Swell, seconds: float, prompts: int, seed: int) -> list[Arrival]:
    """Return a Poisson process with the rate of ``swell``, by thinning.

    Args:
        prompts: how many prompts there are; the lengths of answers are drawn as well.
    """
    draw = random.Random(f"{seed} {model}")
    found, now = [], 0.0
    while (now := now + draw.expovariate(swell.high)) < seconds:
        if draw.random() * swell.high < swell.at(now):
            found.append(Arrival(now, model, draw.randrange(prompts), draw.choice(MAX_TOKENS)))
    return found


def merged(*loads: Sequence[Arrival]) -> list[Arrival]:
    """Return several models' requests in the order of their arrival."""
    return sorted((one for load in loads for one in load), key=lambda one: one.at_seconds)


def draw_prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of token ids, with all of ``LENGTHS`` as often."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(LENGTHS[number % len(LENGTHS)])] for number in range(count)]


# -------------------------------------------------------------------------------------------------------------- clients


PATIENCE_SECONDS = 15.0
"""How long a client waits for its first token before it leaves."""
ANSWER_SECONDS = 60.0
"""How long a client waits for the whole answer; what has not ended then has no end."""
NUDGE_TOKENS = 32
"""So few that it does not matter whether they are counted."""
_BUSY = (429, 503)


class Outcome(str, enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    FAILED = "failed"
    LEFT = "left"
    NO_END = "no end"


@dataclass(frozen=True)
class Target:
    """Where a model's requests go, its prompts, and the right answer to each."""

    url: str
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]


@dataclass
class Received:
    """What a client got for one request. Times in seconds, from the request's arrival.

    Attributes:
        arrived_seconds: after the begin of the load.
        first_token_seconds: None if none came.
        gaps_ms: milliseconds between two tokens, as one text: a results file has a line for each value. Tokens in one
            piece share out the time since the piece before.
        retry_after: whether a refusal named a time.
        why: the error, shortened.
    """

    model: str
    arrived_seconds: float
    prompt_tokens: int
    outcome: Outcome = Outcome.NO_END
    first_token_seconds: float | None = None
    gaps_ms: str = ""
    retry_after: bool = False
    why: str = ""

    @property
    def gaps_seconds(self) -> list[float]:
        return [int(one) / 1e3 for one in self.gaps_ms.split()]


async def offered(
    load: Sequence[Arrival], targets: Mapping[str, Target], salt: str, say: Callable[[str], None]
) -> list[Received]:
    """Send each request at its time, and return what came of each when all have ended."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    begun, numbers = time.monotonic(), itertools.count()
    async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as http:

        async def at_its_time(one: Arrival) -> Received:
            await asyncio.sleep(begun + one.at_seconds - time.monotonic())
            say(f"{next(numbers) + 1} of {len(load)} requests sent")
            return await ask(http, targets[one.model], one, f"{salt}-{one.model}-{one.at_seconds:.4f}")

        return list(await asyncio.gather(*(at_its_time(one) for one in load)))


async def nudge(targets: Mapping[str, Target]) -> None:
    """Send each model one short request: an idle prefill counts what it has moved when it computes the next prompt."""
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False) as http:
        for target in targets.values():
            body = {"model": "model", "prompt": list(target.prompts[0][:NUDGE_TOKENS]), "max_tokens": 1}
            await http.post(f"{target.url}/v1/completions", json=body)


async def ask(http: httpx.AsyncClient, target: Target, one: Arrival, salt: str) -> Received:
    """Send one request and judge its answer. ``salt``: of its own, so that no prefix cache knows its prompt."""
    prompt = target.prompts[one.prompt]
    found = Received(one.model, one.at_seconds, len(prompt))
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": one.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    first = asyncio.Event()
    reading = asyncio.ensure_future(_read(http, f"{target.url}/v1/completions", body, tokens, found, first))
    waiting = asyncio.ensure_future(first.wait())
    try:
        await asyncio.wait({reading, waiting}, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not first.is_set() and not reading.done():
            found.outcome = Outcome.LEFT
            return found
        await asyncio.wait({reading}, timeout=ANSWER_SECONDS)
        if reading.done() and not reading.exception():
            found.outcome = reading.result()
            if found.outcome is Outcome.RIGHT and tokens != list(target.answers[one.prompt][: one.max_tokens]):
                found.outcome = Outcome.WRONG
        elif reading.done():
            found.outcome, found.why = Outcome.FAILED, repr(reading.exception())[:200]
        return found
    finally:
        for task in (reading, waiting):
            task.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)


async def _read(
    http: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    tokens: list[int],
    found: Received,
    first: asyncio.Event,
) -> Outcome:
    begun = last = time.monotonic()
    gaps: list[float] = []
    async with http.stream("POST", url, json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            found.why = (await reply.aread())[:200].decode(errors="replace")
            found.retry_after = "retry-after" in reply.headers
            return Outcome.REFUSED if reply.status_code in _BUSY else Outcome.FAILED
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                # A whole answer is judged by its tokens.
                return Outcome.RIGHT
            if not line.startswith("data: "):
                continue
            said = json.loads(line.removeprefix("data: "))
            if "error" in said:
                found.why = json.dumps(said["error"])[:200]
                is_busy = str(said["error"].get("code")) in map(str, _BUSY)
                return Outcome.REFUSED if is_busy and not tokens else Outcome.FAILED
            new = [token for choice in said["choices"] for token in choice.get("token_ids") or ()]
            if not new:
                continue
            now = time.monotonic()
            if found.first_token_seconds is None:
                found.first_token_seconds = now - begun
                first.set()
                gaps += [0.0] * (len(new) - 1)
            else:
                gaps += [(now - last) / len(new)] * len(new)
            found.gaps_ms = " ".join(f"{gap * 1e3:.0f}" for gap in gaps)
            last = now
            tokens += new
    found.why = "the stream ended without [DONE]"
    return Outcome.FAILED


# ---------------------------------------------------------------------------------------------------- the right answers
# Those of one stock server for each model, without kvcached and without a connector.


KEPT, DRAWN = 18, 42
"""Prompts of each model, and among how many they are chosen."""
LEAST_LEAD = 0.0004
"""In nats, of each token before the second best one. Requests are batched differently in every run, which has changed
log-probabilities by at most 0.0001 in float32 (docs/measurements.md): a closer decision may be taken either way by
stock vLLM, too."""
AT_A_TIME = 6


@dataclass(frozen=True)
class Asked:
    """Prompts of a model, and the right answer to each."""

    prompts: list[list[int]]
    answers: list[list[int]]


def reference_of(logs: Path, say: Callable[[str], None]) -> dict[str, Asked]:
    """Return the answers of an earlier run with this vLLM; else start a stock server for each model, ask, stop."""
    folders = {model: make_model(shape) for model, shape in MODELS.items()}
    words = [
        *(found_version("vllm"), KEPT, DRAWN, LEAST_LEAD, LENGTHS, MAX_TOKENS, MAX_MODEL_LEN),
        *(f"{model} {folder.name}" for model, folder in folders.items()),
    ]
    known = CACHE / f"answers-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]}.json"
    if not known.is_file():
        found = _reference_of(folders, logs, say)
        partial = known.with_suffix(".partial")
        partial.write_text(json.dumps({model: dataclasses.asdict(one) for model, one in found.items()}))
        partial.replace(known)
    return {model: Asked(**one) for model, one in json.loads(known.read_text()).items()}


def _reference_of(folders: Mapping[str, Path], logs: Path, say: Callable[[str], None]) -> dict[str, Asked]:
    specs = [
        ServerSpec(
            name=f"reference-{model}",
            model=folder,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            forks=True,
        )
        for model, folder in folders.items()
    ]
    with Running(specs, logs, say) as launched:
        say("the right answers")
        return asyncio.run(_ask(dict(zip(folders, launched.ready(), strict=True))))


async def _ask(servers: Mapping[str, Server]) -> dict[str, Asked]:
    found = {}
    for seed, (model, server) in enumerate(servers.items()):
        prompts = draw_prompts(DRAWN, seed)
        found[model] = chosen(prompts, await answers_of(server.base_url, prompts, max(MAX_TOKENS), "right", AT_A_TIME))
    return found


def chosen(prompts: list[list[int]], answers: list[Alone], count: int = KEPT) -> Asked:
    """Return ``count`` of the prompts whose answers have no close decision, with all lengths as often."""
    kept: list[int] = []
    for length in dict.fromkeys(LENGTHS):
        wanted = count * LENGTHS.count(length) // len(LENGTHS)
        clear = [
            number
            for number, prompt in enumerate(prompts)
            if len(prompt) == length and answers[number].lead >= LEAST_LEAD
        ]
        if len(clear) < wanted:
            raise ServerError(
                f"found {len(clear)} prompts of {length} tokens without a close decision in their answers; expected "
                f"{wanted}. Wrong answers could not be told from rounding. Draw more prompts."
            )
        kept += clear[:wanted]
    return Asked([prompts[one] for one in kept], [answers[one].token_ids for one in kept])
