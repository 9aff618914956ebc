# SPDX-License-Identifier: Apache-2.0
"""worker/lease_table.py and wire/lease_word.py: who is kept has one word, and nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.lease_word import BUCKETS, WORDS_PER_BUCKET, place_of
from kvcached_nixl.worker import lease_table
from kvcached_nixl.worker.lease_table import KeptRequests, Words

IDS = st.integers(0, 30).map(lambda number: PrefillRequestId(f"cmpl-{number}"))


def empty() -> Words:
    return np.zeros((BUCKETS, WORDS_PER_BUCKET), dtype=np.uint64)


def words_of(table: Words) -> set[tuple[int, int]]:
    return {(int(bucket), int(table[bucket, place])) for bucket, place in zip(*np.nonzero(table), strict=True)}


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "remove"]), IDS), max_size=80))
def test_it_is_a_set_whose_members_have_a_word_each(operations: list[tuple[str, PrefillRequestId]]) -> None:
    table, model = empty(), set[PrefillRequestId]()
    kept = KeptRequests(table)
    for operation, request_id in operations:
        if operation == "remove" and request_id not in model:
            with pytest.raises(KeyError):
                kept.remove(request_id)
            continue
        getattr(kept, operation)(request_id)
        getattr(model, operation)(request_id)
        assert set(kept) == model and len(kept) == len(model)
        assert words_of(table) == {place_of(one) for one in model}
        assert np.count_nonzero(table) == len(model)


def test_a_full_bucket_refuses_and_says_so_and_has_room_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has no word is not read: the request is computed anew."""
    monkeypatch.setattr(lease_table, "place_of", lambda request_id: (7, 1 + int(request_id)))
    table = empty()
    kept = KeptRequests(table)
    names = [PrefillRequestId(str(number)) for number in range(WORDS_PER_BUCKET + 1)]
    for name in names:
        kept.add(name)
    assert (kept.refused, len(kept)) == (1, len(names))
    assert f"request {names[-1]}" in caplog.text
    assert words_of(table) == {(7, 1 + number) for number in range(WORDS_PER_BUCKET)}
    kept.remove(names[0])
    late = PrefillRequestId("1000")
    kept.add(late)
    assert (7, 1001) in words_of(table) and kept.refused == 1
    kept.remove(names[-1])


@pytest.mark.parametrize("table", [np.zeros((2, 2), dtype=np.uint64), empty() + 1], ids=["shape", "not empty"])
def test_a_table_that_does_not_fit_is_refused(table: Words) -> None:
    with pytest.raises(ValueError, match="expected"):
        KeptRequests(table)


def test_words_are_spread_and_none_is_empty() -> None:
    """Sixteen thousand requests at once leave every bucket half empty."""
    places = [place_of(PrefillRequestId(f"cmpl-{number}")) for number in range(16 * BUCKETS)]
    assert len(set(places)) == len(places)
    assert all(0 < word < 2**64 for _, word in places)
    assert np.bincount([bucket for bucket, _ in places], minlength=BUCKETS).max() < WORDS_PER_BUCKET // 1.5
