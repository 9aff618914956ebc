# SPDX-License-Identifier: Apache-2.0
"""wire/manifest.py: impossible values are refused, and the ownership token and the digest depend on all that counts."""

from __future__ import annotations

import hashlib
import json
import random
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.codecs import each, plain_id

from kvcached_nixl.wire.checked import Malformed, convert
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Embeddings, Keeps, KVGroup, KVGroups, Manifest, digest_of

MANIFEST = Manifest(
    protocol=PROTOCOL,
    incarnation="0123456789abcdef",
    request_id="cmpl-r-0-0123abcd",
    digest="0123456789abcdef" * 2,
    num_tokens=10,
    block_sizes=(4, 4),
    context_parallel=(1, 1),
    groups=(BlockRange(0, (7, 3, 9)), BlockRange(4, (2, 8))),
    lease_seconds=30.0,
    num_media=0,
)
OTHER: dict[str, Any] = {
    "incarnation": "0123456789abcdee",
    "request_id": "cmpl-r-0-0123abce",
    "digest": "0123456789abcdee" * 2,
    "num_tokens": 9,
    "block_sizes": (4, 4),
    "groups": (BlockRange(0, (7, 9, 3)), BlockRange(4, (2, 8))),
    "lease_seconds": 29.0,
    "num_media": 1,
}


@pytest.mark.parametrize("field", sorted(set(OTHER) - {"block_sizes"}))
def test_the_token_changes_with_every_field(field: str) -> None:
    assert {*OTHER, "protocol", "context_parallel"} == set(Manifest.__struct_fields__)
    other = msgspec.structs.replace(MANIFEST, **{field: OTHER[field]})
    assert 0 < other.ownership_token < 2**64
    assert other.ownership_token != MANIFEST.ownership_token


def test_a_token_is_never_the_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 marks a free place in the table."""

    class Nothing:
        def digest(self) -> bytes:
            return bytes(8)

    monkeypatch.setattr("hashlib.blake2b", lambda *_, **__: Nothing())
    assert MANIFEST.ownership_token == 1


def test_the_token_is_this_one() -> None:
    """Golden: both sides compute it by themselves."""
    assert MANIFEST.ownership_token == 9732852793281000563


@given(
    num_tokens=st.integers(1, 200),
    block_size=st.integers(1, 32),
    first=st.integers(0, 3),
    lease_seconds=st.floats(0, 86_400, exclude_min=True) | st.integers(1, 86_400),
    request_id=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20),
)
def test_it_comes_back_from_a_router_as_it_was(
    num_tokens: int, block_size: int, first: int, lease_seconds: float, request_id: str
) -> None:
    """Through JSON, and with whole numbers written without a point, as JavaScript does: the same ownership token."""
    first_block = min(first, (num_tokens - 1) // block_size)
    ids = tuple(range(5, 5 + -(-num_tokens // block_size) - first_block))
    made = msgspec.structs.replace(
        MANIFEST,
        num_tokens=num_tokens,
        block_sizes=(block_size,),
        request_id=request_id,
        groups=(BlockRange(first_block * block_size, ids),),
        lease_seconds=float(lease_seconds),
        num_media=0,
    )
    plain = msgspec.to_builtins(made)
    again = json.loads(json.dumps(plain))
    assert convert(again, Manifest) == made
    assert convert(again, Manifest).ownership_token == made.ownership_token
    if made.lease_seconds.is_integer():
        assert (
            convert(again | {"lease_seconds": int(made.lease_seconds)}, Manifest).ownership_token
            == made.ownership_token
        )


def group(first_token: int, *block_ids: Any, **more: Any) -> dict[str, Any]:
    return {"first_token": first_token, "block_ids": [*block_ids], **more}


NAMED = each(
    protocol=["4"],
    incarnation=[12, "0123456789abcdeg"],
    request_id=["", "\ud800", "x" * 1025],
    digest=["0", None],
    num_tokens=[2**31, 10.5],
    block_sizes=[(-4, 4)],
    context_parallel=[[1]],
    groups=[None],
    lease_seconds=[86_400.1, 0, float("nan"), float("inf"), True],
    num_media=[-1],
    surplus=[1],
)
"""Fields that the refusal names."""
EXPLAINED: dict[str, list[dict[str, Any]]] = {
    "another kvcached_nixl": [{"protocol": 3}],
    f"protocol {PROTOCOL}": [{"protocol": 4}],
    "at least one token": [{"num_tokens": 0}],
    "at least one": [{"block_sizes": (0, 4)}],
    "context parallelism": each(context_parallel=[[2, 1], [1, 2]]),
    "end where the tokens do": [
        *each(num_tokens=[13, 8], groups=[[group(0, 7, 3)], [group(0, 7, 3, 9, 1)], [group(12), group(16)]])
    ],
    "end where the tokens do|start a block": [{"block_sizes": (5, 5)}],
    "start a block": [{"groups": [group(2, 7, 3)]}],
    "no block twice": [{"groups": [group(0, 7, 3, 7)]}],
    "block_ids": each(groups=[[group(0, 7, 3, wrong)] for wrong in (-1, 2**31, True)]),
    "first_token": [{"groups": [{"block_ids": [7, 3, 9]}]}],
    "more": [{"groups": [group(0, 7, 3, 9, more=1)]}],
    "64 KV-cache groups": [
        {"groups": [group(0, 7, 3, 9)] * 65},
        {"block_sizes": [], "groups": []},
        {"block_sizes": [4] * 65, "groups": []},
    ],
    "a block size for each": [{"block_sizes": [4, 4, 4]}],
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [(one, next(iter(one))) for one in NAMED] + [(one, words) for words, ones in EXPLAINED.items() for one in ones],
    ids=plain_id,
)
def test_what_cannot_be_is_malformed_and_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(Malformed, match=words):
        plain = msgspec.to_builtins(MANIFEST) | {"block_sizes": [4] * len(changed.get("groups") or "ab")} | changed
        convert(plain, Manifest)


BOUNDS = [
    *each(
        request_id=["x", "x" * 1024],
        num_tokens=[9, 12],
        groups=[[group(0, 7, 3, 9)], [group(0, 7, 3, 9)] * 64],
        lease_seconds=[86_400, 1e-9],
        num_media=[2**31 - 1],
    ),
    {"num_tokens": 1, "groups": [group(0, 0)]},
    {"num_tokens": 2**31 - 1, "groups": []},
    {"block_sizes": (1,), "num_tokens": 2, "groups": [group(1, 2**31 - 1)]},
    {"block_sizes": (4,) * 64, "groups": []},
    {"groups": [group(12)], "num_tokens": 12},
]


@pytest.mark.parametrize("changed", BOUNDS, ids=plain_id)
def test_a_manifest_at_its_bounds_is_sound(changed: dict[str, Any]) -> None:
    plain = msgspec.to_builtins(MANIFEST) | {"block_sizes": [4] * len(changed.get("groups") or "ab")} | changed
    assert convert(plain, Manifest).protocol == PROTOCOL


def test_ranges_hold_the_prompt_and_nothing_else() -> None:
    """Whatever else is allocated: generated tokens, look-ahead; and what has left a window is not there."""
    blocks = ([7, 3, 9, 11, 12], [0, 5, 6, 13, 14])
    equal, wide = KVGroups((KVGroup(4), KVGroup(4))), KVGroups((KVGroup(4), KVGroup(8)))
    assert equal.ranges(blocks, (0, 4), 10) == (BlockRange(0, (7, 3, 9)), BlockRange(4, (5, 6)))
    assert equal.ranges(blocks, (0, 4), 8) == (BlockRange(0, (7, 3)), BlockRange(4, (5,)))
    assert equal.ranges(blocks, (0, 0), 1) == (BlockRange(0, (7,)), BlockRange(0, (0,)))
    assert wide.ranges(blocks, (0, 8), 10) == (BlockRange(0, (7, 3, 9)), BlockRange(8, (5,)))
    with pytest.raises(ValueError, match="zip"):
        equal.ranges(blocks, (0,), 10)


def test_of_a_state_the_last_block_alone_matters() -> None:
    """It is the one that the last of the tokens is in, as vLLM counts; peers count a block of one token."""
    groups = KVGroups((KVGroup(4), KVGroup(8, Keeps.STATE)))
    assert groups.block_sizes == (4, 1) and groups.step_tokens == 4
    blocks = ([7, 3, 9], [0, 5, 6])
    assert groups.ranges(blocks, (0, 0), 8) == (BlockRange(0, (7, 3)), BlockRange(7, (0,)))
    assert groups.ranges(blocks, (0, 4), 9) == (BlockRange(0, (7, 3, 9)), BlockRange(8, (5,)))
    assert groups.ranges(blocks, (0, 0), 30)[1] == BlockRange(29, ()), "which no manifest accepts"
    assert groups.growing(blocks, 11) == (BlockRange(0, (7, 3, 9)), BlockRange(10, ()))


TOKENS = list(range(100, 132))
IMAGE = ("hash-of-an-image", 4, 8)


def test_with_everything_that_counts_it_is_these_digits() -> None:
    """Golden: features are hashed in the order of their first tokens, then of their names, and others count as well."""
    features = [("a", 16, 2), ("z", 4, 8), ("b", 16, 2), ("y", 32, 2)]
    are_tokens = [place % 3 > 0 for place in range(40)]
    found = digest_of(
        TOKENS, 31, embeddings=b"abc", are_tokens=are_tokens, features=features, lora="é\ud800", salt="s\ud800"
    )
    assert found == "a6971ba8af706558f93b3df2e2ecdebe"
    assert digest_of(TOKENS, 32, features=[("z", 4, 8), ("a", 16, 2)]) == "e1cf42d51c44b7e774ebfce188ce6a69"


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": [*TOKENS[:31], 0]},
        {"token_ids": [0, *TOKENS[1:]]},
        {"token_ids": [TOKENS[1], TOKENS[0], *TOKENS[2:]]},
        {"token_ids": None},
        {"num_tokens": 31},
        {"embeddings": b"\x00"},
        {"are_tokens": [True] * 32},
        {"are_tokens": [True] * 31 + [False]},
        {"features": [IMAGE]},
        {"features": [("another", 4, 8)]},
        {"features": [("hash-of-an-image", 5, 8)]},
        {"features": [("hash-of-an-image", 4, 9)]},
        {"features": [IMAGE, ("another", 16, 8)]},
        {"lora": "adapter"},
        {"salt": "adapter"},
        {"lora": "a", "salt": "b"},
        {"lora": "ab"},
        {"salt": "ab"},
        {"lora": "\ud800"},
    ],
    ids=plain_id,
)
def test_everything_that_kv_follows_from_counts(changed: dict[str, Any]) -> None:
    """Each against the plain prompt and against each other."""
    others = [{}, {"features": [IMAGE, IMAGE]}, {"lora": "b", "salt": "a"}]
    found = digest_of(**{"token_ids": TOKENS, "num_tokens": 32} | changed)
    assert len(found) == 32 and int(found, 16) >= 0
    assert found not in [digest_of(**{"token_ids": TOKENS, "num_tokens": 32} | one) for one in others]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.lists(st.integers(0, 9), max_size=40))
def test_the_first_tokens_of_a_longer_prompt_have_the_digest_of_the_shorter(
    tokens: list[int], further: list[int]
) -> None:
    """Decode's prompt may go on where prefill's ended, with an image behind it."""
    behind = ("behind", len(tokens), 4)
    shorter = digest_of(tokens, len(tokens), lora="l", salt="s", features=[("in it", 0, 1)])
    longer = digest_of([*tokens, *further], len(tokens), lora="l", salt="s", features=[("in it", 0, 1), behind])
    assert shorter == longer
    if further:
        assert digest_of([*tokens, *further], len(tokens) + 1, lora="l", salt="s") != shorter


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 9, 10])
def test_embeddings_are_hashed_to_the_end_of_a_token(num_tokens: int) -> None:
    """Inside a chunk of 256 KiB, at its end and behind it; of more tokens than there are, all."""
    width, data = 96 << 10, random.Random(1).randbytes(9 * 96 << 10)
    expected = hashlib.blake2b(b"torch.half " + data[: num_tokens * width], digest_size=16).digest()
    assert Embeddings("torch.half", memoryview(data), width).hash_of(num_tokens) == expected


def test_a_long_prompt_costs_little() -> None:
    """64k tokens; the bound is ten times what a slow machine takes."""
    tokens = list(range(65_536))
    begun = time.perf_counter()
    digest_of(tokens, 65_536)
    assert time.perf_counter() - begun < 0.1
