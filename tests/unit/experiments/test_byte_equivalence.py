# SPDX-License-Identifier: Apache-2.0
"""experiments/byte_equivalence reports all differences, and nothing else: what is compared, what is expected of each
KV-cache group, which damages are planted, and what a run concludes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="needs an environment: bash experiments/env.sh")

from experiments.__main__ import parse
from experiments.byte_equivalence import run
from experiments.byte_equivalence.arms import ARMS, Arm, of_size
from experiments.byte_equivalence.compare import (
    Check,
    Difference,
    Expected,
    catches,
    compare_answers,
    compare_groups,
    compare_senders,
    compared,
    match_records,
    until_tie,
)
from experiments.byte_equivalence.harness import came_back, remapped
from experiments.byte_equivalence.pair_run import Dependence, of_all_ranks
from experiments.byte_equivalence.run import exit_status, summary, summary_of
from experiments.byte_equivalence.subjects import (
    CORRUPTIONS,
    DAMAGED_BLOCKS,
    DAMAGED_TOKENS,
    Group,
    Prompt,
    corruptions_of,
    damage_prompts,
    fewest_received,
    may_be_cached,
)
from experiments.common.client import Answer, HandOver, joined
from experiments.common.counted import PageCount
from experiments.common.report import Run
from experiments.common.servers import ServerError

ROOT = Path(__file__).parents[3]

ANSWER = Answer([5, 6, 7], [-0.1, -0.2, -0.3], [{"5": -0.1, "9": -2.0}, {"6": -0.2}, {"7": -0.3}])
DIGESTS = ["a", "b", "c"]
THREE = [Expected(3, 3, 3)]


def seen(received: list[str] | None, *, sent: list[str] = DIGESTS, remote: list[int] | None = None) -> HandOver:
    """Return a hand-over of three blocks of which D received ``received`` (None: no record of a transfer)."""
    ids = list(range(len(sent)))
    record: dict[str, Any] = {"remote_block_ids": [ids if remote is None else remote], "digests": [received]}
    return HandOver(ANSWER, "r", [ids], [list(sent)], None if received is None else record)


@pytest.mark.parametrize(
    ("found", "tolerance", "aspects"),
    [
        (ANSWER, 0.0, []),
        (replace(ANSWER, token_ids=[5, 6, 8]), None, ["tokens"]),
        (Answer([5, 6], [-0.1, -0.2], ANSWER.top_logprobs[:2]), 0.0, ["tokens", "log-probabilities"]),
        (replace(ANSWER, logprobs=[float("nan")] * 3), 1e9, ["log-probabilities"]),
        (replace(ANSWER, top_logprobs=[{"5": -0.1, "9": -2.5}, {}, {}]), 0.4, ["log-probabilities"]),
        # The tolerance is the largest gap that passes.
        (replace(ANSWER, logprobs=[-0.11, -0.2, -0.3]), 0.02, []),
        (replace(ANSWER, logprobs=[-0.11, -0.2, -0.3]), 0.005, ["log-probabilities"]),
    ],
)
def test_answers(found: Answer, tolerance: float | None, aspects: list[str]) -> None:
    assert [one.aspect for one in compare_answers("p", ANSWER, found, tolerance)] == aspects


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
    observation: HandOver, blocks: int, fewest: int, expected: list[str]
) -> None:
    found = compare_groups("p", observation, [Expected(blocks, blocks, fewest)])
    assert [one.aspect for one in found] == expected


def test_a_corruption_is_caught_by_bytes_and_by_output() -> None:
    """The two ways to catch one are told apart."""
    damaged = seen(["a", "b", "x"])
    moved = replace(ANSWER, token_ids=[5, 6, 8])
    both = replace(damaged, answer=moved)
    assert catches("p", ANSWER, both, THREE, tolerance=0.0) == (["blocks"], ["tokens"])
    assert catches("p", ANSWER, damaged, THREE, tolerance=0.0) == (["blocks"], [])


def test_senders_are_compared_over_full_blocks_only() -> None:
    """The unused end of a tail block holds whatever was there before."""
    ours, tail, start = (seen([], sent=list(sent)) for sent in ("abc", "abx", "xbc"))
    assert compare_senders("p", ours, tail, full_blocks=2) == []
    assert compare_senders("p", ours, start, full_blocks=2)


def test_what_p_sent_is_taken_from_its_records_where_the_client_could_not_look() -> None:
    """D was asked first: P's blocks are free when its answer comes."""
    pushed = {"transfer": "r", "block_ids": [[4]], "digests": [["a"]]}
    unseen = replace(seen([]), sent_block_ids=[], sent_digests=[])
    looked_at = replace(unseen, sent_block_ids=[[1]], sent_digests=[["b"]])
    matched = match_records([unseen, looked_at], [], [pushed])
    assert [one.sent_digests for one in matched] == [[["a"]], [["b"]]]
    assert matched[0].sent_block_ids == [[4]]


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


FULL, WINDOW, STATE = Group(32, None, False, 2), Group(64, 128, False, 2), Group(160, None, True, 2)


def prompt(num_tokens: int, family: str | None = None) -> Prompt:
    return Prompt("p", tuple(range(num_tokens)), family)


@pytest.mark.parametrize(
    ("group", "num_tokens", "shared", "has_states", "recomputes", "expected"),
    [
        (FULL, 33, 0, False, False, Expected(2, 2, 2, 0)),
        (FULL, 33, 0, False, True, Expected(2, 2, 1, 1)),
        (FULL, 33, 0, True, True, Expected(1, 1, 1, 0)),
        (FULL, 100, 64, False, False, Expected(4, 4, 2, 0)),
        (WINDOW, 400, 0, False, True, Expected(2, 7, 0, 0)),
        (WINDOW, 65, 0, False, True, Expected(2, 2, 0, 1)),
        (STATE, 700, 0, True, True, Expected(1, 1, 1, 0)),
    ],
)
def test_what_travels_of_a_group_follows_from_what_it_keeps(
    group: Group, num_tokens: int, shared: int, has_states: bool, recomputes: bool, expected: Expected
) -> None:
    """With states, prefill has one token less; with windows, decode takes one less."""
    found = group.expected(prompt(num_tokens), shared, has_states=has_states, recomputes_last=recomputes)
    assert found == expected


def test_decode_may_have_all_but_the_last_token_of_a_prompt_that_began_like_another() -> None:
    assert may_be_cached(prompt(65, "f"), [FULL, WINDOW, STATE])
    assert not may_be_cached(prompt(65), [FULL, WINDOW])
    assert not may_be_cached(prompt(33, "f"), [FULL, WINDOW])


def test_each_kind_of_group_is_damaged_in_its_own_ways() -> None:
    found = [(one.kind, one.group) for one in corruptions_of([STATE, STATE, FULL, WINDOW])]
    assert found == [
        *(("swap_two_blocks", 2), ("zero_a_block", 2), ("drop_tail_block", 2), ("older_blocks", 3)),
        *(("drop_tail_block", 0), ("zero_a_block", 0), ("state_of_another_token", 0), ("state_of_another_token", 0)),
        *(("swap_two_layers", 0), ("swap_two_groups", 0)),
    ]
    kept = [one.kept_tokens for one in corruptions_of([STATE]) if one.kept_tokens]
    # States are kept behind every 160 tokens, and behind the last but one.
    assert kept == [DAMAGED_TOKENS - 1, 1120 + 1]
    assert [one.kind for one in corruptions_of([FULL])] == ["swap_two_blocks", "zero_a_block", "drop_tail_block"]
    assert not any(one.changes_output for one in corruptions_of([FULL]) if one.kind == "swap_two_blocks")


BLOCK = 32


def test_the_damaged_prompts_share_no_block() -> None:
    """A block that an earlier request left behind is never right by luck."""
    blocks = [
        prompt.token_ids[start : start + BLOCK]
        for prompt in damage_prompts(6, block_size=BLOCK, vocabulary=512)
        for start in range(0, len(prompt.token_ids), BLOCK)
    ]
    assert len(blocks) == 6 * DAMAGED_BLOCKS == len(set(blocks))


@pytest.mark.parametrize(
    ("tokens", "common", "family", "fewest"),
    [
        (100, 70, "f", 2),  # two whole blocks are common, two more travel
        (100, 70, None, 4),  # nothing is shared outside a family
        (64, 64, "f", 1),  # the last token is always computed, so its block always travels
        (65, 64, "f", 1),
        (31, 31, "f", 1),
    ],
)
def test_the_fewest_blocks_that_must_travel(tokens: int, common: int, family: str | None, fewest: int) -> None:
    """Only whole common blocks of the same family stay at home."""
    earlier = Prompt("earlier", tuple(range(common)) + (9999,), family)
    assert fewest_received(prompt(tokens, family), [earlier], BLOCK) == fewest


EQUAL = Check("arm", "tokens", True, "30 prompts")
UNEQUAL = compared("arm", "tokens", [Difference("p", "tokens", "[red]found[/red] 1, expected 2")], "30 prompts")
NOT_STARTED = Check("arm", "serves", False, "no", failed_setup=True)


@pytest.mark.parametrize(
    ("rows", "status"),
    [([EQUAL], 0), ([EQUAL, UNEQUAL], 1), ([NOT_STARTED, EQUAL], 2), ([NOT_STARTED, UNEQUAL], 1), ([], 2)],
)
def test_the_exit_status_tells_a_difference_from_a_failed_set_up(rows: list[Check], status: int) -> None:
    """A difference outweighs a server that did not start; having checked nothing is no success."""
    assert exit_status(summary_of(rows)) == status


PAGE_GROUP = 16 << 20


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # Growing alone is no proof that pages were mapped again.
        (remapped("arm", "what", PageCount(5, 9, 1, 3, 2, 2, 2)).passed, True),
        (remapped("arm", "what", PageCount(5, 9, 1, 3, 2)).passed, False),
        # Every round has to end with one page group; never having looked is no success.
        (came_back("arm", "what", [PAGE_GROUP] * 2, PAGE_GROUP).passed, True),
        (came_back("arm", "what", [PAGE_GROUP, 2 * PAGE_GROUP], PAGE_GROUP).passed, False),
        (came_back("arm", "what", [], PAGE_GROUP).passed, False),
        # Noise that looks like dependence, an unseen block, and an empty trial prove nothing.
        (Dependence(3, 0.0, {0: 0.1, 1: 0.2}).proved, True),
        (Dependence(3, 0.01, {0: 0.1}).proved, False),
        (Dependence(3, 0.0, {0: 0.1, 1: 0.0}).proved, False),
        (Dependence(3, 0.0, {}).proved, False),
    ],
)
def test_what_proves_nothing_fails(found: bool, expected: bool) -> None:
    assert found is expected


def test_every_corruption_of_the_promise_is_planted() -> None:
    """Swapped, shifted, dropped, K for V, read too early; all but the invisible swap must show in the output too."""
    kinds = {corruption.kind for corruption in CORRUPTIONS}
    assert kinds == {"swap_two_blocks", "shift_v_by_a_head", "drop_tail_block", "send_k_for_v", "zero_a_block"}
    assert [one.words for one in CORRUPTIONS if not one.changes_output] == ["two full blocks swapped"]


def test_a_run_has_the_arms_whose_layout_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.29 on attention says which layouts it takes, and that of CPUs takes none with all layers in a block."""
    for has_gpu, vllm, expected in ((False, "0.28.0", True), (False, "0.30.0", False), (True, "0.30.0", True)):
        monkeypatch.setattr("experiments.common.device.has_gpu", lambda has_gpu=has_gpu: has_gpu)
        assert any(" contiguous" in arm.name for arm in of_size("brief", vllm)) is expected
    assert of_size("full", "0.28.0") == list(ARMS)


STOCK, PULL, PUSH = ARMS[1:4]


def row_of(arm: Arm, **changes: object) -> dict[str, object]:
    return {"arm": arm.name, "check": "tokens", "passed": True, **changes}


def test_what_was_not_run_again_stays_with_the_commit_it_is_of(tmp_path: Path) -> None:
    """Rows of the arms that were run are replaced as a whole."""
    file, new = tmp_path / "last-1.json", [row_of(PULL)]
    assert summary(new, file, [PULL]) == {"verdict": "equal", "missing": [], "checks": new}
    assert summary(new, file, [PUSH, PULL])["missing"] == [PUSH.name]
    old = [row_of(PULL, passed=False), row_of(PUSH), row_of(STOCK, commit="older")]
    file.write_text(json.dumps({"commit": "old", "checks": old}))
    whole = [row_of(PUSH, commit="old"), row_of(STOCK, commit="older"), *new]
    assert summary(new, file, [STOCK, PULL, PUSH]) == {"verdict": "equal", "missing": [], "checks": whole}


@pytest.mark.parametrize(
    ("options", "modes", "file"),
    [
        ([], {"pull", "push"}, "last-0.28.0.json"),
        (["--mode", "push"], {"push"}, "last-0.28.0.json"),
        (["--mode", "pull", "--quick"], {"pull"}, "last-0.28.0-quick.json"),
        (["--mode", "pull", "--brief"], {"pull"}, None),
        (["--mode", "push", "--model", "gemma4"], {"push"}, "last-0.28.0-gemma4.json"),
        (["--mode", "push", "--only", "staged", "--only", "2P"], {"push"}, "last-0.28.0.json"),
    ],
)
def test_a_mode_is_compared_alone(
    options: list[str], modes: set[str], file: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The results keep the rows of the other mode's arms, or say that they are missing."""
    arms: list[Arm] = []

    class Harness:
        def __init__(self, subject: object, chosen: list[Arm], run: Run) -> None:
            arms.extend(chosen)
            self.rows = [Check(arm.name, "tokens", True, "1 prompt") for arm in chosen]

        def run(self) -> None:
            pass

    monkeypatch.setattr(run, "Harness", Harness)
    kept = row_of(PULL, commit="old")
    for path in () if file is None else (tmp_path / file,):
        path.write_text(json.dumps({"commit": "old", "checks": [kept]}))
    asked = Run(parse(["byte_equivalence", "--vllm", "0.28.0", *options]), tmp_path)
    assert run.main(asked) == 0
    assert {arm.mode for arm in arms} == modes
    written = {one.name for one in tmp_path.glob("last-*")}
    assert written == ({file} if file else set())
    if modes == {"push"}:
        assert kept in json.loads((tmp_path / str(file)).read_text())["checks"]


@pytest.mark.parametrize("words", [["pull"], ["push", "pull"]])
def test_a_word_that_fits_no_arm_is_refused(words: list[str], tmp_path: Path) -> None:
    only = [each for word in words for each in ("--only", word)]
    with pytest.raises(ServerError, match="found none that fits --only 'pull'; there are: kvcached P/D"):
        run.main(Run(parse(["byte_equivalence", "--mode", "push", "--brief", *only]), tmp_path))


def test_help_needs_no_environment() -> None:
    """``--help`` works with an interpreter that has nothing installed, and explains the exit statuses."""
    command = [sys.executable, "-S", "-E", "-m", "experiments", "byte_equivalence", "--help"]
    assert "exit status" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
