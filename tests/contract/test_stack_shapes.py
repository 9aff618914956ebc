# SPDX-License-Identifier: Apache-2.0
"""What serving stacks send to prefill and to decode, as their sources say: every shape hands KV over.

``stack_shapes/`` has one file for each way in which a stack asks: the stack's version and source, the parameters of
both requests, and how they are encoded on the way. docs/routers.md lists the stacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.nodes import DECODE_FILLING, PREFILL_FILLING, RESERVED, Node, nodes
from support.waiting import until

SHAPES = sorted((Path(__file__).parent / "stack_shapes").glob("*.json"))
HOST = "localhost"
"""Not the address in prefill's answer: some stacks put the host of prefill's URL there."""
EXACT = 2**53
"""Numbers above this are rounded where JSON's numbers are floats."""


def floats(value: Any) -> Any:
    """As protobuf's Struct has them."""
    if isinstance(value, dict):
        return {key: floats(one) for key, one in value.items()}
    if isinstance(value, list):
        return [floats(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def of_go(value: Any) -> Any:
    """As Go's ``encoding/json`` writes what it has read into ``map[string]any``: sorted, whole numbers without ".0"."""
    if isinstance(value, dict):
        return {key: of_go(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [of_go(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return int(float(value)) if isinstance(value, int) and abs(value) > EXACT else value


ON_THE_WAY: Mapping[str, Callable[[Any], Any]] = {
    "none": lambda value: value,
    "python-json": lambda value: json.loads(json.dumps(value)),
    "rust-json": lambda value: json.loads(json.dumps(value)),
    "go-json": lambda value: of_go(json.loads(json.dumps(value))),
    "floats": lambda value: floats(json.loads(json.dumps(value))),
}


class Stack:
    """One shape, between two engines."""

    def __init__(self, shape: Mapping[str, Any], prefill: Node, decode: Node) -> None:
        self.shape, self.prefill, self.decode = shape, prefill, decode
        named = shape["prefill"]["request_id"] is not None
        header = re.sub(r"\{[^}]*\}", "0f3c2d1e5b6a49788796a5b4c3d2e1f0", shape["prefill"]["request_id"] or "")
        # vLLM puts the suffix behind every id; without X-Request-Id the ids of the two sides have nothing in common.
        self.prefill_id = f"cmpl-{header}-0-aaaaaaaa" if named else "cmpl-1b2c3d4e5f60718a-0-aaaaaaaa"
        self.decode_id = f"cmpl-{header}-0-dddddddd" if named else "cmpl-a817065f4e3d2c1b-0-dddddddd"
        self.values: Mapping[str, Any] = {
            "$request_id": header,
            "$transfer_id": "xfer-77",
            "$prefill_host": HOST,
            "$prefill_engine_id": prefill.engine.engine_id,
            "$prefill_side_channel_host": "127.0.0.1",
            "$prefill_side_channel_port": prefill.engine.port,
            "$tp_size": 1,
            "$pp_size": 1,
            # A multi-turn proxy tells prefill what decode has of the turns before.
            "$decode_engine_id": decode.engine.engine_id,
            "$decode_request_id": "cmpl-earlier-0-eeeeeeee",
            "$decode_host": HOST,
            "$decode_side_channel_host": "127.0.0.1",
            "$decode_side_channel_port": decode.engine.port,
            "$decode_block_ids": [[1, 2]],
            "$decode_num_tokens": 64,
            "$decode_blocks_expiry_time": 1.5e9,
            "$decode_tp_size": 1,
            "$decode_dcp_size": 1,
            "$decode_pp_size": 1,
        }

    def filled(self, params: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: self.values.get(str(value), value) for key, value in params.items()}
        if str(found.get("transfer_id", "")).startswith("xfer-{"):
            found["transfer_id"] = self.values["$transfer_id"]
        unknown = [value for value in found.values() if isinstance(value, str) and value.startswith("$")]
        assert not unknown, unknown
        return found

    @property
    def max_tokens(self) -> int:
        body = self.shape["prefill"]["body"]
        return int(body.get("max_tokens", body.get("max_new_tokens")))

    def ask_prefill(self) -> None:
        self.prefill.add(self.prefill_id, self.filled(self.shape["prefill"]["kv_transfer_params"]), self.max_tokens)

    def for_decode(self) -> dict[str, Any]:
        told = self.shape["decode"]["kv_transfer_params"]
        answer = self.prefill.transfer_params.get(self.prefill_id, {})
        kept = answer if told["from"] == "answer" else {key: answer[key] for key in told["keep"] or ()}
        params = {**kept, **self.filled(told["set"])}
        found: dict[str, Any] = ON_THE_WAY[told["through"]]({k: v for k, v in params.items() if k not in told["drop"]})
        return found

    def ask_decode(self, params: dict[str, Any]) -> list[int]:
        """Returns the blocks of decode's request."""
        self.decode.add(self.decode_id, params)
        self.decode.step()
        assert self.decode.waits(self.decode_id)
        return self.decode.blocks(self.decode_id)


@pytest.fixture
def stack(tmp_path: Path, log: pytest.LogCaptureFixture) -> Any:
    with nodes(Node, tmp_path, log) as make:

        def of(shape: Mapping[str, Any]) -> Stack:
            mode = {"transfer_mode": shape["transfer_mode"]}
            prefill, decode = (
                make(PREFILL_FILLING, RESERVED, **mode),
                make(DECODE_FILLING, RESERVED, policy="fail", **mode),
            )
            return Stack(shape, prefill, decode)

        yield of


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] if place % 4 else [])
        for place, path in enumerate(SHAPES)
    ],
)
def test_kv_is_handed_over(path: Path, stack: Callable[..., Stack]) -> None:
    """To the blocks of decode's request, rightly; then both engines owe nothing, and work."""
    one = stack(json.loads(path.read_text()))
    if one.shape["order"] == "prefill first":
        one.ask_prefill()
        one.prefill.step_until(lambda: one.prefill_id in one.prefill.transfer_params)
        local = one.ask_decode(one.for_decode())
    else:
        local = one.ask_decode(one.for_decode())
        until(lambda: one.prefill.write_tasks)
        one.ask_prefill()
    one.decode.step_until(lambda: one.decode_id in one.decode.received, one.prefill)
    assert one.decode.holds(local)
    one.decode.step_until(lambda: one.decode_id in one.decode.ended, one.prefill)
    assert one.decode.ended[one.decode_id] == "length"
    assert one.decode.account["kvcached_nixl_failures"] == []
    one.prefill.rest(one.decode)
    one.prefill.serves(one.decode)


def test_every_shape_says_where_it_is_from() -> None:
    assert len(SHAPES) >= 30
    for path in SHAPES:
        shape = json.loads(path.read_text())
        assert shape["version"] and "/" in shape["source"], path.name
