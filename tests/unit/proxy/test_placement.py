# SPDX-License-Identifier: Apache-2.0
"""proxy/kind.py, proxy/cost.py, the usage in proxy/relay.py: what fits, what costs less, what was cached."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcached_nixl.proxy.affinity import PIECE_BYTES, PIECE_TOKENS, PrefixTree
from kvcached_nixl.proxy.cost import Costs
from kvcached_nixl.proxy.kind import Kind, kind_of
from kvcached_nixl.proxy.relay import with_cached_tokens


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (Kind(1, 2, 3), Kind(1, 2, 3), True),
        (Kind(1, 2, 3), Kind(1, 2, 4), True),  # laid out otherwise
        (Kind(1, 0, 3), Kind(1, 2, 3), True),  # not from files
        (Kind(1, 2, 3), Kind(1, 4, 5), False),
        (Kind(1, 0, 3), Kind(1, 0, 4), False),
        (Kind(1, 0, 0), Kind(1, 0, 0), False),  # nothing to compare: the handshake refuses it, too
        (Kind(1, 2, 3), Kind(2, 2, 3), False),
    ],
)
def test_what_fits(one: Kind, other: Kind, fits: bool) -> None:
    assert (one.fits(other), other.fits(one)) == (fits, fits)


def text(**values: Any) -> bytes:
    return "".join(f"kvcached_nixl:{name}_id{{{value}\n" for name, value in values.items()).encode()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (text(compatibility='engine="0"} 1.0', checkpoint='e="0"} 4.503599627370495e+15', weights='e="0"} 0.0'), True),
        (text(compatibility='engine="0"} 0.0', checkpoint='e="0"} 0.0', weights='e="0"} 0.0'), False),
        (text(compatibility='engine="0"} 1.0', checkpoint='e="0"} 2.0'), False),
        (text(compatibility='e="0"} 1.0', checkpoint='e="0"} 2.0', weights='e="0"} 3.0\n')
         + text(compatibility='e="1"} 1.0', checkpoint='e="1"} 2.0', weights='e="1"} 4.0'), False),
        (text(compatibility='e="0"} NaN', checkpoint='e="0"} 2.0', weights='e="0"} 3.0'), False),
        (b"", False),
        (b"\xff\x00kvcached_nixl:weights_id", False),
    ],
)  # fmt: skip
def test_kind_of_a_server(said: bytes, kind: bool) -> None:
    found = kind_of(said)
    assert found == (Kind(1.0, 4503599627370495.0, 0.0) if kind else None)


def test_costs() -> None:
    costs = Costs()
    assert costs.of_handing_over(1000) is None
    costs.prefilled(1.0, 1000)
    costs.handed_over(0.5)
    assert costs.of_handing_over(3000) == pytest.approx(3.5)
    # Before decode was measured it counts as fast as prefill.
    assert costs.of_computing_alone(1000, 0, 0) == pytest.approx(1.0)
    assert costs.of_computing_alone(1000, 2000, 3) == pytest.approx(6.0)
    costs.computed_alone(1.0, 100)
    assert costs.of_computing_alone(1000, 0, 0) == pytest.approx(10.0)
    # What was measured long ago is forgotten.
    for _ in range(500):
        costs.prefilled(2.0, 1000)
        costs.handed_over(-1.0)
    assert costs.of_handing_over(1000) == pytest.approx(2.0, rel=0.01)


def test_the_tokens_that_a_server_has_computed_before() -> None:
    tree = PrefixTree()
    tree.add(b"m", b"a" * 3 * PIECE_BYTES, "one")
    tree.add(b"m", b"a" * 2 * PIECE_BYTES + b"b" * PIECE_BYTES, "two")
    assert tree.lengths(b"m", b"a" * 5 * PIECE_BYTES) == {"one": 3 * PIECE_TOKENS, "two": 2 * PIECE_TOKENS}
    assert tree.lengths(b"other", b"a" * 5 * PIECE_BYTES) == {}


SAID = {
    "chat": {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}, "choices": []},
    "responses": {"response": {"usage": {"input_tokens_details": {"cached_tokens": 9}, "input_tokens": 9}}},
    "messages": {"type": "message_start", "message": {"usage": {"cache_read_input_tokens": 9}}},
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("begin", [b"", b"data: ", b"event: x\ndata: "])
def test_cached_tokens_in_usage(said: dict[str, Any], begin: bytes) -> None:
    end = b"\n\n" if begin else b""
    found = with_cached_tokens(begin + json.dumps(said).encode() + end, 4)
    assert found.startswith(begin)
    assert found.endswith(end)
    replaced = json.loads(
        json.dumps(said).replace('ens": 9}', 'ens": 4}').replace('cached_tokens": 9', 'cached_tokens": 4')
    )
    replaced = json.loads(json.dumps(replaced).replace('"input_tokens": 4}', '"input_tokens": 9}'))
    assert json.loads(found.removeprefix(begin)) == replaced


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "tool_use", "input": {"cached_tokens": 5, "usage": {"cached_tokens": 5}}}]},
        {"choices": [{"text": '"usage": {"cached_tokens": 5}'}]},
        {"type": "content_block_start", "content_block": {"input": {"cache_read_input_tokens": 5}}},
    ],
)
def test_what_the_model_has_said_is_not_usage(said: dict[str, Any]) -> None:
    whole = {**said, "usage": {"cached_tokens": 9}}
    assert json.loads(with_cached_tokens(json.dumps(whole).encode(), 4)) == {**said, "usage": {"cached_tokens": 4}}
    for begin in (b"", b"data: "):
        line = begin + json.dumps(said).encode()
        assert json.loads(with_cached_tokens(line, 4).removeprefix(begin)) == said
    broken = json.dumps(whole).encode()[:-1]
    assert with_cached_tokens(broken, 4) == broken
