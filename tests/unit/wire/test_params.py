# SPDX-License-Identifier: Apache-2.0
"""Router parameters: both requests of a transfer get one name, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_nixl.wire.params import RemotePrefill, prefill_params, remote_prefill, transfer_of

PREFILL = RemotePrefill("e", "127.0.0.1", 5600, 2)
COORDINATES = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 2}


def test_an_explicit_name_is_exact() -> None:
    """Whatever the request ids are."""
    names = {transfer_of({"transfer_id": "a"}, request_id) for request_id in ("cmpl-x-0-01234567", "other")}
    assert len(names) == 1
    assert transfer_of({"transfer_id": "a-01234567"}, "x") not in names


@pytest.mark.parametrize("prefix", ["cmpl-", "chatcmpl-"])
def test_without_one_the_shared_request_id_counts_and_its_random_end_does_not(prefix: str) -> None:
    prefill, decode, other = (
        transfer_of({}, f"{prefix}{tail}") for tail in ("r-0-0123abcd", "r-0-89ef4567", "r-1-0123abcd")
    )
    assert prefill == decode != other


def test_an_id_without_a_random_end_is_left_whole() -> None:
    """VLLM_DISABLE_REQUEST_ID_RANDOMIZATION leaves it out."""
    assert transfer_of({}, "cmpl-r-0") != transfer_of({}, "cmpl-r")
    assert transfer_of({}, "cmpl-r-0") == transfer_of({}, "cmpl-r-0-00000000")


def test_an_explicit_name_never_meets_a_request_id() -> None:
    assert transfer_of({"transfer_id": "a"}, "x") != transfer_of({}, "a")


@pytest.mark.parametrize("wrong", ["", 7, ["a"]])
def test_a_name_that_is_none_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="transfer_id="):
        transfer_of({"transfer_id": wrong}, "x")


def test_prefill_is_found_by_its_coordinates() -> None:
    """Keys of other uses are left alone; one rank is the default."""
    params: dict[str, Any] = COORDINATES | {"do_remote_prefill": True, "remote_block_ids": None}
    assert remote_prefill(params) == RemotePrefill("e", "127.0.0.1", 5600, 2)
    del params["tp_size"]
    assert remote_prefill(params).tp_size == 1


@pytest.mark.parametrize(
    "changed",
    [
        *[{name: None} for name in COORDINATES],
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_port": "5600"},
        {"remote_host": ""},
        {"remote_engine_id": ""},
        {"tp_size": 0},
    ],
    ids=str,
)
def test_coordinates_that_cannot_be_used_are_an_error(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params of a pushed request"):
        remote_prefill(COORDINATES | changed)


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_host", "remote_port"])
def test_a_missing_coordinate_is_named(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        remote_prefill({name: value for name, value in COORDINATES.items() if name != missing})


WORDS = st.text('ab09-é"', min_size=1, max_size=12)
REQUEST_IDS = st.builds(
    "{}{}-0{}".format,
    st.sampled_from(["cmpl-", "chatcmpl-", ""]),
    WORDS,
    st.sampled_from(["-0123abcd", "-89ef4567"]),
)


@given(
    prefill=st.builds(RemotePrefill, WORDS, WORDS, st.integers(1, 65535), st.integers(1, 1024)),
    prefill_id=REQUEST_IDS,
    decode_id=REQUEST_IDS,
    transfer_id=st.none() | WORDS,
    block_ids=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
)
@settings(deadline=None)
def test_what_prefill_answers_leads_decode_to_it(
    prefill: RemotePrefill, prefill_id: str, decode_id: str, transfer_id: str | None, block_ids: list[list[int]]
) -> None:
    """Through a router that passes it on as JSON, with any id of its own for decode's request."""
    answer = json.loads(json.dumps(prefill_params(prefill, prefill_id, transfer_id, block_ids)))
    assert remote_prefill(answer) == prefill
    asked = {"do_remote_decode": True} | ({} if transfer_id is None else {"transfer_id": transfer_id})
    assert transfer_of(answer, decode_id) == transfer_of(asked, prefill_id)
    assert answer["remote_block_ids"] == block_ids


def test_the_answer_of_prefill_is_these_keys() -> None:
    """Routers and peers that pull know them by name."""
    assert prefill_params(PREFILL, "cmpl-r-0-0123abcd", None, ((1, 2), (3,))) == {
        **COORDINATES,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": None,
        "transfer_mode": "push",
        "remote_request_id": "cmpl-r-0-0123abcd",
        "remote_block_ids": [[1, 2], [3]],
    }


def test_an_explicit_name_counts_more_than_the_id_of_prefill() -> None:
    params = {"transfer_id": "a", "remote_request_id": "cmpl-r-0-0123abcd"}
    assert transfer_of(params, "cmpl-s-0-0123abcd") == transfer_of({"transfer_id": "a"}, "x")


def test_the_id_of_prefill_counts_more_than_that_of_decode() -> None:
    """A router need not give both the same ``X-Request-Id``."""
    found = transfer_of({"remote_request_id": "cmpl-r-0-0123abcd"}, "cmpl-s-0-89ef4567")
    assert found == transfer_of({}, "cmpl-r-0-0123abcd") != transfer_of({}, "cmpl-s-0-89ef4567")


@pytest.mark.parametrize(
    "theirs", ["1b4e28ba-2fa1-41d2-883f-0016d3cca427", "1b4e28ba2fa141d2883f0016d3cca427", "", None, 7]
)
def test_an_id_of_a_router_in_the_place_of_prefill_s_is_not_used(theirs: object) -> None:
    """Prefill knows only ids that vLLM made; with any other the two would never meet."""
    request_id = "cmpl-r-0-0123abcd"
    assert transfer_of({"remote_request_id": theirs}, request_id) == transfer_of({}, request_id)
