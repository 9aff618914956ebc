# SPDX-License-Identifier: Apache-2.0
"""The experiment's arithmetic: each target on both sides of its limit, and the options that its servers get."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.memory_path.arms import ARMS, BLOCK_BYTES, GIVING_BACK, PAGE_GROUP_BYTES, PAIRS, planned, specs, staged
from experiments.memory_path.measure import Measured, read
from experiments.memory_path.occupied import Loaded, Occupied
from experiments.memory_path.report import (
    judge_first_token,
    judge_occupied,
    judge_resident,
    plot,
    table_of_loaded,
    table_of_occupied,
)
from experiments.memory_path.resident import Resident
from experiments.push_vs_pull.arms import PULL, SHARED_MEMORY, TCP
from experiments.push_vs_pull.measure import Sample
from experiments.push_vs_pull.report import cells

STAGED = staged(PULL)
MIB = 2**20


def test_a_staged_arm_differs_in_its_memory_path_alone(tmp_path: Path) -> None:
    """So that what differs in its figures is what staging does."""
    for direct, other in PAIRS:
        for one, two in zip(specs(direct, GIVING_BACK, tmp_path), specs(other, GIVING_BACK, tmp_path), strict=True):
            assert (one.environment, one.arguments) == (two.environment, two.arguments)
            mine, theirs = (dict(spec.kv_transfer or {}) for spec in (one, two))
            extra, others = mine.pop("kv_connector_extra_config"), theirs.pop("kv_connector_extra_config")
            assert mine == theirs
            assert others == {**extra, "memory_path": "host"}  # type: ignore[dict-item]
    assert len({arm.servers for arm in ARMS}) == len(ARMS)


def test_as_many_blocks_are_planned_as_fit() -> None:
    """Into what kvcached leaves of its device."""
    assert planned(8).blocks * BLOCK_BYTES <= 0.95 * 8 * 2**30 < (planned(8).blocks + 1) * BLOCK_BYTES


def resident(more_mib: dict[float, int]) -> list[Resident]:
    return [
        Resident(arm, "prefill", gib, (500 + (mib if "staged" in arm else 0)) * MIB, int(gib * 2**30))
        for gib, mib in more_mib.items()
        for arm in ("pull", "pull, staged")
    ]


@pytest.mark.parametrize(
    ("more", "reached"),
    [
        ({1: 105, 60: 105}, [True, True, True]),
        ({1: 106, 60: 105}, [False, True, True]),
        ({1: 95, 60: 105}, [True, True, False]),
        ({1: 100, 60: 6000}, [True, False, False]),
    ],
)
def test_resident_memory_is_the_slab_and_the_same_for_every_reservation(
    more: dict[float, int], reached: list[bool]
) -> None:
    """At most a twentieth more, and a twentieth apart."""
    verdicts = judge_resident(resident(more), slab_gib=100 / 1024)
    assert [one.reached for one in verdicts] == reached
    assert "stock host buffer 61440 MiB" in verdicts[1].found


@pytest.mark.parametrize(("seconds", "reached"), [(1.15, True), (1.16, False)])
def test_first_token_staged_against_direct(seconds: float, reached: bool) -> None:
    """Over TCP; shared memory is reported only."""
    samples = [
        Sample(arm.name, transport.name, 512, 1, first, 0.01, None)
        for transport in (TCP, SHARED_MEMORY)
        for arm, first in ((PULL, 1.0), (STAGED, seconds))
    ]
    assert [one.reached for one in judge_first_token(cells(samples))] == [reached]


@pytest.mark.parametrize(("seconds", "reached"), [(0.012, True), (0.0121, False)])
def test_blocks_stay_taken_for_the_copy(seconds: float, reached: bool) -> None:
    """A fifth longer at most; of the direct path nothing is promised."""
    found = [
        Occupied(STAGED.name, 2048, seconds, 0.5, 0.01, 0.5),
        Occupied(STAGED.name, 2048, seconds, 0.5, 0.01, 0.5),
        Occupied(PULL.name, 2048, 0.5, 0.5, 0.0, 0.5),
    ]
    assert [one.reached for one in judge_occupied(found)] == [reached]
    assert table_of_occupied(found).row_count == 2


def test_what_is_left_of_the_pool_and_the_plot(tmp_path: Path) -> None:
    """In page groups, and a file."""
    loaded = [Loaded(arm.name, 10, 5.0, 3.5 * PAGE_GROUP_BYTES, 10 * PAGE_GROUP_BYTES) for arm in (PULL, STAGED)]
    table = table_of_loaded(loaded, PAGE_GROUP_BYTES)
    assert list(table.columns[-1].cells) == ["6.5", "6.5"]
    assert list(table.columns[3].cells) == ["35%", "35%"]
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    plot([Occupied(PULL.name, 2048, 0.5, 0.5, 0.0, 0.5)], loaded, "title", path)
    assert path.stat().st_size > 1000
    assert Measured().samples == []


def test_a_part_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    """Each part is a run of its own, whose arms are compared with each other and with nothing else."""
    file = tmp_path / "last.json"
    assert read(file) == Measured()
    earlier = Measured(loaded=[Loaded("pull", 1, 1.0, 1.0, 2)], occupied=[Occupied(PULL.name, 1, 0.5, 0.5, 0.0, 0.5)])
    file.write_text(json.dumps(dataclasses.asdict(earlier)))
    assert read(file) == earlier
    now = Measured(loaded=[Loaded("pull", 2, 1.0, 1.0, 2)])
    assert now.beside(earlier) == Measured(loaded=now.loaded, occupied=earlier.occupied)
