# SPDX-License-Identifier: Apache-2.0
"""worker/transfer/ownership_tokens.py: only kept offers have a token, one each, and decode sees exactly these."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import tokens_of

from kvcached_nixl.worker.transfer.ownership_tokens import (
    BUCKETS,
    TOKENS_PER_BUCKET,
    TokenArray,
    TokenBuffers,
    TokenTable,
    bucket_of,
)

OWNERS = st.integers(0, 12).map("p-{}".format)
WORDS = st.integers(1, 2**64 - 1) | st.integers(0, 3).map(lambda place: 7 + place * BUCKETS)


def empty(rows: int = BUCKETS) -> TokenArray:
    return np.zeros((rows, TOKENS_PER_BUCKET), dtype=np.uint64)


def tokens_in(table: TokenArray) -> list[int]:
    return sorted(int(word) for word in table[np.nonzero(table)])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(OWNERS, st.none() | WORDS), max_size=60))
def test_each_owner_has_the_token_it_was_last_given_in_its_bucket(operations: list[tuple[str, int | None]]) -> None:
    words, model = empty(), dict[str, int]()
    table = TokenTable(words)
    for owner, word in operations:
        if word is None:
            table.remove(owner)
            model.pop(owner, None)
        else:
            assert table.publish(owner, word)
            model[owner] = word
        assert len(tokens_of(table)) == len(model)
        assert tokens_in(words) == sorted(model.values())
        assert all((words[bucket_of(one)] == np.uint64(one)).any() for one in model.values())


def test_two_owners_of_one_token_have_two() -> None:
    """One that goes does not take the other's."""
    words = empty()
    table = TokenTable(words)
    assert table.publish("a", 5) and table.publish("b", 5)
    table.remove("a")
    table.remove("a")
    assert tokens_in(words) == [5]
    table.remove("b")
    assert tokens_in(words) == []


def test_a_full_bucket_refuses_and_has_room_again() -> None:
    """An offer without an ownership token is not used: the request is recomputed."""
    words = empty()
    table = TokenTable(words)
    for number in range(TOKENS_PER_BUCKET):
        assert table.publish(number, 7 + number * BUCKETS)
    assert not table.publish("late", 7 + TOKENS_PER_BUCKET * BUCKETS)
    assert len(tokens_of(table)) == TOKENS_PER_BUCKET and not (words[8:] != 0).any()
    assert table.publish("elsewhere", 8)
    assert not table.publish("elsewhere", 7 + TOKENS_PER_BUCKET * BUCKETS)
    assert 8 not in tokens_in(words), "an owner without room for its new token has no old one"
    table.remove(3)
    assert table.publish("late", 7 + TOKENS_PER_BUCKET * BUCKETS)


@pytest.mark.parametrize("table", [np.zeros((2, 2), dtype=np.uint64), empty() + 1], ids=["shape", "not empty"])
def test_a_table_that_does_not_fit_is_refused(table: TokenArray) -> None:
    with pytest.raises(ValueError, match="expected"):
        TokenTable(table)


# --------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("word", [1, BUCKETS - 1, 2**64 - 1, 3 * BUCKETS + 5])
def test_the_bucket_that_is_read_is_the_one_the_token_would_be_in(word: int) -> None:
    words, rows = empty(), empty(2)
    token_buffers = TokenBuffers(rows)
    taken = token_buffers.take(lambda: None)
    assert taken is not None
    here, there = token_buffers.ranges(taken, int(words.ctypes.data), word)
    assert here.tolist() == [[rows[taken].ctypes.data, TOKENS_PER_BUCKET * 8]]
    assert there.tolist() == [[words[bucket_of(word)].ctypes.data, TOKENS_PER_BUCKET * 8]]
    assert not token_buffers.holds(taken, word)
    rows[taken] = words[bucket_of(word)]
    assert not token_buffers.holds(taken, word)
    TokenTable(words).publish("p", word)
    rows[taken] = words[bucket_of(word)]
    assert token_buffers.holds(taken, word)
    assert not token_buffers.holds(taken, word ^ 2**20)


def test_a_token_of_before_is_not_seen_in_a_buffer_that_is_used_again() -> None:
    """If a READ fails silently, the row still holds tokens that were read for another attempt."""
    rows = empty(1)
    token_buffers = TokenBuffers(rows)
    taken = token_buffers.take(lambda: None)
    assert taken is not None
    rows[taken, 3] = 5
    token_buffers.give_back(taken)
    assert token_buffers.take(lambda: None) == taken and not token_buffers.holds(taken, 5)
