# SPDX-License-Identifier: Apache-2.0
"""From vLLM 0.32 on, the model runs with vLLM's current configuration when its memory is measured."""

import contextlib
import sys
import types
from types import SimpleNamespace

import torch
from kvcached.integration.vllm.patches import GPUWorkerPatch

current, seen = [], []


@contextlib.contextmanager
def set_current_vllm_config(vllm_config):
    current.append(vllm_config)
    yield
    current.pop()


class Worker:
    """vLLM's, as far as it is asked; kvcached's path without a snapshot of a GPU's memory."""

    vllm_config = "the worker's"
    cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    requested_memory = 500
    model_runner = SimpleNamespace(profile_run=lambda: seen.extend(current))

    def determine_available_memory(self):
        return 0


torch.cuda.empty_cache = torch.cuda.reset_peak_memory_stats = lambda: None
torch.cuda.memory_stats = lambda: {"allocated_bytes.all.peak": 0}
module = types.ModuleType("vllm.v1.worker.gpu_worker")
vars(module).update(Worker=Worker, set_current_vllm_config=set_current_vllm_config)
GPUWorkerPatch().patch_worker_determine_available_memory(module)
Worker().determine_available_memory()
print(
    f"the model runs with the configuration {seen[0]!r}" if seen else "the model runs without a current configuration"
)
sys.exit(seen != ["the worker's"])
