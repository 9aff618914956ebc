# SPDX-License-Identifier: Apache-2.0
"""scheduler/told_headroom.py: rises and falls of what is mapped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.scheduler.told_headroom import MappedMemory


def test_rises_and_falls_are_added_up() -> None:
    mapped = MappedMemory()
    for num_bytes in (10, 10, 30, 5, 0, 5):
        mapped.look(num_bytes)
    assert (mapped.num_bytes, mapped.risen_bytes, mapped.fallen_bytes) == (5, 35, 30)


@given(st.lists(st.integers(0, 2**50)))
def test_what_is_mapped_is_the_difference(looks: list[int]) -> None:
    mapped = MappedMemory()
    for num_bytes in looks:
        mapped.look(num_bytes)
    assert mapped.risen_bytes - mapped.fallen_bytes == mapped.num_bytes == (looks or [0])[-1]
