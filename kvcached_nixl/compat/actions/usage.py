# SPDX-License-Identifier: Apache-2.0
"""``usage`` of decode's answer: the prompt tokens that prefill had cached, not all that were handed over.

vLLM 0.31 and later read prefill's number themselves, from the same key. Source: ``v1/engine/output_processor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcached_nixl.compat.private import private
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY

__all__ = ["take_cached_tokens"]


def take_cached_tokens(request_state: Any, request: Any) -> None:
    """Let what a request of decode says of prefill stand in the place of vLLM's own number.

    Args:
        request_state: a new ``RequestState`` of the API server.
        request: its ``EngineCoreRequest``; anything may be in its parameters.
    """
    sampling = private(request, "sampling_params")
    extra = None if sampling is None else private(sampling, "extra_args")
    params = extra.get("kv_transfer_params") if isinstance(extra, Mapping) else None
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return
    cached = params.get(CACHED_TOKENS_KEY)
    if isinstance(cached, float) and cached.is_integer():
        cached = int(cached)
    if isinstance(cached, int) and not isinstance(cached, bool) and 0 <= cached <= _num_tokens(request):
        _say(request_state, cached)


def _say(request_state: Any, cached: int) -> None:
    """Set the number right behind vLLM, which sets its own with a request's first output and never again.

    Nothing is called for later outputs: at a thousand streams that would keep a tenth of a core busy.
    """
    # None for a pooling model.
    processor = private(request_state, "logprobs_processor")
    if processor is None:
        return

    def update_from_output(output: Any) -> None:
        del processor.update_from_output
        request_state.num_cached_tokens = cached
        processor.update_from_output(output)

    processor.update_from_output = update_from_output


def _num_tokens(request: Any) -> int:
    token_ids = private(request, "prompt_token_ids")
    return 0 if token_ids is None else len(token_ids)
