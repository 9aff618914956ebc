# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state (Mamba, linear attention): where prefill stops, and what vLLM's own connector must not see.

A state cannot be taken back by a token, and decode has to compute the last token of a prompt to get a first answer. So
prefill computes a prompt without its last token, and one token of an answer, which is none of the prompt's answer.
Sources: ``v1/nixl/base_scheduler.py`` (``_truncate_mamba_request_for_prefill``), ``v1/nixl/base_worker.py``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvcached_nixl.vllm.adapter.private import optional, private
from kvcached_nixl.vllm.adapter.specs import is_state, keeps_of
from kvcached_nixl.vllm.adapter.versions import found_version, installed_row
from kvcached_nixl.wire.kv_groups import FEWEST_TOKENS, Keeps

__all__ = [
    "align_chunks",
    "ends_in_media",
    "know_states",
    "stop_before_last",
    "unserved_states",
    "whole_because",
    "without_states",
]

_MARK = "_kvcached_nixl_whole_because"
"""Key in ``kv_transfer_params``: why the prompt was left whole; empty if its last token was taken away."""


def stop_before_last(core_request: Any) -> None:
    """Take the last token from a prompt that is to be handed over, and let prefill compute one token of an answer.

    The token that it computes is none of the answer's. A prompt that has to stay whole is computed as any other, and
    not handed over.

    Args:
        core_request: an ``EngineCoreRequest`` that has just reached the engine's process.
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
    sampling.extra_args = {**sampling.extra_args, "kv_transfer_params": {**params, _MARK: reason}}
    if reason:
        return
    sampling.max_tokens, sampling.min_tokens = 1, 0
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (whole := private(core_request, name)) is not None:
            setattr(core_request, name, whole[:-1])


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


def whole_because(params: Mapping[str, Any]) -> str:
    """Why a request's prompt is whole, so that prefill cannot hand over its states; "" if `stop_before_last` cut it."""
    return str(params.get(_MARK, "it did not enter the engine as requests do"))


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


def ends_in_media(mm_features: Iterable[Any], num_tokens: int) -> bool:
    """Whether the last token of a prompt belongs to an image, a sound, ..."""
    ends = (int(one.mm_position.offset) + int(one.mm_position.length) for one in mm_features)
    return max(ends, default=0) >= num_tokens


def unserved_states(specs: Iterable[Any], speculative_config: Any) -> list[tuple[str, str]]:
    """Settings with which decode would go on from another state than prefill's: (found, expected).

    Args:
        specs: of all layers.
        speculative_config: vLLM's, or None.
    """
    specs = [spec for spec in specs if is_state(spec)]
    if not specs:
        return []
    refused = []
    if not installed_row().shape.serves_states:
        found = f"layers that keep a state, with vLLM {found_version('vllm')}"
        refused.append((found, "vLLM 0.28 or later, whose engine can load them"))
    if odd := sorted({spec.mamba_cache_mode for spec in specs} - {"none", "align"}):
        # Then a state is kept at every block boundary, and the last one is not always where the last token is.
        refused.append((f"--mamba-cache-mode {odd[0]}", "--mamba-cache-mode align, or none"))
    if not installed_row().shape.keeps_checkpoints and any(
        spec.mamba_cache_mode == "align" and optional(spec, "num_prefill_checkpoint_blocks") for spec in specs
    ):
        refused.append(("checkpoints of states while a prompt is computed", "vLLM 0.32, or --no-enable-prefix-caching"))
    if optional(speculative_config, "num_speculative_tokens"):
        # vLLM may schedule drafts with the first token that decode computes, and takes that for a part of a prompt: the
        # state is then one behind tokens that were only guessed (vllm#55178).
        refused.append(("--speculative-config, with layers that keep a state", "no speculative decoding"))
    return refused


def without_states(kv_cache_config: Any) -> Any:
    """The KV-cache groups with attention only, for the constructor of vLLM's own NIXL worker.

    It wants another layout of convolution states (``VLLM_SSM_CONV_STATE_LAYOUT=DS``), and does not know all kinds of
    states; but none of its own methods moves any.
    """
    groups = [
        one for one in private(kv_cache_config, "kv_cache_groups") if keeps_of(one.kv_cache_spec) is not Keeps.STATE
    ]
    if len(groups) == len(kv_cache_config.kv_cache_groups):
        return kv_cache_config
    # Not a copy: it would have what vLLM has already derived from all groups.
    return dataclasses.replace(kv_cache_config, kv_cache_groups=groups)


def know_states(worker: Any, kv_cache_config: Any) -> None:
    """Give a worker that was constructed `without_states` all KV-cache groups, for `nixl_worker.WorkerView`."""
    private(worker, "kv_cache_config")
    worker.kv_cache_config = kv_cache_config
