# SPDX-License-Identifier: Apache-2.0
"""README.md: what it repeats is what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcached_nixl.compat.matrix import markdown
from kvcached_nixl.compat.series import ROWS, Evidence

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()


def section(name: str) -> str:
    found = re.search(rf"<!-- {name}:.*?-->\n(.*?)\n<!-- end of {name} -->", README, re.DOTALL)
    assert found is not None, f"README.md has no section between '<!-- {name}: ... -->' and '<!-- end of {name} -->'"
    return found[1].strip()


def test_the_support_matrix_is_the_capability_table() -> None:
    """Regenerate it with: python -m kvcached_nixl.compat.matrix."""
    assert section("support matrix") == markdown()


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


def test_the_byte_equivalence_claim_has_whole_runs() -> None:
    """The table of results names versions; each has the summary of a run of all arms."""
    (claim,) = [line for line in README.splitlines() if line.startswith("| Is it what one stock instance gives?")]
    named = re.findall(r"0\.\d+\.\d+", claim)
    assert named and set(named) <= set(COMPARED)
    for version in named:
        assert not lacking(json.loads((RESULTS / f"last-{version}.json").read_text()))


def test_every_experiment_has_a_row() -> None:
    """experiments/README.md: question, command, last result, versions, hardware, one row per folder with a run.sh."""
    table = (REPOSITORY / "experiments/README.md").read_text()
    for script in sorted((REPOSITORY / "experiments").glob("*/run.sh")):
        assert f"experiments/{script.parent.name}/run.sh" in table
