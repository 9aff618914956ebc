# SPDX-License-Identifier: Apache-2.0
"""The hooks that let kvcached and vLLM's CPU worker run without a GPU: one function per replaced attribute."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import wrapt

from .device import capacity_bytes, clear_abandoned, device_info, refuse_foreign_account, sign_account
from .errors import HostvmmError
from .geometry import Pool
from .host import available_memory_bytes, spare_mappings

_OVERCOMMIT_VARIABLE = "KVCACHED_HOSTVMM_OVERCOMMIT"
_MAPPINGS_FOR_OTHERS = 4096


class HostCuda:
    """The part of `torch.cuda` that kvcached's vLLM interface uses, for the emulated device."""

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(name=f"kvcached on host memory ({device})", total_memory=capacity_bytes())


class TorchWithHostCuda(wrapt.ObjectProxy):  # type: ignore[type-arg]  # old ones cannot be subscripted
    """The torch module with `cuda` replaced. Only one module of kvcached sees it."""

    _self_cuda = HostCuda()

    @property
    def cuda(self) -> HostCuda:
        return self._self_cuda


def init_kvcached(
    wrapped: Callable[..., None], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Checks the host's memory, and passes the emulated device to kvcached.

    The CPU worker passes the device `cpu`, for which kvcached has no memory calls. Each worker rank gets its own
    emulated device, as on GPUs. The engine core gets device 0.
    """
    call = signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    rank = given["tp_rank"] + max(given["pp_rank"], 0) * given["world_size"] if given["is_worker"] else 0
    clear_abandoned()
    refuse_foreign_account(rank)
    refuse_if_host_too_small(rank)
    given["device"] = f"cuda:{rank}"
    wrapped(*call.args, **call.kwargs)
    sign_account(rank)


def refuse_if_host_too_small(index: int) -> None:
    """Raises HostvmmError if the machine has less memory available than emulated device `index` has free.

    KVCACHED_HOSTVMM_OVERCOMMIT=1 skips the check, for pools that reserve much and use little.
    """
    if os.environ.get(_OVERCOMMIT_VARIABLE, "").lower() in ("1", "true"):
        return
    needed_bytes = device_info(index).free_bytes
    found_bytes = available_memory_bytes()
    if needed_bytes > found_bytes:
        raise HostvmmError(
            found=f"{found_bytes / 2**30:.2f} GiB of memory available on this machine",
            expected=f"{needed_bytes / 2**30:.2f} GiB, the free memory of the emulated device (KVCACHED_HOSTVMM_GIB)",
            consequence="Filling the device would make the kernel kill processes, so the engine is stopped.",
            remedy=f"Lower KVCACHED_HOSTVMM_GIB, or set {_OVERCOMMIT_VARIABLE}=1 if the pool will stay mostly empty.",
        )


def refuse_if_too_few_mappings(pool: Pool) -> None:
    """Raises HostvmmError if the kernel allows this process too few memory mappings for the pool's addresses.

    At the limit no code in the process can map or unmap anything. So some mappings are left for other code.
    """
    spare, limit = spare_mappings()
    needed = pool.mappings + _MAPPINGS_FOR_OTHERS
    if needed > spare:
        raise HostvmmError(
            found=f"{spare} more memory mappings allowed in this process (vm.max_map_count is {limit})",
            expected=f"{needed}: one per {pool.zero_page_bytes >> 20} MiB of the emulated device, and a reserve",
            consequence="The KV pool's addresses cannot be mapped, so the engine is stopped.",
            remedy="Lower KVCACHED_HOSTVMM_GIB, set KVCACHED_CONTIGUOUS_LAYOUT=true (larger pages), or run: "
            f"sysctl -w vm.max_map_count={limit + needed - spare}",
        )


def start_worker_listener_thread(
    wrapped: Callable[..., None], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Starts the listener thread without a CUDA device.

    Selecting a device that does not exist would end the thread silently, and every map request would wait for ever.
    """
    call = signature(wrapped).bind(*args, **kwargs)
    call.arguments["device_index"] = None
    wrapped(*call.args, **call.kwargs)


def alloc_kv_cache(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses a pool for whose addresses the kernel allows too few mappings."""
    call = signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    kv_buffers = 2 if len(given["kvcache_shape"]) == 5 and given["attention_type"] in ("MHA", "GQA") else 1
    refuse_if_too_few_mappings(_pool(given["num_layers"], kv_buffers))
    return wrapped(*args, **kwargs)


def allocate_kv_cache(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replaces `torch.cuda.get_device_properties` while kvcached allocates for model runner V2 and calls it.

    Called once per worker, before it serves requests. The replacement is visible to the whole process meanwhile.
    """
    import torch
    from kvcached.integration.vllm import model_runner_v2

    config = signature(wrapped).bind(*args, **kwargs).arguments["config"]
    refuse_if_too_few_mappings(_pool(model_runner_v2.cache_geometry(config).num_pools, 1))
    stock = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = HostCuda().get_device_properties
    try:
        return wrapped(*args, **kwargs)
    finally:
        torch.cuda.get_device_properties = stock


def get_kv_cache_manager(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Refuses a pool in which no block could get memory; kvcached would log that and wait for ever."""
    call = signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    pool = _pool(given["num_layers"], given["num_kv_buffers"])
    planned_bytes = None
    if given["num_blocks"] is not None:
        planned_bytes = given["num_blocks"] * given["block_size"] * given["cell_size"] * pool.layers * pool.kv_buffers
    pool.refuse_if_too_small(planned_bytes)
    return wrapped(*args, **kwargs)


def worker_release_barrier(worker: object) -> bool:
    """Replaces kvcached's wait for earlier GPU work before pages are retired.

    No wait is needed: work on a CPU is finished when its call returns, and the worker executes one call at a time. Runs
    in the worker process, which looks it up by name.
    """
    return True


def determine_available_memory(
    wrapped: Callable[[], int], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Limits the planned KV cache to what fits the emulated device. Returns bytes.

    Otherwise vLLM plans VLLM_CPU_KVCACHE_SPACE without regard to the device's size. Block ids would exceed kvcached's
    addresses, and vLLM would check --max-model-len against memory that does not exist.
    """
    planned_bytes = wrapped(*args, **kwargs)
    layers = len(instance.model_runner.get_kv_cache_spec())
    if not layers:
        return planned_bytes
    # Assumes two buffers per layer, the larger of the two geometries. The page groups of a packed pool divide it.
    pool = _pool(layers, 2)
    pool.refuse_if_too_small()
    return min(planned_bytes, pool.usable_bytes)


def _pool(layers: int, kv_buffers: int) -> Pool:
    from kvcached import utils

    return Pool(capacity_bytes(), utils.PAGE_SIZE, layers, kv_buffers, utils.CONTIGUOUS_LAYOUT, utils.GPU_UTILIZATION)
