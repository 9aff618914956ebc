# SPDX-License-Identifier: Apache-2.0
"""wire/params.py: parameters of routers and clients are checked once, and both requests of a push get one name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from support.codecs import each, fuzz, plain_id

from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.checked import MAX_TP_SIZE, Malformed
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.params import (
    MANIFEST_KEY,
    MAX_REQUEST_ID,
    FetchParams,
    RemotePrefill,
    name_of,
    params_to_decode,
    params_to_prefill,
    prefill_params,
    read_fetch,
    read_offer,
)

PREFILL = RemotePrefill("e", "127.0.0.1", 5600, 2)
COORDINATES = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 2, "pp_size": 1}
PREFILL_ID = "cmpl-r-0-0123abcd"
MANIFEST = Manifest(
    PROTOCOL,
    "0" * 16,
    PREFILL_ID,
    "0" * 32,
    10,
    (4, 4),
    (1, 1),
    (BlockRange(0, (7, 3, 9)), BlockRange(8, (2,))),
    30.0,
    0,
)
ANSWER = prefill_params(PREFILL, MANIFEST, transfer_id=None, transfer_mode=TransferMode.PULL, cached_tokens=0)
BOTH_AT_ONCE: dict[str, Any] = {"do_remote_prefill": True, **COORDINATES}


def read(params: dict[str, Any], *, may_rendezvous: bool = False, request_id: str = "cmpl-d-0-89ef4567") -> FetchParams:
    return read_fetch(params, request_id, may_rendezvous=may_rendezvous)


# ---------------------------------------------------------------------------------------------------------------- roles


WRONG_ROLES: list[dict[str, Any]] = [
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": 1},
    {"do_remote_prefill": "true"},
    {"do_remote_prefill": True, "do_remote_decode": "false"},
    {"do_remote_prefill": True, "do_remote_decode": 0},
    {"do_remote_prefill": False, "do_remote_decode": False},
    {"do_remote_prefill": []},
    {"do_remote_prefill": "x" * 10_000},
    {},
]


@pytest.mark.parametrize("roles", WRONG_ROLES, ids=lambda roles: str(roles)[:60])
def test_both_roles_or_none_or_no_booleans_are_refused(roles: dict[str, Any]) -> None:
    """B2: vLLM's bidirectional mode sends both."""
    plain = {key: value for key, value in ANSWER.items() if not key.startswith("do_")}
    with pytest.raises(HandOverFailed, match="exactly one of do_remote_prefill and do_remote_decode") as refused:
        read(plain | roles)
    assert refused.value.cause is FailureCause.PARAMETERS
    with pytest.raises(HandOverFailed, match="exactly one"):
        read_offer(roles, "cmpl-x")
    assert len(str(refused.value)) < 500


def test_a_role_that_is_nested_deeper_than_can_be_shown_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for refusing in (lambda: read(ANSWER | {"do_remote_decode": deep}), lambda: read(ANSWER | {MANIFEST_KEY: deep})):
        with pytest.raises(HandOverFailed) as refused:
            refusing()
        assert refused.value.cause is FailureCause.PARAMETERS


def test_a_field_with_an_endless_name_is_not_shown_whole() -> None:
    with pytest.raises(HandOverFailed, match="unknown field") as refused:
        read(ANSWER | {MANIFEST_KEY: msgspec.to_builtins(MANIFEST) | {"x" * 100_000: 1}})
    assert len(str(refused.value)) < 1000


# --------------------------------------------------------------------------------------------------------- coordinates


WRONG_COORDINATES = each(
    remote_port=[None, 0, 65536, 70_000, -1, "5600", 5600.5, float("nan"), float("inf"), True],
    remote_host=[None, "", 7, "x" * 1025, "\ud800"],
    remote_engine_id=[None, "", [], ["e"], "e" * 1025, "\udfff"],
    tp_size=[0, -1, MAX_TP_SIZE + 1, 10**9, "2", True, 2**80],
    pp_size=[0, -1, MAX_TP_SIZE // 2 + 1, 10**9, "1", "2", True],
)
WRONG_NAMES = each(
    transfer_id=["", 7, ["a"], True, "x" * 1025, "\ud800"],
    remote_request_id=["", 7, ["a"], {}, True, "x" * 1025, "\ud800"],
)
WRONG_FIELDS = each(
    transfer_mode=["staged"],
    dcp_size=[-1],
    remote_block_ids=["x", [[-1]], [[1, "2"]]],
    remote_num_tokens=[-1],
    remote_blocks_expiry_time=["soon"],
    **{MANIFEST_KEY: [{"protocol": PROTOCOL}]},
)


@pytest.mark.parametrize("is_answer", [True, False], ids=["with a manifest", "without"])
@pytest.mark.parametrize("changed", [*WRONG_COORDINATES, *WRONG_NAMES, *WRONG_FIELDS], ids=plain_id)
def test_what_cannot_be_used_is_refused_and_named_on_both_sides(changed: dict[str, Any], is_answer: bool) -> None:
    """B1 and B4: a port that is missing waited for ever, a size of 10**9 built so many peers."""
    (field,) = changed
    with pytest.raises(HandOverFailed, match=f"kv_transfer_params: .*{field}") as refused:
        read((ANSWER if is_answer else BOTH_AT_ONCE) | changed, may_rendezvous=True)
    assert refused.value.cause is FailureCause.PARAMETERS
    # On prefill None says that there are none, and as many stages as could be are not counted with ranks.
    if changed[field] not in (None, MAX_TP_SIZE // 2 + 1):
        with pytest.raises(HandOverFailed, match=field):
            read_offer({"do_remote_decode": True, **changed}, "cmpl-x")


PARAMETERS_AT_THEIR_BOUNDS = [
    *each(
        remote_port=[1, 65535],
        remote_host=["h", "h" * 1024],
        remote_engine_id=["e", "e" * 1024],
        tp_size=[1, MAX_TP_SIZE],
        pp_size=[1, MAX_TP_SIZE // 2],
        remote_num_tokens=[0, 2**31 - 1],
        remote_block_ids=[[0, [2**31 - 1]]],
    ),
    {"dcp_size": 1},
    {"transfer_id": "t" * 1024, "remote_request_id": "r" * 1024},
]


@pytest.mark.parametrize("changed", PARAMETERS_AT_THEIR_BOUNDS, ids=plain_id)
def test_parameters_at_their_bounds_are_used(changed: dict[str, Any]) -> None:
    found = read(ANSWER | changed).prefill
    assert msgspec.to_builtins(found) == COORDINATES | {key: changed[key] for key in COORDINATES if key in changed}


# ------------------------------------------------------------------------------------------------------------- manifest


@pytest.mark.parametrize("there", [{}, {MANIFEST_KEY: None}], ids=["missing", "null"])
def test_parameters_without_a_manifest_are_refused_with_the_remedy(there: dict[str, Any]) -> None:
    """A router that rebuilds them field by field, or a client that makes them up (B1)."""
    params = {name: value for name, value in ANSWER.items() if name != MANIFEST_KEY} | there
    with pytest.raises(HandOverFailed, match="pass the whole kv_transfer_params of prefill's answer on") as refused:
        read(params)
    assert refused.value.cause is FailureCause.NO_MANIFEST
    assert MANIFEST_KEY in str(refused.value)
    found = read(params | {"transfer_id": "t"}, may_rendezvous=True)
    assert (found.manifest, found.lease_name) == (None, "transfer:t")


@pytest.mark.parametrize("value", [[], "manifest", 1, True, float("nan"), {}, [msgspec.to_builtins(MANIFEST)]], ids=str)
@pytest.mark.parametrize("may_rendezvous", [False, True])
def test_a_manifest_that_is_none_is_refused_even_where_none_is_needed(value: object, may_rendezvous: bool) -> None:
    with pytest.raises(HandOverFailed, match="kv_transfer_params: ") as refused:
        read(ANSWER | {MANIFEST_KEY: value}, may_rendezvous=may_rendezvous)
    assert refused.value.cause is FailureCause.PARAMETERS


# ----------------------------------------------------------------------------------------------------------------- name


ROUTERS_ID = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"
T = {"transfer_id": "a"}
SAME_NAMES: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    (T, "cmpl-x-0-01234567", T, "other"),
    # The shared request id counts, and its random end does not.
    *(({}, f"{kind}-r-0-0123abcd", {}, f"{kind}-r-0-89ef4567") for kind in ("cmpl", "chatcmpl")),
    # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION leaves the end out.
    ({}, "cmpl-r-0", {}, "cmpl-r-0-00000000"),
    # An explicit name counts more than the id of prefill, and that more than decode's.
    (T | {"remote_request_id": PREFILL_ID}, "cmpl-s-0-0123abcd", T, "x"),
    ({"remote_request_id": PREFILL_ID}, "cmpl-s-0-89ef4567", {}, PREFILL_ID),
    # A router's id in the place of prefill's: prefill knows only ids that vLLM made.
    *(
        ({"remote_request_id": one}, PREFILL_ID, {}, PREFILL_ID)
        for one in (ROUTERS_ID, ROUTERS_ID.replace("-", ""), None)
    ),
]
OTHER_NAMES: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    (T, "x", {"transfer_id": "a-01234567"}, "x"),
    ({}, "cmpl-r-0-0123abcd", {}, "cmpl-r-1-0123abcd"),
    ({}, "cmpl-r-0", {}, "cmpl-r"),
    # An explicit name never meets a request id.
    (T, "x", {}, "a"),
    ({"transfer_id": "request:a"}, "x", {}, "a"),
    ({"remote_request_id": PREFILL_ID}, "cmpl-s-0-89ef4567", {}, "cmpl-s-0-89ef4567"),
]


def test_both_requests_of_a_hand_over_get_one_name_and_others_another() -> None:
    for params, request_id, others, other_id in SAME_NAMES:
        assert name_of(params, request_id) == name_of(others, other_id), (params, request_id)
    for params, request_id, others, other_id in OTHER_NAMES:
        assert name_of(params, request_id) != name_of(others, other_id), (params, request_id)


@pytest.mark.parametrize("changed", WRONG_NAMES, ids=plain_id)
def test_a_name_that_is_none_is_malformed_and_named(changed: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match=next(iter(changed))):
        name_of(changed, "x")


def test_a_request_whose_own_id_nobody_can_send_is_refused() -> None:
    with pytest.raises(HandOverFailed, match="no Unicode text"):
        read(BOTH_AT_ONCE, may_rendezvous=True, request_id="cmpl-\ud800")


def test_a_request_whose_id_no_manifest_can_name_is_refused_on_both_sides() -> None:
    """Otherwise prefill's message with its last WRITE would be malformed, and decode would wait in vain."""
    longest = "cmpl-" + "x" * (MAX_REQUEST_ID - 5)
    assert read_offer({"do_remote_decode": True}, longest)
    with pytest.raises(HandOverFailed, match="1001 characters"):
        read_offer({"do_remote_decode": True, "transfer_id": "t"}, longest + "x")
    with pytest.raises(HandOverFailed, match="1001 characters"):
        read(BOTH_AT_ONCE, may_rendezvous=True, request_id=longest + "x")


def test_decodes_id_may_have_any_length_where_something_else_names_the_request() -> None:
    long = "cmpl-" + "x" * 5000
    for params in (ANSWER, BOTH_AT_ONCE | T, BOTH_AT_ONCE | {"remote_request_id": PREFILL_ID}):
        assert len(read(params, may_rendezvous=True, request_id=long).name) < 100


# --------------------------------------------------------------------------------------------------------------- answer


def test_the_answer_of_prefill_is_these_keys() -> None:
    """Routers and stock peers know them by name; stock decode finds block ids, one list a group."""
    assert prefill_params(PREFILL, MANIFEST, transfer_id="t", transfer_mode=TransferMode.PUSH, cached_tokens=2) == {
        **COORDINATES,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "transfer_mode": "push",
        "remote_request_id": PREFILL_ID,
        "remote_block_ids": [[], []],
        "remote_prefill_cached_tokens": 2,
        MANIFEST_KEY: msgspec.to_builtins(MANIFEST),
    }


def test_mutated_answers_are_read_or_refused() -> None:
    """Any value anywhere: a router may send what it likes."""

    def reads(said: bytes) -> None:
        params = msgspec.msgpack.decode(said, type=dict[str, Any])
        try:
            found = read(params, may_rendezvous=bool(len(said) % 2))
        except HandOverFailed as cause:
            assert cause.cause in (FailureCause.PARAMETERS, FailureCause.NO_MANIFEST)
            assert len(str(cause)) < 1000
            refused.append(cause)
        else:
            # Whatever follows can be sent on.
            assert found.lease_name.encode() and found.prefill.host.encode()
            assert found.manifest is None or found.manifest.ownership_token

    refused: list[HandOverFailed] = []
    num_read, _ = fuzz(reads, [msgspec.msgpack.encode(ANSWER)], 20_000, ValueError)
    assert 1_000 < len(refused) < num_read - 1_000


# ------------------------------------------------------------------------------------------------------------ the model


STOCK_ANSWER = {
    **{"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_host": "h"},
    **{"remote_port": 5600, "tp_size": 1, "remote_request_id": "cmpl-r-0-0123abcd", "remote_block_ids": [[1, 2], []]},
    **{"remote_num_tokens": 33, "remote_blocks_expiry_time": 123.5, "transfer_mode": "pull", "pp_size": 1},
}


@pytest.mark.parametrize(
    "params",
    [STOCK_ANSWER, STOCK_ANSWER | {"remote_block_ids": [1, 2]}, ANSWER, BOTH_AT_ONCE],
    ids=lambda params: str(sorted(params))[:60],
)
def test_what_supported_servers_say_is_read_from_json(params: dict[str, Any]) -> None:
    """Stock vLLM's answer, flat block ids of old versions, and this package's."""
    found = read(json.loads(json.dumps(params)), may_rendezvous=True)
    assert found.prefill.port == params["remote_port"]
    assert (found.manifest == MANIFEST) is (MANIFEST_KEY in params)


def test_what_nobody_knows_passes_whatever_it_is() -> None:
    assert read(ANSWER | {"of_tomorrow": object(), "": [{"deep": [None, 1e300]}]}).manifest == MANIFEST


def test_where_both_are_asked_at_once_they_meet_under_one_name() -> None:
    to_prefill = params_to_prefill("t")
    to_decode = params_to_decode(PREFILL, "t")
    found = read(to_decode, may_rendezvous=True)
    assert found.prefill == PREFILL and found.name == read_offer(to_prefill, "cmpl-other")
    # Stock vLLM reads both roles.
    assert to_prefill == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
    assert to_decode == {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t", **COORDINATES}
