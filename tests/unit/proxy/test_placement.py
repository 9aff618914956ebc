# SPDX-License-Identifier: Apache-2.0
"""proxy/kind.py, proxy/cost.py, the usage in proxy/relay.py: what fits, what costs less, what was cached."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvcached_nixl.proxy.affinity import PIECE_BYTES, PrefixTree
from kvcached_nixl.proxy.api import ApiRoute
from kvcached_nixl.proxy.client import error_event
from kvcached_nixl.proxy.cost import Costs
from kvcached_nixl.proxy.kind import Kind, kind_of
from kvcached_nixl.proxy.relay import with_cached_tokens
from kvcached_nixl.proxy.request_body import read


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
        (text(compatibility='e="0"} NaN', checkpoint='e="0"} 2.0', weights='e="0"} 3.0'), False),
        (text(compatibility='e="0"} 1.0', checkpoint='e="0"} 2.0', weights='e="0"} 3.0')
         + text(compatibility='e="1"} 1.0', checkpoint='e="1"} 4.0', weights='e="1"} 4.0'), False),
        (text(compatibility='e="0"} 1.0', checkpoint='e="0"} 4503599627370495.0', weights='e="0"} 3.0')
         + text(compatibility='e="1"} 1.0', checkpoint='e="1"} 4503599627370495.0', weights='e="1"} 4.0'), True),
        (b"", False),
        (b"\xff\x00kvcached_nixl:weights_id", False),
    ],
)  # fmt: skip
def test_kind_of_a_server(said: bytes, kind: bool) -> None:
    found = kind_of(said)
    assert found == (Kind(1.0, 4503599627370495.0, 0.0) if kind else None)


def test_what_a_client_library_writes_is_read() -> None:
    """In its form for large numbers, which has changed: 0.24 wrote three digits of an exponent."""
    registry = CollectorRegistry()
    for name, value in (("compatibility", 2**52 - 1), ("checkpoint", 2**51 + 1), ("weights", 0)):
        Gauge(f"kvcached_nixl:{name}_id", "x", ["model_name", "engine"], registry=registry).labels("m", "0").set(value)
    said = generate_latest(registry)
    assert kind_of(said) == Kind(2.0**52 - 1, 2.0**51 + 1, 0.0)
    older = text(compatibility='e="0"} 4.503599627370495e+015', checkpoint='e="0"} 2.0', weights='e="0"} 3.0')
    assert kind_of(older) == Kind(2.0**52 - 1, 2.0, 3.0)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_costs() -> None:
    clock = Clock()
    costs = Costs(clock)
    assert not costs.is_alone_better(0.0, 1000)
    for tokens in (1000, 2000, 4000) * 4:
        costs.prefilled(0.5 + tokens / 1000, tokens)
        costs.handed_over(0.25)
    assert costs.of_handing_over(3000) == pytest.approx(3.75)
    # Before decode was measured it counts as fast as prefill.
    assert costs.of_computing_alone(1000, 0, 0) == pytest.approx(1.5)
    assert costs.of_computing_alone(1000, 2000, 3) == pytest.approx(6.5)
    assert costs.is_alone_better(1.5, 2000)
    assert not costs.is_alone_better(3.0, 2000)


def test_one_measurement_that_is_far_off_counts_little() -> None:
    """Such as a compilation, or an outage."""
    costs = Costs(Clock())
    for tokens in (100, 1000, 4000) * 6:
        costs.prefilled(0.1 + tokens / 1000, tokens)
        costs.computed_alone(0.2 + tokens / 500, tokens)
        costs.handed_over(0.1)
    before = costs.of_handing_over(1000), costs.of_computing_alone(1000, 0, 0)
    for _ in range(3):
        costs.prefilled(60.0, 10)
        costs.computed_alone(60.0, 10)
        costs.handed_over(60.0)
    assert (costs.of_handing_over(1000), costs.of_computing_alone(1000, 0, 0)) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_was_not_measured_for_long_is_tried_once(is_alone: bool) -> None:
    """A first measurement that was far off must not decide for ever, and neither must a state that has passed."""
    clock = Clock()
    costs = Costs(clock)
    costs.prefilled(1.0, 1000)
    costs.computed_alone(0.01 if is_alone else 10.0, 1000)

    def decided() -> bool:
        return costs.is_alone_better(costs.of_computing_alone(1000, 0, 0), 1000)

    assert {decided() for _ in range(100)} == {is_alone}
    clock.seconds = 11.0
    assert [decided() for _ in range(5)] == [not is_alone, *4 * [is_alone]]
    if is_alone:
        costs.computed_alone(0.01, 1000)
        for _ in range(3):
            costs.prefilled(0.001, 1000)
    else:
        costs.prefilled(1.0, 1000)
        for _ in range(3):
            costs.computed_alone(0.001, 1000)
    assert decided() is not is_alone


def test_the_pieces_that_a_server_has_computed_before() -> None:
    tree = PrefixTree()
    tree.add(b"m", b"a" * 3 * PIECE_BYTES, "one")
    tree.add(b"m", b"a" * 2 * PIECE_BYTES + b"b" * PIECE_BYTES, "two")
    assert tree.pieces(b"m", b"a" * 5 * PIECE_BYTES) == {"one": 3, "two": 2}
    assert tree.pieces(b"other", b"a" * 5 * PIECE_BYTES) == {}


@pytest.mark.parametrize(
    "media",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 100_000}},
        {"type": "input_audio", "input_audio": {"data": "iVBO" * 100_000, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO" * 100_000}},
    ],
    ids=lambda media: media["type"],
)
def test_media_are_no_text(media: dict[str, Any]) -> None:
    said = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 4000}, media, media]}]}
    found = read(ApiRoute.CHAT, json.dumps(said).encode(), allows_params=False)
    assert 3000 < found.prompt_tokens < 3200
    said["messages"][0]["content"] = json.dumps(media)
    found = read(ApiRoute.CHAT, json.dumps(said).encode(), allows_params=False)
    assert found.prompt_tokens > 100_000 or media["type"] == "image_url", "a text that quotes one is text"


@pytest.mark.parametrize(
    ("body", "piece_tokens", "least", "most"),
    [
        ({"prompt": "x" * 4000}, 63, 1000, 1001),
        ({"prompt": [100_000] * 1900}, 31, 1890, 1901),
        ({"prompt": [1] * 1900, "prefix_prompt_ids": [1] * 1900}, 64, 1890, 1901),
        ({"prompt": "x", "tools": [{"x": "y" * 4000}]}, 0, 1000, 1010),
        ({"prompt": "x", "system": "y" * 4000}, 0, 1000, 1010),
        ({"prompt": "x", "instructions": "y" * 4000}, 0, 1000, 1010),
    ],
)  # fmt: skip
def test_the_tokens_of_a_prompt_are_estimated(body: dict[str, Any], piece_tokens: int, least: int, most: int) -> None:
    found = read(ApiRoute.COMPLETIONS, json.dumps(body).encode(), allows_params=False)
    assert found.piece_tokens == piece_tokens
    assert least <= found.prompt_tokens <= most
    other = read(ApiRoute.COMPLETIONS, json.dumps(body).encode().replace(b"yy", b"yz", 1), allows_params=False)
    assert (other.namespace == found.namespace) is ("prompt" in body and len(body) == 1 or "prefix_prompt_ids" in body)


@pytest.mark.parametrize("route", [None, *ApiRoute])
@pytest.mark.parametrize(
    "said",
    [
        b'{"detail":"Not Found"}',
        b"no JSON",
        b'{"error":null}',
        b'{"error":"text"}',
        b"\xff",
        b"{" * 5000,
        b'{"error":{"message":"m",\r\n"code":\n400}}',
    ],
)
def test_anerror_event_is_an_error_to_every_client(said: bytes, route: ApiRoute | None) -> None:
    event = error_event(route, 404, said)
    lines = event.split(b"\n")
    assert event.endswith(b"\n\n") and b"\r" not in event
    assert len(lines) == (4 if route is ApiRoute.MESSAGES else 3)
    found = json.loads(lines[-3].removeprefix(b"data: "))
    assert found["error"]["message"] == ("m" if b'"m"' in said else "The request failed: a server refused it.")
    if route is ApiRoute.MESSAGES:
        assert (lines[0], found["type"]) == (b"event: error", "error")


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
        b'{"usage":{"input_tokens":' + b"9" * 5000 + b',"cache_read_input_tokens":9}}',
        b'{"usage":{"input_tokens":1,"cache_read_input_tokens":' + b"9" * 5000 + b"}}",
        b'{"message":' * 900 + b'{"usage":{"cached_tokens":9}}' + b"}" * 900,
    ],
    ids=["input", "cached", "nested"],
)
def test_a_server_s_odd_usage_breaks_nothing(said: bytes) -> None:
    assert with_cached_tokens(said, 4)


def test_anthropic_counts_cached_tokens_apart() -> None:
    """``input_tokens`` are the others, so the sum stays that of the prompt."""
    said = {"usage": {"input_tokens": 1, "cache_read_input_tokens": 999, "output_tokens": 5}, "type": "message"}
    for cached in (0, 600, 999):
        usage = json.loads(with_cached_tokens(json.dumps(said).encode(), cached))["usage"]
        assert usage == {"input_tokens": 1000 - cached, "cache_read_input_tokens": cached, "output_tokens": 5}


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
