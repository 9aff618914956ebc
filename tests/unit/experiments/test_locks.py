# SPDX-License-Identifier: Apache-2.0
"""The locked packages of one vLLM are in several files, which together are one environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.script_loading import load_script

LOCKS = Path(__file__).parents[3] / "experiments" / "locks"

lock = load_script("experiments_lock", LOCKS / "lock.py")


@pytest.mark.parametrize("target", lock.targets(), ids=lambda target: target.own)
def test_files_of_a_target_are_one_environment(target: lock.Target) -> None:  # type: ignore[name-defined]
    """On each Python: no package twice, none without a hash, and the vLLM, torch and NIXL that versions.in names."""
    lines = [line for file in target.files for line in (LOCKS / file).read_text().splitlines()]
    assert all(" --hash=sha256:" in line for line in lines)
    for python in target.pythons:
        found = [Requirement(line.partition(" --hash")[0]) for line in lines]
        found = [one for one in found if one.marker is None or one.marker.evaluate({"python_version": python})]
        assert len({one.name for one in found}) == len(found) > 100
        pins = {f"{one.name}{one.specifier}" for one in found}
        assert {*target.requirements(), f"torch=={target.torch}"} <= pins


def test_what_some_pythons_get_has_a_marker() -> None:
    """And all hashes of a version are on its one line."""
    found = lock.merged(
        {
            "3.11": {"a==1": frozenset("1"), "b==2": frozenset("2")},
            "3.12": {"a==1": frozenset("3"), "b==1": frozenset("4")},
            "3.10": {"a==1": frozenset("1"), "b==1": frozenset("5"), "c==1": frozenset("6")},
        }
    )
    lines = {
        "a==1": "--hash=sha256:1 --hash=sha256:3",
        'b==1 ; python_version == "3.10" or python_version == "3.12"': "--hash=sha256:4 --hash=sha256:5",
        'b==2 ; python_version == "3.11"': "--hash=sha256:2",
        'c==1 ; python_version == "3.10"': "--hash=sha256:6",
    }
    assert found == {name: f"{name} {hashes}" for name, hashes in lines.items()}
