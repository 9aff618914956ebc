# SPDX-License-Identifier: Apache-2.0
"""Counting kvcached's maps and unmaps from samples of its account."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from experiments.common.pages import PageCount, PageWatch, count_pages, own_names


@pytest.mark.parametrize(
    ("levels", "mapped", "unmapped", "remapped"),
    [([], 0, 0, 0), ([4], 0, 0, 0), ([0, 2, 6], 6, 0, 0), ([6, 2, 0], 0, 6, 0), ([0, 4, 2, 6], 8, 2, 4)],
)
def test_only_a_rise_after_a_fall_is_a_remap(levels: list[int], mapped: int, unmapped: int, remapped: int) -> None:
    """A pool that only grows, or only shrinks, has remapped nothing."""
    counted = count_pages([(8, level) for level in levels])
    assert (counted.mapped_bytes, counted.unmapped_bytes, counted.remapped_bytes) == (mapped, unmapped, remapped)


def test_the_account_is_read_as_kvcached_writes_it(tmp_path: Path) -> None:
    """Limit, used, reserved: mapped is used plus reserved; the same reading twice is one sample."""
    watch = PageWatch("engine", tmp_path)
    for used, reserved in ((0, 0), (4, 2), (4, 2), (1, 0)):
        (tmp_path / "engine").write_bytes(struct.pack("=qqq", 100, used, reserved))
        watch.sample()
    assert watch.count() == PageCount(3, 100, 0, 6, mapped_bytes=6, unmapped_bytes=5, remapped_bytes=0)


def test_an_engine_is_found_by_what_it_was_given(tmp_path: Path) -> None:
    """Its own name begins with that; of several each is watched by its own."""
    for name in ("kvx-dp0-1a", "kvx-dp1-1b", "kvxother-1c", "plain"):
        (tmp_path / name).write_bytes(struct.pack("=qqq", 100, 4, 2))
    assert own_names("kvx", tmp_path) == ["kvx-dp0-1a", "kvx-dp1-1b"]
    assert own_names("plain", tmp_path) == ["plain"]
    with pytest.raises(ValueError, match="Watch each of them"):
        PageWatch("kvx", tmp_path).sample()
    for name in ("kvx-dp1-1b", "kvxother", "plain"):
        assert PageWatch(name, tmp_path).mapped_bytes() == 6
