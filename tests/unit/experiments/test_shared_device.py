# SPDX-License-Identifier: Apache-2.0
"""experiments/shared_device: its load is the same for every arm, its arithmetic, and what its arms differ in."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("rich", reason="needs an environment: bash experiments/env.sh")

import httpx

from experiments.common.client import Answer
from experiments.common.servers import ServerError
from experiments.shared_device import clients
from experiments.shared_device.clients import (
    LENGTHS,
    MAX_TOKENS,
    Arrival,
    Outcome,
    Received,
    Swell,
    Target,
    arrivals,
    ask,
    chosen,
    draw_prompts,
)
from experiments.shared_device.measure import Ran
from experiments.shared_device.report import FIRST_TOKEN_SECONDS, TOKEN_SECONDS, goodput, is_good

GOOD = Received("a", 0.0, 256, Outcome.RIGHT, 1.0, "100 100")


def test_every_arm_gets_the_same_requests() -> None:
    swell = Swell(0.5, 4.0)
    load = arrivals("a", swell, 60.0, 10, seed=1)
    assert load == arrivals("a", swell, 60.0, 10, seed=1)
    assert load != arrivals("a", swell, 60.0, 10, seed=2) and load != arrivals("b", swell, 60.0, 10, seed=1)
    assert {one.max_tokens for one in load} == set(MAX_TOKENS) and {one.prompt for one in load} == set(range(10))


@pytest.mark.parametrize(
    ("more", "good"),
    [
        ({}, True),
        ({"outcome": Outcome.WRONG}, False),
        ({"outcome": Outcome.LEFT}, False),
        ({"first_token_seconds": FIRST_TOKEN_SECONDS}, True),
        ({"first_token_seconds": FIRST_TOKEN_SECONDS + 0.01}, False),
        ({"gaps_ms": f"0 {2000 * TOKEN_SECONDS:.0f}"}, True),
        ({"gaps_ms": f"0 {2000 * TOKEN_SECONDS + 10:.0f}"}, False),
        ({"gaps_ms": ""}, True),
    ],
    ids=str,
)
def test_goodput_counts_right_answers_in_time(more: dict[str, Any], good: bool) -> None:
    one = dataclasses.replace(GOOD, **more)
    assert is_good(one) is good and goodput(Ran("an arm", 4.0, [one, GOOD])) == (good + 1) / 4


@pytest.mark.parametrize(("prefilled", "moved", "share"), [(0, 0, None), (1000, 750, 0.25), (1000, 1032, 0.0)])
def test_what_no_decode_received_is_wasted(prefilled: float, moved: float, share: float | None) -> None:
    assert Ran("an arm", counts={"prefilled": prefilled, "moved": moved}).wasted_share == share


def answer(lead_nats: float, tokens: int = 2) -> Answer:
    return Answer([1] * tokens, [0.0] * tokens, [{"1": 0.0, "2": -1.0}] * (tokens - 1) + [{"2": -lead_nats, "1": 0.0}])


def test_prompts_with_a_close_decision_are_left_out() -> None:
    assert answer(0.5).lead == 0.5 and answer(2.0).lead == 1.0
    prompts = draw_prompts(2 * len(LENGTHS), seed=1)
    answers = [answer(0.0001 if number < len(LENGTHS) else 0.5) for number in range(len(prompts))]
    found = chosen(prompts, answers, count=len(LENGTHS))
    assert sorted(map(len, found.prompts)) == sorted(LENGTHS)
    assert all(prompt in prompts[len(LENGTHS) :] for prompt in found.prompts)
    with pytest.raises(ServerError, match="without a close decision"):
        chosen(prompts, answers, count=2 * len(LENGTHS))


ARRIVAL = Arrival(0.0, "a", 0, 3)
RIGHT = (4, 5, 6, 7)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def tokens(*ids: int) -> bytes:
    return event(choices=[{"text": "", "token_ids": list(ids)}])


DONE = b"data: [DONE]\n\n"


def asked(reply: Callable[[], Any]) -> Received:
    async def run() -> Received:
        transport = httpx.MockTransport(lambda request: reply())
        async with httpx.AsyncClient(transport=transport) as http:
            return await ask(http, Target([[1, 2]], [RIGHT], "http://x"), ARRIVAL, "salt")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "headers", "body", "outcome", "num_gaps"),
    [
        (200, {}, b": comment\n\n" + tokens(4) + tokens(5, 6) + DONE, Outcome.RIGHT, 2),
        (200, {}, tokens(4, 5, 6) + DONE, Outcome.RIGHT, 2),
        (200, {}, tokens(4) + tokens(5, 7) + DONE, Outcome.WRONG, 2),
        (200, {}, tokens(4) + tokens(5) + DONE, Outcome.WRONG, 1),
        (200, {}, tokens(4) + tokens(5, 6), Outcome.FAILED, 2),
        (200, {}, tokens(4) + event(error={"code": 503, "message": "x"}), Outcome.FAILED, 0),
        (200, {}, event(error={"code": 503, "message": "x"}) + DONE, Outcome.REFUSED, 0),
        (503, {"Retry-After": "3"}, b"{}", Outcome.REFUSED, 0),
        (500, {}, b"{}", Outcome.FAILED, 0),
    ],
)
def test_outcomes(status: int, headers: dict[str, str], body: bytes, outcome: Outcome, num_gaps: int) -> None:
    found = asked(lambda: httpx.Response(status, headers=headers, content=body))
    assert (found.outcome, len(found.gaps_seconds)) == (outcome, num_gaps)
    assert found.retry_after is bool(headers)
    assert (found.first_token_seconds is None) is (b"token_ids" not in body)


class Silent(httpx.AsyncByteStream):
    """Sends ``first``, then nothing for ever."""

    def __init__(self, first: bytes) -> None:
        self.first = first

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.first
        await asyncio.Event().wait()


@pytest.mark.parametrize(("first", "outcome"), [(b"\n", Outcome.LEFT), (tokens(4), Outcome.NO_END)])
def test_a_client_gives_up(first: bytes, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.05)
    assert asked(lambda: httpx.Response(200, stream=Silent(first))).outcome is outcome
