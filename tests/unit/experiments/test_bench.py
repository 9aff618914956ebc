# SPDX-License-Identifier: Apache-2.0
"""The bench: its statistics; what is said in conversations, where it is sent, and what is missing there; and what
counts towards the time to first token."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

pytest.importorskip("rich", reason="needs an environment: bash experiments/env.sh")

from experiments.__main__ import parse
from experiments.bench import conversations, push_vs_pull
from experiments.bench.comparison import Samples, percentile
from experiments.bench.conversations import (
    ANSWER_TOKENS,
    BLOCK_BYTES,
    FIRST,
    FURTHER,
    HOME,
    MESSAGE_TOKENS,
    OTHER,
    Arm,
    Got,
    Load,
    Serving,
    Turn,
    ask,
    converse,
)
from experiments.bench.traces import SUMMARY, WEB_FRAMEWORK, Span, Traced
from experiments.common.client import Answer, AnswerError, Client
from experiments.common.report import Run
from experiments.common.servers import Running, ServerError


@pytest.mark.parametrize(
    ("values", "hundredths", "expected"),
    [([3.0], 50, 3.0), ([3.0, 1.0], 50, 1.0), ([1.0, 2.0, 3.0], 50, 2.0), ([1.0, 2.0], 90, 2.0), ([2.0, 1.0], 0, 1.0)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], hundredths: int, expected: float) -> None:
    """Nothing is interpolated, and few values have their largest as the 99th."""
    assert percentile(hundredths)(values) == expected


def test_without_a_link_there_is_nothing_to_measure_over_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(push_vs_pull, "enter", lambda _: False)
    with pytest.raises(ServerError, match="found none that fits --only 'a link'; there are: shared memory; TCP."):
        push_vs_pull.main(Run(parse(["bench", "push_vs_pull", "--only", "a link"]), tmp_path))


def test_arms_are_compared_where_both_were_measured() -> None:
    samples = Samples(("{} tokens",))
    for length, ours, stock in ((8, 1.15, 1.0), (16, 1.16, 1.0), (32, 1.0, None)):
        samples.add((length,), "ours", seconds=ours)
        if stock is not None:
            samples.add((length,), "stock", seconds=stock)
    found = samples.compare("ours", "stock", "seconds", "first token", most=1.15)
    assert [tuple(one) for one in found] == [
        ("8 tokens: first token (<= 1.15)", "1.15 x", True),
        ("16 tokens: first token (<= 1.15)", "1.16 x", False),
    ]
    found += samples.compare("ours", "stock", "seconds", "", least=1.155)
    found += samples.compare("ours", "stock", "seconds", "", most=1.0, where=lambda one: one[0] > 8)
    assert [one.reached for one in found[2:]] == [False, True, False]


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


def test_what_runs_beside_is_not_counted() -> None:
    """What prefill keeps or sends after its answer; vLLM's summary; and what the web framework makes by itself."""
    of_decode = {"decode_asking": (0.0, 1.0), "decode_moving": (1.0, 1.4), "server_answering": (1.4, 1.5)}
    of_prefill = {"prefill_computing": (0.0, 1.0), "prefill_offered": (0.9, 1.2), "prefill_sending": (1.0, 1.3)}
    spans = [
        Span("t", name, "client", name, "vllm", *times, process)
        for process, some in (("decode", of_decode), ("prefill", of_prefill))
        for name, times in {**some, SUMMARY: (0.0, 4.0)}.items()
    ]
    spans.append(Span("t", "w", "client", "POST /v1/completions", WEB_FRAMEWORK, 0.0, 1.0, "prefill"))
    one = Traced("t", spans, 1.5)
    assert [each.name for each in one.leaves] == ["decode_moving", "server_answering", "prefill_computing"]
    assert one.share == pytest.approx(1.0)
