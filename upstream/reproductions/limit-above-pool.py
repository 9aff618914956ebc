# SPDX-License-Identifier: Apache-2.0
"""A limit that is raised above the pool makes pages that the pool does not have, or has already handed out."""

import sys
import threading
import types
import uuid

from kvcached.kv_cache_manager import KVCacheManager, PageAllocator

PAGE_BYTES = 2 << 20
POOL_PAGES = 8

pages = PageAllocator(
    1, POOL_PAGES * PAGE_BYTES, PAGE_BYTES, enable_page_prealloc=False, ipc_name=f"reproduction-{uuid.uuid4().hex[:12]}"
)
manager = object.__new__(KVCacheManager)
vars(manager).update(
    page_allocator=pages, mem_size=POOL_PAGES * PAGE_BYTES, in_shrink=False, reserved_blocks=[], _lock=threading.RLock()
)
manager._wait_post_init = types.MethodType(lambda self: None, manager)
manager.resize(POOL_PAGES // 2 * PAGE_BYTES)
manager.resize(2 * POOL_PAGES * PAGE_BYTES)
found = pages.get_num_free_pages()
pages.release_shared_segment()
print(f"{found} pages can be allocated, of a pool of {POOL_PAGES}")
sys.exit(found != POOL_PAGES)
