# SPDX-License-Identifier: Apache-2.0
"""wire/checked.py and wire/planes.py: input from outside is a usable value or raises `Malformed`."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.codecs import fuzz

from kvcached_nixl.wire.checked import (
    MAX_TP_SIZE,
    BlockNumber,
    Count,
    Digest,
    Identifier,
    Incarnation,
    Malformed,
    Port,
    Rank,
    Seconds,
    TpSize,
    convert,
    decoder,
    require,
)
from kvcached_nixl.wire.planes import Planes

NESTED = 100_000


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    left: Tree | None = None
    value: Count = 0

    def __post_init__(self) -> None:
        require(self.value != 13, "another number")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Identifier, ["a", "é", "x" * 1024, "a\n"], ["", "x" * 1025, "\ud800", "a\udfff", None, 1, b"a", ["a"]]),
        (Port, [1, 65535], [0, 65536, -1, True, "80", [80.0], 80.5, float("inf"), float("nan"), 1e300, 2**70]),
        (TpSize, [1, MAX_TP_SIZE], [0, -1, MAX_TP_SIZE + 1, 10**9, True, 1.5]),
        (Rank, [0, MAX_TP_SIZE - 1], [-1, MAX_TP_SIZE]),
        (BlockNumber, [0, 2**31 - 1], [-1, 2**31, False]),
        (Count, [0, 2**31 - 1], [-1, 2**31, None]),
        (Seconds, [1, 0.5, 86_400], [0, -1, 86_401, float("nan"), float("inf"), "30", True]),
        (Digest, ["0123456789abcdef" * 2], ["", "0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n", 0]),
        (Incarnation, ["0123456789abcdef"], ["", "0" * 15, "0" * 17, "g" * 16, "0" * 16 + "\n", 2**53]),
    ],
)
def test_each_type_takes_its_range_and_nothing_beside_it(kind: Any, good: list[Any], bad: list[Any]) -> None:
    assert [convert(one, kind) for one in good] == good
    for one in bad:
        with pytest.raises(Malformed):
            convert(one, kind)


def test_a_message_names_the_field() -> None:
    with pytest.raises(Malformed, match=r"\$\.left\.value"):
        convert({"left": {"value": -1}}, Tree)
    with pytest.raises(Malformed, match="expected another number"):
        convert({"left": {"value": 13}}, Tree)
    with pytest.raises(Malformed, match="expected another number"):
        decoder(Tree)(msgspec.msgpack.encode({"value": 13}))


def test_a_nesting_bomb_is_malformed() -> None:
    """B7: a thousand nested arrays ended the listener."""
    read, read_any = decoder(Tree), decoder(Any)
    for bomb in (b"\x91" * NESTED, b"\x81\xa4left" * NESTED, b"\x91" * NESTED + b"\xc0"):
        for reader in (read, read_any):
            with pytest.raises(Malformed):
                reader(bomb)
    deep: Any = None
    for _ in range(NESTED):
        deep = {"left": deep}
    with pytest.raises(Malformed):
        convert(deep, Tree)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["left", "value", "x"]), inner),
    max_leaves=8,
)


@given(JSON)
def test_no_value_raises_anything_else(value: Any) -> None:
    """Whatever JSON can say, NaN and half characters too."""
    with contextlib.suppress(Malformed):
        assert isinstance(convert(value, Tree), Tree)


def test_mutated_bytes_are_read_or_malformed() -> None:
    assert min(fuzz(decoder(Tree), [msgspec.msgpack.encode(Tree(Tree(None, 7), 9))], 20_000)) > 500


@pytest.mark.parametrize(
    ("found", "kind", "expected"),
    [(12.0, int, 12), ([1.0, 2.0], list[int], [1, 2]), ({"a": [3.0]}, dict[str, list[int]], {"a": [3]})],
)
def test_whole_numbers_may_be_floats(found: object, kind: type, expected: object) -> None:
    """Protobuf's Struct has no other numbers."""
    assert repr(convert(found, kind)) == repr(expected)


SOUND: dict[str, Any] = {
    "bases": (4096, 8192),
    "keys": (1, 2),
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
        {"bases": [0], "keys": [0]},
        *[{size: 1} for size in ("cell_bytes", "num_blocks", "block_size", "num_heads")],
        *[{size: 2**40 - 1} for size in ("cell_bytes", "num_blocks", "block_size", "num_heads")],
        *[{f"{stride}_stride_bytes": 0} for stride in ("block", "token", "head")],
        *[{f"{stride}_stride_bytes": 2**48 - 1} for stride in ("block", "token", "head")],
        {"first_head": 0},
        {"first_head": 2**31 - 1},
        {"bases": [2**63 - (512 * 8 + 128 * 4 + 64 * 2) - 1], "keys": [2**63 - 1]},
    ],
    ids=lambda changed: str(changed)[:50],
)
def test_the_smallest_and_the_largest_values_are_sound(changed: dict[str, Any]) -> None:
    """Every byte of the planes has an address of 63 bits."""
    assert planes(**changed).first_head == changed.get("first_head", 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"bases": [], "keys": []},
        {"bases": [0] * 65_537, "keys": list(range(65_537))},
        *[
            {"bases": [wrong], "keys": [1]}
            for wrong in (-1, 2**63, 2**63 - 1, 2**64 - 1, 2**63 - (512 * 8 + 128 * 4 + 64 * 2), 1.0)
        ],
        {"bases": [4096, 2**63 - 512 * 8]},
        {"bases": None},
        *[{"keys": wrong} for wrong in ([1], [1, 1], [1, 2, 3], [1, "2"], None)],
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


@given(st.fixed_dictionaries({one: NUMBERS for one in list(SOUND)[2:]}), st.lists(NUMBERS, min_size=1))
def test_whatever_is_accepted_can_be_added_up(fields: dict[str, int], bases: list[int]) -> None:
    try:
        made = planes(**fields, bases=bases, keys=list(range(len(bases))))
    except Malformed:
        return
    last = np.int64(made.num_blocks - 1) * made.block_stride_bytes
    last += (made.block_size - 1) * made.token_stride_bytes + (made.num_heads - 1) * made.head_stride_bytes
    assert all(0 <= int(np.int64(base) + last) == base + int(last) for base in made.bases)
