# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/support.md that follow from the code: ``python tests/support/matrix.py`` prints them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvcached_nixl.cli.report import COMPARED
from kvcached_nixl.vllm.adapter.versions import CHANGES, KVCACHED_SUPPORTED, ROWS, Row

__all__ = ["tables"]


def tables() -> list[str]:
    """Tests run with each series, what is compared, and changes of vLLM; and a sentence before them."""
    return [
        f"With kvcached {KVCACHED_SUPPORTED.removeprefix('==')}. Anything else is refused at start.",
        _table(["vLLM", "tested by", "with"], [_band(list(rows)) for _, rows in groupby(ROWS, _tested)]),
        _table(["of two engines", "what is compared; if it differs, the hand-over fails"], COMPARED.items()),
        _table(["since vLLM", "what this package has to know"], [[one.since, one.what] for one in CHANGES]),
    ]


def _band(rows: Sequence[Row]) -> Sequence[str]:
    """One row for consecutive series with the same evidence."""
    span = rows[0].series if len(rows) == 1 else f"{rows[0].series} to {rows[-1].series}"
    return span, _tested(rows[0]), ", ".join(row.tested for row in rows)


def _tested(row: Row) -> str:
    return ", ".join(evidence.value for evidence in row.evidence)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(tables()) + "\n")
