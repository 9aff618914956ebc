# SPDX-License-Identifier: Apache-2.0
"""The load, drawn from a seed before a run, so that every arm gets the same requests; and clients that stream answers,
give up when they have waited too long, and compare what they get with what is right."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx

from experiments.common.client import Answer as Alone
from experiments.common.client import AnswerError, Client, answers_of
from experiments.common.model import make_model
from experiments.common.servers import Running, ServerError, ServerSpec
from experiments.shared_device.arms import BLOCK_SIZE, MAX_MODEL_LEN, MODELS

LENGTHS = (256, 512, 512, 768, 1024, 1536)
"""Of prompts, in tokens: whole blocks, so that the bytes of a hand-over say how many tokens it moved."""
MAX_TOKENS = (32, 64, 96, 128)
"""Of answers."""


@dataclass(frozen=True)
class Arrival:
    """A request that comes whether earlier ones have been answered or not (open loop): when, after the begin of the
    load, which prompt of the model, and how long an answer."""

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
    """Return a Poisson process with the rate of ``swell``, by thinning; the lengths of answers are drawn as well."""
    draw = random.Random(f"{seed} {model}")
    found, now = [], 0.0
    while (now := now + draw.expovariate(swell.high)) < seconds:
        if draw.random() * swell.high < swell.at(now):
            found.append(Arrival(now, model, draw.randrange(prompts), draw.choice(MAX_TOKENS)))
    return found


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
    """A model's prompts and the right answer to each; ``url``: where its requests go."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    url: str = ""


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
            prompt = target.prompts[0][:NUDGE_TOKENS]
            with contextlib.suppress(AnswerError):
                await Client(target.url, http).complete(prompt, max_tokens=1, salt="nudge", request_id="nudge")


async def ask(http: httpx.AsyncClient, target: Target, one: Arrival, salt: str) -> Received:
    """Send one request and judge its answer. ``salt``: of its own, so that no prefix cache knows its prompt."""
    prompt, right = target.prompts[one.prompt], list(target.answers[one.prompt][: one.max_tokens])
    found, tokens = Received(one.model, one.at_seconds, len(prompt)), list[int]()
    parts = Client(target.url, http).stream(
        prompt, max_tokens=one.max_tokens, salt=salt, request_id=salt, return_token_ids=True
    )
    begun = last = time.perf_counter()
    gaps: list[float] = []
    try:
        with anyio.fail_after(PATIENCE_SECONDS) as limit:
            async for now, part in parts:
                new = [token for choice in part["choices"] for token in choice.get("token_ids") or ()]
                if new and found.first_token_seconds is None:
                    limit.deadline = anyio.current_time() + ANSWER_SECONDS
                    found.first_token_seconds = now - begun
                    gaps += [0.0] * (len(new) - 1)
                elif new:
                    gaps += [(now - last) / len(new)] * len(new)
                tokens, last = tokens + new, now if new else last
        found.outcome = Outcome.RIGHT if tokens == right else Outcome.WRONG
    except TimeoutError:
        found.outcome = Outcome.NO_END if tokens else Outcome.LEFT
    except AnswerError as error:
        found.outcome = Outcome.REFUSED if error.status in _BUSY and not tokens else Outcome.FAILED
        found.retry_after, found.why = error.retry_after, str(error)[:200]
    except httpx.HTTPError as error:
        found.outcome, found.why = Outcome.FAILED, repr(error)[:200]
    found.gaps_ms = " ".join(f"{gap * 1e3:.0f}" for gap in gaps)
    return found


# ---------------------------------------------------------------------------------------------------- the right answers
# Those of one stock server for each model, without kvcached and without a connector.


KEPT, DRAWN = 18, 42
"""Prompts of each model, and among how many they are chosen."""
LEAST_LEAD = 0.0004
"""In nats, of each token before the second best one. Requests are batched differently in every run, which has changed
log-probabilities by at most 0.0001 in float32 (docs/measurements.md): a closer decision may be taken either way by
stock vLLM, too."""
AT_A_TIME = 6


def reference_of(logs: Path, say: Callable[[str], None]) -> dict[str, Target]:
    """Start a stock server for each model, ask, and stop it; returns each model's prompts and answers."""
    specs = [
        ServerSpec(f"reference-{model}", make_model(shape), "float32", BLOCK_SIZE, MAX_MODEL_LEN, forks=True)
        for model, shape in MODELS.items()
    ]
    found = {}
    with Running(specs, logs, say) as launched:
        for seed, (model, server) in enumerate(zip(MODELS, launched.ready(), strict=True)):
            say("the right answers")
            prompts = draw_prompts(DRAWN, seed)
            answers = asyncio.run(answers_of(server.base_url, prompts, max(MAX_TOKENS), "right", AT_A_TIME))
            found[model] = chosen(prompts, answers)
    return found


def chosen(prompts: list[list[int]], answers: list[Alone], count: int = KEPT) -> Target:
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
    return Target([prompts[one] for one in kept], [answers[one].token_ids for one in kept])
