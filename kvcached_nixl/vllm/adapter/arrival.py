# SPDX-License-Identifier: Apache-2.0
"""What enters vLLM's engine besides new requests: stand-ins for rejected requests, and more input of sessions.

Sources: ``entrypoints/generate/base/serving.py`` (``_with_kv_transfer_rejection_cleanup``), ``v1/engine/core.py``,
``Scheduler.add_request``, ``v1/sample/logits_processor/builtin.py``, ``lora/worker_manager.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from kvcached_nixl.vllm.adapter.private import private

__all__ = ["Arrival", "arrival_of", "drop_unknown_stops", "give_own_id", "is_stand_in", "load_once"]


class Arrival(Enum):
    """How a request relates to those that the scheduler knows already."""

    FIRST = "nothing has its id"
    MORE = "the next input of a streaming session, or its end"
    REPEATED = "another request has its id"


def arrival_of(engine_scheduler: Any, request: Any) -> Arrival:
    """Classify ``request``. A finished request counts as known while its blocks are held: vLLM still has its id."""
    existing = private(engine_scheduler, "requests").get(request.request_id)
    if existing is None:
        return Arrival.FIRST
    is_session = existing.streaming_queue is not None and not existing.is_finished()
    is_its_client = existing.client_index == request.client_index
    return Arrival.MORE if is_session and is_its_client and not is_stand_in(request) else Arrival.REPEATED


def is_stand_in(request: Any) -> bool:
    """Whether ``request`` stands for one that vLLM rejected, so that connectors free what is held for that one.

    vLLM adds it and aborts it at once. Its only token is not the prompt's.
    """
    return bool(private(request, "abort_immediately"))


def give_own_id(core_request: Any) -> None:
    """Give a stand-in a unique request id.

    It arrives with the ``request_id`` of a client's body, which may be the id of any request that this engine runs,
    holds or has in a session. vLLM would confuse the two, abort the other request, or end the engine.

    Args:
        core_request: an ``EngineCoreRequest`` that has just reached the engine's process.
    """
    if private(core_request, "abort_immediately"):
        core_request.request_id = f"kvcached-nixl-rejected-{secrets.token_hex(16)}"


def drop_unknown_stops(core_request: Any, vocab_size: int) -> None:
    """Remove stop tokens outside the model's vocabulary. No sequence can end with them.

    vLLM only checks that they are integers. With ``min_tokens`` it masks their logits, and an index outside the
    vocabulary ends the engine.

    Args:
        core_request: as in `give_own_id`.
        vocab_size: of the model; 0 if unknown.
    """
    sampling = private(core_request, "sampling_params")
    if sampling is None or not vocab_size:
        return
    known = {one for one in sampling.all_stop_token_ids if 0 <= one < vocab_size}
    if len(known) != len(sampling.all_stop_token_ids):
        sampling.all_stop_token_ids.intersection_update(known)
        sampling.stop_token_ids = [one for one in sampling.stop_token_ids or () if one in known]


def load_once(core_request: Any, is_loaded: Callable[[Any], bool]) -> None:
    """Clear ``load_inplace`` of a request whose adapter was reloaded already.

    After a reload vLLM's API server sets ``load_inplace`` in all later requests, so workers read the adapter's files
    again at every step. Files that are being replaced would end the engine, or change what it computes.

    Args:
        core_request: as in `give_own_id`.
        is_loaded: whether the current files of an adapter were loaded in place already, by a call and not by a request.
    """
    lora = private(core_request, "lora_request")
    if lora is not None and lora.load_inplace and is_loaded(lora):
        core_request.lora_request = msgspec.structs.replace(lora, load_inplace=False)
