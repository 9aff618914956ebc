# SPDX-License-Identifier: Apache-2.0
"""experiments/bench/conversations.py and talks.py: what is said, where it is sent and what is missing there; and that
targets can be missed."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import httpx
import pytest

pytest.importorskip("rich")
pytest.importorskip("psutil")

from experiments.bench import conversations
from experiments.bench.conversations import (
    ASKS,
    BLOCK_BYTES,
    FIRST,
    FURTHER,
    HOME,
    OTHER,
    STOCK_PD,
    Arm,
    Serving,
    converse,
    judge,
)
from experiments.bench.samples import Samples
from experiments.bench.talks import ANSWER_TOKENS, MESSAGE_TOKENS, Got, Load, Turn, ask
from experiments.common.client import Answer, AnswerError, Client
from experiments.common.servers import Running

RIGHT = Answer(
    [7, 9], [-0.1, -0.2], [{"token_id:7": -0.1, "token_id:8": -3.0}, {"token_id:9": -0.2, "token_id:3": -4.0}]
)


def at(arm: Arm, *urls: str) -> Serving:
    return Serving(arm, cast(Running, None), urls)


@pytest.mark.parametrize("load", [Load(), Load(2, 3, 1024)])
def test_histories_are_as_long_as_asked_for_at_most(load: Load) -> None:
    messages = load.messages()
    assert messages == load.messages() and len(messages) == load.conversations
    for said in messages:
        assert len(said) == load.turns
        assert all(MESSAGE_TOKENS[0] <= len(one.tokens) <= MESSAGE_TOKENS[1] for one in said[1:])
        length = sum(len(one.tokens) for one in said) + (load.turns - 1) * ANSWER_TOKENS
        assert load.history_tokens / 2 < length <= load.history_tokens


def test_each_turn_goes_to_another_server() -> None:
    three, one = at(OTHER, "a", "b", "c"), at(HOME, "a")
    assert all(three.place(talk, turn) != three.place(talk, turn + 1) for talk in range(4) for turn in range(6))
    assert {one.place(talk, turn) for talk in range(4) for turn in range(6)} == {0}


def test_what_is_missing_is_what_the_asked_server_has_not_seen() -> None:
    """Turns of 40, 100 and 200 tokens: 2, 4 and 7 blocks, of which 2 and 4 are cached with the answers before."""
    talk = [Turn([5] * length, 0.0, RIGHT) for length in (40, 100, 200)]
    assert at(HOME, "a").missing_bytes([talk]) == {FIRST: 2 * BLOCK_BYTES, FURTHER: (2 + 3) * BLOCK_BYTES}
    assert at(OTHER, "a", "b").missing_bytes([talk]) == {FIRST: 2 * BLOCK_BYTES, FURTHER: (4 + 5) * BLOCK_BYTES}


def test_a_round_is_counted_by_first_and_further_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations of three turns; in each further turn a server computes 10 tokens."""
    asked: list[str] = []

    async def fake(to: Client, prompt: list[int], right: Answer, salt: str, name: str) -> Got:
        asked.append(name)
        return Got(None, f"{name}: broken") if name == "salt-1-2" else Got(float(len(prompt)))

    monkeypatch.setattr(conversations, "ask", fake)
    monkeypatch.setattr(conversations, "settled", lambda read: read())
    monkeypatch.setattr(Serving, "counted", lambda _: Counter(decode=10 * max(0, len(asked) - 2), moved=0))
    samples = Samples(("{}",))
    talks = [[Turn([5] * length, 0.001, RIGHT) for length in (40, 100, 200)] for _ in range(2)]
    problems = asyncio.run(converse(at(HOME, "http://a"), talks, "salt", samples, 1.0))
    assert asked[:2] == ["salt-0-0", "salt-1-0"] and len(asked) == 6
    assert problems == ["home, salt-1-2: broken"]
    further = samples.figures[(FURTHER,), "home"]
    assert sorted(further["first_token"]) == [100, 100, 200] and sum(further["error"]) == 1
    assert further["decode"] == [10] and further["missing"] == [5 * BLOCK_BYTES / 2]
    assert samples.values((FIRST,), "home", "decode") == [0]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (RIGHT, "right"),
        (Answer([7, 3], RIGHT.logprobs, RIGHT.top_logprobs), "wrong"),
        (Answer(RIGHT.token_ids, [-0.1, -0.3], RIGHT.top_logprobs), "wrong"),
        (AnswerError("500"), "error"),
        (httpx.ReadError("gone"), "error"),
    ],
)
def test_an_answer_is_right_if_tokens_and_log_probabilities_are(found: Answer | Exception, verdict: str) -> None:
    class Fake:
        async def streamed(self, prompt: list[int], **_: Any) -> tuple[float, Answer]:
            if isinstance(found, Exception):
                raise found
            return 0.0, found

    got = asyncio.run(ask(cast(Client, Fake()), [1], RIGHT, "salt", "name"))
    assert got.verdict == verdict and got.figures[verdict] == 1 and bool(got.problem) == (verdict != "right")
    assert ("first_token" in got.figures) == (verdict != "error")


@pytest.mark.parametrize(
    ("changes", "problems", "missed"),
    [
        ({}, [], []),
        ({HOME.name: (1.16, 10)}, [], ["home / stock"]),
        ({OTHER.name: (1.31, 10)}, [], ["other / stock"]),
        ({ASKS.name: (1.9, 10)}, [], ["asks / home"]),
        ({STOCK_PD.name: (1.9, 10)}, [], ["stock P/D / home"]),
        ({OTHER.name: (1.3, 11)}, [], ["other, bytes moved"]),
        ({}, ["wrong"], ["wrong answers"]),
    ],
)
def test_each_target_can_be_missed(
    changes: dict[str, tuple[float, int]], problems: list[str], missed: list[str]
) -> None:
    figures = {"stock": (1.0, 0), "home": (1.0, 0), "other": (1.3, 10), "asks": (3.0, 10), "stock P/D": (3.0, 10)}
    samples = Samples(("{}",))
    for arm, (seconds, moved) in {**figures, **changes}.items():
        samples.add((FIRST,), arm, **Got(9.0).figures)
        samples.add((FURTHER,), arm, **Got(seconds).figures)
        samples.add((FURTHER,), arm, moved=float(moved), missing=10.0)
    found = [one.target for one in judge(samples, problems, 10) if not one.reached]
    assert len(found) == len(missed) and all(word in target for word, target in zip(missed, found, strict=True))
