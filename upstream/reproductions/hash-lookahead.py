# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33 reads ``num_hash_lookahead_tokens`` of the block pool where layers keep a state."""

import sys
import types
from types import SimpleNamespace

from kvcached.integration.vllm import interfaces, patches


class Pool(SimpleNamespace):
    """Stands for ElasticBlockPool."""

    null_block = None

    def __init__(self, *sizes, **options):
        super().__init__(**options)


class KVCacheCoordinator:
    """vLLM's, as far as it is asked: with its own block pool at first."""

    def __init__(self, kv_cache_config):
        self.kv_cache_config = kv_cache_config
        self.block_pool = SimpleNamespace(num_hash_lookahead_tokens=3, enable_caching=True, hash_block_size=16)
        self.single_type_managers = [SimpleNamespace()]


for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.block_pool"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm.v1.core.block_pool"].ElasticBlockPool = Pool
interfaces.init_kvcached, interfaces.get_world_size = lambda **options: None, lambda: 1
patches._validate_kv_cache_groups = lambda config: None
patches._get_first_attention_group = lambda config: SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
patches._infer_attention_type = patches._get_group_size = lambda config: 1
patches._get_kv_cache_params = lambda *spec, **options: (1, 1)
patches._get_native_hash_block_size = lambda *pool: 16
module = types.ModuleType("vllm.v1.core.kv_cache_coordinator")
module.KVCacheCoordinator = KVCacheCoordinator
patches.KVCacheCoordinatorPatch().patch_coordinator(module)
pool = KVCacheCoordinator(SimpleNamespace(num_blocks=4, kv_cache_groups=[])).block_pool
found = getattr(pool, "num_hash_lookahead_tokens", None)
print(f"{type(pool).__name__}.num_hash_lookahead_tokens is {found}; vLLM's own has 3")
sys.exit(found != 3)
