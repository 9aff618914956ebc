# SPDX-License-Identifier: Apache-2.0
"""Completes kvcached's patches: what they leave out of vLLM below 0.28, KV events, and what vLLM 0.32 and 0.33 expect.

Runs in: every process, while vLLM is being imported, as kvcached patches it.
"""

from __future__ import annotations

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.locate import KVCACHED_ALLOCATION, KVCACHED_COORDINATOR, KVCACHED_GPU_WORKER
from kvcached_nixl.vllm.adapter.series import COUNTS_EXTERNAL_WEIGHTS, HITS_DIVERGE
from kvcached_nixl.vllm.patches.actions.block_events import with_block_events
from kvcached_nixl.vllm.patches.actions.completed import (
    with_configuration,
    with_external_weights,
    with_hash_lookahead,
    with_rollback,
)

__all__ = ["SEAMS"]

_UPSTREAM = "kvcached 0.1.6, kvcached/integration/vllm/patches.py; vLLM"
_REMOVE_WHEN = "kvcached accepts this version itself"

INIT_DEVICE = Patch(
    target=KVCACHED_GPU_WORKER,
    attribute="patch_worker_init_device",
    process="every",
    parameters=("self", "gpuworker_mod"),
    versions=COUNTS_EXTERNAL_WEIGHTS.later,
    why="kvcached's request_memory has two parameters, and vLLM passes three: no worker on a GPU would start.",
    upstream=f"{_UPSTREAM} 0.32, vllm/v1/worker/utils.py",
    remove_when=_REMOVE_WHEN,
)


@INIT_DEVICE.around
def patch_worker_init_device(call: Call) -> bool:
    return with_external_weights(call.argument("gpuworker_mod"), call.proceed)


DETERMINE_AVAILABLE_MEMORY = Patch(
    target=KVCACHED_GPU_WORKER,
    attribute="patch_worker_determine_available_memory",
    process="every",
    parameters=("self", "gpuworker_mod"),
    versions=COUNTS_EXTERNAL_WEIGHTS.later,
    why="kvcached runs the model without vLLM's current configuration to find out what memory it needs.",
    upstream=f"{_UPSTREAM} 0.32, vllm/v1/worker/gpu_worker.py",
    remove_when=_REMOVE_WHEN,
)


@DETERMINE_AVAILABLE_MEMORY.around
def patch_worker_determine_available_memory(call: Call) -> bool:
    return with_configuration(call.argument("gpuworker_mod"), call.proceed)


COORDINATOR = Patch(
    target=KVCACHED_COORDINATOR,
    attribute="patch_coordinator",
    process="every",
    parameters=("self", "kvcoord_mod"),
    why="kvcached's block pool reports no KV events, so routers that follow them see an empty cache; with vLLM 0.33 it "
    "lacks an attribute that vLLM reads where layers have states.",
    upstream=f"{_UPSTREAM}, vllm/v1/core/block_pool.py",
    remove_when="kvcached's own pool does both",
)


@COORDINATOR.around
def patch_coordinator(call: Call) -> bool:
    coordinator = call.argument("kvcoord_mod")
    return with_block_events(coordinator, lambda: with_hash_lookahead(coordinator, call.proceed))


ALLOCATION = Patch(
    target=KVCACHED_ALLOCATION,
    attribute="patch_allocate_slots",
    process="every",
    parameters=("self", "kvcache_manager_mod"),
    versions=HITS_DIVERGE.earlier,
    why="the engine would end one step after another engine on its device has taken the memory that a request with "
    "cached tokens was about to get.",
    upstream="kvcached 0.1.6, kvcached/integration/vllm/allocation_attempt.py",
    remove_when="vLLM 0.27 is no longer supported",
)


@ALLOCATION.around
def patch_allocate_slots(call: Call) -> bool:
    return with_rollback(call.instance, call.proceed)


SEAMS = (
    patch_worker_init_device,
    patch_worker_determine_available_memory,
    patch_coordinator,
    patch_allocate_slots,
)
