# SPDX-License-Identifier: Apache-2.0
"""Router parameters: both requests of a transfer get one name, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached_nixl.wire.params import RemotePrefill, remote_prefill, transfer_of

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
