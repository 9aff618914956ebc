# SPDX-License-Identifier: Apache-2.0
"""Add up the results of several pytest runs: ``python tests/totals.py FOLDER`` reads each JUnit file in the folder.

Prints one line in the format of pytest's own last line, so that the end of a long log says how many tests were run.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def total(folder: Path) -> str:
    """Returns the line.

    Raises:
        ValueError: no test was run, so the run must not count as passed.
    """
    counts: Counter[str] = Counter()
    seconds = 0.0
    for file in sorted(folder.glob("*.xml")):
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            for name in ("tests", "failures", "errors", "skipped"):
                counts[name] += int(suite.attrib[name])
            seconds += float(suite.attrib["time"])
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    if passed + counts["failures"] + counts["errors"] == 0:
        raise ValueError(f"no test was run: {counts['skipped']} were skipped")
    words = [("failed", counts["failures"]), ("passed", passed), ("skipped", counts["skipped"])]
    words.append(("errors", counts["errors"]))
    return f"{', '.join(f'{number} {word}' for word, number in words if number)} in {seconds:.2f}s"


if __name__ == "__main__":
    try:
        print(total(Path(sys.argv[1])))
    except ValueError as cause:
        sys.exit(f"tests/totals.py: {cause}")
