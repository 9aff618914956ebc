# SPDX-License-Identifier: Apache-2.0
"""What enters vLLM's engine: requests, stand-ins for rejected ones, more input of sessions, and look-ups.

Of a model with layers that keep a state, a prompt that is to be handed over arrives without its last token: a state
cannot be taken back by a token, and decode has to compute the last token of a prompt to get a first answer. The token
that prefill samples behind the shortened prompt is dropped.

A look-up says how much of a prompt the engine has cached, and may have that kept for a peer. An API server calls its
engine for it as for other things that are no requests: a request would be counted, be limited as those of clients
(``--max-num-queued-tokens``), and set the ranks of data parallelism going. What takes time runs on a thread of its own,
so that no step waits for it. Blocks are kept between two steps.

Runs in: the engine-core process.
Sources: ``entrypoints/generate/base/serving.py`` (``_with_kv_transfer_rejection_cleanup``), ``v1/engine/core.py``,
``Scheduler.add_request``, ``v1/sample/logits_processor/builtin.py``, ``lora/worker_manager.py``,
``v1/nixl/base_scheduler.py`` (``_truncate_mamba_request_for_prefill``), ``platforms/cpu.py``,
``v1/core/kv_cache_coordinator.py``; vllm#41383, vllm#38027.
"""

from __future__ import annotations

import copy
import functools
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.attributes import OWNER, has_loop, optional, owner_of, private
from kvcached_nixl.vllm.adapter.locate import ENGINE_CORE_BASE, ENGINE_SCHEDULER
from kvcached_nixl.vllm.adapter.queues import hold
from kvcached_nixl.vllm.adapter.requests import WHOLE_BECAUSE, ends_in_media, hash_embeddings, is_stand_in
from kvcached_nixl.vllm.adapter.specs import keeps_of
from kvcached_nixl.vllm.patches.engine_blocks import blocks_of, bound_sides
from kvcached_nixl.vllm.patches.tier import tier_of
from kvcached_nixl.vllm.patches.weights import identify_if_due
from kvcached_nixl.wire.manifest import FEWEST_TOKENS, Keeps

MOST_LOOK_UPS = 32
"""That an engine has at once."""


@Patch(ENGINE_SCHEDULER, "add_request", "scheduler", "self request")
def add_request(call: Call) -> None:
    """Without it, the lease of a request that waits to be allocated would end, and prefill would reuse its blocks.
    Until every supported vLLM tells the connector of a request's arrival, and of the scheduler."""
    request = call.argument("request")
    if not isinstance(private(request, "kv_transfer_params"), Mapping):
        # From 0.32 on vLLM's scheduler reads them unchecked, and an error there ends the engine. vLLM's own API server
        # fails at such a request before, from 0.31 on; other clients of an engine may not.
        request.kv_transfer_params = None
    if optional(owner_of(call.instance), "reject_new_requests") and is_stand_in(request):
        # From 0.33 on a paused engine tells clients to try again. Another one needs the KV then, which prefill would
        # release now. vLLM aborts what it does not know, without an effect.
        return
    arrival = arrival_of(call.instance, request)
    found = list(bound_sides(call.instance))
    for side in found:
        is_taken = side.offering.kept.keeps(request.request_id) or request.request_id in side.engine.failures.sessions
        if arrival is Arrival.REPEATED or is_taken:
            side.refuse(request.request_id, request.client_index)
            return
    is_held = False
    for side in found if arrival is Arrival.FIRST else ():
        # A worker may load an adapter's files again for any request that uses it, so identify it for every request.
        side.read.adapter_arrives(request.lora_request)
        is_held |= side.arrived(side.read(request), may_hold=not is_held)
    # It has to see what vLLM does with the request from here on.
    tier_of(call.instance)
    call.proceed()
    if is_held:
        hold(call.instance, request)


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


@Patch(ENGINE_CORE_BASE, "preprocess_add_request", "scheduler", "self request")
def preprocess_add_request(call: Call) -> Any:
    """Without it, the request that vLLM adds for one that it has rejected has an id that the client chose. If a request
    whose blocks are kept has that id, the engine would end. So would it for stop tokens that the model does not have,
    and for an adapter whose files are incomplete. And prefill would hand over states behind a prompt's last token, from
    which decode cannot go back, or one of another block where drafts follow the token, or on a CPU cached states of
    other tokens than those of their blocks. Embeddings would be hashed on the engine's thread. Until vLLM gives such a
    request a unique id, checks stop tokens, loads an adapter once, asks its connector where prefill stops, and keeps
    the block size that its scheduler was made with."""
    request = call.argument("request")
    if private(request, "abort_immediately"):
        # A stand-in arrives with the ``request_id`` of a client's body, which may be the id of any request that this
        # engine runs, holds or has in a session. vLLM would confuse the two, abort the other one, or end the engine.
        request.request_id = f"kvcached-nixl-rejected-{secrets.token_hex(16)}"
    vars(call.instance.scheduler)[OWNER] = call.instance
    if not has_loop(call.instance):
        # An engine in its client's own process has no loop that repeats a look at weights.
        identify_if_due(call.instance)
    drop_unknown_stops(request, call.instance.vllm_config.model_config.get_vocab_size())
    sides_here = list(bound_sides(call.instance.scheduler))
    lora = private(request, "lora_request")
    if lora is not None and lora.load_inplace and any(side.read.is_loaded(lora) for side in sides_here):
        # After a reload by a call vLLM's API server sets ``load_inplace`` in all later requests, so workers would read
        # the adapter's files again at every step. Files that are being replaced would end the engine, or change what it
        # computes.
        request.lora_request = msgspec.structs.replace(lora, load_inplace=False)
    if any(side.engine.groups.have_states for side in sides_here):
        align_chunks(call.instance.scheduler)
        draft_behind_prompts(call.instance.scheduler)
        if any(side.may_offer for side in sides_here):
            stop_before_last(request)
    found = call.proceed()
    made, _ = found
    if sides_here and made.kv_transfer_params is not None:
        # Here on the thread that decodes requests: the engine's would make every request wait.
        hash_embeddings(made)
    return found


# A core request below is an ``EngineCoreRequest`` that has just reached the engine's process.


def drop_unknown_stops(core_request: Any, vocab_size: int) -> None:
    """Remove stop tokens outside the model's vocabulary. No sequence can end with them.

    vLLM only checks that they are integers. With ``min_tokens`` it masks their logits, and an index outside the
    vocabulary ends the engine. ``vocab_size`` is 0 if it is not known.
    """
    sampling = private(core_request, "sampling_params")
    if sampling is None or not vocab_size:
        return
    known = {one for one in sampling.all_stop_token_ids if 0 <= one < vocab_size}
    if len(known) != len(sampling.all_stop_token_ids):
        sampling.all_stop_token_ids.intersection_update(known)
        sampling.stop_token_ids = [one for one in sampling.stop_token_ids or () if one in known]


# ------------------------------------------------------------------------------------- models with layers with states


def align_chunks(scheduler: Any) -> None:
    """Let prefill's chunks end where blocks with a state end, as vLLM's scheduler means them to.

    Otherwise its prefix cache takes the state of a token in the middle of a block for the one at the block's end, and
    every prompt that begins with this block is computed from it. A CPU's platform sets ``block_size`` back to its
    default when the scheduler exists (``v1/engine/core.py``: ``_perform_handshakes``).
    """
    cache_config = private(scheduler, "cache_config")
    if cache_config.mamba_cache_mode == "align":
        specs = (one.kv_cache_spec for one in private(scheduler, "kv_cache_config").kv_cache_groups)
        # One of them: vLLM takes states of one kind only.
        cache_config.block_size = next(spec.block_size for spec in specs if keeps_of(spec) is Keeps.STATE)


def draft_behind_prompts(scheduler: Any) -> None:
    """Let no step that computes the last token of a prompt have drafts.

    vLLM's scheduler pads a token that is left alone of a prompt with as many drafts as a step of decode has. Where they
    reach the next block, the state is not in the block of that token, and a manifest would name another one. vLLM does
    not pad where the number of drafts is looked up by the number of requests: so it looks up a constant.
    """
    num_drafts = private(scheduler, "num_spec_tokens")
    if num_drafts and private(scheduler, "dynamic_sd_lookup") is None:
        scheduler.dynamic_sd_lookup = [num_drafts] * (private(scheduler, "max_num_running_reqs") + 1)


def stop_before_last(core_request: Any) -> None:
    """Take the last token from a prompt that is to be handed over, and let prefill sample one token, which is dropped.

    A prompt that has to stay whole is computed as any other, and not handed over.
    """
    sampling = private(core_request, "sampling_params")
    params = ((sampling.extra_args if sampling is not None else None) or {}).get("kv_transfer_params")
    if not isinstance(params, Mapping) or core_request.resumable:
        return
    # With both roles set, decode's half has the request, and may compute it.
    if params.get("do_remote_decode") is not True or params.get("do_remote_prefill") not in (None, False):
        return
    reason = _obstacle(core_request)
    # Copies: where the engine runs in its client's process, the client has these objects, too.
    core_request.sampling_params = sampling = copy.copy(sampling)
    sampling.extra_args = {**sampling.extra_args, "kv_transfer_params": {**params, WHOLE_BECAUSE: reason}}
    if reason:
        return
    sampling.max_tokens, sampling.min_tokens = 1, 0
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (whole := private(core_request, name)) is not None:
            setattr(core_request, name, whole[:-1])


def _obstacle(core_request: Any) -> str:
    tokens, embeds = core_request.prompt_token_ids, core_request.prompt_embeds
    num_tokens = len(tokens) if tokens is not None else len(embeds)
    if num_tokens < FEWEST_TOKENS:
        return f"states of a prompt of {num_tokens} tokens are not handed over; expected at least {FEWEST_TOKENS}"
    sampling = core_request.sampling_params
    if sampling.prompt_logprobs is not None or optional(sampling, "prompt_logprob_token_ids") is not None:
        return "all tokens of its prompt have to be computed for their log-probabilities"
    if ends_in_media(core_request.mm_features or (), num_tokens):
        return "its last token belongs to an image, a sound, ..."
    return ""


# ----------------------------------------------------------------------------------------------------------- look-ups

LOOK_UP = "kvcached_nixl_look_up"
"""The engine core's method that API servers call (`answering`)."""


def let_look_up(core: Any) -> None:
    """Lets API servers call for it. Idempotent."""
    if LOOK_UP not in vars(core):
        setattr(core, LOOK_UP, _LookUps(core).begin)


class _LookUps:
    """Those of one engine."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._looker = ThreadPoolExecutor(1, "kvcached_nixl-look-up")
        self._room = threading.Semaphore(MOST_LOOK_UPS)

    def begin(
        self, token_ids: bytes, request_id: str, adapter: Any, salt: str, least_tokens: int, most_seconds: float
    ) -> Future[dict[str, Any]]:
        """What an API server calls.

        Args:
            adapter: vLLM's ``LoRARequest`` as it was sent, or None.
            least_tokens: if so many are cached, their KV is wanted; 0 if only their number is.
            most_seconds: how long the peer waits for the answer. Half of that is left for the step before it.
        """
        answer: Future[dict[str, Any]] = Future()
        begun = time.monotonic(), most_seconds
        if not self._room.acquire(blocking=False):
            side, *_ = bound_sides(self._core.scheduler)
            answer.set_result(side.look_up(0))
            return answer
        self._looker.submit(self._look_up, answer, least_tokens, *begun, token_ids, request_id, adapter, salt)
        return answer

    def _look_up(
        self,
        answer: Future[dict[str, Any]],
        least_tokens: int,
        begun_seconds: float,
        most_seconds: float,
        *of_request: Any,
    ) -> None:
        try:
            blocks, (side, *_) = blocks_of(self._core.scheduler), bound_sides(self._core.scheduler)
            # Others wait for this thread.
            has_left = 0 < most_seconds < time.monotonic() - begun_seconds
            # While the engine is paused, what is cached is of no use to others.
            if has_left or not (blocks.caches_prefixes and blocks.admits):
                answer.set_result(side.look_up(0))
                return
            request = self._request(*of_request)
            num_tokens = blocks.num_cached_tokens_of(request)
            if 0 < least_tokens <= num_tokens:
                until_seconds = begun_seconds + most_seconds / 2
                side.call_soon(functools.partial(self._offer, answer, until_seconds, request, num_tokens))
            else:
                answer.set_result(side.look_up(num_tokens))
        except Exception as error:  # noqa: BLE001 - the API server gets it
            answer.set_exception(error)
        finally:
            self._room.release()

    def _offer(self, answer: Future[dict[str, Any]], until_seconds: float, request: Any, num_tokens: int) -> None:
        """On the engine's thread, between two steps: keep what is cached, if the peer still waits for it."""
        blocks, (side, *_) = blocks_of(self._core.scheduler), bound_sides(self._core.scheduler)
        # As for a request: its blocks are cached under the name of its adapter, which may be another one's by now.
        side.read.adapter_arrives(request.lora_request)
        side.outdate_renamed()
        if blocks.admits and side.offers_cached and time.monotonic() < until_seconds:
            num_tokens, block_ids = blocks.keep_cached(request)
            if side.offer_cached(side.read(request), num_tokens, block_ids, answer.set_result):
                return
            blocks.drop(request)
        answer.set_result(side.look_up(num_tokens))

    def _request(self, token_ids: bytes, request_id: str, adapter: Any, salt: str) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            f"{LOOK_UP}-{request_id}-{secrets.token_hex(4)}",
            np.frombuffer(token_ids, "<u4").tolist(),
            SamplingParams(max_tokens=1),
            None,
            lora_request=None if adapter is None else msgspec.convert(adapter, LoRARequest),
            cache_salt=salt or None,
            block_hasher=private(self._core, "request_block_hasher"),
        )
