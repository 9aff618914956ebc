# SPDX-License-Identifier: Apache-2.0
"""experiments/fuzzed_router: its targets can be missed, and it reads an answer exactly as it was sent."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("httpx")

from experiments.fuzzed_router import answers, bodies, messages
from experiments.fuzzed_router.__main__ import judge
from experiments.fuzzed_router.answers import Choice, Reply, Said, Unreadable
from experiments.fuzzed_router.messages import Expects
from experiments.fuzzed_router.traffic import FINE, SHARES, Found

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


def found(**more: int) -> Found:
    verdicts = Counter({"right": 2, "refused": 3, "not compared": 1, **more})
    return Found(verdicts=verdicts, valid=2, valid_right=2)


@pytest.mark.parametrize(
    ("changed", "handed", "trouble", "missed"),
    [
        ({}, 2, "", []),
        ({"the server's own": 4, "no HTTP": 2, "served": 1}, 2, "", []),
        ({"HTTP 502": 1}, 2, "", ["4xx or a right answer"]),
        ({"wrong": 1}, 2, "", ["4xx or a right answer"]),
        ({"no end": 1}, 2, "", ["4xx or a right answer", "no request hangs"]),
        ({}, 2, "decode has ended", ["servers and routers are alive and serve correctly"]),
        ({}, 0, "", ["requests handed over in this direction"]),
    ],
    ids=str,
)
def test_each_target_can_be_missed(changed: dict[str, int], handed: int, trouble: str, missed: list[str]) -> None:
    verdicts = judge("pull", found(**changed), handed, trouble)
    assert [one.target for one in verdicts if not one.reached] == [f"pull: {target}" for target in missed]


def test_a_valid_request_that_is_refused_or_none_at_all_misses() -> None:
    refused = found()
    refused.valid_right = 1
    assert [one.reached for one in judge("pull", refused, 2, "")].count(False) == 1
    assert [one.reached for one in judge("pull", Found(), 2, "")] == [False, False, True, True, True]


def test_fine_and_missed_are_told_apart() -> None:
    assert found(**{"HTTP 500": 2, "dropped": 1}).missed_count == 3
    assert found(**dict.fromkeys(FINE, 1)).missed_count == 0
    assert sum(share for _, share in SHARES) == 100


def test_the_answers_of_one_connection_are_read_one_by_one() -> None:
    """Chunked, with a length, without a body, and behind a 100."""
    heard = (
        b"HTTP/1.1 405 X\r\nContent-Length: 9\r\n\r\n"
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        b"HTTP/1.1 413 X\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhe"
    )
    one, other, last = answers.replies(heard, ["HEAD", "POST", "POST"])
    assert (one.status, one.body, other.body, last.body) == (405, b"", b"abc", b"he")
    assert last.is_last and not other.is_last
    assert answers.replies(b"", ["POST"]) == []
    for broken in (heard[:-1], b"no http", heard + b"HTTP/1.1 200"):
        with pytest.raises(Unreadable):
            answers.replies(broken, ["HEAD", "POST", "POST"])


def whole(**more: Any) -> Reply:
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "token_ids": [1, 2]}
    return Reply(200, JSON, json.dumps({"choices": [choice], **more}).encode())


def streamed(*events: object, end: bytes = b"data: [DONE]\n\n") -> Reply:
    return Reply(200, EVENTS, b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in events) + end)


PARTS: list[Any] = [
    {"choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "b", "token_ids": [2], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
]


def test_a_stream_says_what_a_whole_answer_says() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    expected = Said((Choice("ab", "length", (1, 2)),), (5, 2))
    assert answers.read(whole(usage=usage)) == answers.read(streamed(*PARTS)) == expected
    chat = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "ab"}, "finish_reason": None, "token_ids": [1, 2]}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
    ]
    assert answers.read(streamed(*chat)).choices == expected.choices


@pytest.mark.parametrize(
    "reply",
    [
        streamed(*PARTS, end=b""),
        streamed(*PARTS[:1], {"error": {"message": "x"}}),
        Reply(200, JSON, b"{"),
        Reply(200, JSON, b"[]"),
        Reply(200, JSON, b'{"choices": []}'),
        Reply(200, JSON, b'{"choices": [{}]}'),
    ],
    ids=range(6),
)
def test_what_is_no_answer_is_none(reply: Reply) -> None:
    with pytest.raises(Unreadable):
        answers.read(reply)


def test_an_answer_agrees_only_with_its_own() -> None:
    one = answers.read(whole())
    assert answers.agrees(one, answers.read(streamed(*PARTS)))
    assert not answers.agrees(one, Said((Choice("ab", "stop", (1, 2)),)))
    assert not answers.agrees(one, Said((*one.choices, *one.choices)))
    assert not answers.agrees(Said(one.choices, (5, 2)), Said(one.choices, (6, 2)))


@pytest.mark.parametrize(
    ("body", "is_determined"),
    [
        (b'{"temperature": 0}', True),
        (b'{"temperature": 1, "temperature": 0.0}', True),
        (b'{"temperature": 0, "temperature": 1}', False),
        (b'{"temperature": null}', False),
        (b'{"temperature": 0, "use_beam_search": true}', False),
        (b"{}", False),
        (b"[]", False),
        (b"{", False),
    ],
)
def test_only_the_best_token_each_time_is_compared(body: bytes, is_determined: bool) -> None:
    assert answers.is_determined(body) is is_determined


def test_a_failure_is_the_server_s_own_only_if_it_is_the_same() -> None:
    routed = Reply(502, JSON, b'{"error": {"message": "The request failed: the server answered 500."}}')
    assert answers.is_same_failure(routed, Reply(500, JSON, b""))
    assert answers.is_same_failure(Reply(503, JSON, b""), Reply(503, JSON, b""))
    for status in (200, 400, 503):
        assert not answers.is_same_failure(routed, Reply(status, JSON, b""))
    began = Reply(502, JSON, b"the server's response begins with an error")
    assert answers.is_same_failure(began, Reply(200, EVENTS, b'data: {"error": {}}'))
    assert not answers.is_same_failure(began, streamed(*PARTS))
    assert not answers.is_same_failure(Reply(504, JSON, b""), Reply(500, JSON, b""))


def test_errors_are_those_that_clients_know() -> None:
    assert answers.says_error(Reply(400, JSON, b'{"error": {"message": "x", "type": "BadRequestError"}}'))
    for body in (b"Not Found", b'{"detail": "Not Found"}', b'{"error": "x"}', b"[]"):
        assert not answers.says_error(Reply(404, JSON, body))


def test_the_same_seed_draws_the_same_and_every_way_is_drawn() -> None:
    def drawn(seed: int) -> list[bytes]:
        random_, requests = random.Random(seed), bodies.valid()
        return [make(random_, requests, "s").content for make in (bodies.odd, bodies.mutated) for _ in range(500)]

    assert drawn(1) == drawn(1) != drawn(2)
    random_ = random.Random(3)
    some = [bodies.Body("valid", bodies.COMPLETIONS, bodies.encode({"prompt": f"{n}", "n": n})) for n in range(3)]
    cases = [messages.odd_http(random_, some) for _ in range(2000)]
    assert {one.messages[0].expects for one in cases} == set(Expects)
    assert {one.change.partition(" ")[0] for one in cases} >= {"method", "target", "header", "chunked", "several,"}
    # What may only be refused or end the connection is not counted as an answer of a server's.
    assert all(len(one.messages) == 1 for one in cases if one.messages[0].expects is Expects.NO_HTTP)


def test_valid_requests_take_the_best_token_and_no_more_than_the_context() -> None:
    requests = bodies.valid()
    assert len(requests) > 25 and {path for path, _ in requests} == {bodies.COMPLETIONS, bodies.CHAT}
    for _, fields in requests:
        assert answers.is_determined(bodies.encode(fields))
        assert len(json.dumps(fields.get("prompt", fields.get("messages")))) < 1200
        salted = json.loads(bodies.encode(bodies.salted(fields, "s0001-00000001")))
        assert salted.pop("cache_salt") == "s0001-00000001" and salted == fields
