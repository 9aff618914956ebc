# SPDX-License-Identifier: Apache-2.0
"""wire/planes.py: no address of a peer exceeds 64 bits, whatever is added to it (finding B6)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.wire.checked import Malformed, decoder
from kvcached_nixl.wire.planes import Planes

SOUND: dict[str, Any] = {
    "bases": (4096, 8192),
    "block_stride_bytes": 512,
    "token_stride_bytes": 128,
    "head_stride_bytes": 64,
    "cell_bytes": 64,
    "num_blocks": 8,
    "block_size": 4,
    "num_heads": 2,
    "first_head": 2,
}
read = decoder(Planes)


def planes(**changed: Any) -> Planes:
    found: Planes = read(msgspec.msgpack.encode(SOUND | changed))
    return found


@pytest.mark.parametrize(
    "changed",
    [
        {"bases": [0]},
        *[{size: 1} for size in ("cell_bytes", "num_blocks", "block_size", "num_heads")],
        *[{size: 2**40 - 1} for size in ("cell_bytes", "num_blocks", "block_size", "num_heads")],
        *[{f"{stride}_stride_bytes": 0} for stride in ("block", "token", "head")],
        *[{f"{stride}_stride_bytes": 2**48 - 1} for stride in ("block", "token", "head")],
        {"first_head": 0},
        {"first_head": 2**31 - 1},
        {"bases": [2**63 - (512 * 8 + 128 * 4 + 64 * 2) - 1]},
    ],
    ids=lambda changed: str(changed)[:50],
)
def test_the_smallest_and_the_largest_values_are_sound(changed: dict[str, Any]) -> None:
    """Every byte of the planes has an address of 63 bits."""
    assert planes(**changed).first_head == changed.get("first_head", 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"bases": []},
        {"bases": [0] * 65_537},
        {"bases": [-1]},
        {"bases": [2**63]},
        {"bases": [2**63 - 1]},
        {"bases": [2**64 - 1]},
        {"bases": [4096, 2**63 - 512 * 8]},
        {"bases": [2**63 - (512 * 8 + 128 * 4 + 64 * 2)]},
        {"bases": None},
        {"bases": [1.0]},
        *[
            {size: wrong}
            for size in ("cell_bytes", "num_blocks", "block_size", "num_heads")
            for wrong in (0, -1, 2**40)
        ],
        *[
            {f"{stride}_stride_bytes": wrong}
            for stride in ("block", "token", "head")
            for wrong in (-1, 2**48, "8", None)
        ],
        {"block_stride_bytes": 2**47, "num_blocks": 2**17},
        {"token_stride_bytes": 2**47, "block_size": 2**17},
        {"head_stride_bytes": 2**47, "num_heads": 2**17},
        {"first_head": -1},
        {"first_head": 2**31},
        {"surplus": 1},
    ],
    ids=lambda changed: str(changed)[:50],
)
def test_what_cannot_be_added_up_in_64_bits_is_malformed(changed: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        planes(**changed)


NUMBERS = st.integers(-1, 2**20) | st.integers(2**38, 2**50) | st.integers(2**60, 2**64 - 1)


@given(st.fixed_dictionaries({field: NUMBERS for field in SOUND if field != "bases"}), st.lists(NUMBERS, min_size=1))
def test_whatever_is_accepted_can_be_added_up(fields: dict[str, int], bases: list[int]) -> None:
    try:
        made = planes(**fields, bases=bases)
    except Malformed:
        return
    last = np.int64(made.num_blocks - 1) * made.block_stride_bytes
    last += (made.block_size - 1) * made.token_stride_bytes + (made.num_heads - 1) * made.head_stride_bytes
    assert all(0 <= int(np.int64(base) + last) == base + int(last) for base in made.bases)
