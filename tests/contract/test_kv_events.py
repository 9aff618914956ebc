# SPDX-License-Identifier: Apache-2.0
"""KV events of kvcached's own block pool: replayed, they are what the pool has cached, after every change.

Real: kvcached's pool, vLLM's requests, hashes and events. Missing: pages; any number of block ids is handed out.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from support.kvcached_pool import elastic_pool
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvcached_nixl.vllm.patches.kvcached_quirks import report_blocks

BLOCK_SIZE, BLOCKS, GROUP = 4, 24, 0


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    init_none_hash(sha256)
    return elastic_pool(monkeypatch, BLOCKS, BLOCK_SIZE, max_cached_blocks=8)


class Replay:
    """What a router knows that reads the events."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.known: Counter[Any] = Counter()
        self.kinds: Counter[str] = Counter()

    def read(self) -> None:
        for event in self.pool.take_events():
            self.kinds[type(event).__name__] += 1
            if isinstance(event, BlockStored):
                assert event.block_size == BLOCK_SIZE
                assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
                self.known.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.known.subtract(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.known.clear()

    def is_right(self) -> bool:
        """Whether it is what the pool has, block by block."""
        held = [one.block_hash for one in self.pool.blocks if one.block_hash is not None]
        expected = Counter(block_pool.maybe_convert_block_hash(block_pool.get_block_hash(one)) for one in held)
        return +self.known == expected and min(self.known.values(), default=0) >= 0


def request_of(number: int, num_blocks: int) -> Request:
    """Requests of equal numbers begin alike."""
    prompt = [number * 1000 + place for place in range(num_blocks * BLOCK_SIZE)]
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(f"r-{number}-{num_blocks}", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def exercise(pool: Any, replay: Replay, steps: int = 400) -> None:
    """Requests come, share prefixes and end; caches are trimmed, evicted from and cleared."""
    draw = random.Random(7)
    running: list[list[Any]] = []
    for _ in range(steps):
        what = draw.choice(["start", "start", "start", "end", "end", "evict", "clear"])
        if what == "start" and len(running) < 4:
            request = request_of(draw.randrange(4), draw.randint(1, 5))
            hits: list[Any] = []
            for block_hash in request.block_hashes:
                found = pool.get_cached_block(block_hash, [GROUP])
                if not found:
                    break
                hits += found
            pool.touch(hits)
            missing = len(request.block_hashes) - len(hits)
            if missing > pool.get_num_free_blocks():
                pool.free_blocks(reversed(hits))
                continue
            blocks = [*hits, *(pool.get_new_blocks(missing) if missing else [])]
            pool.cache_full_blocks(request, blocks, len(hits), len(blocks), BLOCK_SIZE, GROUP)
            running.append(blocks)
        elif what == "end" and running:
            pool.free_blocks(reversed(running.pop(draw.randrange(len(running)))))
        elif what == "evict" and running:
            pool.evict_blocks({one.block_id for one in draw.choice(running)[-1:]})
        elif what == "clear" and not running:
            assert pool.reset_prefix_cache()
        replay.read()
        assert replay.is_right(), what
    for blocks in running:
        pool.free_blocks(reversed(blocks))
    assert pool.reset_prefix_cache()
    replay.read()
    assert replay.is_right() and not +replay.known


def test_events_are_what_the_pool_does(pool: Any) -> None:
    report_blocks(pool)
    replay = Replay(pool)
    exercise(pool, replay)
    assert min(replay.kinds[kind] for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared")) > 3


def test_an_eviction_that_is_not_told_is_noticed(pool: Any) -> None:
    """A planted fault: if this finds nothing, the case above shows nothing."""
    pool._emit_block_removed_events = lambda *_: None
    report_blocks(pool)
    with pytest.raises(AssertionError):
        exercise(pool, Replay(pool))


def test_without_this_package_kvcached_says_nothing(pool: Any) -> None:
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request_of(1, 2), blocks, 0, 2, BLOCK_SIZE, GROUP)
    assert pool.take_events() == []


def test_vllm_s_own_pool_is_left_alone() -> None:
    stock = block_pool.BlockPool(BLOCKS, True, BLOCK_SIZE, True)
    before = dict(vars(stock))
    report_blocks(stock)
    assert vars(stock) == before
