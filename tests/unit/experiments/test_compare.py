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
    compare_blocks,
    compare_senders,
    largest_logprob_gap,
    match_records,
    until_tie,
)
from experiments.common.client import Answer, HandOver, joined, of_all_ranks, per_group

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
    return [one.aspect for one in compare_blocks("p", observation, blocks=blocks, fewest_received=fewest)]


def test_equal_answers_have_no_difference() -> None:
    """An answer equals itself, at no tolerance at all."""
    assert compare_answers("p", ANSWER, ANSWER, 0.0) == []


def test_one_other_token_is_reported_with_its_place() -> None:
    """A single token that differs is a difference, and the text says where."""
    (found,) = compare_answers("p", ANSWER, replace(ANSWER, token_ids=[5, 6, 8]), None)
    assert found.aspect == "tokens"
    assert "token 2" in found.text


def test_an_answer_cut_short_is_reported() -> None:
    """A prefix of the right tokens is not the right answer."""
    short = Answer([5, 6], [-0.1, -0.2], ANSWER.top_logprobs[:2])
    assert [one.aspect for one in compare_answers("p", ANSWER, short, 0.0)] == ["tokens", "log-probabilities"]


@pytest.mark.parametrize(
    ("gap", "tolerance", "reported"), [(0.01, 0.02, False), (0.01, 0.005, True), (0.0, 0.0, False)]
)
def test_log_probabilities_beyond_the_tolerance_are_reported(gap: float, tolerance: float, reported: bool) -> None:
    """The tolerance is the largest gap that passes."""
    moved = replace(ANSWER, logprobs=[ANSWER.logprobs[0] - gap, *ANSWER.logprobs[1:]])
    assert bool(compare_answers("p", ANSWER, moved, tolerance)) is reported


def test_alternatives_count_too() -> None:
    """A log-probability that only an alternative has wrong is seen."""
    moved = replace(ANSWER, top_logprobs=[{"5": -0.1, "9": -2.5}, *ANSWER.top_logprobs[1:]])
    assert largest_logprob_gap(ANSWER, moved) == pytest.approx(0.5)


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


def test_a_tie_needs_both_tokens_on_both_sides() -> None:
    """What one side did not think of is no tie; and what came before it is compared all the same."""
    one, other = of_tie(0.0, token=6), of_tie(0.0, token=8)
    assert compare_answers("p", one, replace(other, top_logprobs=[{}, {"token_id:8": -0.5}, {}]), 0.125)
    assert compare_answers("p", one, replace(other, top_logprobs=[]), 0.125)
    assert compare_answers("p", one, replace(other, logprobs=[-0.5, *other.logprobs[1:]]), 0.125)


def test_a_log_probability_that_is_no_number_is_reported() -> None:
    """NaN is not within any tolerance."""
    broken = replace(ANSWER, logprobs=[float("nan")] * 3)
    assert compare_answers("p", ANSWER, broken, 1e9)


@pytest.mark.parametrize("received", [DIGESTS, ["b", "c"], ["c"]])
def test_a_received_tail_equals_what_was_sent(received: list[str]) -> None:
    """D may have cached the start of the prompt: it receives the tail."""
    assert aspects(seen(received)) == []


@pytest.mark.parametrize("received", [["a", "c", "b"], ["a", "b", "x"], ["a"], ["a", "b"]])
def test_other_bytes_on_d_are_reported(received: list[str]) -> None:
    """Swapped, changed and misplaced blocks are differences in bytes."""
    assert aspects(seen(received)) == ["blocks"]


def test_a_request_without_a_transfer_is_reported() -> None:
    """D computing the prompt itself gives right tokens, and is not a hand-over."""
    assert aspects(seen(None)) == ["hand-over"]


def test_receiving_nothing_is_reported() -> None:
    """A transfer of no blocks compares nothing."""
    assert aspects(seen([])) == ["hand-over"]


def test_receiving_fewer_blocks_than_the_prefix_cache_explains_is_reported() -> None:
    """Blocks that neither travelled nor were cached were recomputed."""
    assert aspects(seen(["b", "c"]), fewest=3) == ["hand-over"]


def test_an_offer_of_another_size_than_the_prompt_is_reported() -> None:
    """P must offer as many blocks as the prompt fills."""
    assert aspects(seen(DIGESTS), blocks=4) == ["hand-over"]


def test_reading_other_blocks_than_offered_is_reported() -> None:
    """Equal bytes from another block id are luck."""
    assert aspects(seen(DIGESTS, remote=[0, 1, 9])) == ["hand-over"]


def test_a_missing_group_is_reported() -> None:
    """All KV-cache groups travel."""
    observation = seen(DIGESTS)
    two = replace(observation.hand_over, sent_block_ids=[[0, 1, 2], [3]], sent_digests=[DIGESTS, ["d"]])
    assert "hand-over" in aspects(replace(observation, hand_over=two))


def test_a_corruption_is_caught_by_bytes_and_by_output() -> None:
    """The two ways to catch one are told apart."""
    damaged = seen(["a", "b", "x"])
    moved = replace(ANSWER, token_ids=[5, 6, 8])
    both = replace(damaged, hand_over=replace(damaged.hand_over, answer=moved))
    assert catches("p", ANSWER, both, THREE, tolerance=0.0) == (["blocks"], ["tokens"])
    assert catches("p", ANSWER, damaged, THREE, tolerance=0.0) == (["blocks"], [])


def test_a_missing_transfer_does_not_count_as_caught_by_bytes() -> None:
    """A corruption that was never applied cannot be caught."""
    assert catches("p", ANSWER, seen(None), THREE, tolerance=0.0) == ([], [])


def test_senders_are_compared_over_full_blocks_only() -> None:
    """The unused end of a tail block holds whatever was there before."""
    ours, tail, start = (
        seen(DIGESTS).hand_over,
        seen([], sent=["a", "b", "x"]).hand_over,
        seen([], sent=["x", "b", "c"]),
    )
    assert compare_senders("p", ours, tail, full_blocks=2) == []
    assert compare_senders("p", ours, start.hand_over, full_blocks=2)


def test_records_are_matched_by_the_id_on_p() -> None:
    """Records come in the order transfers finish; hand-overs in the order they were asked."""
    first, second = (replace(seen([]).hand_over, transfer=name) for name in ("one", "two"))
    matched = match_records([first, second], [{"transfer": name, "request_id": ""} for name in ("two", "one")])
    assert [one.record and one.record["transfer"] for one in matched] == ["one", "two"]


def test_what_d_asked_for_is_found_by_the_clients_id() -> None:
    """Of a request for which D asked nobody there is no record."""
    first, other = (replace(seen([]).hand_over, transfer=name) for name in ("one", "two"))
    matched = match_records([first, other], [{"transfer": "t", "request_id": "cmpl-one-0-0123abcd"}])
    assert [one.record and one.record["transfer"] for one in matched] == ["t", None]


def test_what_p_sent_is_taken_from_its_records_where_the_client_could_not_look() -> None:
    """D was asked first: P's blocks are free when its answer comes."""
    pushed = {"transfer": "r", "block_ids": [[4]], "digests": [["a"]]}
    unseen = replace(seen([]).hand_over, sent_block_ids=[], sent_digests=[])
    looked_at = replace(unseen, sent_block_ids=[[1]], sent_digests=[["b"]])
    matched = match_records([unseen, looked_at], [], [pushed])
    assert [one.hand_over.sent_digests for one in matched] == [[["a"]], [["b"]]]
    assert matched[0].hand_over.sent_block_ids == [[4]]


def test_a_flat_list_of_block_ids_is_one_group() -> None:
    """Connectors before KV-cache groups sent one list."""
    assert per_group([3, 4]) == per_group([[3, 4]]) == [[3, 4]]


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
