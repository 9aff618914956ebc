# SPDX-License-Identifier: Apache-2.0
"""What kvcached and vLLM's CPU worker need to be told on a machine without a GPU: one small function per name."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import BoundArguments, signature
from types import SimpleNamespace
from typing import Any

import wrapt

from .device import capacity_bytes, clear_abandoned, device_info, refuse_foreign_account, sign_account
from .errors import HostvmmError
from .geometry import Pool, shape_for_kvcached, view_for_attention
from .host import available_memory_bytes, spare_mappings

_OVERCOMMIT_VARIABLE = "KVCACHED_HOSTVMM_OVERCOMMIT"
_MAPPINGS_FOR_OTHERS = 4096


class HostCuda:
    """`torch.cuda` as kvcached's vLLM interface uses it, answered for the emulated device."""

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(name=f"kvcached on host memory ({device})", total_memory=capacity_bytes())


class TorchWithHostCuda(wrapt.ObjectProxy):  # type: ignore[type-arg]  # old ones cannot be subscripted
    """The torch module with `cuda` replaced, for one importing module only."""

    _self_cuda = HostCuda()

    @property
    def cuda(self) -> HostCuda:
        return self._self_cuda


def init_kvcached(
    wrapped: Callable[..., None], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Checks the host, and names the emulated device.

    The CPU worker's device is `cpu`, which kvcached has no memory calls for. Each worker rank gets a device
    of its own, as on GPUs; the engine core asks about the first.
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
    """Raises HostvmmError if the machine cannot back the rest of emulated device `index`.

    KVCACHED_HOSTVMM_OVERCOMMIT=1 skips the check, for pools that reserve much and use little.
    """
    if os.environ.get(_OVERCOMMIT_VARIABLE, "").lower() in ("1", "true"):
        return
    needed_bytes = device_info(index).free_bytes
    found_bytes = available_memory_bytes()
    if needed_bytes > found_bytes:
        raise HostvmmError(
            found=f"{found_bytes / 2**30:.2f} GiB of memory available on this machine",
            expected=f"{needed_bytes / 2**30:.2f} GiB, what the emulated device (KVCACHED_HOSTVMM_GIB) has free",
            consequence="Filling the device would make the kernel kill processes, so the engine is stopped.",
            remedy=f"Lower KVCACHED_HOSTVMM_GIB, or set {_OVERCOMMIT_VARIABLE}=1 if the pool will stay mostly empty.",
        )


def refuse_if_too_few_mappings(pool: Pool) -> None:
    """Raises HostvmmError if the kernel allows this process too few memory mappings for the pool's addresses.

    At the limit nothing can be mapped or unmapped any more, by anyone in the process, so some are left for others.
    """
    spare, limit = spare_mappings()
    needed = pool.mappings + _MAPPINGS_FOR_OTHERS
    if needed > spare:
        raise HostvmmError(
            found=f"{spare} more memory mappings allowed in this process (vm.max_map_count is {limit})",
            expected=f"{needed}: one per {pool.zero_page_bytes >> 20} MiB of the emulated device, and some for others",
            consequence="The KV pool's addresses cannot be mapped, so the engine is stopped.",
            remedy="Lower KVCACHED_HOSTVMM_GIB, set KVCACHED_CONTIGUOUS_LAYOUT=true (larger pages), or run: "
            f"sysctl -w vm.max_map_count={limit + needed - spare}",
        )


def start_worker_listener_thread(
    wrapped: Callable[..., None], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Lets the listener thread select no CUDA device.

    There is none, and a failing selection ends the thread silently, after which every map request waits for ever.
    """
    call = signature(wrapped).bind(*args, **kwargs)
    call.arguments["device_index"] = None
    wrapped(*call.args, **call.kwargs)


def alloc_kv_cache(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Offers kvcached CPU attention's shape in kvcached's order, and gives attention the same bytes in its own."""
    call = signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    kv_buffers = 2 if len(given["kvcache_shape"]) == 5 and given["attention_type"] in ("MHA", "GQA") else 1
    refuse_if_too_few_mappings(_pool(given["num_layers"], kv_buffers))
    return _in_attention_order(wrapped, call)


def _in_attention_order(wrapped: Callable[..., Any], call: BoundArguments) -> Any:
    asked = tuple(call.arguments["kvcache_shape"])
    offered = shape_for_kvcached(asked, call.arguments["block_size"])
    call.arguments["kvcache_shape"] = offered
    result = wrapped(*call.args, **call.kwargs)
    if offered == asked:
        return result
    if isinstance(result, tuple):
        return ([view_for_attention(tensor) for tensor in result[0]], *result[1:])
    return [view_for_attention(tensor) for tensor in result]


def build_kv_views(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for the views of a second KV-cache group over the same memory."""
    return _in_attention_order(wrapped, signature(wrapped).bind(*args, **kwargs))


def allocate_kv_cache(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answers for the emulated device while kvcached allocates for model runner V2: it asks torch itself, by its name.

    Once per worker, before it serves anything.
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
    """Refuses a pool in which no block could ever be backed; kvcached would log and wait for ever."""
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
    """Stands for kvcached's wait for earlier GPU work before pages are retired.

    Work on a CPU is over when its call returns, and the worker answers calls one at a time. Runs in the worker process;
    sent there by name.
    """
    return True


def determine_available_memory(
    wrapped: Callable[[], int], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Plans no more KV cache than the emulated device can back, in bytes.

    Without it, the plan is VLLM_CPU_KVCACHE_SPACE whatever the device's size, block ids exceed kvcached's addresses,
    and vLLM's own check of --max-model-len is made against memory that does not exist.
    """
    planned_bytes = wrapped(*args, **kwargs)
    layers = len(instance.model_runner.get_kv_cache_spec())
    if not layers:
        return planned_bytes
    # Two buffers per layer is the larger of the two geometries; a packed pool's steps divide it.
    pool = _pool(layers, 2)
    pool.refuse_if_too_small()
    return min(planned_bytes, pool.usable_bytes)


def _pool(layers: int, kv_buffers: int) -> Pool:
    from kvcached import utils

    return Pool(capacity_bytes(), utils.PAGE_SIZE, layers, kv_buffers, utils.CONTIGUOUS_LAYOUT, utils.GPU_UTILIZATION)
