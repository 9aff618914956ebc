# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.kvcached_quirks` with modules as vLLM 0.32 and 0.33 have them, and kvcached's replacements."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.errors import Refused
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.patches.kvcached_quirks import (
    patch_allocate_slots,
    patch_coordinator,
    patch_worker_init_device,
)

GIB = 1 << 30
SNAPSHOT, CACHE = SimpleNamespace(total_memory=80 * GIB), SimpleNamespace(gpu_memory_utilization=0.5)


def patched(patch: Patch, target: Any, apply: Callable[[], bool]) -> Any:
    """As where kvcached patches a module of vLLM: ``apply``."""
    return patch(Call(lambda gpuworker_mod=None, kvcoord_mod=None: apply(), None, (target, target), {}))


def module(**contents: Any) -> Any:
    made = types.ModuleType("patched")
    vars(made).update(contents)
    return made


def gpu_worker() -> Any:
    """vLLM 0.32's."""

    def request_memory(init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
        raise AssertionError("kvcached replaces it")

    return module(request_memory=request_memory)


def kvcached_request_memory(init_snapshot: Any, cache_config: Any) -> int:
    return int(init_snapshot.total_memory * cache_config.gpu_memory_utilization)


def test_external_weights_are_not_the_engines_to_use() -> None:
    worker = gpu_worker()

    def apply() -> bool:
        worker.request_memory = kvcached_request_memory
        return True

    assert patched(patch_worker_init_device, worker, apply) is True
    assert worker.request_memory(SNAPSHOT, CACHE) == 40 * GIB
    assert worker.request_memory(SNAPSHOT, CACHE, 0) == 40 * GIB
    assert worker.request_memory(SNAPSHOT, CACHE, 15 * GIB) == 25 * GIB
    assert worker.request_memory(SNAPSHOT, CACHE, external_weight_memory=15 * GIB) == 25 * GIB
    for too_many in (40 * GIB, 41 * GIB):
        with pytest.raises(Refused, match="gpu_memory_utilization 0.5") as refused:
            worker.request_memory(SNAPSHOT, CACHE, too_many)
        assert str(too_many) in refused.value.found and str(40 * GIB) in refused.value.found


def test_what_kvcached_leaves_is_left() -> None:
    """kvcached says that it has patched the module before, or that it cannot."""
    worker = gpu_worker()
    stock = worker.request_memory
    for answer in (True, False):
        assert patched(patch_worker_init_device, worker, lambda answer=answer: answer) is answer  # type: ignore[misc]
        assert worker.request_memory is stock


def coordinators() -> tuple[Any, Callable[[], bool]]:
    """vLLM 0.33's class of coordinators with its subclass, and kvcached's patch, which replaces the block pool."""

    class KVCacheCoordinator:
        def __init__(
            self,
            kv_cache_config: str,
            use_eagle: bool,
            num_hash_lookahead_tokens: int = 0,
            enable_kv_cache_events: bool = False,
        ) -> None:
            self.block_pool = SimpleNamespace(num_hash_lookahead_tokens=num_hash_lookahead_tokens)

    class Unitary(KVCacheCoordinator):
        def __init__(self, kv_cache_config: str, use_eagle: bool, num_hash_lookahead_tokens: int = 0) -> None:
            super().__init__(kv_cache_config, use_eagle, num_hash_lookahead_tokens=num_hash_lookahead_tokens)

    made = module(KVCacheCoordinator=KVCacheCoordinator, Unitary=Unitary)
    stock = KVCacheCoordinator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.block_pool = SimpleNamespace()

    def apply() -> bool:
        KVCacheCoordinator.__init__ = init  # type: ignore[method-assign]
        return True

    return made, apply


@pytest.mark.parametrize("name", ["KVCacheCoordinator", "Unitary"])
def test_kvcacheds_block_pool_has_the_lookahead(name: str) -> None:
    made, apply = coordinators()
    assert patched(patch_coordinator, made, apply)
    assert getattr(made, name)("config", False).block_pool.num_hash_lookahead_tokens == 0
    assert getattr(made, name)("config", True, 3).block_pool.num_hash_lookahead_tokens == 3
    assert getattr(made, name)("config", use_eagle=True, num_hash_lookahead_tokens=2).block_pool == SimpleNamespace(
        num_hash_lookahead_tokens=2
    )


def test_kvcached_patches_the_allocation_as_where_it_undoes_one() -> None:
    """And nothing else: the version is vLLM's again also if the patch raises."""
    patch, seen = SimpleNamespace(detected_version="0.26.0"), []

    def apply() -> bool:
        seen.append(patch.detected_version)
        if len(seen) > 1:
            raise RuntimeError
        return True

    assert patch_allocate_slots(Call(apply, patch, (), {})) is True
    with pytest.raises(RuntimeError):
        patch_allocate_slots(Call(apply, patch, (), {}))
    assert seen == ["0.28.0", "0.28.0"] and patch.detected_version == "0.26.0"
