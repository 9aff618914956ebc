# SPDX-License-Identifier: Apache-2.0
"""Exit statuses, arms and the command line of the byte-equivalence harness."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.byte_equivalence import __main__ as cli
from experiments.byte_equivalence import comparison, harness
from experiments.byte_equivalence import run as last
from experiments.byte_equivalence.arm_run import CORRUPTIONS, Dependence
from experiments.byte_equivalence.arms import ARMS, Arm, of_size, phases, small_pool, specs
from experiments.byte_equivalence.compare import Difference
from experiments.byte_equivalence.comparison import Check, compared, exit_status, summary_of
from experiments.byte_equivalence.harness import Baseline, Harness
from experiments.common.command_line import DEFAULT_VLLM
from experiments.common.model import GQA
from experiments.common.report import Narrator
from experiments.common.servers import ServerError

ROOT = Path(__file__).parents[3]
EQUAL = Check("arm", "tokens", True, "30 prompts")
UNEQUAL = compared("arm", "tokens", [Difference("p", "tokens", "[red]found[/red] 1, expected 2")], "30 prompts")
NOT_STARTED = Check("arm", "serves", False, "no", failed_setup=True)


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([EQUAL], 0),
        ([EQUAL, UNEQUAL], 1),
        ([NOT_STARTED, EQUAL], 2),
        ([NOT_STARTED, UNEQUAL], 1),
        ([], 2),
    ],
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


def test_stock_arms_do_not_know_kvcached(tmp_path: Path) -> None:
    """A stock arm's servers get no setting of kvcached, whatever pool the phase has."""
    for arm in ARMS:
        for spec in specs(arm, tmp_path, "float32", small_pool(16 << 20, 5)):
            assert arm.kvcached is any("KVCACHED" in name for name in spec.environment)


def test_a_run_has_the_arms_whose_layout_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.29 on attention says which layouts it takes, and that of CPUs takes none with all layers in a block."""
    for has_gpu, vllm, expected in ((False, "0.28.0", True), (False, "0.30.0", False), (True, "0.30.0", True)):
        monkeypatch.setattr("experiments.common.device.has_gpu", lambda has_gpu=has_gpu: has_gpu)
        assert any(" contiguous" in arm.name for arm in of_size("brief", vllm)) is expected
    assert of_size("full", "0.28.0") == list(ARMS)


def test_servers_that_do_not_start_are_a_row_and_the_next_arm_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One arm that cannot serve must not cost what the others would have shown."""

    class Launched:
        stopped = 0

        def __init__(self, made: object, logs: Path, say: object) -> None:
            self.names = [spec.name for spec in made]  # type: ignore[attr-defined]

        def __enter__(self) -> Launched:
            return self

        def __exit__(self, *_: object) -> None: ...

        def ready(self) -> list[object]:
            if any("non-contiguous" in name for name in self.names):
                raise ServerError("status 1")
            return []

        def stop(self) -> None:
            Launched.stopped += 1

    async def served(run: object) -> None: ...

    monkeypatch.setattr(harness, "Running", Launched)
    monkeypatch.setattr(harness, "Asking", Launched)
    monkeypatch.setattr(harness, "make_model", lambda shape: tmp_path)
    monkeypatch.setattr(harness.Harness, "_reference", lambda *_: Baseline([], []))
    monkeypatch.setattr(comparison, "with_pairs", lambda *_: asyncio.sleep(0))
    brief = [arm for arm in ARMS if arm.in_runs == "brief"]
    made = Harness(brief[::-1], tmp_path, Narrator("test"), quick=True)
    made.run()
    assert [(row.arm, row.passed, row.failed_setup) for row in made.rows] == [(brief[1].name, False, True)]
    assert Launched.stopped == 2


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
        [sys.executable, "-S", "-E", "-m", "experiments.byte_equivalence", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "exit status" in found.stdout


def test_the_command_line_has_the_promised_options() -> None:
    """``--vllm``, ``--mode``, ``--quick`` and ``--brief``; the newest vLLM unless told otherwise."""
    usual = {"vllm": DEFAULT_VLLM, "mode": None, "size": "full", "arm": [], "model": None}
    assert vars(cli.parse([])) == usual
    assert cli.parse(["--brief"]).size == "brief"
    found = vars(cli.parse(["--vllm", "0.28.0", "--mode", "pull", "--quick"]))
    assert found == {**usual, "vllm": "0.28.0", "mode": "pull", "size": "quick"}
