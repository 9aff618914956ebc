# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of the experiment one after the other, so that no two pairs are measured at the same time."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from experiments.common.model import make_model
from experiments.common.report import Narrator
from experiments.memory_path import occupied, resident
from experiments.memory_path.arms import ARMS, FIRST_TOKEN, FIRST_TOKEN_QUICK, RESERVED_GIB, SLAB_GIB, VERIFIED, staged
from experiments.push_vs_pull import measure as first_token
from experiments.push_vs_pull.arms import MODEL, PULL, SHARED_MEMORY, TCP

LENGTHS = (2048, 8192)
ROUNDS, QUICK_ROUNDS = 9, 3
REQUESTS, QUICK_REQUESTS = 48, 12


@dataclass
class Measured:
    """All measured figures."""

    resident: list[resident.Resident] = field(default_factory=list)
    samples: list[first_token.Sample] = field(default_factory=list)
    occupied: list[occupied.Occupied] = field(default_factory=list)
    loaded: list[occupied.Loaded] = field(default_factory=list)

    def beside(self, earlier: Measured) -> Measured:
        """Return these figures, with those of ``earlier`` for parts that this run did not measure."""
        names = [one.name for one in fields(self)]
        return Measured(**{name: getattr(self, name) or getattr(earlier, name) for name in names})


def read(path: Path) -> Measured:
    """Return the figures in a results file; empty if there is no file."""
    if not path.is_file():
        return Measured()
    said = json.loads(path.read_text())
    kinds = {
        "resident": resident.Resident,
        "samples": first_token.Sample,
        "occupied": occupied.Occupied,
        "loaded": occupied.Loaded,
    }
    return Measured(**{name: [kind(**one) for one in said[name]] for name, kind in kinds.items()})


def measure_part(part: str, found: Measured, logs: Path, narrator: Narrator, *, quick: bool) -> None:
    """Measure one part and add its figures to ``found``."""
    model = make_model(MODEL)
    if part == "memory":
        for gib, arm in itertools.product(RESERVED_GIB, (PULL, staged(PULL, SLAB_GIB))):
            found.resident += resident.measure(arm, gib, model, logs, narrator.update)
            narrator.say(f"{arm.name}, {gib} GiB reserved: measured")
    elif part == "first-token":
        load = FIRST_TOKEN_QUICK if quick else FIRST_TOKEN
        for transport in (TCP, SHARED_MEMORY):
            narrator.say(f"over {transport.name}")
            found.samples += first_token.measure(
                (*ARMS, VERIFIED), [transport], model, load, logs, narrator.update, lambda *_: None
            )
    else:
        rounds, requests = (QUICK_ROUNDS, QUICK_REQUESTS) if quick else (ROUNDS, REQUESTS)
        for arm in ARMS:
            times, loaded = occupied.measure(arm, LENGTHS, rounds, requests, model, logs, narrator.update)
            found.occupied += times
            found.loaded.append(loaded)
            narrator.say(f"{arm.name}: measured")
