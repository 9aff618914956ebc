# SPDX-License-Identifier: Apache-2.0
"""Branch coverage of the unit and flow tiers, by folder, from ``coverage json``; for tests/run.sh.

What only another tier can run is left out (``omit`` in pyproject.toml says which and why).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

LEAST_PERCENT = 90.0
"""Of branches, in all."""


def folder_of(file: str) -> str:
    """``worker/decode`` of ``kvcached_nixl/worker/decode/receiver.py``; ``.`` of a module at the top."""
    return str(PurePosixPath(file).relative_to("kvcached_nixl").parent)


def by_folder(report: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Folder -> (branches that were taken, branches)."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file, one in report["files"].items():
        taken, branches = found[folder_of(file)]
        summary = one["summary"]
        found[folder_of(file)] = taken + summary["covered_branches"], branches + summary["num_branches"]
    return {folder: pair for folder, pair in sorted(found.items()) if pair[1]}


def percent(taken: int, branches: int) -> float:
    return 100.0 * taken / branches if branches else 100.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 1 if too few branches were taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what coverage json wrote")
    options = parser.parse_args(arguments)
    found = by_folder(json.loads(options.report.read_text()))
    if not found:
        print("coverage: no branch was measured", file=sys.stderr)
        return 1
    total = sum(taken for taken, _ in found.values()), sum(branches for _, branches in found.values())
    width = max(map(len, found))
    for folder, pair in {**found, "all": total}.items():
        print(f"{folder:{width}}  {percent(*pair):5.1f} % of {pair[1]:5} branches")
    if percent(*total) < LEAST_PERCENT:
        print(f"found {percent(*total):.1f} % of branches; expected at least {LEAST_PERCENT:g} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
