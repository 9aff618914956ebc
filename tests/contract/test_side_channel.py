# SPDX-License-Identifier: Apache-2.0
"""vLLM's side channel, on the installed vLLM: what is asked in a wrong way, with the stock listener beside ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import engine_node
import test_geometry
import test_pull
import zmq
from engine_node import DECODE_ID, PREFILL_ID
from test_pull import Node, served
from test_push import DECODE_FILLING, PREFILL_FILLING, RESERVED
from test_transport import until

from kvcached_nixl.compat.side_channel import side_channel
from kvcached_nixl.compat.versions import installed_row
from kvcached_nixl.patching import Registry

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, test_geometry.patched
node, pair = test_pull.node, test_pull.pair

ASK = b"get_meta_msg"
UNREADABLE = [b"", b"\xff", *map(msgspec.msgpack.encode, [5, [ASK], [ASK, 0, 0, 0], [ASK, {}], [ASK, {}, {}]])]


def say(prefill: Node, question: bytes, happened: Callable[[], bool]) -> None:
    """On a connection of its own, and waits for what it does instead of for an answer."""
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://127.0.0.1:{prefill.engine.port}")
        asking.send(question)
        until(happened)


def test_what_one_peer_asks_in_a_wrong_way_ends_no_handshake(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    for number, question in enumerate(UNREADABLE, 1):
        say(prefill, question, lambda number=number: prefill.log.text.count("Dropped a message") == number)
    said, _ = side_channel(installed_row().side_channel_names_stage)("127.0.0.1", prefill.engine.port, 3)
    assert "no rank" in said and "3" in said and "tp_size" in said
    served(prefill, decode)


def test_a_decode_that_is_told_a_wrong_tp_size_holds_up_no_other(node: Callable[..., Node]) -> None:
    prefill, misled, decode = node(PREFILL_FILLING), node(DECODE_FILLING), node(DECODE_FILLING)
    misled.add(DECODE_ID, {**prefill.address(PREFILL_ID), "remote_block_ids": ([1, 2, 3],), "tp_size": 2})
    misled.step_until(lambda: DECODE_ID in misled.ended)
    assert misled.ended[DECODE_ID] == "error"
    served(prefill, decode)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "question",
    [b"\xff", msgspec.msgpack.encode([ASK, 3]), msgspec.msgpack.encode([ASK, 0, 3])],
    ids=["nothing", "a rank that is not there", "the same, of a stage"],
)
def test_the_stock_listener_is_over(question: bytes, patched: Registry, node: Callable[..., Node]) -> None:
    """What the test before this one is about; if this fails, vLLM has learned it."""
    patched.uninstall()
    prefill = node(PREFILL_FILLING, dataclasses.replace(RESERVED, reserved_blocks=RESERVED.num_blocks))
    thread = prefill.connector_scheduler._nixl_handshake_listener_t
    assert thread.is_alive()
    say(prefill, question, lambda: not thread.is_alive())
