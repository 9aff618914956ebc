# SPDX-License-Identifier: Apache-2.0
"""Completes what kvcached 0.1.6 puts into vLLM 0.32 and later, which expect more of it than earlier ones, and into vLLM
below 0.28, for which it leaves something out.

Each function has kvcached patch a module, wraps what kvcached put there, and returns what kvcached's patch returns.
What kvcached does not replace, because it has done so before, is not wrapped again.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import wrapt

from kvcached_nixl.errors import Refused
from kvcached_nixl.vllm.adapter.series import HITS_DIVERGE

__all__ = ["with_configuration", "with_external_weights", "with_hash_lookahead", "with_pool", "with_rollback"]


def with_external_weights(gpu_worker: types.ModuleType, apply: Callable[[], bool]) -> bool:
    """Accept the third argument of ``request_memory``: the bytes of weights that another process holds on the device.

    As in vLLM's own, they are not the engine's to use. kvcached's function has two parameters.
    Source: vLLM 0.32, ``vllm/v1/worker/utils.py``. With 0.32.0 it was run on an H200.
    """

    def request_memory(wrapped: Callable[..., int], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return _without_external(wrapped, *args, **kwargs)

    return _completed(apply, gpu_worker, "request_memory", request_memory)


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


def with_configuration(gpu_worker: types.ModuleType, apply: Callable[[], bool]) -> bool:
    """Set vLLM's current configuration while ``determine_available_memory`` runs the model, as vLLM's own does.

    Source: vLLM 0.32, ``vllm/v1/worker/gpu_worker.py``. With 0.32.0 it was run on an H200.
    """

    def determine(wrapped: Callable[..., int], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        with gpu_worker.set_current_vllm_config(worker.vllm_config):
            return wrapped(*args, **kwargs)

    return _completed(apply, gpu_worker.Worker, "determine_available_memory", determine)


def with_rollback(patch: Any, apply: Callable[[], bool]) -> bool:
    """Undo an allocation that fails half way, because another engine has taken the memory meanwhile.

    kvcached does so from vLLM 0.28 on. Below, vLLM's next step finds the beginning of it, and ends the engine. What
    kvcached restores is the same there: vLLM 0.26 and 0.27, ``vllm/v1/core/single_type_kv_cache_manager.py``.

    Args:
        patch: kvcached's, which reads vLLM's version when it is applied.
    """
    found, patch.detected_version = patch.detected_version, f"{HITS_DIVERGE.since}.0"
    try:
        return apply()
    finally:
        patch.detected_version = found


def with_hash_lookahead(kv_cache_coordinator: types.ModuleType, apply: Callable[[], bool]) -> bool:
    """Give kvcached's block pool the attribute ``num_hash_lookahead_tokens`` of vLLM's own, which vLLM reads.

    Source: vLLM 0.33, ``vllm/v1/core/block_pool.py`` and ``single_type_kv_cache_manager.py``.
    """
    name = "num_hash_lookahead_tokens"
    if name not in inspect.signature(kv_cache_coordinator.KVCacheCoordinator.__init__).parameters:
        return apply()
    return with_pool(kv_cache_coordinator, apply, name, lambda pool, count: setattr(pool, name, count))


def with_pool(
    kv_cache_coordinator: types.ModuleType,
    apply: Callable[[], bool],
    parameter: str,
    then: Callable[[Any, Any], None],
) -> bool:
    """Complete kvcached's block pool, which replaces vLLM's when a coordinator is constructed.

    Args:
        parameter: of vLLM's constructor.
        then: called with the pool and the parameter's value.
    """
    owner = kv_cache_coordinator.KVCacheCoordinator
    signature = inspect.signature(owner.__init__)

    def init(wrapped: Callable[..., None], coordinator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        bound = signature.bind(coordinator, *args, **kwargs)
        bound.apply_defaults()
        then(coordinator.block_pool, bound.arguments[parameter])

    return _completed(apply, owner, "__init__", init)


def _completed(apply: Callable[[], bool], owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
    before = vars(owner)[name]
    is_patched = apply()
    replaced = vars(owner)[name]
    if replaced is not before:
        setattr(owner, name, wrapt.FunctionWrapper(replaced, wrapper))
    return is_patched
