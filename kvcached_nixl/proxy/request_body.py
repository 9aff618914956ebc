# SPDX-License-Identifier: Apache-2.0
"""Reads a client's body. Once per request; without side effects.

The body is parsed once (`body_fields`). Values that the router does not need stay the client's bytes, and both
servers get them unchanged. Only fields are read that decide whether and how the prompt's KV can be handed over.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from kvcached_nixl.proxy.affinity import PIECE_BYTES, PREFIX_BYTES
from kvcached_nixl.proxy.api import Api, ApiRoute, api_of
from kvcached_nixl.proxy.asked import Alone, Asked
from kvcached_nixl.proxy.body_fields import bad_body, fields_of, known_of, nested, prefix_ids_of, require_number
from kvcached_nixl.proxy.failure import RouterFailure
from kvcached_nixl.wire.params import KvTransferParams, Malformed, parse

__all__ = ["read"]

DEFAULT_MAX_TOKENS = 256
"""Assumed for a request without a limit, when servers' outstanding tokens are compared."""
BYTES_PER_TOKEN = 4
MEDIA_TOKENS = 1024
"""Assumed for an image, a sound, ... that a body has in base64, whatever its size."""
_MEDIA = (re.compile(rb';base64,[^"]{1024,}'), re.compile(rb'"data":\s*"[^"]{1024,}'))
"""OpenAI's and Anthropic's. Inside a text, quotes are escaped."""
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
_NAMESPACE = ("model", "cache_salt", "tools", "chat_template", "system", "instructions")
"""Fields before a prompt's text, or which decide how it becomes tokens."""
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
    fields, api = fields_of(body), api_of(route)
    known = known_of(fields)
    _refuse_state(fields, api)
    _refuse_side_doors(fields, known, allows_params)
    if api.sampling:
        sampling = known_of(nested(fields, api.sampling))
        # By itself: of two fields of one name, on both levels, neither may hide the other.
        _refuse_side_doors(fields, sampling, allows_params)
        known |= sampling
    if api.reasons_in != "choices":
        # Such an answer has one choice, and the servers ignore this field.
        known.pop("n", None)
    params, raw_params = _own_params(fields, allows_params)
    ids = prefix_ids_of(fields)
    fields.pop("kv_transfer_params", None)
    fields.pop("prefix_prompt_ids", None)
    if params is not None and params.prefix_prompt_ids is not None:
        if ids is not None and ids != params.prefix_prompt_ids[: len(ids)]:
            raise bad_body(
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
    n = known.get("n") or 1
    if alone is None and n > 1:
        require_number(fields, "seed")
    limit = next((found for name in reversed(api.limits) if (found := known.get(name))), None)
    return Asked(
        route=route,
        fields=fields,
        params=params,
        raw_params=raw_params,
        prompts=prompts if alone is None else (),
        n=n if alone is None else 1,
        # A beam search is not streamed.
        choices=1 if alone is None or known.get("use_beam_search") else n * max(1, len(prompts)),
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


def _refuse_state(fields: Mapping[str, msgspec.Raw], api: Api) -> None:
    for name in api.state:
        if bytes(fields.get(name, msgspec.Raw(b"null"))) not in (b"null", b"false"):
            raise bad_body(name, f"{name}: one server would have to keep the response, and the router knows of none")


def _refuse_side_doors(fields: Mapping[str, msgspec.Raw], known: Mapping[str, Any], allows_params: bool) -> None:
    for door in ("vllm_xargs", "extra_args"):
        for name in known.get(door) or ():
            if name in ("kv_transfer_params", "ec_transfer_params"):
                raise bad_body(door, f"{door} has {name!r}, which only the router may set", RouterFailure.PARAMETERS)
    if not allows_params and bytes(fields.get("ec_transfer_params", msgspec.Raw(b"null"))) != b"null":
        raise bad_body(
            "ec_transfer_params", "ec_transfer_params may be set by the router only", RouterFailure.PARAMETERS
        )


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
        raise bad_body("kv_transfer_params", f"kv_transfer_params: {error}", RouterFailure.PARAMETERS) from error
    if params.is_hint:
        return params, raw
    if not allows_params:
        raise bad_body(
            "kv_transfer_params",
            "kv_transfer_params of a client are not accepted: only the router chooses the server that a request is "
            "handed over from. Leave them out (prefix_prompt_ids alone is allowed)",
            RouterFailure.PARAMETERS,
        )
    if not (params.do_remote_prefill or params.do_remote_decode):
        raise bad_body(
            "kv_transfer_params",
            "kv_transfer_params name no role: expected do_remote_prefill or do_remote_decode to be true",
            RouterFailure.PARAMETERS,
        )
    return params, raw


def _not_one_by_one(api: Api, fields: Mapping[str, msgspec.Raw], n: int | None, prompts: int) -> tuple[str, str]:
    """Returns what asks for several sequences that cannot be handed over one by one, and its field; else ""."""
    if n is not None and n < 1:
        raise bad_body("n", f"n: found {n}, expected at least 1")
    if (n or 1) * max(1, prompts) > MOST_SEQUENCES:
        raise bad_body("n", f"found {(n or 1) * max(1, prompts)} sequences, expected at most {MOST_SEQUENCES} in all")
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
        raise bad_body("prompt", f"prompt: found a list of more, expected at most {MOST_SEQUENCES}")
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
    if text.startswith(b"[") and text[1:2].isdigit():
        return text.count(b",")
    size_bytes, tokens = len(text), 0
    for media in _MEDIA:
        for found in media.finditer(text):
            size_bytes -= found.end() - found.start()
            tokens += MEDIA_TOKENS
    return tokens + size_bytes // BYTES_PER_TOKEN
