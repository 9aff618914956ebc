# SPDX-License-Identifier: Apache-2.0
"""proxy/ranks.py: what a server's answers tell about its data-parallel ranks."""

from __future__ import annotations

import json

import pytest

from kvcached_nixl.proxy.ranks import MOST_FORMER, MOST_RANKS, PULL_SECONDS, Found, Ranks, range_of
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.params import RemotePrefill


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def found(name: str, start: str = "0", *, port: int = 5600, pushes: bool = True) -> Found:
    return Found(RemotePrefill(name, "127.0.0.1", port), start * 16, TransferMode.PUSH if pushes else TransferMode.PULL)


def counted(count: int, clock: Clock | None = None) -> Ranks:
    ranks = Ranks("server", clock or Clock())
    ranks.learn(None, found("p_dp0"))
    assert ranks.wants_count and ranks.found(None) is None
    ranks.asking()
    assert not ranks.wants_count
    ranks.counted(count)
    assert not ranks.wants_count
    return ranks


def said(message: object) -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}).encode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (said("data_parallel_rank 7 is out of range [0, 2)."), 2),
        (said("data_parallel_rank 7 is out of range [0, 2). (parameter=data_parallel_rank)"), 2),
        (said(f"data_parallel_rank 7 is out of range [0, {MOST_RANKS})."), MOST_RANKS),
        (said(f"data_parallel_rank 7 is out of range [0, {MOST_RANKS + 1})."), None),
        (said("data_parallel_rank 7 is out of range [0, 0)."), None),
        (said("data_parallel_rank 8 is out of range [0, 2)."), None),
        (said("found 'data_parallel_rank 7 is out of range [0, 2).'"), None),
        (said(["data_parallel_rank 7 is out of range [0, 2)."]), None),
        (b'{"detail": "data_parallel_rank 7 is out of range [0, 2)."}', None),
        (b"data_parallel_rank 7 is out of range [0, 2).", None),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b"", None),
    ],
    ids=map(str, range(13)),
)
def test_only_the_refusal_of_what_was_named_says_how_many_there_are(body: bytes, expected: int | None) -> None:
    assert range_of(body, 7) == expected


def test_a_server_with_one_engine_is_never_asked_or_named() -> None:
    ranks = Ranks("server")
    assert ranks.latest is None and ranks.found(None) is None and not ranks.wants_count
    for name in ("p", "p_dp", "p_dp0x", "p_dpx"):
        ranks.forget()
        ranks.learn(None, found(name))
        assert ranks.found(None) == ranks.latest == found(name)
        assert ranks.named == () and not ranks.wants_count
    # Another start of it, under the same name or another.
    for one in (found("p_dpx", "1"), found("q"), found("r", pushes=False)):
        ranks.learn(None, one)
        assert ranks.found(None) == one and not ranks.wants_count
    ranks.lost(None)
    assert ranks.found(None) is None and ranks.latest is None


def test_what_is_pulled_is_never_asked_or_named() -> None:
    ranks = Ranks("server")
    for number in range(4):
        ranks.learn(None, found(f"p_dp{number % 2}", pushes=False))
        assert not ranks.wants_count and ranks.named == ()


def test_of_several_none_is_where_another_one_was() -> None:
    ranks = counted(2)
    assert ranks.named == (0, 1) and ranks.found(None) is ranks.found(0) is ranks.found(1) is None
    ranks.learn(0, found("p_dp4"))
    ranks.learn(1, found("p_dp5", port=5601))
    assert (ranks.found(0), ranks.found(1)) == (found("p_dp4"), found("p_dp5", port=5601))
    # A request from before it was known how many there are.
    ranks.learn(None, found("p_dp5", port=5601))
    assert ranks.found(None) is None and ranks.found(0) == found("p_dp4")
    ranks.learn(7, found("p_dp7"))
    assert ranks.found(7) is None


def test_one_of_several_that_hands_nothing_over_is_forgotten_alone() -> None:
    ranks = counted(2)
    ranks.learn(0, found("p_dp0"))
    ranks.learn(1, found("p_dp1"))
    ranks.lost(0)
    assert ranks.found(0) is None and ranks.found(1) == found("p_dp1") and ranks.named == (0, 1)


def test_another_start_asks_for_the_number_again_and_keeps_what_is_known_meanwhile() -> None:
    ranks = counted(2)
    ranks.learn(0, found("p_dp0"))
    ranks.learn(1, found("p_dp1"))
    ranks.learn(1, found("p_dp1", "1"))
    assert ranks.wants_count and ranks.found(0) == found("p_dp0") and ranks.found(1) == found("p_dp1", "1")
    ranks.asking()
    ranks.counted(3)
    assert ranks.named == (0, 1, 2) and ranks.found(0) == found("p_dp0") and ranks.found(2) is None
    ranks.counted(1)
    assert ranks.named == () and ranks.found(0) is None and ranks.found(None) is None


def test_one_rank_of_an_external_balancer_is_known_from_its_first_answer() -> None:
    ranks = counted(1)
    assert ranks.named == () and ranks.found(None) == found("p_dp0")
    ranks.learn(None, found("p_dp0", "1"))
    assert ranks.found(None) == found("p_dp0", "1") and ranks.wants_count


@pytest.mark.parametrize("kind", ["one name", "two names", "uncountable"])
def test_engines_that_cannot_be_told_apart_are_tried_anew_later(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    ranks = Ranks("server", clock) if kind == "one name" else counted(2, clock)

    def mix() -> None:
        if kind == "one name":
            for name in "aba":
                ranks.learn(None, found(name))
        elif kind == "two names":
            for rank in (0, 1):
                ranks.learn(rank, found("p_dp0"))
        else:
            ranks.asking()
            ranks.uncountable()

    mix()
    for _ in range(3):
        assert ranks.named == () and not ranks.wants_count
        ranks.learn(None, found("a" if kind == "one name" else "p_dp1"))
        assert ranks.found(None) is None
    assert ranks.latest is not None
    clock.now += PULL_SECONDS + 1
    ranks.learn(None, found("a" if kind == "one name" else "p_dp1"))
    assert ranks.wants_count == (kind != "one name")
    assert (ranks.found(None) is not None) == (kind == "one name")
    if kind == "one name":
        mix()
        assert ranks.found(None) is None
    assert len(caplog.records) == 1 and "expected" in caplog.text


def test_many_starts_of_one_server_are_no_several_and_cost_no_memory() -> None:
    ranks = Ranks("server")
    for number in range(10 * MOST_FORMER):
        ranks.learn(None, found("p", f"{number:x}"))
        assert ranks.found(None) == ranks.latest is not None
    assert len(ranks._former) <= MOST_FORMER
