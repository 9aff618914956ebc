# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a running engine, and how its workers then update what they tell peers.

Sources: ``v1/engine/core.py``, ``v1/engine/async_llm.py`` (``update_weights`` and its like are collective RPCs),
``v1/worker/gpu_worker.py``, ``distributed/kv_transfer/kv_transfer_state.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from kvcached_nixl.compat.actions.engine import core_of, has_call
from kvcached_nixl.compat.attached_state import sides
from kvcached_nixl.compat.private import private

logger = logging.getLogger("vllm.kvcached_nixl")

__all__ = ["changes_adapters", "changes_weights", "identify_again", "identify_if_due", "worker_sides"]

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
"""vLLM's collective RPCs that change weights, even if a sample of the weights stays the same."""
_DUE = "_kvcached_nixl_identity_is_due"
_LOOKING = frozenset({"list_loras", "pin_lora"})


def changes_weights(method: object) -> bool:
    """Whether a collective RPC is known to change weights. `identify_again` finds changes by other methods."""
    return method in _CHANGING if isinstance(method, str) else False


def changes_adapters(method: object) -> bool:
    """Whether a collective RPC may have loaded or removed a LoRA adapter."""
    return isinstance(method, str) and "lora" in method and method not in _LOOKING


def identify_again(core: Any, *, has_changed: bool) -> None:
    """Make the workers read their weights again, and revoke KV that was computed with others.

    If such a call waits in the engine's queue, this is left to that one: vLLM takes no step before it has answered all
    of them, and reading the weights after each of many calls would keep it from ever taking one.

    Args:
        core: vLLM's ``EngineCore``, between two steps.
        has_changed: treat the weights as changed whatever the workers find.
    """
    # While an engine starts, vLLM calls its workers before there is a scheduler.
    scheduler = vars(core).get("scheduler")
    found = [] if scheduler is None else list(sides(private(scheduler, "connector")))
    if not found:
        return
    if has_changed or core.model_executor.is_sleeping:
        for side in found:
            side.revocations.weights_changed()
    # An engine in its client's own process has no queue.
    if core_of(scheduler) is not None and has_call(core, "collective_rpc"):
        vars(core)[_DUE] = True
        return
    _identify(core)


def identify_if_due(core: Any) -> None:
    """Before a step, do what `identify_again` has left to a call that vLLM rejected, because it shuts down."""
    if vars(core).get(_DUE):
        _identify(core)


def _identify(core: Any) -> None:
    scheduler = core.scheduler
    if core.model_executor.is_sleeping:
        # Sleeping weights cannot be read. They are read when everything is awake.
        vars(core)[_DUE] = False
        return
    content: dict[Any, Any] = {}
    try:
        for one in core.model_executor.get_kv_connector_handshake_metadata() or ():
            content.update(one or {})
        if content:
            scheduler.connector.set_xfer_handshake_metadata_pp_aware(content)
    except Exception:
        logger.exception("The workers' weights cannot be identified. No KV is handed over until they can.")
        for side in sides(private(scheduler, "connector")):
            side.side_channel.hide()
    vars(core)[_DUE] = False


def worker_sides() -> Iterator[Any]:
    """Our facade of each NIXL connector of this worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        yield from sides(get_kv_transfer_group())
