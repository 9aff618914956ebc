# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors in memory: of every byte, whatever the strides, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvcached_nixl.identity import memory  # noqa: E402
from kvcached_nixl.identity.memory import described, read  # noqa: E402
from kvcached_nixl.wire.handshake import Tensors  # noqa: E402


def tensors(**changed: Any) -> dict[str, Any]:
    made = {
        "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "c.scale": torch.tensor(1.5),
        "d.packed": torch.arange(5, dtype=torch.uint8),
        "e.eight": torch.arange(7).to(torch.float8_e4m3fn),
        "f.none": torch.empty(0),
    }
    return made | {name.replace("_", "."): one for name, one in changed.items()}


def told(place: str = "0 of 1", **changed: Any) -> Tensors:
    return described(read(tensors(**changed).items()), place)


def test_it_follows_from_what_they_hold() -> None:
    one = told()
    assert len(one.layout) == len(one.content) == 32 and len(one.each) == 4 * 6
    assert described(read(reversed(tensors().items())), "0 of 1") == one
    other = told(c_scale=torch.tensor(1.25))
    assert other.layout == one.layout and other.content != one.content
    assert [one.each[at : at + 4] == other.each[at : at + 4] for at in range(0, 24, 4)].index(False) == 2
    assert told("1 of 2").layout != one.layout
    assert told(c_scale=torch.tensor([1.5])).layout != one.layout


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("piece_bytes", [16, 8 << 20])
def test_every_byte_counts_and_where_it_is(monkeypatch: pytest.MonkeyPatch, turned: bool, piece_bytes: int) -> None:
    monkeypatch.setattr(memory, "_PIECE_BYTES", piece_bytes)
    large = torch.zeros(30, 11, dtype=torch.uint8)
    seen = large.t() if turned else large
    found = set()
    for place in range(large.numel()):
        large.view(-1)[place] = 1
        found.add(read([("w", seen)])["w"].checksum)
        large.view(-1)[place] = 0
    assert len(found) == large.numel()
    swapped = torch.arange(330, dtype=torch.int64)
    before = read([("w", swapped)])["w"].checksum
    swapped[[3, 200]] = swapped[[200, 3]]
    assert read([("w", swapped)])["w"].checksum != before


def test_views_are_read_as_what_they_show() -> None:
    whole = torch.arange(60, dtype=torch.bfloat16)
    for view in (whole[1:7], whole[::3], whole.view(6, 10)[1:4, 2:5], whole.view(6, 10)[:, ::2].t()):
        assert read([("w", view)])["w"].checksum is not None
    assert read([("w", whole[3:7])]) == read([("w", whole[3:7].clone())])
    assert read([("w", whole.view(6, 10)[1:4, 2:5])]) == read([("w", whole.view(6, 10)[1:4, 2:5].clone())])


def test_what_cannot_be_read_has_no_content() -> None:
    found = described(read([("w", torch.empty(3, device="meta")), ("v", torch.ones(2))]), "")
    assert found.content == "" and found.layout
    assert described({}, "").content == ""
