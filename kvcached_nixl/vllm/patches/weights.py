# SPDX-License-Identifier: Apache-2.0
"""Patches for the identity of weights: vLLM loads them, tells peers about them, and changes them at runtime (rule R11).

Runs in: the worker (files and identity) and the engine core (calls from outside that may change weights).
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.patching import Call, Patch, Target
from kvcached_nixl.vllm.adapter.locate import (
    ENGINE_CORE_BASE,
    LOADER_BASE,
    MODEL_LOADER,
    STREAMING_LOADER,
    WORKER_PROCESS,
)
from kvcached_nixl.vllm.adapter.weights import note_files, watch_loading, weights_of
from kvcached_nixl.vllm.patches.actions.changing import changes_adapters, identify_again, worker_sides
from kvcached_nixl.vllm.patches.actions.engine_blocks import bound_sides


def _of_worker(target: Target, attribute: str, parameters: tuple[str, ...], upstream: str) -> Patch:
    return Patch(
        target=target,
        attribute=attribute,
        process="worker",
        parameters=("self", *parameters),
        why="KV of other weights would be taken for this model's, with HTTP 200.",
        upstream=upstream,
        remove_when="vLLM's compatibility hash includes the content of the weights",
    )


@_of_worker(
    MODEL_LOADER,
    "_prepare_weights",
    ("model_name_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides"),
    "vllm#55776; vllm/model_executor/model_loader/default_loader.py",
).around
def prepare_weights(call: Call) -> Any:
    found = call.proceed()
    # vLLM 0.31 returns the name of an index file, too.
    _, files, *_ = found
    note_files(call.instance, call.argument("model_name_or_path"), call.argument("subfolder"), files)
    return found


@_of_worker(
    STREAMING_LOADER,
    "_prepare_weights",
    ("model_name_or_path", "revision"),
    "vllm/model_executor/model_loader/runai_streamer_loader.py",
).around
def stream_weights(call: Call) -> Any:
    files = call.proceed()
    note_files(call.instance, call.argument("model_name_or_path"), None, files)
    return files


@_of_worker(
    LOADER_BASE,
    "__init__",
    ("load_config",),
    "vllm/model_executor/model_loader/base_loader.py: load_model calls load_weights, then has kernels rewrite what was "
    "loaded, and delete parameters",
).around
def make_loader(call: Call) -> None:
    call.proceed()
    watch_loading(call.instance)


@_of_worker(
    WORKER_PROCESS,
    "get_kv_connector_handshake_metadata",
    (),
    "vllm/v1/worker/gpu_worker.py; called by the engine core when every worker has its KV cache",
).around
def get_kv_connector_handshake_metadata(call: Call) -> Any:
    found = list(worker_sides())
    weights = weights_of(call.instance) if found else ()
    for side in found:
        side.identify(*weights)
    return call.proceed()


def _of_engine(attribute: str, parameters: tuple[str, ...], why: str, upstream: str) -> Patch:
    return Patch(
        target=ENGINE_CORE_BASE,
        attribute=attribute,
        process="scheduler",
        parameters=("self", *parameters),
        why=why,
        upstream=f"vllm/v1/engine/core.py; {upstream}",
        remove_when="vLLM tells its connector that the weights of an engine have changed",
    )


@_of_engine(
    "collective_rpc",
    ("method", "timeout", "args", "kwargs"),
    "parts of one prompt, or the two servers of one hand-over, would be computed with different weights.",
    "every weight update is a collective_rpc (update_weights, reload_weights, methods of worker extensions)",
).around
def collective_rpc(call: Call) -> Any:
    method, has_failed = call.argument("method"), True
    try:
        found = call.proceed()
        has_failed = False
        return found
    finally:
        # Also if the call has failed, because it may have succeeded on other workers.
        if changes_adapters(method):
            for side in bound_sides(call.instance.scheduler):
                side.revocations.adapters_changed()
        identify_again(call.instance, method, has_failed=has_failed)


@_of_engine(
    "wake_up",
    ("tags",),
    "an engine that was put to sleep at level 2 would wake up without valid weights and still hand over KV.",
    "sleep mode discards weights",
).around
def wake_up(call: Call) -> Any:
    try:
        return call.proceed()
    finally:
        identify_again(call.instance, None)


_ADAPTER = "KV of an adapter that was replaced under the same name would be taken for the new adapter's."


@_of_engine("add_lora", ("lora_request",), _ADAPTER, "load_inplace").around
def add_lora(call: Call) -> Any:
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
            side.read.doubt(request.lora_int_id)
        raise
    for side in bound_sides(call.instance.scheduler) if request.load_inplace else ():
        side.read.loaded(request.lora_int_id)
    return found


@_of_engine("remove_lora", ("lora_id",), _ADAPTER, "unload_lora_adapter").around
def remove_lora(call: Call) -> Any:
    try:
        return call.proceed()
    finally:
        for side in bound_sides(call.instance.scheduler):
            side.revocations.adapters_changed(call.argument("lora_id"))
