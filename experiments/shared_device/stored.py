# SPDX-License-Identifier: Apache-2.0
"""What was measured, as a results file has it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.shared_device.arms import ARMS
from experiments.shared_device.clients import Outcome, Received
from experiments.shared_device.counts import Counts
from experiments.shared_device.measure import Ran
from experiments.shared_device.memory import Sample
from experiments.shared_device.overload import Overloaded

__all__ = ["Measured", "read"]


@dataclass(frozen=True)
class Measured:
    """Results by part."""

    runs: list[Ran] = field(default_factory=list)
    overload: list[Overloaded] = field(default_factory=list)

    def with_run(self, ran: Ran) -> Measured:
        """Return these results with another run, in place of an earlier one of its arm; in the order of the table."""
        known = {**{one.arm: one for one in self.runs}, ran.arm: ran}
        return dataclasses.replace(self, runs=[known[arm.name] for arm in ARMS if arm.name in known])

    def without_runs(self) -> Measured:
        """Return these results without the table's, all of which are measured again."""
        return dataclasses.replace(self, runs=[])

    def with_overload(self, found: list[Overloaded]) -> Measured:
        """Return these results with others at a multiple of decode's capacity."""
        return dataclasses.replace(self, overload=found)


def read(path: Path) -> Measured:
    """Return what a results file has; nothing if there is no such file."""
    if not path.is_file():
        return Measured()
    content = json.loads(path.read_text())
    return Measured(
        [
            Ran(**{**one, **_asked(one), "samples": [Sample(**sample) for sample in one["samples"]]})
            for one in content["runs"]
        ],
        [Overloaded(**{**one, **_asked(one)}) for one in content["overload"]],
    )


def _asked(one: Mapping[str, Any]) -> dict[str, Any]:
    received = [Received(**{**each, "outcome": Outcome(each["outcome"])}) for each in one["received"]]
    return {"received": received, "counts": Counts(**one["counts"])}
