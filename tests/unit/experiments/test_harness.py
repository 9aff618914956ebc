# SPDX-License-Identifier: Apache-2.0
"""Exit statuses, arms and the command line of the byte-equivalence harness."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.byte_equivalence import rows as last
from experiments.byte_equivalence.arms import ARMS, Arm, of_size
from experiments.byte_equivalence.compare import Difference
from experiments.byte_equivalence.pair_run import CORRUPTIONS, Dependence
from experiments.byte_equivalence.rows import Check, came_back, compared, exit_status, remapped, summary_of
from experiments.byte_equivalence.subjects import phases
from experiments.common.model import GQA
from experiments.common.pages import PageCount

ROOT = Path(__file__).parents[3]
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


def test_dependence_is_proved_only_if_repeating_changes_nothing() -> None:
    """Noise that looks like dependence, an unseen block, and an empty trial prove nothing."""
    assert Dependence(3, 0.0, {0: 0.1, 1: 0.2}).proved
    assert not Dependence(3, 0.01, {0: 0.1}).proved
    assert not Dependence(3, 0.0, {0: 0.1, 1: 0.0}).proved
    assert not Dependence(3, 0.0, {}).proved


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


FULL = phases(GQA, quick=False)
CONTIGUOUS = ("kvcached P/D, contiguous, pull", "kvcached P/D, contiguous, push")
STOCK, PULL, PUSH = (arm for arm in ARMS if arm.name in ("stock P/D, pull", *CONTIGUOUS))


def rows_of(arm: Arm, **changes: object) -> list[dict[str, object]]:
    return [{"arm": arm.name, "check": check, "passed": True, **changes} for check in last._needed(arm, FULL)]


def test_what_was_not_run_again_stays_with_the_commit_it_is_of(tmp_path: Path) -> None:
    """Rows of the arms that were run are replaced as a whole."""
    file = tmp_path / "last-1.json"
    new = rows_of(PULL)
    whole = last.summary(new, file, [PULL], FULL)
    assert whole == {"verdict": "equal", "missing": [], "checks": new}
    old = [*rows_of(PULL, passed=False), *rows_of(PUSH), *rows_of(STOCK, commit="older")]
    file.write_text(json.dumps({"commit": "old", "checks": old}))
    found = last.summary(new, file, [STOCK, PULL, PUSH], FULL)
    assert found["verdict"] == "equal" and found["missing"] == []
    assert found["checks"] == [*rows_of(PUSH, commit="old"), *rows_of(STOCK, commit="older"), *new]


def test_the_rows_that_are_needed_are_those_that_a_run_gives() -> None:
    """Rows are named as in the committed results; a name without results would make every arm missing."""
    found = json.loads((ROOT / "experiments/byte_equivalence/results/last-0.28.0.json").read_text())
    given = {(row["arm"], row["check"]) for row in found["checks"]}
    for arm in (ARMS[0], STOCK, PULL, PUSH):
        assert {(arm.name, check) for check in last._needed(arm, FULL)} <= given


def test_help_needs_no_environment() -> None:
    """``--help`` works with an interpreter that has nothing installed, and explains the exit statuses."""
    found = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "experiments", "byte_equivalence", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "exit status" in found.stdout


PAGE_GROUP = 16 << 20


@pytest.mark.parametrize(
    ("counted", "passed"), [(PageCount(5, 9, 1, 3, 2, 2, 2), True), (PageCount(5, 9, 1, 3, 2), False)]
)
def test_a_run_that_remapped_nothing_fails(counted: PageCount, passed: bool) -> None:
    """Growing alone is no proof."""
    assert remapped("arm", "what", counted).passed is passed


@pytest.mark.parametrize(
    ("resting", "passed"), [([PAGE_GROUP] * 2, True), ([PAGE_GROUP, 2 * PAGE_GROUP], False), ([], False)]
)
def test_memory_that_did_not_come_back_fails(resting: list[int], passed: bool) -> None:
    """Every round has to end with one page group; never having looked is no success."""
    assert came_back("arm", "what", resting, PAGE_GROUP).passed is passed
