# SPDX-License-Identifier: Apache-2.0
"""The routed endpoints: where a request has its prompt and its limits, and how an answer shows that it is complete.

Everything that differs between them is in this table. Field names and events are those of vLLM's entrypoints, 0.26 to
0.33 (openai, anthropic, and serve/disagg, later scale_out/token_in_token_out).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Api", "ApiRoute", "api_of"]


class ApiRoute(str, Enum):
    """Path of a client's request, and of each leg."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"


@dataclass(frozen=True)
class Api:
    """One endpoint. Patterns match whole JSON keys: quotes are escaped inside a string, so generated text cannot match.

    Attributes:
        prompt: field with the prompt, for estimates and prefix affinity.
        limits: fields with the largest number of tokens; prefill gets 1 for each.
        prefill: other fields that prefill gets.
        sampling: field that has ``limits`` and the other sampling parameters; "" if they are on the top level.
        state: fields that name what one server keeps for itself; such a request cannot be routed.
        end: end of the last event of a stream.
        counts: an event that shows that the request is computed; what comes before ``first`` of them is held back.
        error: an event that is an error.
        reason: the mark of a complete answer; group 1 is why it ended.
        reason_field, reasons_in: where an answer that is not streamed says the same: a field of each item of a list,
            or, if ``reasons_in`` is "", of the answer.
    """

    prompt: str
    limits: tuple[str, ...]
    prefill: tuple[tuple[str, Any], ...] = (("stream", False),)
    sampling: str = ""
    state: tuple[str, ...] = ()
    end: re.Pattern[bytes] = re.compile(rb"data: \[DONE\]\n\n\Z")
    counts: re.Pattern[bytes] = re.compile(rb'"choices":\s*\[\s*\{')
    first: int = 1
    error: re.Pattern[bytes] = re.compile(rb'data: \{"error"')
    reason: re.Pattern[bytes] = re.compile(rb'"finish_reason":\s*"([a-z_]+)"')
    reason_field: str = "finish_reason"
    reasons_in: str = "choices"


_OF_OPENAI = (("stream", False), ("n", 1))
_COMPLETIONS = Api("prompt", ("max_tokens",), _OF_OPENAI)
# vLLM sends the role first, and only after it an error.
_CHAT = Api("messages", ("max_tokens", "max_completion_tokens"), _OF_OPENAI, first=2)
_RESPONSES = Api(
    "input",
    ("max_output_tokens",),
    (("stream", False), ("store", False)),
    state=("previous_response_id", "background"),
    end=re.compile(rb"(?:\A|\n\n)event: response\.(?:completed|incomplete)\n[^\n]*\n\n\Z"),
    counts=re.compile(rb"(?:\A|\n\n)event: response\.(?!created|in_progress|queued)"),
    error=re.compile(rb"(?:\A|\n\n)event: (?:error|response\.failed)\n"),
    reason=re.compile(rb"(?:\A|\n\n)event: response\.(completed|incomplete)\n"),
    reason_field="status",
    reasons_in="",
)
_MESSAGES = Api(
    "messages",
    ("max_tokens",),
    end=re.compile(rb"(?:\A|\n\n)event: message_stop\n[^\n]*\n\n(?:data: \[DONE\]\n\n)?\Z"),
    counts=re.compile(rb"(?:\A|\n\n)event: (?:content_block_|message_delta|message_stop)"),
    error=re.compile(rb"(?:\A|\n\n)event: error\n"),
    reason=re.compile(rb'"stop_reason":\s*"([a-z_]+)"'),
    reason_field="stop_reason",
    reasons_in="",
)
_GENERATE = Api("token_ids", ("max_tokens",), sampling="sampling_params")


def api_of(route: ApiRoute) -> Api:
    """Returns the endpoint of a path."""
    return {
        ApiRoute.COMPLETIONS: _COMPLETIONS,
        ApiRoute.CHAT: _CHAT,
        ApiRoute.RESPONSES: _RESPONSES,
        ApiRoute.MESSAGES: _MESSAGES,
        ApiRoute.GENERATE: _GENERATE,
    }[route]
