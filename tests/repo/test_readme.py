# SPDX-License-Identifier: Apache-2.0
"""README.md: what it repeats is what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

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


@pytest.mark.parametrize("version", [row.tested for row in ROWS if Evidence.E2E in row.evidence])
def test_the_byte_equivalence_claim_has_a_committed_result(version: str) -> None:
    """The README claims equality for a version only with the summary of a run that found it."""
    result = json.loads((REPOSITORY / f"experiments/byte_equivalence/results/last-{version}.json").read_text())
    assert result["verdict"] == "equal"
    # Of more servers or ranks a whole run is not on record for each version.
    assert not [arm for arm in result["missing"] if "2P/2D" not in arm and "tensor parallel" not in arm]
    assert version in README


def test_every_experiment_has_a_row() -> None:
    """experiments/README.md: question, command, last result, versions, hardware, one row per folder with a run.sh."""
    table = (REPOSITORY / "experiments/README.md").read_text()
    for script in sorted((REPOSITORY / "experiments").glob("*/run.sh")):
        assert f"experiments/{script.parent.name}/run.sh" in table
