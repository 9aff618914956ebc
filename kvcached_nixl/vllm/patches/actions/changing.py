# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a running engine, and how its workers then update what they tell peers.

Sources: ``v1/engine/core.py``, ``v1/engine/async_llm.py`` (``update_weights`` and its like are collective RPCs),
``v1/worker/gpu_worker.py``, ``distributed/kv_transfer/kv_transfer_state.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from kvcached_nixl.vllm.adapter.attached_state import sides
from kvcached_nixl.vllm.adapter.private import private
from kvcached_nixl.vllm.adapter.weights import note_calls
from kvcached_nixl.vllm.patches.actions.engine import core_of, has_call

logger = logging.getLogger("vllm.kvcached_nixl")

__all__ = ["changes_adapters", "identify_again", "identify_if_due", "worker_sides"]

_CHANGING = frozenset(
    {
        "reload_weights",
        "load_model",
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
    }
)
"""vLLM's collective RPCs that change weights, even if their bytes stay the same."""
_HARMLESS = frozenset(
    {
        "check_health",
        "get_cache_block_size_bytes",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "update_max_model_len",
        "vocab_size",
    }
)
"""Those that change no weight. Of any other call it is not known."""
_DUE = "_kvcached_nixl_calls_to_look_at"
_MISSED = "_kvcached_nixl_calls_not_looked_at"
_LOOKING = frozenset({"list_loras", "pin_lora"})


def changes_adapters(method: object) -> bool:
    """Whether a collective RPC may have loaded or removed a LoRA adapter."""
    return isinstance(method, str) and "lora" in method and method not in _LOOKING


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
        vars(core).setdefault(_MISSED, set()).update(vars(core).pop(_DUE, ()))
        for side in found:
            side.side_channel.hide()
        return
    has_changed = name in _CHANGING or core.model_executor.is_sleeping
    for side in found:
        side.revocations.weights_doubted(has_changed=has_changed)
    called = vars(core).setdefault(_DUE, set())
    called |= vars(core).pop(_MISSED, set())
    if name is not None:
        called.add(f"{name} (failed)" if has_failed else name)
    # An engine in its client's own process has no loop that looks before each step.
    has_loop = core_of(scheduler) is not None
    is_fetchable = any(side.revocations.keeps_offers for side in found)
    if not has_loop or (is_fetchable and not has_call(core, "collective_rpc")):
        _identify(core)


def identify_if_due(core: Any) -> None:
    """Before a step, do what `identify_again` has left."""
    if _DUE in vars(core):
        _identify(core)


def _identify(core: Any) -> None:
    scheduler, executor = core.scheduler, core.model_executor
    if executor.is_sleeping:
        # Sleeping weights cannot be read. They are read when everything is awake.
        return
    called = vars(core).pop(_DUE)
    content: dict[Any, Any] = {}
    try:
        if called:
            executor.collective_rpc(note_calls, args=(sorted(called),))
        for one in executor.get_kv_connector_handshake_metadata() or ():
            content.update(one or {})
        if content:
            scheduler.connector.set_xfer_handshake_metadata_pp_aware(content)
    except Exception:
        logger.exception("The workers' weights cannot be identified. No KV is handed over until they can.")
        vars(core)[_MISSED] = called
        for side in sides(private(scheduler, "connector")):
            side.side_channel.hide()


def worker_sides() -> Iterator[Any]:
    """Our facade of each NIXL connector of this worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        yield from sides(get_kv_transfer_group())
