# SPDX-License-Identifier: Apache-2.0
"""The plan of test runs (``tests/plan.py``): every job runs in some turn, and no run exceeds its time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import plan
import pytest
from plan import BUDGET_MINUTES, MINUTES, SERVED, TIERS, Job

TESTS = Path(__file__).resolve().parents[1]
NUMBERS = range(len(plan.everything()))


def test_every_test_is_in_some_job() -> None:
    """A new folder or a new file of the slowest tier would else never run."""
    folders = {path.parent.name for path in TESTS.rglob("test_*.py") if path.parent.parent == TESTS}
    nested = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders | nested == set(TIERS) - {"lint", "coverage", "equivalence", "pythons"}
    files = {f"e2e/{path.name}" for path in (TESTS / "e2e").glob("test_*.py")}
    files |= {f"stacks/{path.name}" for path in (TESTS / "stacks").glob("test_*.py")}
    assert {what for what in MINUTES if what.startswith(("e2e/", "stacks/"))} == files
    assert {what.partition("/")[0] for what in MINUTES} == set(TIERS)
    assert not [*TESTS.rglob("*.orig"), *TESTS.rglob("*.rej")], "left by a merge or a patch"


def test_the_eight_newest_series_are_supported() -> None:
    """One comes, one goes: each costs a tenth of all the minutes, and code that nothing else needs."""
    assert len(plan.ROWS) == 8


def test_everything_is_everything_once() -> None:
    """Each tier, each supported vLLM."""
    jobs = plan.everything()
    assert len(set(jobs)) == len(jobs)
    assert {job.tier for job in jobs} == set(TIERS)
    assert {job.size for job in jobs if job.what != "equivalence/V2"} == {"whole"}
    for tier in ("contract", "equivalence"):
        assert {job.vllm for job in jobs if job.tier == tier} == {row.tested for row in plan.ROWS}


def test_a_newcomer_waits_12_minutes() -> None:
    """After the environment is there; by the estimates."""
    jobs = plan.newcomer("0.28.0")
    assert {job.tier for job in jobs} == set(plan.NEWCOMER) and {job.vllm for job in jobs} == {"0.28.0"}
    assert round(sum(job.minutes for job in jobs), 1) <= 12


@pytest.mark.parametrize("vllm", ["0.30.0", "0.26.0"])
def test_a_newcomer_with_another_vllm_sees_as_much(vllm: str) -> None:
    jobs = plan.newcomer(vllm)
    assert {job.tier for job in jobs} == set(plan.NEWCOMER)
    assert sum(job.minutes for job in jobs) <= 25


@pytest.mark.parametrize("number", NUMBERS)
def test_a_turn_fits_and_has_what_is_run_each_time(number: int) -> None:
    """The newest vLLM that servers are tested with, and one of the others, however full the turn."""
    jobs = plan.turn(number)
    assert len(set(jobs)) == len(jobs)
    assert plan.minutes(jobs) <= BUDGET_MINUTES
    for tier in ("contract", "equivalence"):
        assert len({job.vllm for job in jobs if job.tier == tier} & set(SERVED)) >= 2
        assert plan.NEWEST in {job.vllm for job in jobs if job.tier == tier}
    assert {"lint", "coverage", "repo", "install", "gpu", "stacks"} <= {job.tier for job in jobs}


def test_successive_turns_take_successive_vllms() -> None:
    """Of those that servers are tested with."""
    for number in NUMBERS:
        turns = [plan.turn(number + step) for step in range(len(SERVED) - 1)]
        brief = {job.vllm for jobs in turns for job in jobs if job.tier == "contract"}
        assert brief >= set(SERVED)


def test_the_turns_of_so_many_commits_leave_nothing_out() -> None:
    """Whatever is too much for one turn comes first in another."""
    seen = {job for number in NUMBERS for job in plan.turn(number)}
    assert set(plan.everything()) <= seen


def test_what_a_turn_leaves_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """In the form in which tests/run.sh prints it."""
    assert plan.main(["turn", "--number", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}
    left_out = {line.removeprefix("# ") for line in lines if line.startswith("#")}
    assert left_out and said == {str(job) for job in plan.turn(3)}
    assert left_out == {str(job) for job in plan.everything()} - said


def test_named_tiers_are_whole_and_those_without_vllm_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    """With each vLLM that is chosen; an unknown tier is refused."""
    assert plan.named(["unit", "contract"], ["0.26.0", "0.28.0"]) == [
        Job("unit", "0.28.0"),
        Job("contract", "0.26.0"),
        Job("contract", "0.28.0"),
    ]
    assert plan.main(["all", "unti"]) == 2
    assert "found 'all' among tiers" in capsys.readouterr().err
    assert plan.main(["unti"]) == 2
    assert "found the tier 'unti'; expected one of: lint" in capsys.readouterr().err


TOTALS = Path(__file__).parents[1] / "totals.py"
SUITE = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}" time="{}"/></testsuites>'


@pytest.mark.parametrize(
    ("suites", "line", "status"),
    [
        ([(3, 0, 0, 1, 1.5), (4, 1, 1, 0, 2.0)], "1 failed, 4 passed, 1 skipped, 1 errors in 3.50s", 0),
        ([(3, 0, 0, 3, 1.5)], "no test was run: 3 were skipped", 1),
        ([], "no test was run: 0 were skipped", 1),
    ],
)
def test_the_last_line(suites: list[tuple[object, ...]], line: str, status: int, tmp_path: Path) -> None:
    for number, suite in enumerate(suites):
        (tmp_path / f"{number}.xml").write_text(SUITE.format(*suite))
    ended = subprocess.run([sys.executable, TOTALS, tmp_path], capture_output=True, text=True, check=False)
    assert line in ended.stdout + ended.stderr
    assert ended.returncode == status
