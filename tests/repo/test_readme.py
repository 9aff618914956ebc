# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ repeat agrees with the code and the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.matrix import markdown

from experiments.__main__ import QUESTIONS
from kvcached_nixl.vllm.adapter.versions import KVCACHED_SUPPORTED, ROWS, Evidence

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
SUPPORT = (REPOSITORY / "docs/support.md").read_text()
MEASUREMENTS = (REPOSITORY / "docs/measurements.md").read_text()


def row_of(text: str, first_cell: str) -> str:
    """The only row of a table that begins with this cell."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first_cell} |")]
    return row


def section(name: str) -> str:
    found = re.search(rf"<!-- {name}:.*?-->\n(.*?)\n<!-- end of {name} -->", SUPPORT, re.DOTALL)
    assert found is not None, f"docs/support.md has nothing between '<!-- {name}: ... -->' and '<!-- end of {name} -->'"
    return found[1].strip()


def test_the_support_matrix_is_what_the_code_says() -> None:
    """Regenerate it with: python tests/support/matrix.py."""
    assert section("support matrix") == markdown()


def test_the_summary_of_support_names_the_same_versions() -> None:
    """README.md has one table for all: the first and the last series, and kvcached's."""
    assert f"{ROWS[0].series} to {ROWS[-1].series}, " in row_of(README, "vLLM")
    assert f"kvcached {KVCACHED_SUPPORTED.removeprefix('==')}," in row_of(README, "kvcached, NIXL")


def test_no_page_says_that_a_gpu_was_used_before_the_table_does() -> None:
    """When a series has that evidence, the first lines of README.md and the table in docs/support.md change."""
    has_run = any(Evidence.GPU in row.evidence for row in ROWS)
    assert ("nothing yet" in row_of(SUPPORT, Evidence.GPU.value)) is not has_run


RESULTS = REPOSITORY / "experiments/byte_equivalence/results"
COMPARED = [row.tested for row in ROWS if Evidence.EQUIVALENCE in row.evidence]


def lacking(result: dict[str, Any]) -> list[str]:
    """The arms that are missing; of more servers or ranks a whole run is not on record for each version."""
    return [arm for arm in result["missing"] if "2P/2D" not in arm and "tensor parallel" not in arm]


@pytest.mark.parametrize("version", COMPARED)
def test_byte_equivalence_of_the_matrix_has_a_committed_result(version: str) -> None:
    """One of every arm of a quick run at least; and no run on record found a difference."""
    paths = [RESULTS / f"last-{version}.json", RESULTS / f"last-{version}-quick.json"]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    assert {one["verdict"] for one in found} == {"equal"}
    assert not all(map(lacking, found))


CLAIMS = {
    "README.md": row_of(README, "Are bytes and tokens right?"),
    "docs/measurements.md": row_of(MEASUREMENTS, "Is the output identical to one stock instance?"),
}


@pytest.mark.parametrize("page", CLAIMS)
def test_the_byte_equivalence_claim_has_whole_runs(page: str) -> None:
    """Both tables of results name versions; each has the summary of a run of all arms."""
    named = re.findall(r"0\.\d+\.\d+", CLAIMS[page])
    assert named and set(named) <= set(COMPARED)
    for version in named:
        assert not lacking(json.loads((RESULTS / f"last-{version}.json").read_text()))


SCRIPTS = sorted((REPOSITORY / "experiments").glob("*/run.sh"))
COMMANDS = [
    *(f"bash experiments/{script.parent.name}/run.sh" for script in SCRIPTS if script.parent.name != "bench"),
    *(f"bash experiments/bench/run.sh {question}" for question in QUESTIONS),
]
MOST_CELL_CHARACTERS = 90


@pytest.mark.parametrize("command", COMMANDS)
def test_every_experiment_has_a_row(command: str) -> None:
    """experiments/README.md: question, command, last result, versions; docs/measurements.md has the figures."""
    table = (REPOSITORY / "experiments/README.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith("|") and f"`{command}`" in line]
    cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
    assert len(cells) == 4
    assert all(len(cell) <= MOST_CELL_CHARACTERS for cell in cells), "a row is for reading: details go below the table"
    assert f"`{command}" in MEASUREMENTS


def test_all_experiments_are_found() -> None:
    assert len(COMMANDS) >= 12
