# SPDX-License-Identifier: Apache-2.0
"""proxy/request_body.py, body_fields.py, leg_body.py: which fields are taken out of a body, and what stays as it is."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.proxy.api import ApiRoute
from kvcached_nixl.proxy.asked import Alone, Asked
from kvcached_nixl.proxy.failure import Refusal
from kvcached_nixl.proxy.leg_body import decode_body, one_token_body
from kvcached_nixl.proxy.request_body import read
from kvcached_nixl.wire.params import KvTransferParams, RemotePrefill


def asked(route: ApiRoute = ApiRoute.COMPLETIONS, *, allows_params: bool = False, **fields: Any) -> Asked:
    prompt: dict[str, Any] = {"prompt": "x"} if route is ApiRoute.COMPLETIONS else {"messages": []}
    return read(route, json.dumps({**prompt, **fields}).encode(), allows_params=allows_params)


def prefill_body(found: Asked, transfer_id: str | None, leg_id: str) -> bytes:
    return one_token_body(found, KvTransferParams.for_prefill(transfer_id), leg_id)


def refused(**fields: Any) -> Refusal:
    with pytest.raises(Refusal) as found:
        asked(**fields)
    assert found.value.status == 400
    return found.value


ODD = b'{"prompt" : [1, 2 ,3], "x": 1.50, "y": "\\u00e9\\n", "z": {"a":[1e5, -0.0]}, "\xc3\xa9": null}'


def test_what_is_not_known_stays_the_bytes_that_it_was() -> None:
    """Numbers keep their form, text its escapes, keys their letters."""
    found = read(ApiRoute.COMPLETIONS, ODD, allows_params=False)
    values = {key: bytes(value) for key, value in found.fields.items()}
    assert values == {
        "prompt": b"[1, 2 ,3]",
        "x": b"1.50",
        "y": b'"\\u00e9\\n"',
        "z": b'{"a":[1e5, -0.0]}',
        "é": b"null",
    }
    for body in (prefill_body(found, None, "leg"), decode_body(found, None, "leg")):
        assert all(value in body for value in values.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text("abcxyz_é", min_size=1).map("u_{}".format), JSON), st.booleans())
def test_decode_s_body_is_the_client_s(fields: dict[str, Any], has_params: bool) -> None:
    """But for the parameters."""
    params = KvTransferParams.for_decode(RemotePrefill("e", "h", 1), "t") if has_params else None
    body = json.loads(decode_body(asked(**fields), params, "leg"))
    assert body.pop("kv_transfer_params", None) == (msgspec.to_builtins(params) if has_params else None)
    assert body == {"prompt": "x", **fields}


def test_of_a_key_that_is_there_twice_the_last_counts_for_everybody() -> None:
    """One is left, so router and server cannot disagree."""
    found = read(ApiRoute.COMPLETIONS, b'{"prompt": "a", "n": 2, "prompt": "b", "n": 1}', allows_params=False)
    assert found.alone is None
    assert decode_body(found, None, "leg") == b'{"prompt":"b","n":1}'


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"prompt_embeds": ["AA==", "AB=="]}, "prompt", "one by one"),
        ({"use_beam_search": True}, "use_beam_search", "one by one"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", "max_tokens"),
    ],
    ids=str,
)
def test_more_than_one_hand_over_needs_leave(fields: dict[str, Any], param: str, word: str) -> None:
    found = asked(**fields)
    assert found.needs_leave and found.param == param and param in found.reason and word in found.reason


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({"n": 2}, 2),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2], [3]], "n": 4}, 12),
        ({"prompt": ['"', '\\"', "\\\\"], "n": 2}, 6),
        ({"prompt": ["["]}, 1),
    ],
    ids=str,
)
def test_each_sequence_is_a_hand_over(fields: dict[str, Any], sequences: int) -> None:
    found = asked(**fields)
    assert found.sequences == sequences and found.alone is None and not found.needs_leave


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        *(({"n": 2, "temperature": value}, 1) for value in (0, 0.0, -0.0, 9e-6, "0", " 0.0 ", False, -1)),
        *(({"n": 2, "temperature": value}, 2) for value in (1, 0.1, 1e-5, "1", True, None, "odd", [0], {"a": 0})),
        ({"n": 2, "prompt": ["a", "b"], "temperature": 0}, 1),
        ({"n": 1, "prompt": ["a", "b"], "temperature": 0}, 2),
        ({"n": 4, "use_beam_search": True}, 1),
        ({"n": 4, "prompt_logprobs": 1}, 1),
    ],
    ids=str,
)
def test_what_one_server_computes_or_refuses_goes_to_it_as_it_is(fields: dict[str, Any], sequences: int) -> None:
    found = asked(**fields)
    assert found.sequences == sequences and (found.alone is None) == (sequences == 2)
    assert found.needs_leave == ("use_beam_search" in fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 129},
        {"prompt": ["a"] * 129},
        {"prompt": [[1]] * 129},
        {"prompt": ["a"] * 65, "n": 2},
        {"prompt": [""] * 9999},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_too_many_sequences_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="at most 128"):
        asked(**fields)


@pytest.mark.parametrize(
    "prompt", ["x", "", [1, 2], ["x"], [[1, 2]], [], None, {"odd": 1}, ["a", [1]], [[1], "a"], ["a", None]], ids=str
)
def test_one_prompt_or_what_is_none_is_left_to_the_servers(prompt: Any) -> None:
    found = asked(prompt=prompt)
    assert not found.needs_leave and found.sequences == 1


@pytest.mark.parametrize(
    ("route", "fields", "reason"),
    [
        (ApiRoute.COMPLETIONS, {"prompt_logprobs": 0}, Alone.LOGPROBS),
        (ApiRoute.COMPLETIONS, {"echo": True, "logprobs": 0}, Alone.LOGPROBS),
        (ApiRoute.COMPLETIONS, {"echo": True}, None),
        (ApiRoute.COMPLETIONS, {"logprobs": 5}, None),
        (ApiRoute.CHAT, {"echo": True, "logprobs": True}, None),
        (ApiRoute.CHAT, {"max_completion_tokens": 0}, Alone.NOTHING_TO_DECODE),
        (ApiRoute.CHAT, {"max_tokens": None, "n": None, "stream": None}, None),
    ],
    ids=str,
)
def test_what_decode_computes_itself(route: ApiRoute, fields: dict[str, Any], reason: Alone | None) -> None:
    found = asked(route, **fields)
    assert found.alone is reason and not found.needs_leave


@pytest.mark.parametrize("route", [ApiRoute.RESPONSES, ApiRoute.MESSAGES])
def test_an_answer_that_has_no_choices_is_one_sequence(route: ApiRoute) -> None:
    """Its servers ignore the field, and several such answers cannot be merged."""
    found = asked(route, n=3, input="x")
    assert found.sequences == found.choices == 1 and found.alone is None


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"n": 3}, 1),
        ({"n": 3, "temperature": 0}, 3),
        ({"n": 3, "prompt_logprobs": 1}, 3),
        ({"n": 2, "prompt": ["a", "b"], "echo": True, "logprobs": 1}, 4),
        ({"prompt": [1, 2], "prompt_logprobs": 1}, 1),
        ({"n": 4, "use_beam_search": True}, 1),
    ],
    ids=str,
)
def test_how_many_choices_one_server_has_to_end(fields: dict[str, Any], choices: int) -> None:
    assert asked(**fields).choices == choices


@pytest.mark.parametrize("seed", ["7", 7.5, True, {}, [1]], ids=str)
def test_the_seed_of_several_sequences_is_a_number(seed: Any) -> None:
    """Each gets one of its own. A single one has it computed by the servers, whatever it is."""
    assert refused(n=2, seed=seed).param == "seed"
    assert asked(seed=seed).sequences == asked(n=2, seed=None).n - 1 == 1


@pytest.mark.parametrize("field", ["n", "stream", "max_tokens", "echo", "prompt_logprobs", "cache_salt", "model"])
@pytest.mark.parametrize("value", [[], {}, "x", 1.5])
def test_a_wrong_type_is_named(field: str, value: Any) -> None:
    if field in ("cache_salt", "model") and value == "x":
        return
    refusal = refused(**{field: value})
    assert refusal.param == field and field in refusal.message


def test_a_client_s_parameters_are_refused_but_for_a_hint() -> None:
    for params in ({"do_remote_prefill": True}, {"transfer_id": "t"}, {"remote_host": "h"}, {"kvcached_nixl": {}}):
        assert refused(kv_transfer_params=params).param == "kv_transfer_params"
    for params in (None, {}, {"prefix_prompt_ids": [1]}, {"of": "nobody"}):
        found = asked(kv_transfer_params=params)
        assert found.params is None and "kv_transfer_params" not in found.fields


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"do_remote_prefill": True, "do_remote_decode": True}, "at most one"),
        ({"do_remote_prefill": True}, "remote_engine_id"),
        ({"do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "h", "remote_port": 0}, "remote_port"),
        ({"do_remote_decode": "yes"}, "do_remote_decode"),
        ({"do_remote_decode": True, "transfer_mode": "staged"}, "transfer_mode"),
        ({"transfer_id": "t"}, "no role"),
    ],
    ids=str,
)
def test_allowed_parameters_are_checked_all_the_same(params: dict[str, Any], word: str) -> None:
    assert word in refused(allows_params=True, kv_transfer_params=params).message


def test_parameters_by_another_door_are_refused() -> None:
    """vLLM puts both into one dictionary."""
    assert refused(vllm_xargs={"kv_transfer_params": "x"}).param == "vllm_xargs"
    assert refused(ec_transfer_params={"a": 1}).param == "ec_transfer_params"
    assert asked(vllm_xargs={"mine": 1}, ec_transfer_params=None).alone is None


def test_prefix_ids_are_the_prefix_and_go_no_further() -> None:
    found = asked(prefix_prompt_ids=[1, 2, 2**31 - 1])
    assert found.prefix == array("i", [1, 2, 2**31 - 1]).tobytes()
    assert b"prefix_prompt_ids" not in prefill_body(found, None, "x") + decode_body(found, None, "x")
    assert asked(kv_transfer_params={"prefix_prompt_ids": [1]}).prefix == array("i", [1]).tobytes()
    both = {"prefix_prompt_ids": [1], "kv_transfer_params": {"prefix_prompt_ids": [2]}}
    assert refused(**both).param == "prefix_prompt_ids"
    for wrong in ([-1], [2**31], ["1"], "1", {}):
        assert refused(prefix_prompt_ids=wrong).param == "prefix_prompt_ids"


def test_namespaces_keep_apart_what_shares_no_blocks() -> None:
    one = asked(cache_salt="a").namespace
    assert one != asked(cache_salt="b").namespace != asked(model="m", cache_salt="b").namespace


def test_prefill_gets_an_id_of_the_router_s_where_the_client_has_one() -> None:
    assert json.loads(prefill_body(asked(request_id="mine"), "t", "leg"))["request_id"] == "leg"
    assert "request_id" not in json.loads(prefill_body(asked(), "t", "leg"))


@pytest.mark.parametrize("number", ["9223372036854775808", "-9223372036854775809", "1" + "0" * 400])
def test_integers_beyond_64_bits_are_refused_wherever_they_are(number: str) -> None:
    with pytest.raises(Refusal, match="64 bits"):
        read(ApiRoute.COMPLETIONS, b'{"prompt": "x", "a": [{"b": %s}]}' % number.encode(), allows_params=False)
    digits = f'{{"prompt": "{number}", "seed": 9223372036854775807}}'.encode()
    assert read(ApiRoute.COMPLETIONS, digits, allows_params=False).alone is None


def test_ten_thousand_mutated_bodies_are_read_or_refused() -> None:
    """Whatever comes: a request that can be sent on, or a 400."""
    draw = random.Random(3)
    whole = json.dumps(
        {"model": "m", "prompt": "hello", "n": 1, "stream": True, "max_tokens": 3, "kv_transfer_params": {"a": 1}}
    ).encode()
    refusals = 0
    for _ in range(10_000):
        body = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(body))
            body[place : place + draw.randrange(0, 3)] = draw.choice(
                [
                    b"",
                    b'"',
                    b"{",
                    b"}",
                    b"[",
                    b"\\",
                    b"\xff",
                    b"\x00",
                    b"1e9999",
                    b"NaN",
                    b"null",
                    b",",
                    b"9" * 40,
                    b":",
                ]
            )
        try:
            found = read(ApiRoute.COMPLETIONS, bytes(body), allows_params=False)
        except Refusal as refusal:
            assert refusal.status == 400 and len(refusal.message) < 1000
            refusals += 1
        else:
            json.loads(decode_body(found, None, "x"))
            json.loads(prefill_body(found, None, "x"))
    assert 3_000 < refusals < 10_000


def test_prefill_s_parameters_are_put_in_byte_for_byte() -> None:
    raw = b'{ "a" :1.50, "b": "\\u00e9", "kvcached_nixl":{"x" : 18446744073709551615}}'
    body = decode_body(asked(), msgspec.Raw(raw), "leg")
    assert body == b'{"prompt":"x","kv_transfer_params":' + raw + b"}"


@pytest.mark.parametrize("door", ["vllm_xargs", "extra_args"])
@pytest.mark.parametrize("hides", ["neither", "above", "below"])
def test_no_level_of_a_body_hides_a_side_door_on_the_other(door: str, hides: str) -> None:
    """On the generate endpoint both levels have fields of these names; either would choose decode's server."""
    bad: dict[str, Any] = {door: {"kv_transfer_params": {"remote_host": "evil"}}}
    above: dict[str, Any] = {door: {}} if hides == "above" else bad if hides == "below" else {}
    below: dict[str, Any] = {door: {}} if hides == "below" else bad
    body = json.dumps({"token_ids": [1], **above, "sampling_params": {"max_tokens": 2, **below}}).encode()
    with pytest.raises(Refusal, match="only the router may set"):
        read(ApiRoute.GENERATE, body, allows_params=False)
