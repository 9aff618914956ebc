# SPDX-License-Identifier: Apache-2.0
"""Which of the kernel's limits the doctor calls too low."""

from __future__ import annotations

import pytest

from kvcached_nixl.cli.doctor import FILES, LOCKED, MAPPINGS, SHARED, UNLIMITED, Limits, limits, shortfalls

ENOUGH: Limits = {LOCKED: UNLIMITED, FILES: 65_536, MAPPINGS: 65_530, SHARED: 4 << 30}


def test_this_host_has_them_all() -> None:
    assert {*limits()} == {*ENOUGH}


@pytest.mark.parametrize(
    ("changed", "pins", "word"),
    [
        ({LOCKED: 65_536}, True, "ulimit -l"),
        ({LOCKED: 65_536}, False, ""),
        ({MAPPINGS: 65_529}, True, "vm.max_map_count"),
        ({SHARED: 64 << 20}, True, "--shm-size"),
        ({SHARED: "not known: no such file"}, True, ""),
        ({}, True, ""),
    ],
)
def test_what_is_too_low_is_said(changed: Limits, pins: bool, word: str) -> None:
    found = [*shortfalls({**ENOUGH, **changed}, pins=pins)]
    assert len(found) == bool(word) and all(word in one for one in found)
