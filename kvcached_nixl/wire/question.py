# SPDX-License-Identifier: Apache-2.0
"""What decode asks of a prefill server, and what that answers.

The request is one of vLLM's own (``vllm/entrypoints/openai/completion``), ``POST /v1/completions`` with token ids,
which vLLM's authentication guards and which ends when the connection does. Prefill computes the prompt and one token.
What has more than token ids goes to an endpoint of this package (`wire.asked_prompt`), and so does the question how
much of a prompt is cached."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvcached_nixl.wire.asked_prompt import ASKED_PATH, Prompt, encode
from kvcached_nixl.wire.headroom import Computed, Ended
from kvcached_nixl.wire.params import HEADROOM_KEY, RemotePrefill, params_to_prefill

PATH = "v1/completions"
ROLE_HEADER = "X-Kvcached-Nixl-Role"
"""Of an answer that refuses a question for the server's role."""
MOST_ID = 200
_OF_SEVERAL = re.compile(r"_dp\d+\Z")
_ODD = re.compile(r"[^A-Za-z0-9._:-]")
LONGEST_RETRY_SECONDS = 60.0
"""A server that names a longer time is asked again after this."""
MOST_ANSWER_BYTES = 16 << 20
"""A manifest of a million tokens in blocks of 16 has less than a megabyte."""


@dataclass(frozen=True)
class Question:
    """A prompt whose KV is asked for.

    Attributes:
        adapter: name of its LoRA adapter; "" for none.
        transfer_id: push: under which decode registers its blocks; "" if it does so after the answer.
        trace_headers: W3C trace context, as it came.
        prompt: what is sent of one that has more than token ids.
    """

    request_id: str
    token_ids: Sequence[int] | None
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    transfer_id: str = ""
    prompt: Prompt | None = None

    @property
    def path(self) -> str:
        return PATH if self.prompt is None else ASKED_PATH

    @property
    def headers(self) -> Mapping[str, str]:
        kind = "application/json" if self.prompt is None else "application/msgpack"
        return {"Content-Type": kind, **(self.trace_headers or {})}

    def body(self) -> bytes:
        if self.prompt is not None:
            return encode(msgspec.structs.replace(self.prompt, transfer_id=self.transfer_id or None))
        found: dict[str, Any] = {
            "request_id": plain_id(self.request_id),
            "prompt": self.token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "kv_transfer_params": params_to_prefill(self.transfer_id),
        }
        if self.priority:
            found["priority"] = self.priority
        if self.adapter:
            found["model"] = self.adapter
        if self.salt:
            found["cache_salt"] = self.salt
        return msgspec.json.encode(found)

    def look_up_body(self) -> bytes:
        """Of a request that asks how many of the tokens are cached; not for a prompt that has more than tokens."""
        token_ids = np.asarray(self.token_ids, "<u4").tobytes()
        return encode(Prompt(plain_id(self.request_id), token_ids, adapter=self.adapter, salt=self.salt))


def plain_id(request_id: str) -> str:
    """A request's id as prefill gets it. Heartbeats separate ids by commas."""
    return _ODD.sub("_", request_id)[:MOST_ID]


class Outcome(msgspec.Struct, frozen=True):
    """How asking a server has ended without an answer.

    Attributes:
        is_final: the server refuses this prompt, and would refuse it again.
        is_of_server: it would give this answer to any prompt.
        is_busy: the server cannot take requests now.
        has_prompt: the server had the whole prompt when its connection ended.
        retry_after_seconds: what it said.
    """

    reason: str
    is_final: bool = False
    is_of_server: bool = False
    is_busy: bool = False
    has_prompt: bool = False
    retry_after_seconds: float = 0.0

    @property
    def ended(self) -> Ended:
        if self.is_final:
            return Ended.REFUSED
        if self.is_busy:
            return Ended.BUSY
        return Ended.UNREACHABLE if self.is_of_server else Ended.FAILED

    @property
    def computed(self) -> Computed:
        """If the prompt is computed here after it."""
        if self.is_final:
            return Computed.REFUSED
        return Computed.UNREACHABLE if self.is_of_server else Computed.FAILED


class AskFailed(Exception):
    """A server has not answered with parameters; ``args[0]`` is an `Outcome`."""

    @property
    def outcome(self) -> Outcome:
        found: Outcome = self.args[0]
        return found


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def read_answer(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Returns the ``kv_transfer_params`` of an answer. Raises `AskFailed`: it has none."""
    if status == 200:
        try:
            params = msgspec.json.decode(body, type=_Answer).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AskFailed(Outcome(f"its answer cannot be read: {error}")) from error
        if params is None:
            raise AskFailed(Outcome("it has computed the prompt, and offers no KV; expected kv_transfer_params"))
        return params
    reason = f"it answered HTTP {status}: {body[:300].decode(errors='replace')}"
    if status in (429, 503):
        # One that computes no prompts for others now may not do so for long.
        is_busy, said = ROLE_HEADER not in headers, headers.get("Retry-After", "")
        seconds = min(float(said), LONGEST_RETRY_SECONDS) if said.isascii() and said.isdigit() else 0.0
        raise AskFailed(Outcome(reason, is_of_server=True, is_busy=is_busy, retry_after_seconds=seconds))
    is_final = status in (400, 404, 413, 422)
    raise AskFailed(Outcome(reason, is_final=is_final, is_of_server=not is_final and status < 500))


def engine_in(params: Mapping[str, Any]) -> RemotePrefill | None:
    """The engine that has answered, if it is the only one behind its URL: vLLM names those of data parallelism so."""
    try:
        found = msgspec.convert(params, RemotePrefill)
    except msgspec.ValidationError:
        return None
    return None if _OF_SEVERAL.search(found.engine_id) else found


def queued_tokens_in(params: Mapping[str, Any]) -> int:
    """How many tokens of prompts wait at a server, by its answer; 0 if that does not say so."""
    headroom = params.get(HEADROOM_KEY)
    said = headroom.get("queued_tokens") if isinstance(headroom, Mapping) else None
    return said if isinstance(said, int) and 0 <= said < 2**31 else 0
