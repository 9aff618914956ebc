# SPDX-License-Identifier: Apache-2.0
"""The hooks that let kvcached and vLLM's CPU worker run without a GPU: one function per replaced attribute."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import wrapt

from hostvmm import pinning
from hostvmm.device import (
    NAME_VARIABLE,
    SIZE_VARIABLE,
    HostvmmError,
    capacity_bytes,
    clear_abandoned,
    device_info,
    device_name,
    refuse_foreign_account,
    sign_account,
)
from hostvmm.limits import Pool, available_memory_bytes, spare_mappings
from kvcached_nixl.patching import Call

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


class TorchWithHostCuda(wrapt.ObjectProxy[Any]):
    """The torch module with `cuda` replaced. Only one module of kvcached sees it."""

    _self_cuda = HostCuda()

    @property
    def cuda(self) -> HostCuda:
        return self._self_cuda


def init_kvcached(call: Call) -> None:
    """Checks the host's memory, and passes the emulated device to kvcached.

    The CPU worker passes the device `cpu`, for which kvcached has no memory calls. Each worker rank gets its own
    emulated device, as on GPUs. The engine core gets device 0.
    """
    rank = 0
    if call.argument("is_worker"):
        rank = call.argument("tp_rank") + max(call.argument("pp_rank"), 0) * call.argument("world_size")
    clear_abandoned()
    refuse_foreign_account(rank)
    refuse_if_host_too_small(rank)
    call.proceed(device=f"cuda:{rank}")
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


def start_worker_listener_thread(call: Call) -> None:
    """Starts the listener thread without a CUDA device.

    Selecting a device that does not exist would end the thread silently, and every map request would wait for ever.
    """
    call.proceed(device_index=None)


def alloc_kv_cache(call: Call) -> Any:
    """Refuses a pool for whose addresses the kernel allows too few mappings. Called up to vLLM 0.28."""
    is_apart = len(call.argument("kvcache_shape")) == 5 and call.argument("attention_type") in ("MHA", "GQA")
    refuse_if_too_few_mappings(_pool(call.argument("num_layers"), 2 if is_apart else 1))
    return call.proceed()


def allocate_kv_cache(call: Call) -> Any:
    """Replaces `torch.cuda.get_device_properties` while kvcached allocates for model runner V2 (vLLM 0.29 on).

    Called once per worker, before it serves requests. The replacement is visible to the whole process meanwhile.
    """
    import torch
    from kvcached.integration.vllm import model_runner_v2

    refuse_if_too_few_mappings(_pool(model_runner_v2.cache_geometry(call.argument("config")).num_pools, 1))
    stock = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = HostCuda().get_device_properties
    try:
        return call.proceed()
    finally:
        torch.cuda.get_device_properties = stock


def get_kv_cache_manager(call: Call) -> Any:
    """Refuses a pool in which no block could get memory; kvcached would log that and wait for ever."""
    pool = _pool(call.argument("num_layers"), call.argument("num_kv_buffers"))
    num_blocks, planned_bytes = call.argument("num_blocks"), None
    if num_blocks is not None:
        cells = num_blocks * call.argument("block_size") * pool.layers * pool.kv_buffers
        planned_bytes = cells * call.argument("cell_size")
    pool.refuse_if_too_small(planned_bytes)
    return call.proceed()


def worker_release_barrier(worker: object) -> bool:
    """Replaces kvcached's wait for earlier GPU work before pages are retired.

    No wait is needed: work on a CPU is finished when its call returns, and the worker executes one call at a time. Runs
    in the worker process, which looks it up by name.
    """
    return True


def determine_available_memory(call: Call) -> int:
    """Limits the planned KV cache to what fits the emulated device. Returns bytes.

    Otherwise vLLM plans VLLM_CPU_KVCACHE_SPACE without regard to the device's size. Block ids would exceed kvcached's
    addresses, and vLLM would check --max-model-len against memory that does not exist.
    """
    planned_bytes: int = call.proceed()
    layers = len(call.instance.model_runner.get_kv_cache_spec())
    if not layers:
        return planned_bytes
    # Assumes two buffers per layer, the larger of the two geometries. The page groups of a packed pool divide it.
    pool = _pool(layers, 2)
    pool.refuse_if_too_small()
    return min(planned_bytes, pool.usable_bytes)


def get_device_uuid(platform: type, device_id: int = 0) -> str:
    """Says which engines share a device. vLLM's CPU platform has no devices."""
    return f"hostvmm {device_name()}"


def give_own_device(prover: ModuleType) -> None:
    """Has kvcached_nixl's prover map its pages on a device of its own: the engine's may be full, or of another size."""
    os.environ.update({NAME_VARIABLE: os.environ["KVCACHED_IPC_NAME"], SIZE_VARIABLE: "0.125"})


def _pool(layers: int, kv_buffers: int) -> Pool:
    from kvcached import utils

    return Pool(capacity_bytes(), utils.PAGE_SIZE, layers, kv_buffers, utils.CONTIGUOUS_LAYOUT, utils.GPU_UTILIZATION)


def _around(hook: Callable[[Call], Any]) -> Callable[[Any], Any]:
    return lambda present: wrapt.FunctionWrapper(present, lambda *call: hook(Call(*call)))


_INTERFACES = "kvcached.integration.vllm.interfaces"

# Module, dotted path inside it, and what makes the replacement of the present value. kvcached 0.1.6; vLLM 0.26 to 0.33.
HOOKS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    (_INTERFACES, "torch", TorchWithHostCuda),
    (_INTERFACES, "init_kvcached", _around(init_kvcached)),
    (_INTERFACES, "start_worker_listener_thread", _around(start_worker_listener_thread)),
    (_INTERFACES, "alloc_kv_cache", _around(alloc_kv_cache)),
    (_INTERFACES, "get_kv_cache_manager", _around(get_kv_cache_manager)),
    ("kvcached.integration.vllm.model_runner_v2", "allocate_kv_cache", _around(allocate_kv_cache)),
    ("kvcached.integration.vllm.patches", "_worker_physical_release_barrier", lambda _: worker_release_barrier),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.determine_available_memory", _around(determine_available_memory)),
    ("vllm.platforms.cpu", "CpuPlatform.get_device_uuid", lambda present: classmethod(get_device_uuid)),
)


def _pinning_hooks() -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """NIXL 1.3 to 1.5. An unusable value of the variable is refused when memory is registered."""
    if pinning.REGISTRATION_VARIABLE in os.environ:
        # `nixl` loads one of the two: the one for torch's CUDA version, or either if torch has no CUDA.
        for module in ("nixl_cu12._api", "nixl_cu13._api"):
            yield module, "nixl_agent.get_reg_descs", _around(pinning.get_reg_descs)
            yield module, "nixl_agent.get_xfer_descs", _around(pinning.get_xfer_descs)


def install() -> None:
    """Installs the hooks of modules that are imported already, and the others as their modules are imported."""
    # vLLM's engines end with os._exit, without cleanup. So this process removes the device files that they left.
    atexit.register(clear_abandoned)
    for module, attribute, replace in (*HOOKS, *_pinning_hooks()):
        wrapt.when_imported(module)(partial(put, attribute, replace))
    wrapt.when_imported("kvcached_nixl.proof.__main__")(give_own_device)


def put(attribute: str, replace: Callable[[Any], Any], module: ModuleType) -> None:
    """Installs one hook. Without it kvcached would wait for ever, or vLLM plan memory that does not exist.

    So the process ends. Another exception could be caught, and Python drops an import hook that raised.
    """
    try:
        owner, name, present = wrapt.resolve_path(module, attribute)
    except AttributeError as error:
        raise SystemExit(
            f"hostvmm: found no {module.__name__}.{attribute}; expected that of kvcached 0.1.6 and a supported vLLM. "
            "kvcached on host memory does not work without it. Make the environment again (experiments/env.sh)."
        ) from error
    setattr(owner, name, replace(present))
