# SPDX-License-Identifier: Apache-2.0
"""The identity of weights: vLLM loads them, tells peers about them, and changes them in a running engine (rule R11).

Runs in: the worker (files and identity) and the engine core (calls from outside that may change weights).
Sources: ``v1/engine/core.py``, ``v1/engine/async_llm.py`` (``update_weights`` and its like are collective RPCs),
``v1/worker/gpu_worker.py``, ``distributed/kv_transfer/kv_transfer_state.py``; vllm#55776.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import has_loop, private, sides
from kvcached_nixl.vllm.adapter.locate import (
    ENGINE_CORE_BASE,
    LOADER_BASE,
    MODEL_LOADER,
    STREAMING_LOADER,
    WORKER_PROCESS,
)
from kvcached_nixl.vllm.adapter.queues import has_call
from kvcached_nixl.vllm.adapter.weights import look_again, note_files, watch_loading, weights_of
from kvcached_nixl.vllm.patches.engine_blocks import bound_sides

logger = logging.getLogger(SERVER_LOGGER)

# ------------------------------------------------------------------------------------------------------- in the worker
# Until vLLM's compatibility hash includes the content of the weights.


@Patch(
    MODEL_LOADER,
    "_prepare_weights",
    "worker",
    "self model_name_or_path subfolder revision fall_back_to_pt allow_patterns_overrides",
)
def prepare_weights(call: Call) -> Any:
    """Without it, KV of other weights would be taken for this model's, with HTTP 200."""
    found = call.proceed()
    # vLLM 0.31 returns the name of an index file, too.
    _, files, *_ = found
    note_files(call.instance, files)
    return found


@Patch(STREAMING_LOADER, "_prepare_weights", "worker", "self model_name_or_path revision")
def stream_weights(call: Call) -> Any:
    """Without it, KV of other weights would be taken for this model's, with HTTP 200."""
    files = call.proceed()
    note_files(call.instance, files)
    return files


@Patch(LOADER_BASE, "__init__", "worker", "self load_config")
def make_loader(call: Call) -> None:
    """Without it, KV of other weights would be taken for this model's, with HTTP 200."""
    call.proceed()
    watch_loading(call.instance)


@Patch(WORKER_PROCESS, "get_kv_connector_handshake_metadata", "worker", "self")
def get_kv_connector_handshake_metadata(call: Call) -> Any:
    """Without it, KV of other weights would be taken for this model's, with HTTP 200."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    found = list(sides(get_kv_transfer_group())) if has_kv_transfer_group() else []
    weights = weights_of(call.instance) if found else ()
    for side in found:
        side.identify(*weights)
    return call.proceed()


# --------------------------------------------------------------------------------------------------- in the engine core
# Until vLLM tells its connector that the weights of an engine have changed.

_CHANGING = frozenset(
    {
        *("reload_weights", "load_model", "start_weight_update", "start_draft_weight_update", "update_weights"),
        *("finish_weight_update",),
    }
)
"""vLLM's collective RPCs that change weights, even if their bytes stay the same."""
_HARMLESS = frozenset(
    {
        *("annotate_profile", "check_health", "checkpoint_prepare", "compute_weight_checksums"),
        *("get_cache_block_size_bytes", "get_compilation_match_table", "get_encoder_timing_stats"),
        *("get_kv_cache_spec", "get_model_inspection", "get_simple_cpu_offload_num_cpu_blocks"),
        *("get_supported_kv_cache_layouts", "get_supported_tasks", "init_weight_transfer_engine", "list_loras"),
        *("pin_lora", "profile", "release_late_interaction_query_cache", "reset_encoder_cache", "reset_mm_cache"),
        *("save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine", "sleep_mode_backend"),
        *("supports_draft_weight_updates", "synchronize_device", "update_max_model_len", "vocab_size"),
    }
)
"""Those that change no weight. Of any other call it is not known."""
_LOOKING = frozenset({"list_loras", "pin_lora"})
_DUE = "_kvcached_nixl_calls_to_look_at"
_MISSED = "_kvcached_nixl_calls_not_looked_at"
_RETRY_AT = "_kvcached_nixl_look_at_seconds"
RETRY_SECONDS = 5.0
"""Until a look at weights that has failed is repeated: workers need some memory for it, which others may have taken."""


@Patch(ENGINE_CORE_BASE, "collective_rpc", "scheduler", "self method timeout args kwargs")
def collective_rpc(call: Call) -> Any:
    """Without it, parts of one prompt, or the two servers of one hand-over, would be computed with different
    weights."""
    method, has_failed = call.argument("method"), True
    try:
        found = call.proceed()
        has_failed = False
        return found
    finally:
        # Also if the call has failed, because it may have succeeded on other workers.
        if isinstance(method, str) and "lora" in method and method not in _LOOKING:
            for side in bound_sides(call.instance.scheduler):
                side.revocations.adapters_changed()
        identify_again(call.instance, method, has_failed=has_failed)


@Patch(ENGINE_CORE_BASE, "wake_up", "scheduler", "self tags")
def wake_up(call: Call) -> Any:
    """Without it, an engine that was put to sleep at level 2 would wake up without valid weights and still hand over
    KV."""
    try:
        return call.proceed()
    finally:
        identify_again(call.instance, None)


def identify_again(core: Any, method: object, *, has_failed: bool = False) -> None:
    """Have the workers read their weights again before the next step, and revoke KV that was computed with others.

    At once if peers may fetch what is kept: who has called may ask them as soon as the call returns. Else not, because
    a trainer may make a thousand calls in a row, and wait for each.

    Args:
        core: vLLM's ``EngineCore``, between two steps.
        method: the collective RPC that has run; None where the engine has woken up.
        has_failed: it may have run on some workers, or in part.
    """
    # While an engine starts, vLLM calls its workers before there is a scheduler.
    scheduler = vars(core).get("scheduler")
    found = [] if scheduler is None else list(sides(private(scheduler, "connector")))
    name = method if method is None or isinstance(method, str) else "a function"
    if not found or name in _HARMLESS:
        return
    if name == "sleep":
        # Without the executor's knowledge. What sleeps cannot be read, so calls before it are looked at later.
        vars(core).setdefault(_MISSED, []).extend(vars(core).pop(_DUE, ()))
        for side in found:
            side.side_channel.hide()
        return
    has_changed = name in _CHANGING or core.model_executor.is_sleeping
    called = vars(core).setdefault(_DUE, [])
    called += vars(core).pop(_MISSED, [])
    vars(core).pop(_RETRY_AT, None)
    if name is not None:
        called.append(f"{name} (failed)" if has_failed else name)
    for side in found:
        side.revocations.weights_doubted(has_changed=has_changed)
    is_fetchable = any(side.offering.kept.are_fetchable for side in found)
    # An engine in its client's own process has no loop that looks before each step.
    if not has_loop(core) or (is_fetchable and not has_call(core, "collective_rpc")):
        identify_if_due(core)


def identify_if_due(core: Any) -> None:
    """Before a step, do what `identify_again` has left."""
    if _DUE not in vars(core) or time.monotonic() < vars(core).get(_RETRY_AT, 0.0):
        return
    scheduler, executor = core.scheduler, core.model_executor
    # Sleeping weights cannot be read. They are read when everything is awake.
    if executor.is_sleeping:
        return
    called = vars(core).pop(_DUE)
    content: dict[Any, Any] = {}
    try:
        answers = executor.collective_rpc(look_again, args=(called,))
        # Every rank has noted them. One that could read would take a reload for another one if it were named again.
        called = []
        for one in answers:
            # After a call that has failed, vLLM may take what a rank has answered to that for an answer to this.
            if not isinstance(one, dict):
                raise RuntimeError(f"a rank has answered {one!r:.1000}")
            content.update(one)
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(content)
        vars(core).pop(_RETRY_AT, None)
    except Exception:
        if _RETRY_AT not in vars(core):
            logger.exception("The workers' weights cannot be identified. No KV is handed over until they can.")
            for side in sides(private(scheduler, "connector")):
                side.side_channel.hide()
        vars(core)[_DUE], vars(core)[_RETRY_AT] = called, time.monotonic() + RETRY_SECONDS


@Patch(ENGINE_CORE_BASE, "add_lora", "scheduler", "self lora_request")
def add_lora(call: Call) -> Any:
    """Without it, KV of an adapter that was replaced under the same name would be taken for the new adapter's."""
    request = call.argument("lora_request")
    for side in bound_sides(call.instance.scheduler):
        if request.load_inplace:
            side.revocations.adapters_changed(request.lora_int_id)
        # Identify the files before the workers load them: they may be replaced afterwards.
        side.read.adapter_arrives(request)
    try:
        found = call.proceed()
    except BaseException:
        # At least one worker may still compute with the earlier adapter.
        for side in bound_sides(call.instance.scheduler):
            number = request.lora_int_id
            side.read.adapters.doubt(number, f"the adapter with lora_int_id {number} could not be loaded")
        raise
    for side in bound_sides(call.instance.scheduler) if request.load_inplace else ():
        side.read.adapters.loaded(request.lora_int_id)
    return found


@Patch(ENGINE_CORE_BASE, "remove_lora", "scheduler", "self lora_id")
def remove_lora(call: Call) -> Any:
    """Without it, KV of an adapter that was replaced under the same name would be taken for the new adapter's."""
    try:
        return call.proceed()
    finally:
        for side in bound_sides(call.instance.scheduler):
            side.revocations.adapters_changed(call.argument("lora_id"))
