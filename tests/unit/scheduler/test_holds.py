# SPDX-License-Identifier: Apache-2.0
"""scheduler/holds.py: blocks are held under a number and freed once."""

from __future__ import annotations

from support.engine_fakes import Pool

from kvcached_nixl.scheduler.holds import Holds


def test_what_is_held_is_given_back_once_and_counted() -> None:
    pool, holds = Pool(), Holds()
    pool.of = {"a": [1, 2], "b": [3], "c": []}
    first = holds.take(pool, "a")
    assert holds.take(pool, "b", 7) == 7
    empty = holds.take(pool, "c")
    assert len({first, 7, empty}) == 3
    assert (pool.of, holds.num_blocks) == ({}, 3)
    assert holds.give_back(pool, 7)
    assert (pool.freed, holds.num_blocks) == ([3], 2)
    assert not holds.give_back(pool, 7)
    assert holds.give_back(pool, first) and holds.give_back(pool, empty)
    assert (pool.freed, holds.num_blocks) == ([3, 1, 2], 0)


def test_numbers_of_two_connectors_of_an_engine_differ() -> None:
    """vLLM reports them in one set."""
    numbers = [Holds().take(Pool(), "a") for _ in range(100)]
    assert len(set(numbers)) == 100
