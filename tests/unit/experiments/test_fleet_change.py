# SPDX-License-Identifier: Apache-2.0
"""experiments/fleet_change: each target can be missed, and an answer is judged by what the client got."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("openai", reason="the official client is not installed")

import httpx
import openai

from experiments.fleet_change import measure
from experiments.fleet_change.measure import Outcome, Phase, Request
from experiments.fleet_change.report import judge, table_of

GOOD = Phase("pull", "restart", 1.0, {"right": 9}, 3, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "outcomes", "more", "missed"),
    [
        ("restart", {}, {}, ""),
        ("kill", {"error in a stream that had begun": 1}, {"bench_failed": 1, "failed_hand_overs": 1}, ""),
        ("kill", {"wrong": 1}, {}, "wrong"),
        ("version", {"no end": 1}, {}, "without an end"),
        ("kill", {"error before the first token": 1}, {}, "before the first token"),
        ("busy", {"error in a stream that had begun": 1}, {}, "errors during"),
        ("version", {}, {"bench_failed": 1}, "vllm bench serve"),
        ("restart", {}, {"failed_hand_overs": 1}, "hand-overs that failed"),
        ("restart", {"503: try again": 1}, {}, "refused while servers run"),
        ("scale to zero", {"503: try again": 1}, {"bench_failed": 1, "failed_hand_overs": 1}, ""),
        ("scale to zero", {"error in a stream that had begun": 1}, {}, "errors during"),
        ("scale to zero", {"right": 0, "503: try again": 1}, {}, "no right answer while scaled"),
    ],
)
def test_each_target_can_be_missed(change: str, outcomes: dict[str, int], more: dict[str, int], missed: str) -> None:
    phases = [GOOD, replace(GOOD, change=change, outcomes={"right": 9, **outcomes}, **more)]
    found = [one.target for one in judge(phases) if not one.reached]
    assert found == [one.target for one in judge(phases) if missed and missed in one.target]
    assert len(found) == bool(missed)
    assert table_of(phases).row_count == 2


@pytest.mark.parametrize(
    ("pieces", "reason", "fails", "outcome"),
    [
        (["a", "b"], "length", False, Outcome.RIGHT),
        (["a"], "length", False, Outcome.WRONG),
        (["a", "b"], None, False, Outcome.WRONG),
        (["a"], None, True, Outcome.AFTER),
        (["x"], None, True, Outcome.WRONG),
        ([], None, True, Outcome.BEFORE),
    ],
)
def test_what_a_client_got(
    monkeypatch: pytest.MonkeyPatch, pieces: list[str], reason: str | None, fails: bool, outcome: Outcome
) -> None:
    async def ask(client: Any, request: Request, begun: list[str]) -> tuple[str, str | None]:
        begun += pieces
        if fails:
            raise openai.OpenAIError("broken off")
        return "".join(pieces), reason

    monkeypatch.setattr(measure, "ask", ask)
    assert asyncio.run(measure.judged(None, Request(1, True), "ab")) is outcome


@pytest.mark.parametrize(
    ("status", "headers", "outcome"),
    [
        (503, {"Retry-After": "7"}, Outcome.REFUSED),
        (503, {}, Outcome.BEFORE),
        (502, {"Retry-After": "7"}, Outcome.BEFORE),
    ],
)
def test_a_refusal_says_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], outcome: Outcome
) -> None:
    async def ask(client: Any, request: Request, begun: list[str]) -> tuple[str, str | None]:
        response = httpx.Response(status, headers=headers, request=httpx.Request("POST", "http://router"))
        raise openai.APIStatusError("refused", response=response, body=None)

    monkeypatch.setattr(measure, "ask", ask)
    assert asyncio.run(measure.judged(None, Request(1, True), "ab")) is outcome


@pytest.mark.parametrize(
    ("code", "pieces", "outcome"),
    [(503, [], Outcome.REFUSED), (502, [], Outcome.BEFORE), (503, ["a"], Outcome.AFTER), (503, ["x"], Outcome.WRONG)],
)
def test_a_stream_that_was_kept_alive_is_refused_by_an_event(
    monkeypatch: pytest.MonkeyPatch, code: int, pieces: list[str], outcome: Outcome
) -> None:
    """As the official client reads the router's event."""
    from kvcached_nixl.proxy.api import ApiRoute
    from kvcached_nixl.proxy.client import error_event
    from kvcached_nixl.proxy.failure import error_body

    event = error_event(ApiRoute.COMPLETIONS, code, error_body(code, "No server is up. Try again."))
    chunks = [b'data: {"choices": [{"index": 0, "text": "%s"}]}\n\n' % one.encode() for one in pieces]
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=b"".join([*chunks, event]))
    client = openai.AsyncOpenAI(
        base_url="http://router/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)),
    )
    assert asyncio.run(measure.judged(client, Request(1, True), "ab")) is outcome
