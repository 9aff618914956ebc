# SPDX-License-Identifier: Apache-2.0
"""tests/size.py counts what there is to read."""

from __future__ import annotations

import size


def test_it_counts_lines_modules_and_functions() -> None:
    report = list(size.report())
    (package,) = [line.split() for line in report if line.startswith(f"{size.PACKAGE} ")]
    by_folder = [line.split() for line in report if line.endswith("modules") and line[0].islower()]
    folders = [line for line in by_folder if line[0] not in (size.PACKAGE, "tests", "experiments")]
    assert int(package[3]) > sum(int(line[3]) for line in folders) > 0
    assert int(package[1]) > sum(int(line[1]) for line in folders)


def test_a_function_has_the_lines_from_its_head_to_its_end() -> None:
    text = "def f():\n    def g():\n        return 1\n    return g\n\n\nasync def h(): ...\n"
    assert sorted(size.function_sizes(text)) == [1, 2, 4]
