# SPDX-License-Identifier: Apache-2.0
"""kvcached's real block pool, with vLLM's requests and hashes. Missing: its pages; any number of block ids is handed
out, and each is a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from vllm.v1.core import block_pool

from kvcached_nixl.vllm.patches.windows import Windows

__all__ = ["Pages", "elastic_pool", "put_into", "windows_open"]


class Pages:
    """kvcached's manager and its page allocator, without pages.

    Attributes:
        num_taken: so often from now on another engine on the device has taken the last page before `alloc`.
    """

    block_mem_size = page_size = num_layers = num_kv_buffers = 1

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_ids = list(range(1, num_blocks))
        self.num_taken = 0

    @property
    def page_allocator(self) -> Pages:
        return self

    def available_size(self) -> int:
        return len(self.free_ids)

    def alloc(self, count: int) -> list[int] | None:
        if count and self.num_taken:
            self.num_taken -= 1
            return None
        if count > len(self.free_ids):
            return None
        taken, self.free_ids = self.free_ids[:count], self.free_ids[count:]
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        self.free_ids += block_ids

    def get_resize_target(self) -> int:
        return 0

    def get_num_inuse_pages(self) -> int:
        return self.num_blocks - len(self.free_ids)

    def get_num_free_pages(self) -> int:
        return len(self.free_ids)

    def get_avail_physical_pages(self) -> int:
        return len(self.free_ids)

    def get_num_reserved_pages(self) -> int:
        return 0

    def _get_num_alloced_blocks(self) -> int:
        return self.get_num_inuse_pages()

    def group_indices_by_page(self, block_ids: Sequence[int], block_mem_size: int) -> dict[int, list[int]]:
        return {one: [one] for one in block_ids}

    def get_page_occupancy(self, pages: Iterable[int]) -> dict[int, int]:
        return dict.fromkeys(pages, 1)


@contextmanager
def windows_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """kvcached's version windows are open, as while it patches vLLM in a process of this package."""
    from kvcached.integration.version_utils import VersionRange

    windows, contains = Windows(), VersionRange.contains
    windows.is_open = True
    with monkeypatch.context() as opened:
        opened.setattr(VersionRange, "contains", lambda self, ver: contains(self, ver) or windows.contains(self, ver))
        yield opened


def elastic_pool(monkeypatch: pytest.MonkeyPatch, num_blocks: int, block_size: int, max_cached_blocks: int = -1) -> Any:
    """Returns an empty pool. vLLM's module is as before when the test has ended."""
    from kvcached.integration.vllm import interfaces
    from kvcached.integration.vllm.patches import ElasticBlockPoolPatch

    with windows_open(monkeypatch) as opened:
        # kvcached changes nothing where there is one.
        opened.setattr(block_pool, "ElasticBlockPool", None, raising=False)
        del block_pool.ElasticBlockPool
        assert ElasticBlockPoolPatch().apply(block_pool)
        opened.setattr(interfaces, "get_kv_cache_manager", lambda *_, **__: Pages(num_blocks))
        pool = block_pool.ElasticBlockPool(
            num_blocks,
            block_size,
            64,
            2,
            enable_caching=True,
            max_cached_blocks=max_cached_blocks,
            hash_block_size=block_size,
        )
    pool.num_hash_lookahead_tokens = 0  # as `with_hash_lookahead` does
    return pool


def put_into(scheduler: Any, pool: Any) -> None:
    """Has vLLM's scheduler use the pool, as kvcached's patch of the coordinator does."""
    manager = scheduler.kv_cache_manager
    manager.block_pool = manager.coordinator.block_pool = pool
    for one in manager.coordinator.single_type_managers:
        vars(one).update(block_pool=pool, _null_block=pool.null_block)
