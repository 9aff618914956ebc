# SPDX-License-Identifier: Apache-2.0
"""Parses a body at its top level only, in bounded time and memory, whatever a client sends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.wire.params import TokenId

__all__ = ["bad_body", "fields_of", "known_of", "nested", "prefix_ids_of", "require_number", "top_level"]

_INT64 = 2**63
top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_integer = msgspec.json.Decoder(int | None)
_token_ids = msgspec.json.Decoder(list[TokenId] | None)
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


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Returns the body's top level, its values unparsed.

    Raises:
        Refusal: 400; it is no JSON object in UTF-8, or one with odd numbers or too many or too large fields.
    """
    try:
        if not body.isascii():
            body.decode()
        if len(body) > LARGE_BYTES:
            _refuse_many_names(body)
        fields = top_level.decode(body)
        _refuse_odd_fields(fields)
    except UnicodeDecodeError as error:
        raise bad_body(None, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise bad_body(None, "the body is nested too deeply") from error
    except msgspec.MsgspecError as error:
        # msgspec reports half of a surrogate pair with the same message.
        reason = str(error).replace("Input data was truncated", "it is truncated, or has half of a surrogate pair")
        raise bad_body(None, f"the body is not the expected JSON object: {reason[:300]}") from error
    return fields


def known_of(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Returns the values of the fields that the router reads. Raises `Refusal` for one of another type."""
    return {name: _decoded(fields, name, decoder) for name, decoder in _KNOWN if name in fields}


def require_number(fields: Mapping[str, msgspec.Raw], name: str) -> None:
    """Raises `Refusal` if the field is there and no integer."""
    if name in fields:
        _decoded(fields, name, _integer)


def prefix_ids_of(fields: Mapping[str, msgspec.Raw]) -> list[int] | None:
    """Returns the beginning of ``prefix_prompt_ids``, as long as it is compared; `Refusal` if these are no ids."""
    raw = bytes(fields.get("prefix_prompt_ids", msgspec.Raw(b"null")))
    if len(raw) > MOST_CHECKED_BYTES:
        raw = raw[: raw.rfind(b",", 0, MOST_CHECKED_BYTES)] + b"]"
    return cast("list[int] | None", _decoded({"prefix_prompt_ids": msgspec.Raw(raw)}, "prefix_prompt_ids", _token_ids))


def nested(fields: Mapping[str, msgspec.Raw], name: str) -> dict[str, msgspec.Raw]:
    """Returns the fields of the JSON object under this name, {} without it. Raises `Refusal` for any other value."""
    found = _decoded(fields, name, top_level) if name in fields else {}
    return cast("dict[str, msgspec.Raw]", found)


def _decoded(fields: Mapping[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(fields[name])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_body(name, f"{name}: {str(error)[:300]}") from error


def _refuse_many_names(body: bytes) -> None:
    """Refuse a large body with many names outside of the fields that may be long: each would become an object."""
    found = _long.decode(body)
    names = body.count(b":") - sum(bytes(getattr(found, name)).count(b":") for name in _LONG)
    if names > MOST_NAMES:
        raise bad_body(None, f"found about {names} names of fields, expected at most {MOST_NAMES}")


def _refuse_odd_fields(fields: Mapping[str, msgspec.Raw]) -> None:
    left_bytes = MOST_CHECKED_BYTES
    for name, value in fields.items():
        if name in _LONG:
            continue
        short = bytes(value)
        if len(short) > MOST_SHORT_BYTES:
            raise bad_body(name[:100], f"{name[:100]}: found {len(short)} bytes, expected at most 1 MiB")
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
            raise bad_body(None, "found an integer beyond 64 bits; expected at most 64 bits")


def bad_body(param: str | None, message: str, cause: RouterFailure = RouterFailure.BODY) -> Refusal:
    """Returns the refusal of a body because of one field, or because of the whole if ``param`` is None."""
    return Refusal(400, cause, f"{message}.", param=param)
