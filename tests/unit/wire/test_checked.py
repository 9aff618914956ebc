# SPDX-License-Identifier: Apache-2.0
"""wire/checked.py: input from outside becomes a usable value or raises `Malformed`, and no other exception."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
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
        (Port, [1, 65535], [0, 65536, -1, True, "80", 80.5, 2**70]),
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


@pytest.mark.parametrize("found", [1.5, float("inf"), float("nan"), 1e300, [12.0], "12", True])
def test_other_floats_are_no_whole_numbers(found: object) -> None:
    with pytest.raises(Malformed):
        convert(found, Port)
