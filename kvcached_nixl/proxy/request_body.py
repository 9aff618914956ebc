# SPDX-License-Identifier: Apache-2.0
"""Reads a client's body. Once per request; without side effects.

The body is parsed once, at its top level only. Values that the router does not need stay the client's bytes, and both
servers get them unchanged. Only fields are read that decide whether and how the prompt's KV can be handed over.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import msgspec

from kvcached_nixl.proxy.affinity import PIECE_BYTES, PREFIX_BYTES
from kvcached_nixl.proxy.api import Api, ApiRoute, api_of
from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.wire.params import KvTransferParams, Malformed, TokenId, parse

__all__ = ["Alone", "Asked", "nested", "read", "top_level"]

DEFAULT_MAX_TOKENS = 256
"""Assumed for a request without a limit, when servers' outstanding tokens are compared."""
BYTES_PER_TOKEN = 4
_INT64 = 2**63


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


top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_token_ids = msgspec.json.Decoder(list[TokenId] | None)
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
# A tuple of pairs, not a dict, so that it is immutable.
_KNOWN = tuple(
    (name, msgspec.json.Decoder(kind))
    for name, kind in (
        ("model", str | None),
        ("stream", bool | None),
        ("n", int | None),
        ("max_tokens", int | None),
        ("max_completion_tokens", int | None),
        ("max_output_tokens", int | None),
        ("prompt_logprobs", int | None),
        ("logprobs", int | bool | None),
        ("echo", bool | None),
        ("use_beam_search", bool | None),
        ("truncate_prompt_tokens", int | None),
        ("truncation", str | None),
        ("cache_salt", str | None),
        ("vllm_xargs", dict[str, msgspec.Raw] | None),
        ("extra_args", dict[str, msgspec.Raw] | None),
    )
)
_NAMESPACE = ("model", "cache_salt", "tools", "chat_template", "system", "instructions")
"""Fields before a prompt's text, or which decide how it becomes tokens."""
_ODD_NUMBER = re.compile(rb"[0-9]{19}|[eE]\+?[0-9]{3}")
# Fields that may be long. Whatever else a body has is short, so that parsing it takes bounded time and memory.
_LONG = (
    *("prompt", "messages", "input", "system", "instructions", "tools", "token_ids", "prompt_embeds", "documents"),
    *("response_format", "structured_outputs", "features", "multi_modal_data", "prefix_prompt_ids", "text", "suffix"),
)
_Long = msgspec.defstruct("_Long", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in _LONG])
_long = msgspec.json.Decoder(_Long)
LARGE_BYTES = 256 << 10
MOST_NAMES = 10_000
MOST_SHORT_BYTES = 1 << 20
MOST_CHECKED_BYTES = 64 << 10
MOST_SEQUENCES = 128
GREEDY_TEMPERATURE = 1e-5
"""vLLM computes greedily below it (``_SAMPLING_EPS``, vllm/sampling_params.py)."""


def read(route: ApiRoute, body: bytes, *, allows_params: bool) -> Asked:
    """Parse a client's body.

    Args:
        allows_params: whether a client may send ``kv_transfer_params`` that name a role or a server.

    Raises:
        Refusal: 400, with what was found and expected, and the name of the field.
    """
    fields, api = _top_level(body), api_of(route)
    known = _known_of(fields)
    _refuse_state(fields, api)
    _refuse_side_doors(fields, known, allows_params)
    if api.sampling:
        sampling = _known_of(nested(fields, api.sampling))
        # By itself: of two fields of one name, on both levels, neither may hide the other.
        _refuse_side_doors(fields, sampling, allows_params)
        known |= sampling
    params, raw_params = _own_params(fields, allows_params)
    ids = _prefix_ids(fields)
    fields.pop("kv_transfer_params", None)
    fields.pop("prefix_prompt_ids", None)
    if params is not None and params.prefix_prompt_ids is not None:
        if ids is not None and ids != params.prefix_prompt_ids[: len(ids)]:
            raise _bad(
                "prefix_prompt_ids",
                "prefix_prompt_ids: found two that differ, in the body and in kv_transfer_params; expected one of them",
            )
        ids = params.prefix_prompt_ids
    text = bytes(fields.get(api.prompt, msgspec.Raw(b"")))
    prompts = _prompts(fields) if api.prompt == "prompt" else ()
    alone, reason, param = _alone(api, fields, known, len(prompts))
    if params is None or params.is_hint:
        params = raw_params = None
    else:
        alone, reason = Alone.CLIENT, ""
    limit = next((found for name in reversed(api.limits) if (found := known.get(name))), None)
    return Asked(
        route=route,
        fields=fields,
        params=params,
        raw_params=raw_params,
        prompts=prompts if alone is None else (),
        n=known.get("n") or 1 if alone is None else 1,
        alone=alone,
        needs_leave=bool(reason),
        reason=reason,
        param=param,
        namespace=b"\0".join(bytes(fields[name]) for name in _NAMESPACE if name in fields),
        prefix=text[:PREFIX_BYTES] if ids is None else array("i", ids[: PREFIX_BYTES // 4]).tobytes(),
        prompt_tokens=1 + sum(_about_tokens(one) for one in (text, *_beside(fields))),
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else min(limit, 1 << 20),
        piece_tokens=PIECE_BYTES // 4 if ids is not None else PIECE_BYTES * _about_tokens(text) // max(1, len(text)),
    )


def _top_level(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        if not body.isascii():
            body.decode()
        if len(body) > LARGE_BYTES:
            _refuse_many_names(body)
        fields = top_level.decode(body)
        _refuse_odd_fields(fields)
    except UnicodeDecodeError as error:
        raise _bad(None, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise _bad(None, "the body is nested too deeply") from error
    except msgspec.MsgspecError as error:
        # msgspec reports half of a surrogate pair with the same message.
        reason = str(error).replace("Input data was truncated", "it is truncated, or has half of a surrogate pair")
        raise _bad(None, f"the body is not the expected JSON object: {reason[:300]}") from error
    return fields


def _refuse_many_names(body: bytes) -> None:
    """Refuse a large body with many names outside of the fields that may be long: each would become an object."""
    found = _long.decode(body)
    names = body.count(b":") - sum(bytes(getattr(found, name)).count(b":") for name in _LONG)
    if names > MOST_NAMES:
        raise _bad(None, f"found about {names} names of fields, expected at most {MOST_NAMES}")


def _refuse_odd_fields(fields: Mapping[str, msgspec.Raw]) -> None:
    left_bytes = MOST_CHECKED_BYTES
    for name, value in fields.items():
        if name in _LONG:
            continue
        short = bytes(value)
        if len(short) > MOST_SHORT_BYTES:
            raise _bad(name[:100], f"{name[:100]}: found {len(short)} bytes, expected at most 1 MiB")
        if len(short) <= left_bytes and _ODD_NUMBER.search(short):
            left_bytes -= len(short)
            _refuse_odd_numbers(msgspec.json.decode(short))


def _refuse_odd_numbers(found: Any) -> None:
    """Refuse integers beyond 64 bits: vLLM would answer them with status 500."""
    rest = [found]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            rest.extend(one.values())
        elif isinstance(one, list):
            rest.extend(one)
        elif isinstance(one, int) and not -_INT64 <= one < _INT64:
            raise _bad(None, "found an integer beyond 64 bits; expected at most 64 bits")


def _known(fields: Mapping[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(fields[name])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad(name, f"{name}: {str(error)[:300]}") from error


def _known_of(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    return {name: _known(fields, name, decoder) for name, decoder in _KNOWN if name in fields}


def _prefix_ids(fields: Mapping[str, msgspec.Raw]) -> list[int] | None:
    """Returns the beginning of ``prefix_prompt_ids``, as long as it is compared."""
    raw = bytes(fields.get("prefix_prompt_ids", msgspec.Raw(b"null")))
    if len(raw) > MOST_CHECKED_BYTES:
        raw = raw[: raw.rfind(b",", 0, MOST_CHECKED_BYTES)] + b"]"
    return cast("list[int] | None", _known({"prefix_prompt_ids": msgspec.Raw(raw)}, "prefix_prompt_ids", _token_ids))


def nested(fields: Mapping[str, msgspec.Raw], name: str) -> dict[str, msgspec.Raw]:
    """Returns the fields of the JSON object under this name, {} without it. Raises `Refusal` for any other value."""
    found = _known(fields, name, top_level) if name in fields else {}
    return cast("dict[str, msgspec.Raw]", found)


def _refuse_state(fields: Mapping[str, msgspec.Raw], api: Api) -> None:
    for name in api.state:
        if bytes(fields.get(name, msgspec.Raw(b"null"))) not in (b"null", b"false"):
            raise _bad(name, f"{name}: one server would have to keep the response, and the router knows of none")


def _refuse_side_doors(fields: Mapping[str, msgspec.Raw], known: Mapping[str, Any], allows_params: bool) -> None:
    for door in ("vllm_xargs", "extra_args"):
        for name in known.get(door) or ():
            if name in ("kv_transfer_params", "ec_transfer_params"):
                raise _bad(door, f"{door} has {name!r}, which only the router may set", RouterFailure.PARAMETERS)
    if not allows_params and bytes(fields.get("ec_transfer_params", msgspec.Raw(b"null"))) != b"null":
        raise _bad("ec_transfer_params", "ec_transfer_params may be set by the router only", RouterFailure.PARAMETERS)


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
            "kv_transfer_params of a client are not accepted: only the router chooses the server that a request is "
            "handed over from. Leave them out (prefix_prompt_ids alone is allowed)",
            RouterFailure.PARAMETERS,
        )
    if not (params.do_remote_prefill or params.do_remote_decode):
        raise _bad(
            "kv_transfer_params",
            "kv_transfer_params name no role: expected do_remote_prefill or do_remote_decode to be true",
            RouterFailure.PARAMETERS,
        )
    return params, raw


def _not_one_by_one(api: Api, fields: Mapping[str, msgspec.Raw], n: int | None, prompts: int) -> tuple[str, str]:
    """Returns what asks for several sequences that cannot be handed over one by one, and its field; else ""."""
    if n is not None and n < 1:
        raise _bad("n", f"n: found {n}, expected at least 1")
    if (n or 1) * max(1, prompts) > MOST_SEQUENCES:
        raise _bad("n", f"found {(n or 1) * max(1, prompts)} sequences, expected at most {MOST_SEQUENCES} in all")
    embeds = _length(bytes(fields.get("prompt_embeds", msgspec.Raw(b"null"))))
    has_prompt = bytes(fields.get("prompt", msgspec.Raw(b"null"))) != b"null"
    if embeds + has_prompt > 1:
        return f"prompt_embeds: found {embeds}, and {'a' if has_prompt else 'no'} prompt", "prompt"
    if api.sampling and (n or 1) > 1:
        return f"n: found {n}", "n"
    return "", ""


def _alone(
    api: Api, fields: Mapping[str, msgspec.Raw], known: Mapping[str, Any], prompts: int
) -> tuple[Alone | None, str, str]:
    """Returns why there is no hand-over, the error text without ``--decode-alone``, and the field it is about."""
    several, name = _not_one_by_one(api, fields, known.get("n"), prompts)
    if known.get("use_beam_search"):
        several, name = "use_beam_search: found true", "use_beam_search"
    if several:
        reason = f"{several}; expected one sequence, because each needs its own hand-over. Send them one by one"
        return Alone.SEVERAL, reason, name
    if (known.get("n") or 1) > 1 and _is_greedy(fields):
        return Alone.SEVERAL, "", ""
    if known.get("prompt_logprobs") is not None or (
        api.prompt == "prompt" and known.get("echo") and known.get("logprobs") is not None
    ):
        return Alone.LOGPROBS, "", ""
    if any((limit := known.get(name)) is not None and limit < 1 for name in api.limits):
        return Alone.NOTHING_TO_DECODE, "", ""
    truncated = -1 if known.get("truncation") == "auto" else known.get("truncate_prompt_tokens")
    if truncated is not None and truncated < 0:
        reason = (
            f"truncate_prompt_tokens: found {truncated}; expected a number of tokens. A negative value makes the "
            "truncation depend on max_tokens, which differs between prefill and decode"
        )
        return Alone.TRUNCATION, reason, "truncate_prompt_tokens"
    return None, "", ""


def _is_greedy(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether it asks for temperature 0 in any form that vLLM accepts; what is no number is left to the server."""
    try:
        said = float(msgspec.json.decode(fields.get("temperature", b"1"), type=float | str | bool, strict=True))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False
    return said < GREEDY_TEMPERATURE


def _prompts(fields: Mapping[str, msgspec.Raw]) -> tuple[msgspec.Raw, ...]:
    """Returns the prompts of a list of several; empty if there is one."""
    value = bytes(fields.get("prompt", msgspec.Raw(b"null")))
    count = _length(value)
    if count > MOST_SEQUENCES:
        raise _bad("prompt", f"prompt: found a list of more, expected at most {MOST_SEQUENCES}")
    prompts = tuple(_raw_list.decode(value)) if count > 1 else ()
    # One by one, texts among lists of token ids would be answered; vLLM refuses them together.
    return prompts if len({bytes(one)[:1] == b'"' for one in prompts}) == 1 else ()


def _length(value: bytes) -> int:
    """Returns the number of prompts in a value; of very many, that there are more than `MOST_SEQUENCES`."""
    if value == b"null":
        return 0
    first = value[1:64].lstrip()[:1]
    # Anything else counts as one prompt, a list of token ids too. The server reports an invalid prompt.
    if not value.startswith(b"[") or first not in (b'"', b"["):
        return 1
    # Between the number of prompts and twice that number, whatever the strings contain.
    about = value.count(b"[") - 1 if first == b"[" else value.count(b'"') - value.count(b'\\"')
    return MOST_SEQUENCES + 1 if about > 2 * MOST_SEQUENCES else len(_raw_list.decode(value))


def _beside(fields: Mapping[str, msgspec.Raw]) -> list[bytes]:
    """Returns what else becomes tokens of the prompt."""
    return [bytes(fields[name]) for name in ("tools", "system", "instructions") if name in fields]


def _about_tokens(text: bytes) -> int:
    # A list of token ids has a comma between every two.
    return text.count(b",") if text.startswith(b"[") and text[1:2].isdigit() else len(text) // BYTES_PER_TOKEN


def _bad(param: str | None, message: str, cause: RouterFailure = RouterFailure.BODY) -> Refusal:
    return Refusal(400, cause, f"{message}.", param=param)
