# SPDX-License-Identifier: Apache-2.0
"""A patch for models with layers that keep a state: vLLM's own NIXL worker is constructed without them.

Runs in: the worker. Where prefill stops is decided in `seams.scheduler.preprocess_add_request`.
"""

from __future__ import annotations

from kvcached_nixl.compat.locate import WORKER
from kvcached_nixl.compat.states import know_states, without_states
from kvcached_nixl.patching import Call, Patch

MAKE_NIXL_WORKER = Patch(
    target=WORKER,
    attribute="__init__",
    process="worker",
    parameters=("self", "vllm_config", "engine_id", "kv_cache_config"),
    needs="pull",
    why="vLLM's own worker would end the engine, because it moves states in parts, and only those of some layouts.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py: is_conv_state_dim_first",
    remove_when="vLLM's own worker leaves the layout of states to the methods that move them",
)


@MAKE_NIXL_WORKER.around
def make_nixl_worker(call: Call) -> None:
    groups = call.argument("kv_cache_config")
    call.proceed(kv_cache_config=without_states(groups))
    know_states(call.instance, groups)


SEAMS = (make_nixl_worker,)
