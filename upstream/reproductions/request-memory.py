# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32's worker passes ``request_memory`` the bytes of weights that another process holds."""

import sys
import types
from types import SimpleNamespace

from kvcached.integration.vllm.patches import GPUWorkerPatch

module = types.ModuleType("vllm.v1.worker.gpu_worker")
module.request_memory = lambda init_snapshot, cache_config, external_weight_memory=0: 0
module.Worker = type("Worker", (), {})
GPUWorkerPatch().patch_worker_init_device(module)
snapshot = SimpleNamespace(total_memory=1000, free_memory=1000)
try:
    found = module.request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.5), 100)
except TypeError as error:
    print(f"a worker cannot start: {error}")
    sys.exit(1)
print(f"{found} of 500 bytes are the engine's, where another process holds 100")
sys.exit(found != 400)
