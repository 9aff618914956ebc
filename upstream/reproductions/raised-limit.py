# SPDX-License-Identifier: Apache-2.0
"""A raised limit counts only from the next allocation on, and vLLM tries none that exceeds what was free before."""

import sys
import threading
import types

from kvcached.kv_cache_manager import KVCacheManager

PAGE_BYTES, BLOCK_BYTES = 2 << 20, 1 << 20


class Pages:
    """Stands for the page allocator, of a pool whose limit was one page and is eight."""

    total = 1

    def get_resize_target(self):
        return 8 * PAGE_BYTES

    def resize(self, num_bytes):
        self.total = num_bytes // PAGE_BYTES
        return True

    def get_num_free_pages(self):
        return self.total

    def get_num_reserved_pages(self):
        return 0

    def get_avail_physical_pages(self):
        return 100


manager = object.__new__(KVCacheManager)
vars(manager).update(
    page_allocator=Pages(),
    page_size=PAGE_BYTES,
    block_mem_size=BLOCK_BYTES,
    num_avail_blocks=0,
    reserved_blocks=[],
    in_shrink=False,
    target_num_blocks=None,
    _lock=threading.RLock(),
    _avail_physical_pages_cache=None,
    _avail_physical_pages_cache_time=0.0,
    _resize_rejected=False,
    _rejected_resize_target=None,
)
manager._wait_post_init = types.MethodType(lambda self: None, manager)
manager._get_cached_avail_physical_pages = types.MethodType(lambda self: 100, manager)
found = manager.available_size()
print(f"available_size() is {found} blocks; the limit that was raised to 8 pages of 2 blocks allows 16")
sys.exit(found != 16)
