# SPDX-License-Identifier: Apache-2.0
"""What kvcached 0.1.6 puts into vLLM, corrected: its own patch of the NIXL connector is taken off, others are
completed, and its limit is kept within its pool.

This package's patches supersede its ``NixlConnectorPatch``. If that is loaded later, its ``patch_connector`` does
nothing. If it was applied already (ENABLE_KVCACHED set in a script, this package loaded by vLLM's plugin loader), its
layout is taken off the connector: it refuses the contiguous one. Its other two changes, of the worker's
``register_kv_caches`` and of what that constructs, stay: this package registers the memory itself.

The others leave something out of vLLM below 0.28, and of what vLLM 0.32 and 0.33 expect, and report no KV events.
Each of them patches a module, and what it put there is wrapped. What kvcached does not replace, because it has done so
before, is not wrapped again.

Runs in: every process, while vLLM is being imported, as kvcached patches it; `resize` in the engine core.
Sources: kvcached 0.1.6, ``integration/vllm/{nixl_compat,patches,allocation_attempt}.py``, ``kv_cache_manager.py``,
``csrc/page_allocator.cpp``; ``v1/core/block_pool.py``, 0.32's ``v1/worker/utils.py`` and ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import wrapt

from kvcached_nixl.errors import Refused
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.locate import (
    KVCACHED_ALLOCATION,
    KVCACHED_COORDINATOR,
    KVCACHED_GPU_WORKER,
    KVCACHED_MANAGER,
    KVCACHED_PATCH,
    PULL_FACADE,
)
from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS, HITS_DIVERGE

_LAYOUT = "get_required_kvcache_layout"
_LAYOUT_SAVED = "_original_get_layout"


def take_off() -> tuple[str, ...]:
    """Delete kvcached's layout from the pull connector, which the name ``NixlConnector`` refers to: it only inherits
    vLLM's. Returns a note if it was there; only in a module that is imported already, as kvcached imports it."""
    module = sys.modules.get(PULL_FACADE.module)
    cls = vars(module).get(PULL_FACADE.qualname) if module is not None else None
    if cls is None or _LAYOUT_SAVED not in vars(cls):
        return ()
    delattr(cls, _LAYOUT_SAVED)
    delattr(cls, _LAYOUT)
    return (f"{cls.__qualname__}.{_LAYOUT}: kvcached's override removed, inherited again",)


@Patch(KVCACHED_PATCH, "patch_connector", "every", "self", when_unsupported=True, prepare=take_off)
def patch_connector(call: Call) -> bool:
    """Without it, kvcached's own patch inflates num_blocks to the whole reservation and refuses the contiguous layout.
    Until kvcached no longer has NixlConnectorPatch."""
    call.note("kvcached asked to patch NixlConnector: superseded, nothing was changed")
    return True


# ------------------------------------------------------------ completed, until kvcached accepts such a version itself

_LOOKAHEAD = "num_hash_lookahead_tokens"
"""Of the pool and of the constructor, from vLLM 0.33 on. Read by ``vllm/v1/core/single_type_kv_cache_manager.py``."""


@Patch(
    KVCACHED_GPU_WORKER,
    "patch_worker_init_device",
    "every",
    "self gpuworker_mod",
    versions=COUNTS_EXTERNAL_WEIGHTS.later,
)
def patch_worker_init_device(call: Call) -> bool:
    """Without it, kvcached's request_memory has two parameters, and vLLM passes three: no worker on a GPU would start.

    The third argument is the bytes of weights that another process holds on the device. As in vLLM's own, they are
    not the engine's to use. With 0.32.0 it was run on an H200."""

    def request_memory(wrapped: Callable[..., int], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return _without_external(wrapped, *args, **kwargs)

    return _completed(call, call.argument("gpuworker_mod"), "request_memory", request_memory)


def _without_external(
    request_memory: Callable[..., int], init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0
) -> int:
    requested_bytes = request_memory(init_snapshot, cache_config)
    left_bytes = requested_bytes - external_weight_memory
    if left_bytes <= 0:
        raise Refused(
            found=f"{external_weight_memory} bytes of weights that another process holds on the device, and "
            f"gpu_memory_utilization {cache_config.gpu_memory_utilization}, which is {requested_bytes} bytes in all",
            expected="more memory than these weights take",
            consequence="The worker does not start: nothing would be left for its KV cache.",
            remedy="Raise --gpu-memory-utilization.",
        )
    return left_bytes


@Patch(
    KVCACHED_GPU_WORKER,
    "patch_worker_determine_available_memory",
    "every",
    "self gpuworker_mod",
    versions=COUNTS_EXTERNAL_WEIGHTS.later,
)
def patch_worker_determine_available_memory(call: Call) -> bool:
    """Without it, kvcached runs the model without vLLM's current configuration to find out what memory it needs.

    With 0.32.0 it was run on an H200."""
    gpu_worker = call.argument("gpuworker_mod")

    def determine(wrapped: Callable[..., int], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        with gpu_worker.set_current_vllm_config(worker.vllm_config):
            return wrapped(*args, **kwargs)

    return _completed(call, gpu_worker.Worker, "determine_available_memory", determine)


@Patch(KVCACHED_COORDINATOR, "patch_coordinator", "every", "self kvcoord_mod")
def patch_coordinator(call: Call) -> bool:
    """Without it, kvcached's block pool reports no KV events, so routers that follow them see an empty cache; with vLLM
    0.33 it lacks an attribute that vLLM reads where layers have states. Until kvcached's own pool does both.

    kvcached replaces vLLM's block pool when a coordinator is constructed. Its own gets what the constructor is asked
    for: KV events (``--kv-events-config``), and ``num_hash_lookahead_tokens``."""
    owner = call.argument("kvcoord_mod").KVCacheCoordinator
    signature = inspect.signature(owner.__init__)

    def init(wrapped: Callable[..., None], coordinator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        bound = signature.bind(coordinator, *args, **kwargs)
        bound.apply_defaults()
        if _LOOKAHEAD in bound.arguments:
            setattr(coordinator.block_pool, _LOOKAHEAD, bound.arguments[_LOOKAHEAD])
        if bound.arguments["enable_kv_cache_events"]:
            report_blocks(coordinator.block_pool)

    return _completed(call, owner, "__init__", init)


def report_blocks(pool: Any) -> None:
    """Make one of kvcached's block pools report what it stores, evicts and clears, as vLLM's own pool does.

    Args:
        pool: a pool that holds no block yet, of kvcached or of vLLM; vLLM's own reports already.
    """
    if "_native_block_pool" not in vars(pool):
        return
    from vllm.distributed.kv_events import AllBlocksCleared
    from vllm.v1.core.block_pool import MEDIUM_GPU

    # Read here: a name that is missing stops the start, not a step.
    remove_hashes, tell_removed = (
        private(pool, name) for name in ("_remove_cached_block_hashes", "_emit_block_removed_events")
    )
    take_events = private(vars(pool)["_native_block_pool"], "take_events")
    reset = pool.reset_prefix_cache

    def remove_cached_block(key: Any, block_id: int) -> Any:
        block = pool.blocks[block_id]
        removed = remove_hashes(block)
        tell_removed(removed)
        return block if removed else None

    def reset_prefix_cache() -> bool:
        is_reset = bool(reset())
        if is_reset and pool.enable_prefix_cache:
            pool.kv_event_queue.append(AllBlocksCleared())
        return is_reset

    pool.enable_kv_cache_events, pool.medium, pool.kv_event_queue = True, MEDIUM_GPU, []
    pool.take_events = functools.partial(take_events, pool)
    pool._remove_cached_block, pool.reset_prefix_cache = remove_cached_block, reset_prefix_cache


@Patch(KVCACHED_ALLOCATION, "patch_allocate_slots", "every", "self kvcache_manager_mod", versions=HITS_DIVERGE.earlier)
def patch_allocate_slots(call: Call) -> bool:
    """Without it, the engine would end one step after another engine on its device has taken the memory that a request
    with cached tokens was about to get. Until vLLM 0.27 is no longer supported.

    Undo an allocation that fails half way, because another engine has taken the memory meanwhile.

    kvcached does so from vLLM 0.28 on, whose version its patch is told. Below, vLLM's next step finds the beginning of
    it, and ends the engine. What kvcached restores is the same there: vLLM 0.26 and 0.27,
    ``vllm/v1/core/single_type_kv_cache_manager.py``.
    """
    patch = call.instance
    found, patch.detected_version = patch.detected_version, f"{HITS_DIVERGE.since}.0"
    try:
        return bool(call.proceed())
    finally:
        patch.detected_version = found


@Patch(KVCACHED_MANAGER, "resize", "scheduler", "self new_mem_size")
def resize(call: Call) -> bool:
    """Without it, a limit above the pool (``kvctl limit``) hands blocks out twice, or blocks that do not exist: two
    requests write one block. Until kvcached keeps it within the pool here, as in its ``set_memory_limit``."""
    pool_bytes = private(call.instance, "mem_size")
    return bool(call.proceed(new_mem_size=min(call.argument("new_mem_size"), pool_bytes)))


def _completed(call: Call, owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
    before = vars(owner)[name]
    is_patched = bool(call.proceed())
    replaced = vars(owner)[name]
    if replaced is not before:
        setattr(owner, name, wrapt.FunctionWrapper(replaced, wrapper))
    return is_patched
