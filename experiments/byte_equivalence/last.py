# SPDX-License-Identifier: Apache-2.0
"""What the last run of each arm found, where a run was of some arms only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def beside(rows: Sequence[dict[str, Any]], last: Path) -> list[dict[str, Any]]:
    """Return ``rows`` after what the file ``last`` has of other arms; each of those says of which commit it is.

    Raises:
        ValueError: ``last`` has an arm that failed and was not run again; a file must not say "equal" beside it.
    """
    if not last.is_file():
        return list(rows)
    before = json.loads(last.read_text())
    arms = {row["arm"] for row in rows}
    kept = [{"commit": before["commit"], **row} for row in before["checks"] if row["arm"] not in arms]
    failed = sorted({row["arm"] for row in kept if not row["passed"]})
    if failed:
        raise ValueError(f"{last} has failures of {', '.join(failed)}: run those again, too, or all arms")
    return [*kept, *rows]
