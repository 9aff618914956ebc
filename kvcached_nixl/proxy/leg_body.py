# SPDX-License-Identifier: Apache-2.0
"""Makes the bodies for prefill and decode from a client's. Values that the router does not change stay its bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcached_nixl.proxy.api import Api, api_of
from kvcached_nixl.proxy.asked import Asked
from kvcached_nixl.proxy.body_fields import nested, top_level
from kvcached_nixl.wire.params import KvTransferParams

__all__ = ["decode_body", "one_token_body"]

# Removed for prefill, because they need more than one token or enlarge the response. None of them changes the KV.
_NOT_FOR_PREFILL = frozenset(
    (
        *("stream", "stream_options", "stream_interval", "n", "best_of"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "include"),
        *("logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo"),
        *("return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"),
    )
)


def one_token_body(asked: Asked, params: KvTransferParams | msgspec.Raw, leg_id: str) -> bytes:
    """Returns the body for a leg of one token, not streamed, as prefill gets it."""
    api = api_of(asked.route)
    fields: dict[str, Any] = {key: value for key, value in asked.fields.items() if key not in _NOT_FOR_PREFILL}
    one_token: dict[str, Any] = dict.fromkeys(api.limits, 1)
    if api.sampling:
        sampling = nested(asked.fields, api.sampling)
        kept = {key: value for key, value in sampling.items() if key not in _NOT_FOR_PREFILL}
        one_token = {api.sampling: {**kept, **one_token, "n": 1}}
    fields |= {**one_token, **dict(api.prefill)}
    return _encode(api, fields, params, leg_id)


def decode_body(asked: Asked, params: KvTransferParams | msgspec.Raw | None, leg_id: str) -> bytes:
    """Returns the body for decode: the client's body, with the kv_transfer_params that locate its KV."""
    return _encode(api_of(asked.route), dict(asked.fields), params, leg_id)


def _encode(api: Api, fields: dict[str, Any], params: KvTransferParams | msgspec.Raw | None, leg_id: str) -> bytes:
    # The client's own request_id must not reach a server: both legs and other clients could share it.
    if "request_id" in fields:
        fields["request_id"] = leg_id
    if params is not None and api.sampling:
        # Where vLLM's own endpoints put them. 0.28 ignores what is beside them on its generate endpoint.
        sampling = fields.get(api.sampling, {})
        sampling = dict(sampling) if isinstance(sampling, dict) else top_level.decode(sampling)
        extra = sampling.get("extra_args", msgspec.Raw(b"null"))
        kept = {} if bytes(extra) == b"null" else top_level.decode(extra)
        fields[api.sampling] = {**sampling, "extra_args": {**kept, "kv_transfer_params": params}}
    elif params is not None:
        fields["kv_transfer_params"] = params
    return msgspec.json.encode(fields)
