# SPDX-License-Identifier: Apache-2.0
"""What a client wants, and what prefill and decode are asked for it. Once per request; pure.

The body is taken apart once, at its top level: what nobody here has to know stays the bytes that it came as, and both
servers get them so. Only what would change which tokens are right is looked into.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.wire.params import KvTransferParams, Malformed, TokenId, parse

__all__ = ["Alone", "Asked", "Route", "decode_body", "prefill_body", "read"]

DEFAULT_MAX_TOKENS = 256
"""What a request without a limit counts as, where outstanding tokens are compared."""
BYTES_PER_TOKEN = 4
_INT64 = 2**63


class Route(str, Enum):
    """What is routed: the path of a client's request, and of each leg."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class Alone(str, Enum):
    """Why decode computes a prompt itself."""

    LOGPROBS = "prompt_logprobs"
    """It has to: the log-probabilities of a prompt come from computing it."""
    NOTHING_TO_DECODE = "max_tokens"
    SEVERAL = "several"
    TRUNCATION = "truncation"
    NO_PREFILL = "no_prefill"
    NO_PARAMETERS = "no_parameters"
    """Prefill has answered without any."""
    CLIENT = "client"
    """The client has parameters of its own."""


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        fields: the body's top level, each value as it came; without ``kv_transfer_params`` and ``prefix_prompt_ids``.
        params: the client's own, allowed and checked; ``None`` if there are none that name a role.
        raw_params: the same as they came.
        alone: why there is nothing to hand over, or None.
        needs_leave: only if the router may let decode compute prompts; ``reason`` say what else to do.
        namespace: of the prefix; requests of two namespaces share no computed blocks.
        prefix: what the prompt begins with: its bytes, or those of the ids that the client has sent.
        prompt_tokens, max_tokens: about how much work it is, for balancing only.
    """

    route: Route
    fields: dict[str, msgspec.Raw]
    params: KvTransferParams | None
    raw_params: msgspec.Raw | None
    alone: Alone | None
    needs_leave: bool
    reason: str
    param: str
    namespace: bytes
    prefix: bytes
    prompt_tokens: int
    max_tokens: int


_top = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
# A tuple of pairs, not a dict: nothing at module level may be changed.
_KNOWN = tuple(
    (name, msgspec.json.Decoder(kind))
    for name, kind in (
        ("model", str | None),
        ("stream", bool | None),
        ("n", int | None),
        ("max_tokens", int | None),
        ("max_completion_tokens", int | None),
        ("prompt_logprobs", int | None),
        ("logprobs", int | bool | None),
        ("echo", bool | None),
        ("use_beam_search", bool | None),
        ("truncate_prompt_tokens", int | None),
        ("cache_salt", str | None),
        ("vllm_xargs", dict[str, msgspec.Raw] | None),
        ("prefix_prompt_ids", list[TokenId] | None),
    )
)
# What needs more than one token, or makes the answer long; nothing of it changes what the KV follows from.
_NOT_FOR_PREFILL = frozenset(
    (
        *("stream", "stream_options", "stream_interval", "n", "best_of"),
        *("max_tokens", "max_completion_tokens", "min_tokens"),
        *("logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo"),
        *("return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"),
    )
)
_ODD_NUMBER = re.compile(rb"[0-9]{19}|[eE]\+?[0-9]{3}")


def read(route: Route, body: bytes, *, allows_params: bool) -> Asked:
    """Take a client's body apart.

    Args:
        allows_params: whether a client may say ``kv_transfer_params`` that name a role or a server.

    Raises:
        Refusal: 400, with what was found and expected; it names the field.
    """
    fields = _top_level(body)
    known = {name: _known(fields, name, decoder) for name, decoder in _KNOWN if name in fields}
    _refuse_side_doors(fields, known, allows_params)
    params, raw_params = _own_params(fields, allows_params)
    fields.pop("kv_transfer_params", None)
    fields.pop("prefix_prompt_ids", None)
    ids = known.get("prefix_prompt_ids")
    if params is not None and params.prefix_prompt_ids is not None:
        if ids is not None and ids != params.prefix_prompt_ids:
            raise _bad("prefix_prompt_ids", "found two that differ, in the body and in kv_transfer_params")
        ids = params.prefix_prompt_ids
    text = bytes(fields.get("prompt" if route is Route.COMPLETIONS else "messages", msgspec.Raw(b"")))
    alone, reason, param = _alone(route, fields, known, text)
    if params is None or params.is_hint:
        params = raw_params = None
    else:
        alone, reason = Alone.CLIENT, ""
    limit = known.get("max_completion_tokens") or known.get("max_tokens")
    return Asked(
        route=route,
        fields=fields,
        params=params,
        raw_params=raw_params,
        alone=alone,
        needs_leave=bool(reason),
        reason=reason,
        param=param,
        namespace=b"\0".join(
            bytes(fields[name]) for name in ("model", "cache_salt", "tools", "chat_template") if name in fields
        ),
        prefix=text if ids is None else array("i", ids).tobytes(),
        prompt_tokens=1 + _about_tokens(text),
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else min(limit, 1 << 20),
    )


def prefill_body(asked: Asked, transfer_id: str | None, leg_id: str) -> bytes:
    """The request as prefill gets it: one token, not streamed, and what is needed is how to hand its KV over."""
    fields: dict[str, Any] = {key: value for key, value in asked.fields.items() if key not in _NOT_FOR_PREFILL}
    fields |= {
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": KvTransferParams.for_prefill(transfer_id),
    }
    if asked.route is Route.CHAT:
        fields["max_completion_tokens"] = 1
    return _encode(fields, leg_id)


def decode_body(asked: Asked, params: KvTransferParams | msgspec.Raw | None, leg_id: str) -> bytes:
    """The request as decode gets it: as it came, with what says where its KV is."""
    fields: dict[str, Any] = dict(asked.fields)
    if params is not None:
        fields["kv_transfer_params"] = params
    return _encode(fields, leg_id)


def _encode(fields: dict[str, Any], leg_id: str) -> bytes:
    # An id of the client's would name a request at a server.
    if "request_id" in fields:
        fields["request_id"] = leg_id
    return msgspec.json.encode(fields)


def _top_level(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        if not body.isascii():
            body.decode()
        fields = _top.decode(body)
        if _ODD_NUMBER.search(body):
            _refuse_odd_numbers(msgspec.json.decode(body))
    except UnicodeDecodeError as error:
        raise _bad(None, f"the body is no UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise _bad(None, "the body is nested too deep") from error
    except msgspec.MsgspecError as error:
        # msgspec has no other word for half of a surrogate pair.
        reason = str(error).replace("Input data was truncated", "it ends too soon, or has half of a surrogate pair")
        raise _bad(None, f"the body is not the JSON object that is expected: {reason[:300]}") from error
    return fields


def _refuse_odd_numbers(found: Any) -> None:
    """No server of this kind answers an integer beyond 64 bits with anything but 500."""
    rest = [found]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            rest.extend(one.values())
        elif isinstance(one, list):
            rest.extend(one)
        elif isinstance(one, int) and not -_INT64 <= one < _INT64:
            raise _bad(None, "found an integer beyond 64 bits")


def _known(fields: Mapping[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(fields[name])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad(name, f"{name}: {str(error)[:300]}") from error


def _refuse_side_doors(fields: Mapping[str, msgspec.Raw], known: Mapping[str, Any], allows_params: bool) -> None:
    for name in known.get("vllm_xargs") or ():
        if name in ("kv_transfer_params", "ec_transfer_params"):
            raise _bad("vllm_xargs", f"vllm_xargs has {name!r}, which is a router's to say", RouterFailure.PARAMETERS)
    if not allows_params and bytes(fields.get("ec_transfer_params", msgspec.Raw(b"null"))) != b"null":
        raise _bad("ec_transfer_params", "ec_transfer_params are a router's to say", RouterFailure.PARAMETERS)


def _own_params(
    fields: Mapping[str, msgspec.Raw], allows_params: bool
) -> tuple[KvTransferParams | None, msgspec.Raw | None]:
    raw = fields.get("kv_transfer_params")
    if raw is None or bytes(raw) == b"null":
        return None, None
    try:
        params = parse(raw)
        if params.do_remote_prefill:
            params.require_coordinates()
    except Malformed as error:
        raise _bad("kv_transfer_params", f"kv_transfer_params: {error}", RouterFailure.PARAMETERS) from error
    if params.is_hint:
        return params, raw
    if not allows_params:
        raise _bad(
            "kv_transfer_params",
            "kv_transfer_params of a client are not taken: which server a request is handed over from is the router's "
            "to say. Leave them out (prefix_prompt_ids alone may be there)",
            RouterFailure.PARAMETERS,
        )
    if not (params.do_remote_prefill or params.do_remote_decode):
        raise _bad(
            "kv_transfer_params",
            "kv_transfer_params name no role: expected do_remote_prefill or do_remote_decode to be true",
            RouterFailure.PARAMETERS,
        )
    return params, raw


def _alone(
    route: Route, fields: Mapping[str, msgspec.Raw], known: Mapping[str, Any], text: bytes
) -> tuple[Alone | None, str, str]:
    """Why nothing is handed over, what the client is told where decode may not do it alone, and of which field."""
    n, several = known.get("n"), ""
    if n is not None and n < 1:
        raise _bad("n", f"n: found {n}, expected at least 1")
    if n is not None and n > 1:
        several, name = f"n: found {n}", "n"
    elif known.get("use_beam_search"):
        several, name = "use_beam_search: found true", "use_beam_search"
    elif route is Route.COMPLETIONS and (count := _prompts(fields)) > 1:
        several, name = f"prompt: found a list of {count}", "prompt"
    if several:
        reason = f"{several}; expected one sequence. Each is a hand-over of its own: send them one by one"
        return Alone.SEVERAL, reason, name
    if known.get("prompt_logprobs") is not None or (
        route is Route.COMPLETIONS and known.get("echo") and known.get("logprobs") is not None
    ):
        return Alone.LOGPROBS, "", ""
    if any((limit := known.get(name)) is not None and limit < 1 for name in ("max_tokens", "max_completion_tokens")):
        return Alone.NOTHING_TO_DECODE, "", ""
    truncated = known.get("truncate_prompt_tokens")
    if truncated is not None and truncated < 0:
        reason = (
            f"truncate_prompt_tokens: found {truncated}; expected a number of tokens. What is left of the prompt would "
            "follow from max_tokens, which is another one for prefill"
        )
        return Alone.TRUNCATION, reason, "truncate_prompt_tokens"
    return None, "", ""


def _prompts(fields: Mapping[str, msgspec.Raw]) -> int:
    """How many prompts a completion has, as text, as ids and as embeddings."""
    return sum(_length(bytes(fields[name])) for name in ("prompt", "prompt_embeds") if name in fields)


def _length(value: bytes) -> int:
    if value == b"null":
        return 0
    # Anything else is one, a list of ids as well; what is no prompt at all is for a server to say.
    is_list = value.startswith(b"[") and value[1:64].lstrip()[:1] in (b'"', b"[")
    return len(_raw_list.decode(value)) if is_list else 1


def _about_tokens(text: bytes) -> int:
    # Lists of ids have a comma each.
    return text.count(b",") if text.startswith(b"[") and text[1:2].isdigit() else len(text) // BYTES_PER_TOKEN


def _bad(param: str | None, message: str, cause: RouterFailure = RouterFailure.BODY) -> Refusal:
    return Refusal(400, cause, f"{message}.", param=param)
