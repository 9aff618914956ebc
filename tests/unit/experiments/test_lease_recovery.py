# SPDX-License-Identifier: Apache-2.0
"""The experiment's verdicts: each target on both sides of its limit, and what a client's request counts as."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest

from experiments.common.client import AnswerError, Client
from experiments.lease_recovery.arms import TOKENS
from experiments.lease_recovery.chaos import SHORTER, Recovery, Told
from experiments.lease_recovery.report import LEAST_REQUESTS, MEMORY_BACK_SECONDS, TOLD_SECONDS, Outcome, judge
from experiments.lease_recovery.traffic import Ended, Traffic, Verdict

STOOD = f"prefill stands still, {SHORTER}"
KILLED = Recovery("decode is killed", 20.0, 1.0, MEMORY_BACK_SECONDS)
OUTLIVED = Recovery(STOOD, 1.0, 1.0, 0.1, 0)
FINE = KILLED, OUTLIVED
RIGHT = Ended("right", "none", 0.0, 1.0)
PADDING = [9] * (TOKENS - 1)
PAUSED = (Told("pause keep", TOLD_SECONDS),)


def reached(ended: Sequence[Ended], *recoveries: Recovery, told: Sequence[Told] = PAUSED) -> list[bool]:
    return [verdict for _, _, verdict in judge(Outcome("pull", True, ended, recoveries, told))]


@pytest.mark.parametrize(
    ("ended", "recovery", "missed"),
    [
        ([RIGHT] * (LEAST_REQUESTS - 1), KILLED, 0),
        ([*[RIGHT] * LEAST_REQUESTS, Ended("wrong", "none", 0.0, 1.0)], KILLED, 1),
        ([*[RIGHT] * LEAST_REQUESTS, Ended("hangs", "none", 0.0, 1.0)], KILLED, 3),
        ([RIGHT] * LEAST_REQUESTS, Recovery("x", 1.0, None, 1.0), 4),
        ([RIGHT] * LEAST_REQUESTS, Recovery("x", 1.0, 1.0, MEMORY_BACK_SECONDS + 0.01), 5),
        ([RIGHT] * LEAST_REQUESTS, Recovery("x", 1.0, 1.0, None), 5),
        ([RIGHT] * LEAST_REQUESTS, Recovery(STOOD, 1.0, 1.0, 0.1, 1), 7),
    ],
    ids=["too few", "wrong", "hangs", "no answer any more", "memory late", "memory never", "a lease ends"],
)
def test_each_target_can_be_missed(ended: list[Ended], recovery: Recovery, missed: int) -> None:
    assert reached([RIGHT] * LEAST_REQUESTS, *FINE) == [True] * 8
    assert [number for number, one in enumerate(reached(ended, *FINE, recovery)) if not one] == [missed]


@pytest.mark.parametrize("told", [(), (*PAUSED, Told("pause wait", TOLD_SECONDS + 0.01))], ids=["none", "late"])
def test_an_operator_who_waits_or_did_not_come_is_a_miss(told: Sequence[Told]) -> None:
    found = reached([RIGHT] * LEAST_REQUESTS, *FINE, told=told)
    assert [number for number, one in enumerate(found) if not one] == [6]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ([1, *PADDING], "right"),
        ([2, *PADDING], "wrong"),
        (AnswerError("500"), "error"),
        (httpx.ConnectError("refused"), "no connection"),
    ],
)
def test_what_an_answer_counts_as(answer: Any, verdict: Verdict) -> None:
    class Server:
        async def complete(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if isinstance(answer, Exception):
                raise answer
            logprobs = {"token_logprobs": [0.0] * TOKENS, "top_logprobs": [{}] * TOKENS}
            return {"choices": [{"token_ids": answer, "logprobs": logprobs}]}

    traffic = Traffic((), "pull", [[3]], [[1, *PADDING]])
    found, detail = asyncio.run(traffic._decode(cast(Client, Server()), "r-0", 0, {}, 5.0))
    assert found == verdict and bool(detail) is (verdict != "right")
    # While weights change, what one of both makes is right; it is not for who asks later.
    traffic.other, traffic.other_until_seconds = [[2, *PADDING]], 4.0
    assert asyncio.run(traffic._decode(cast(Client, Server()), "r-0", 0, {}, 5.0))[0] == verdict
    if answer == [2, *PADDING]:
        assert asyncio.run(traffic._decode(cast(Client, Server()), "r-0", 0, {}, 3.0))[0] == "right"
