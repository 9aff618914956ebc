# SPDX-License-Identifier: Apache-2.0
"""wire/handshake.py: peers that differ never compare equal, and a hostile peer's data is `Malformed`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec
import pytest
from support.codecs import each, fuzz, plain_id

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import (
    Answer,
    Kind,
    Process,
    RankHandshake,
    Tag,
    Tensors,
    Weights,
    differences,
    is_tagged,
    read_answer,
    read_rank,
)
from kvcached_nixl.wire.manifest import PROTOCOL
from kvcached_nixl.wire.planes import GroupMemory, Planes

TAG = Tag("pull", (("vLLM", "0.28.0"), ("model", "m"), ("dtype", "bf16")), ((128, 64), (32,)))
PLANES = Planes((0, 4096), (1, 2), 512, 128, 64, 64, 8, 4, 2, first_head=2)
WEIGHTS = Weights(Tensors("1" * 32, "2" * 32))
PROCESS = Process("a-boot", "pid:[1]", 7, 2**40)
RANK = RankHandshake(
    EngineId("e"), 2, 1, b"\x00nixl", 3, (GroupMemory((PLANES,), 2),), 2**40, "VRAM", True, WEIGHTS, PROCESS, 3, 2
)
OTHER: dict[str, list[Any]] = {
    "mode": ["push"],
    "facts": [
        (("vLLM", "0.28.1"), ("model", "m"), ("dtype", "bf16")),
        (("vLLM", "0.28.0"), ("model", "m")),
        (("vLLM", "0.28.0"), ("dtype", "m"), ("model", "bf16")),
    ],
    "cells": [((128, 64),), ((128,), (64, 32)), ((64, 64), (32,)), ((64, 128), (32,))],
}


def test_the_tag_of_protocol_16_is_these_words() -> None:
    """Golden: a change of this text is a change of protocol."""
    assert PROTOCOL == 16
    assert str(TAG) == (
        "kvcached_nixl/16 pull [vLLM 0.28.0; model m; dtype bf16; group 0: cells of 128 bytes and cells of 64 bytes, "
        "group 1: cells of 32 bytes]"
    )


@pytest.mark.parametrize("field", sorted(OTHER))
def test_every_field_tells_peers_apart(field: str) -> None:
    assert set(OTHER) == set(Tag.__struct_fields__)
    for other in OTHER[field]:
        assert str(msgspec.structs.replace(TAG, **{field: other})) != str(TAG)


def test_a_stock_peer_has_no_tag() -> None:
    """The stock connector offers a bare hash."""
    assert is_tagged(str(TAG))
    assert is_tagged("kvcached_nixl/3 pull [contiguous]")
    assert not is_tagged("abc123")


def test_a_rank_is_described_to_its_peers_and_read_back() -> None:
    """Through the bytes that vLLM's side channel carries."""
    said = msgspec.msgpack.encode(Answer("0123456789abcdef", msgspec.msgpack.encode(RANK)))
    answer = read_answer(said)
    assert answer.incarnation == "0123456789abcdef"
    assert read_rank(answer.rank) == RANK


PLAIN: dict[str, Any] = msgspec.to_builtins(PLANES)


def group(**changed: Any) -> list[dict[str, Any]]:
    """One group of planes with these fields changed."""
    return [{"planes": [PLAIN | changed]}]


WRONG_RANKS = [
    *each(
        tp_size=[0, 10**9],
        tp_rank=[2, -1],
        agent_metadata=["text"],
        device_id=[-1, 2**31],
        token_table_address=[-1, 2**62, 2**63 - 1, 2**63, None],
        engine_id=[None],
        memory_type=["another"],
        weights=[msgspec.to_builtins(WEIGHTS) | one for one in each(layout=["1" * 31], content=["1" * 33])],
        process=[None, *each(pid=[-1], started=[-1, 2**62], boot_id=["b" * 129], namespaces=["n" * 129])],
        groups=[
            [],
            [msgspec.to_builtins(GroupMemory((PLANES,)))] * 65,
            [{"planes": []}],
            [{"planes": [PLAIN] * 65}],
            *([{"planes": [PLAIN, PLAIN | one]}] for one in each(block_size=[8], num_blocks=[4])),
            *([{"planes": [PLAIN], "kernel_blocks_per_block": count}] for count in (0, -1, 2**20, 2**31)),
            *(group(**one) for one in each(bases=[[2**63]], num_blocks=[0], copies=[0])),
            *(group(copies=copies, copy=copy) for copies, copy in ((2, 0), (3, 1), (1, 1), (-1, -2))),
            [{"planes": [PLAIN], "parts": [PLAIN | {"copies": 2, "copy": 1 - RANK.tp_rank}]}],
        ],
    )
]


@pytest.mark.parametrize("changed", WRONG_RANKS, ids=lambda changed: str(changed)[:50])
def test_a_rank_that_cannot_be_is_malformed(changed: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read_rank(msgspec.msgpack.encode(msgspec.to_builtins(RANK, builtin_types=(bytes,)) | changed))


RANKS_AT_THEIR_BOUNDS = [
    {},
    {"tp_size": 256, "tp_rank": 255},
    {"tp_size": 1, "tp_rank": 0},
    {"more": "of a later version"},
    *each(
        device_id=[0, 2**31 - 1],
        token_table_address=[0, 2**62 - 1],
        process=[
            {},
            {"started": 2**62 - 1, "pid": 2**31 - 1},
            {"boot_id": "b" * 128, "namespaces": "n" * 128},
        ],
        groups=[
            [msgspec.to_builtins(GroupMemory((PLANES,)))] * 64,
            [{"planes": [PLAIN] * 64}],
            *([{"planes": [PLAIN], "kernel_blocks_per_block": count}] for count in (1, 2**20 - 1)),
        ],
    ),
]


@pytest.mark.parametrize("changed", RANKS_AT_THEIR_BOUNDS, ids=lambda changed: str(changed)[:50])
def test_a_rank_at_its_bounds_is_sound(changed: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(RANK, builtin_types=(bytes,)) | changed
    assert read_rank(msgspec.msgpack.encode(fields)).engine_id == RANK.engine_id


@pytest.mark.parametrize("missing", RankHandshake.__struct_fields__)
def test_a_rank_that_leaves_something_out_is_malformed(missing: str) -> None:
    fields = msgspec.to_builtins(RANK, builtin_types=(bytes,))
    del fields[missing]
    with pytest.raises(Malformed, match=missing):
        read_rank(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "said",
    [b"", b"\xc1", b"\x91" * 100_000, b"\x80", msgspec.msgpack.encode({"incarnation": 1, "rank": b""})]
    + [msgspec.msgpack.encode({"incarnation": start, "rank": b""}) for start in ("", "0" * 17, "x" * 16)]
    + [msgspec.msgpack.encode({"incarnation": "0" * 16, "rank": "text"}), msgspec.msgpack.encode(RANK)],
    ids=plain_id,
)
def test_an_answer_that_is_none_is_malformed(said: bytes) -> None:
    with pytest.raises(Malformed):
        read_answer(said)


@pytest.mark.parametrize("reader", [read_rank, read_answer])
def test_mutated_handshakes_raise_nothing_but_malformed(reader: Callable[[bytes], object]) -> None:
    rank = msgspec.msgpack.encode(RANK)
    read, malformed = fuzz(reader, [rank, msgspec.msgpack.encode(Answer("0" * 16, rank))], 20_000)
    assert min(read, malformed) > 500


# ------------------------------------------------------------------------------------------------------------- weights


def weights(memory: str = "12", loaded: str = "34", files: str = "5", **more: Any) -> Weights:
    """``memory``, ``loaded``: a digit for the layout, and one for the content, if it is known."""
    described = [Tensors(*(one * 32 for one in pair)) for pair in (memory, loaded)]
    return Weights(*described, files=files * 32, **more)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (weights(), ""),
        (weights(loaded="36", files="7"), ""),
        (weights(loaded="", files=""), ""),
        # Kernels have rewritten them.
        (weights("18"), ""),
        (weights("18", files="6"), ""),
        (weights("82"), ""),
        # Files are read in part, and do not speak for what was read whole.
        (weights("18", loaded="38"), "weights with checksum 8888"),
        (weights("82", loaded="38"), "weights with checksum 8888"),
        (weights("18", loaded="", files=""), "weights with checksum 8888"),
        (weights("18", loaded="78"), "weights with checksum 8888"),
        (weights("82", loaded="78"), ""),
        (weights("82", loaded="78", files="6"), "files with checksum 6666"),
        (weights("1", loaded="78"), ""),
        (weights("1", loaded="78", files="", note="x is out of sight"), "there: x is out of sight"),
        (weights("82", loaded="", files=""), "files cannot be compared"),
        (weights(code="9" * 32), "or rotary angles, with checksum 9999"),
    ],
)
def test_weights_are_compared_by_memory_by_what_was_loaded_and_by_files(other: Weights, expected: str) -> None:
    for one, two in ((weights(), other), (other, weights())):
        assert (one.misfit(two) == "") is (expected == "")
    assert expected in weights().misfit(other)


def test_what_is_not_known_is_not_equal() -> None:
    """Two engines of which nothing is known may be any two models."""
    nothing = weights("1", loaded="", files="")
    assert nothing.misfit(nothing)


def test_the_tensor_and_the_file_that_differ_are_named() -> None:
    each = [b"aaaabbbbcccc", b"aaaabbbbdddd"]
    one, two = (Weights(Tensors("1" * 32, content * 32, held)) for content, held in zip("23", each, strict=True))
    names = {"1" * 32: ["a", "b", "c"]}
    assert "(1 of 3 tensors differ, the first is c)" in one.misfit(two, names)
    assert "tensors differ" not in one.misfit(two, {"9" * 32: ["a"]})
    files = [weights("", "", digit, each_file=(("a", "1"), ("b", digit))) for digit in "67"]
    assert "(b differs)" in files[0].misfit(files[1])
    split = weights("", "", "7", each_file=(("c", "1"),))
    assert "(1 files there, 2 here)" in files[0].misfit(split)


def test_what_differs_between_two_engines_is_said_and_nothing_else() -> None:
    other = msgspec.structs.replace(TAG, facts=(*TAG.facts[:-1], ("dtype", "fp8")))
    assert differences(str(other), str(TAG)) == "found dtype fp8; expected dtype bf16"
    several = msgspec.structs.replace(other, mode="push")
    assert differences(str(several), str(TAG)) == (
        "found dtype fp8, kvcached_nixl/16 push; expected dtype bf16, kvcached_nixl/16 pull"
    )
    more = msgspec.structs.replace(TAG, facts=(*TAG.facts, ("spec", "eagle")))
    assert differences(str(more), str(TAG)) == "found spec eagle; expected nothing"
    assert differences(str(TAG), str(more)) == "found nothing; expected spec eagle"
    assert differences("abc", str(TAG)) == f"found 'abc'; expected {str(TAG)!r}"
    assert differences(str(TAG), str(TAG)).startswith("found 'kvcached_nixl/")


GROUPS = (GroupMemory((PLANES,), 2),)
A, B, C = ("a" * 32, "b" * 32, "c" * 32)


def answer(weights: Weights, tag: str = "tag") -> tuple[str, bytes]:
    rank = RankHandshake(EngineId("e"), 2, 1, b"", 0, GROUPS, 0, "DRAM", False, weights, Process(), 1, 0)
    return tag, msgspec.msgpack.encode(Answer("0" * 16, msgspec.msgpack.encode(rank)))


def known(layout: str, content: str, files: str) -> Weights:
    return Weights(Tensors(layout, content), files=files)


def fits(one: Kind, other: Kind) -> bool:
    """As docs/metrics.md says it."""
    is_same = 0 < one.weights == other.weights or 0 < one.checkpoint == other.checkpoint
    return one.compatibility == other.compatibility and is_same


def test_the_numbers_fit_where_a_handshake_would_succeed() -> None:
    """Every pair of weights of one rank, with memory or files known or not."""
    found = [known(*one) for one in product((A, B), ("", A, B), ("", B, C))]
    for ours, theirs in product(found, found):
        # With other memory of one layout, files are known only if kernels have rewritten what was loaded.
        if ours.memory.is_comparable(theirs.memory) and ours.memory != theirs.memory and ours.files:
            continue
        here, there = (Kind.of([answer(one)]) for one in (ours, theirs))
        assert fits(here, there) is (ours.misfit(theirs) == ""), (ours, theirs)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(Malformed):
        Kind.of([("tag", b"\xc1")])
