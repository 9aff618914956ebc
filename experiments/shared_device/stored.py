# SPDX-License-Identifier: Apache-2.0
"""What was measured, as a results file has it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.shared_device.clients import Outcome, Received
from experiments.shared_device.counts import Counts
from experiments.shared_device.measure import Ran
from experiments.shared_device.memory import Sample
from experiments.shared_device.overload import Overloaded
from experiments.shared_device.table import PARTS

__all__ = ["Measured", "read"]


@dataclass(frozen=True)
class Measured:
    """Results by part; ``runs`` are the table's."""

    runs: list[Ran] = field(default_factory=list)
    overload: list[Overloaded] = field(default_factory=list)
    hybrid: list[Ran] = field(default_factory=list)

    def runs_of(self, part: str) -> list[Ran]:
        """Return the runs of a part, in the order of its arms and rounds."""
        return {"table": self.runs, "hybrid": self.hybrid}[part]

    def with_run(self, part: str, ran: Ran) -> Measured:
        """Return these results with another run, in place of its arm's earlier one and of those of later rounds."""
        kept = [one for one in self.runs_of(part) if one.arm != ran.arm or one.round < ran.round]
        order = [arm.name for arm in PARTS[part].arms]
        known = [one for one in (*kept, ran) if one.arm in order]
        known.sort(key=lambda one: (order.index(one.arm), one.round))
        return self._with_runs(part, known)

    def _with_runs(self, part: str, runs: list[Ran]) -> Measured:
        return dataclasses.replace(self, runs=runs) if part == "table" else dataclasses.replace(self, hybrid=runs)

    def without_runs(self, parts: Iterable[str]) -> Measured:
        """Return these results without the runs of ``parts``, all of which are measured again."""
        found = self
        for part in parts:
            found = found._with_runs(part, [])
        return found

    def with_overload(self, found: list[Overloaded]) -> Measured:
        """Return these results with others at a multiple of decode's capacity."""
        return dataclasses.replace(self, overload=found)


def read(path: Path) -> Measured:
    """Return what a results file has; nothing if there is no such file."""
    if not path.is_file():
        return Measured()
    content = json.loads(path.read_text())
    runs, hybrid = (
        [
            Ran(**{**one, **_asked(one), "samples": [Sample(**sample) for sample in one["samples"]]})
            for one in content.get(name, ())
        ]
        for name in ("runs", "hybrid")
    )
    return Measured(runs, [Overloaded(**{**one, **_asked(one)}) for one in content["overload"]], hybrid)


def _asked(one: Mapping[str, Any]) -> dict[str, Any]:
    received = [Received(**{**each, "outcome": Outcome(each["outcome"])}) for each in one["received"]]
    return {"received": received, "counts": Counts(**one["counts"])}
