# SPDX-License-Identifier: Apache-2.0
"""What vLLM lets into its engine beside requests: stand-ins for requests that it has rejected, and later input of some.

Sources: ``entrypoints/generate/base/serving.py`` (``_with_kv_transfer_rejection_cleanup``), ``v1/engine/core.py``,
``Scheduler.add_request``, ``v1/sample/logits_processor/builtin.py``, ``lora/worker_manager.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from kvcached_nixl.compat.private import private

__all__ = ["Arrival", "arrival_of", "drop_unknown_stops", "give_own_id", "is_stand_in", "load_once"]

_FLAG = "abort_immediately"


class Arrival(Enum):
    """What a request is to the scheduler that it is added to."""

    FIRST = "nothing has its id"
    MORE = "the next input of a streaming session, or its end"
    REPEATED = "another request has its id"


def arrival_of(engine_scheduler: Any, request: Any) -> Arrival:
    """What this request is. One that has ended counts while its blocks are kept: vLLM still knows it by its id."""
    existing = private(engine_scheduler, "requests").get(request.request_id)
    if existing is None:
        return Arrival.FIRST
    is_session = existing.streaming_queue is not None and not existing.is_finished()
    is_its_client = existing.client_index == request.client_index
    return Arrival.MORE if is_session and is_its_client and not is_stand_in(request) else Arrival.REPEATED


def is_stand_in(request: Any) -> bool:
    """Whether it stands for a request that vLLM has rejected, so that a connector gives back what is kept for that one.

    vLLM adds it from 0.22 on and aborts it at once. It has one token that is not the prompt's.
    """
    return bool(vars(request).get(_FLAG, False))


def give_own_id(core_request: Any) -> None:
    """Call a stand-in as nothing else is called.

    It comes under the ``request_id`` of a client's body, which may be that of any request that this engine runs, keeps
    or has in a session: vLLM would take the one for the other, abort that one, or end the engine.

    Args:
        core_request: an ``EngineCoreRequest`` that has just reached the engine's process.
    """
    if _FLAG in core_request.__struct_fields__ and getattr(core_request, _FLAG):
        core_request.request_id = f"kvcached-nixl-rejected-{secrets.token_hex(16)}"


def drop_unknown_stops(core_request: Any, vocab_size: int) -> None:
    """Take out stop tokens that the model does not have: no sequence ends with them.

    vLLM checks that they are integers. With ``min_tokens`` it masks their logits, and the engine ends where there are
    none.

    Args:
        core_request: as above.
        vocab_size: of the model; 0 if nobody knows it.
    """
    sampling = private(core_request, "sampling_params")
    if sampling is None or not vocab_size:
        return
    known = {one for one in sampling.all_stop_token_ids if 0 <= one < vocab_size}
    if len(known) != len(sampling.all_stop_token_ids):
        sampling.all_stop_token_ids.intersection_update(known)
        sampling.stop_token_ids = [one for one in sampling.stop_token_ids or () if one in known]


def load_once(core_request: Any, is_loaded: Callable[[Any], bool]) -> None:
    """Have an adapter that was loaded anew not be loaded anew by each step of each of its requests.

    vLLM's API server sends ``load_inplace`` with all requests from then on, so that its workers read the adapter's
    files again at every step: files that are being replaced would end the engine, or change what it computes.

    Args:
        core_request: as above.
        is_loaded: whether what an adapter's files hold was loaded anew, with no request.
    """
    lora = private(core_request, "lora_request")
    if lora is not None and lora.load_inplace and is_loaded(lora):
        core_request.lora_request = msgspec.structs.replace(lora, load_inplace=False)
