# SPDX-License-Identifier: Apache-2.0
"""wire/headroom.py: numbers that an engine says of itself."""

from __future__ import annotations

import msgspec
import pytest

from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.headroom import AskingFigures, Headroom, encode_headroom, read_headroom

FIGURES = AskingFigures(held=3, asked=2)
SAID = Headroom(10, 20, 30, 1, 5, 2**40, 2**30, 2**31, 2**30, 2, 1.5, 0.0, FIGURES)


def test_it_comes_back_as_it_was() -> None:
    assert read_headroom(encode_headroom(SAID)) == SAID


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in Headroom.__struct_fields__[:-1]
        for value in (-1, 2**63, "1", None, float("nan") if name.endswith("_seconds") else 1.5)
    ],
)
def test_what_is_no_number_of_things_is_refused(name: str, value: object) -> None:
    with pytest.raises(Malformed):
        read_headroom(msgspec.msgpack.encode({**msgspec.structs.asdict(SAID), name: value}))


@pytest.mark.parametrize("changed", [{"held": -1}, {"ended": {"lost": 1}}, {"computed": {"short": -1}}, {"more": 1}])
def test_what_is_no_figure_of_asking_is_refused(changed: object) -> None:
    said = {**msgspec.to_builtins(SAID), "asking": {**msgspec.to_builtins(FIGURES), **changed}}  # type: ignore[dict-item]
    with pytest.raises(Malformed):
        read_headroom(msgspec.msgpack.encode(said))


@pytest.mark.parametrize("said", [b"", b"x", b"\xc1", msgspec.msgpack.encode({"free_tokens": 1})])
def test_other_answers_are_refused(said: bytes) -> None:
    with pytest.raises(Malformed):
        read_headroom(said)
