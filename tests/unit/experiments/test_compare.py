# SPDX-License-Identifier: Apache-2.0
"""The byte-equivalence comparison reports all differences, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments.byte_equivalence.compare import (
    Expected,
    Observation,
    catches,
    compare_answers,
    compare_groups,
    compare_senders,
    match_records,
    until_tie,
)
from experiments.byte_equivalence.pair_run import of_all_ranks
from experiments.common.client import Answer, HandOver, joined

ANSWER = Answer([5, 6, 7], [-0.1, -0.2, -0.3], [{"5": -0.1, "9": -2.0}, {"6": -0.2}, {"7": -0.3}])
DIGESTS = ["a", "b", "c"]
THREE = [Expected(3, 3, 3)]


def seen(received: list[str] | None, *, sent: list[str] = DIGESTS, remote: list[int] | None = None) -> Observation:
    """Return a hand-over of three blocks of which D received ``received`` (None: no record of a transfer)."""
    ids = list(range(len(sent)))
    record: dict[str, Any] = {"remote_block_ids": [ids if remote is None else remote], "digests": [received]}
    return Observation(HandOver(ANSWER, "r", [ids], [list(sent)]), None if received is None else record)


def aspects(observation: Observation, *, blocks: int = 3, fewest: int = 1) -> list[str]:
    """Return the aspects that differ."""
    return [one.aspect for one in compare_groups("p", observation, [Expected(blocks, blocks, fewest)])]


@pytest.mark.parametrize(
    ("found", "tolerance", "aspects"),
    [
        (ANSWER, 0.0, []),
        (replace(ANSWER, token_ids=[5, 6, 8]), None, ["tokens"]),
        (Answer([5, 6], [-0.1, -0.2], ANSWER.top_logprobs[:2]), 0.0, ["tokens", "log-probabilities"]),
        (replace(ANSWER, logprobs=[float("nan")] * 3), 1e9, ["log-probabilities"]),
        (replace(ANSWER, top_logprobs=[{"5": -0.1, "9": -2.5}, {}, {}]), 0.4, ["log-probabilities"]),
    ],
)
def test_answers(found: Answer, tolerance: float | None, aspects: list[str]) -> None:
    assert [one.aspect for one in compare_answers("p", ANSWER, found, tolerance)] == aspects


@pytest.mark.parametrize(
    ("gap", "tolerance", "reported"), [(0.01, 0.02, False), (0.01, 0.005, True), (0.0, 0.0, False)]
)
def test_log_probabilities_beyond_the_tolerance_are_reported(gap: float, tolerance: float, reported: bool) -> None:
    """The tolerance is the largest gap that passes."""
    moved = replace(ANSWER, logprobs=[ANSWER.logprobs[0] - gap, *ANSWER.logprobs[1:]])
    assert bool(compare_answers("p", ANSWER, moved, tolerance)) is reported


def of_tie(gap: float, *, token: int) -> Answer:
    """Three tokens, of which the second is one of two that are ``gap`` nats apart."""
    tops = [{"token_id:5": -0.1}, {"token_id:6": -0.5, "token_id:8": -0.5 - gap}, {f"token_id:{token + 1}": -0.3}]
    return Answer([5, token, token + 1], [-0.1, -0.5, -0.3], tops)


@pytest.mark.parametrize(("gap", "is_tie"), [(0.0, True), (0.25, True), (0.26, False), (2.0, False)])
def test_a_tie_that_rounding_decides_ends_the_comparison(gap: float, is_tie: bool) -> None:
    """With one row, a matrix product is rounded in another way on some processors: an Intel's AMX, in bfloat16."""
    one, other = of_tie(gap, token=6), of_tie(gap, token=8)
    assert bool(compare_answers("p", one, other, 0.125)) is not is_tie
    assert len(until_tie(one, other, 0.125)[0].token_ids) == (1 if is_tie else 3)
    # Between arms that hand over there is no tolerance.
    assert compare_answers("p", one, other, 0.0) if gap else not compare_answers("p", one, other, 0.0)


@pytest.mark.parametrize(
    ("observation", "blocks", "fewest", "expected"),
    [
        # D may have cached the start of the prompt: it receives the tail.
        *((seen(received), 3, 1, []) for received in (DIGESTS, ["b", "c"], ["c"])),
        *((seen(list(received)), 3, 1, ["blocks"]) for received in ("acb", "abx", "a", "ab")),
        # D computing the prompt itself gives right tokens, and is not a hand-over.
        (seen(None), 3, 1, ["hand-over"]),
        (seen([]), 3, 1, ["hand-over"]),
        # Blocks that neither travelled nor were cached were recomputed.
        (seen(["b", "c"]), 3, 3, ["hand-over"]),
        (seen(DIGESTS), 4, 1, ["hand-over"]),
        # Equal bytes from another block id are luck.
        (seen(DIGESTS, remote=[0, 1, 9]), 3, 1, ["hand-over"]),
    ],
)
def test_what_was_received_is_what_was_sent(
    observation: Observation, blocks: int, fewest: int, expected: list[str]
) -> None:
    assert aspects(observation, blocks=blocks, fewest=fewest) == expected


def test_a_corruption_is_caught_by_bytes_and_by_output() -> None:
    """The two ways to catch one are told apart."""
    damaged = seen(["a", "b", "x"])
    moved = replace(ANSWER, token_ids=[5, 6, 8])
    both = replace(damaged, hand_over=replace(damaged.hand_over, answer=moved))
    assert catches("p", ANSWER, both, THREE, tolerance=0.0) == (["blocks"], ["tokens"])
    assert catches("p", ANSWER, damaged, THREE, tolerance=0.0) == (["blocks"], [])


def test_senders_are_compared_over_full_blocks_only() -> None:
    """The unused end of a tail block holds whatever was there before."""
    ours, tail, start = (
        seen(DIGESTS).hand_over,
        seen([], sent=["a", "b", "x"]).hand_over,
        seen([], sent=["x", "b", "c"]),
    )
    assert compare_senders("p", ours, tail, full_blocks=2) == []
    assert compare_senders("p", ours, start.hand_over, full_blocks=2)


def test_what_p_sent_is_taken_from_its_records_where_the_client_could_not_look() -> None:
    """D was asked first: P's blocks are free when its answer comes."""
    pushed = {"transfer": "r", "block_ids": [[4]], "digests": [["a"]]}
    unseen = replace(seen([]).hand_over, sent_block_ids=[], sent_digests=[])
    looked_at = replace(unseen, sent_block_ids=[[1]], sent_digests=[["b"]])
    matched = match_records([unseen, looked_at], [], [pushed])
    assert [one.hand_over.sent_digests for one in matched] == [[["a"]], [["b"]]]
    assert matched[0].hand_over.sent_block_ids == [[4]]


def test_a_block_of_two_ranks_is_equal_where_both_parts_are() -> None:
    """Per group and block, in the ranks' order: either part that differs changes it."""
    one, other = [["a", "b"], ["c"]], [["d", "e"], ["f"]]
    assert joined([one]) == one
    assert joined([one, other]) == [["a+d", "b+e"], ["c+f"]]
    assert joined([one, other]) != joined([other, one])
    assert joined([]) == []


def test_a_transfer_is_recorded_when_every_rank_has_recorded_it() -> None:
    """In any order of theirs; one that a rank has not reported yet is not there."""
    first = [{"transfer": "x", "digests": [["a"]]}, {"transfer": "y", "digests": [["b"]]}]
    second = [{"transfer": "z", "digests": [["e"]]}, {"transfer": "x", "digests": [["d"]]}]
    assert of_all_ranks([first]) == first
    assert of_all_ranks([first, second]) == [{"transfer": "x", "digests": [["a+d"]]}]
    assert of_all_ranks([]) == of_all_ranks([[], []]) == []
