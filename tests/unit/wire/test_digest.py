# SPDX-License-Identifier: Apache-2.0
"""wire/manifest.py: equal in every process for prompts with equal KV, and different for all others."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parameter_ids import plain_id

from kvcached_nixl.wire.manifest import Embeddings, digest_of

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


def test_another_process_finds_the_same() -> None:
    """vLLM's own block hashes differ between processes."""
    code = "from kvcached_nixl.wire.manifest import digest_of; print(digest_of(range(100, 132), 32, lora='é'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest_of(TOKENS, 32, lora="é")


def test_a_long_prompt_costs_little() -> None:
    """64k tokens; the bound is ten times what a slow machine takes."""
    tokens = list(range(65_536))
    begun = time.perf_counter()
    digest_of(tokens, 65_536)
    assert time.perf_counter() - begun < 0.1
