# SPDX-License-Identifier: Apache-2.0
"""Patches for models with layers that keep a state. Where prefill stops is decided in
`patches.scheduler.preprocess_add_request`.

Runs in: the worker, and the engine core.
"""

from __future__ import annotations

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.locate import FACADE, WORKER
from kvcached_nixl.vllm.adapter.series import HITS_DIVERGE
from kvcached_nixl.vllm.adapter.states import know_states, without_states


@Patch(
    target=WORKER,
    attribute="__init__",
    process="worker",
    parameters=("self", "vllm_config", "engine_id", "kv_cache_config"),
    why="vLLM's own worker would end the engine, because it moves states in parts, and only those of some layouts.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py: is_conv_state_dim_first",
    remove_when="vLLM's own worker leaves the layout of states to the methods that move them",
).around
def make_nixl_worker(call: Call) -> None:
    groups = call.argument("kv_cache_config")
    call.proceed(kv_cache_config=without_states(groups))
    know_states(call.instance, groups)


@Patch(
    target=FACADE,
    attribute="supports_divergent_local_hybrid_hits",
    kind="property",
    process="scheduler",
    parameters=("self",),
    versions=HITS_DIVERGE.later,
    why="vLLM would count tokens as computed that only full attention has in decode's prefix cache; sliding windows "
    "would see whatever is in their blocks.",
    upstream="vllm/v1/core/kv_cache_manager.py: get_computed_blocks_for_connector",
    remove_when="a hand-over begins at each KV-cache group's own prefix hit",
).around
def supports_divergent_local_hybrid_hits(call: Call) -> bool:
    """Decode fetches the tokens behind one prefix, the same for all groups."""
    return False
