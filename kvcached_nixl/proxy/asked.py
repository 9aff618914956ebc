# SPDX-License-Identifier: Apache-2.0
"""A client's request, as every stage of the router sees it. Made once per request (`request_body`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from kvcached_nixl.proxy.api import ApiRoute
from kvcached_nixl.wire.params import KvTransferParams

__all__ = ["Alone", "Asked"]


class Alone(str, Enum):
    """Why a request is served by one server, without a hand-over."""

    LOGPROBS = "prompt_logprobs"
    """Decode must compute the prompt to get its log-probabilities."""
    NOTHING_TO_DECODE = "max_tokens"
    SEVERAL = "several"
    """Sequences that cannot be handed over one by one, or which vLLM refuses: greedy ones are all equal."""
    TRUNCATION = "truncation"
    NO_PREFILL = "no_prefill"
    CHEAPER = "cheaper"
    """Decode computes it for less than a hand-over costs (`cost`)."""
    NO_PARAMETERS = "no_parameters"
    """Prefill answered without kv_transfer_params."""
    CLIENT = "client"
    """The client sent its own kv_transfer_params."""


@dataclass(frozen=True)
class Asked:
    """A client's request.

    Attributes:
        fields: the body's top level, values unparsed; without ``kv_transfer_params`` and ``prefix_prompt_ids``.
        params: the client's own kv_transfer_params, allowed and validated; None if there are none that name a role.
        raw_params: the same, unparsed.
        prompts: if the body has a list of several prompts: each, unparsed; otherwise, and if ``alone``, empty.
        n: sequences of each prompt; 1 if ``alone``: one server gets the request as it is.
        choices: how many the answer of one server has at least.
        alone: why there is no hand-over, or None.
        needs_leave: the request is served only with ``--decode-alone``. Otherwise the client gets ``reason``.
        reason: error text that says what to send instead; "" if ``needs_leave`` is false.
        param: the field that ``reason`` is about.
        namespace: of the prefix; requests of two namespaces share no computed blocks.
        prefix: the prompt, for prefix affinity: its bytes, or those of the token ids that the client sent.
        prompt_tokens, max_tokens: estimates of the work, for the choice of servers only.
        piece_tokens: tokens of `PIECE_BYTES` of ``prefix``, estimated.
    """

    route: ApiRoute
    fields: dict[str, msgspec.Raw]
    params: KvTransferParams | None
    raw_params: msgspec.Raw | None
    prompts: tuple[msgspec.Raw, ...]
    n: int
    choices: int
    alone: Alone | None
    needs_leave: bool
    reason: str
    param: str
    namespace: bytes
    prefix: bytes
    prompt_tokens: int
    max_tokens: int
    piece_tokens: int

    @property
    def streams(self) -> bool:
        return "stream" in self.fields and bytes(self.fields["stream"]) == b"true"

    @property
    def keeps_alive(self) -> bool:
        """Whether a comment may come before the first token. Old servers answer the generate endpoint in one piece."""
        return self.streams and self.route is not ApiRoute.GENERATE

    @property
    def sequences(self) -> int:
        """How many sequences the answer has; each is a hand-over of its own."""
        return self.n * max(1, len(self.prompts))
