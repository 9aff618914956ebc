# SPDX-License-Identifier: Apache-2.0
"""``usage`` of decode's answer: the prompt tokens that prefill had cached, not all that were handed over.

vLLM 0.31 and later read prefill's number themselves, from the same key. Source: ``v1/engine/output_processor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcached_nixl.compat.private import private
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY

__all__ = ["say_cached_tokens", "take_cached_tokens"]


def take_cached_tokens(request_state: Any, request: Any) -> None:
    """Keep what a request of decode says of prefill.

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
        setattr(request_state, CACHED_TOKENS_KEY, cached)


def say_cached_tokens(request_state: Any) -> None:
    """Called before each output is made, also before the first one, when vLLM has just set its own number."""
    cached = vars(request_state).get(CACHED_TOKENS_KEY)
    if cached is not None:
        request_state.num_cached_tokens = cached


def _num_tokens(request: Any) -> int:
    token_ids = private(request, "prompt_token_ids")
    return 0 if token_ids is None else len(token_ids)
