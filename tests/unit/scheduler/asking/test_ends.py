# SPDX-License-Identifier: Apache-2.0
"""No prompt is asked for, or waits for others, without an end; and servers pay only for what they have failed in."""

from __future__ import annotations

import msgspec
import pytest
from support.engine_fakes import with_states

from kvcached_nixl.wire.question import Outcome

from .test_asking import ANSWER, BUSY, ODD, Decode, Request

KILLED = Outcome("Server disconnected", is_of_server=True, has_prompt=True)


@pytest.mark.parametrize("failure", [ODD, KILLED], ids=["HTTP 500", "killed"])
@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_servers_that_are_busy_in_between_do_not_hide_those_that_have_failed(
    failure: Outcome, recomputes: bool
) -> None:
    decode = Decode("http://p1", "http://p2", "http://p3", recomputes=recomputes, num_free=10_000)
    decode.arrives("a")
    for outcome in (failure, BUSY, failure):
        number = decode.number("a")
        decode.answers("a", outcome)
        while "a" not in decode.fetching.refused and decode.number("a") == number:
            decode.clock.advance(10)
            decode.turn()
    assert "a" in decode.fetching.refused


@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_a_balancer_without_servers_is_not_busy_for_ever(recomputes: bool) -> None:
    """HAProxy, Envoy and ingress-nginx answer 503 where no server lives behind them."""
    decode = Decode("http://p1", recomputes=recomputes, num_free=10_000)
    decode.arrives("a")
    begun = decode.clock.now_seconds()
    while "a" not in decode.fetching.refused and decode.clock.now_seconds() < begun + 3600:
        if decode.number("a") in decode.asking.questions.asked:
            decode.answers("a", msgspec.structs.replace(BUSY, retry_after_seconds=0.0))
        decode.clock.advance(30)
        decode.turn()
    assert 600 < decode.clock.now_seconds() - begun < 3600


def test_equal_prompts_do_not_wait_for_a_grammar() -> None:
    """vLLM begins its request when that is compiled: in minutes, or never."""
    decode = Decode("http://p1", num_free=10_000)
    decode.arrives("grammar", block_hashes=(b"same",), awaits_grammar=True)
    for name in ("b", "c"):
        decode.arrives(name, block_hashes=(b"same",))
    assert not decode.is_asked("b")
    decode.answers("grammar")
    decode.turn()
    # The next one is asked for, and the others follow that.
    assert decode.is_asked("b") and not decode.is_asked("c")


def test_what_prefill_leaves_whole_is_not_asked_for() -> None:
    """Layers keep states, and the prompt's last token belongs to an image."""
    decode = Decode("http://p1", num_free=10_000)
    decode.asking._engine.groups = with_states()
    for ends_in_media in (True, False):
        assert decode.asking.arrived(Request("a", ends_in_media=ends_in_media)) is not ends_in_media  # type: ignore[arg-type]


def test_an_adapter_that_a_server_lacks_costs_only_its_own_requests() -> None:
    """``load_lora_adapter`` goes from server to server: one answers 404 for the new adapter, and gets other prompts."""
    decode = Decode("http://p1", "http://p2", num_free=10_000)
    missing = Outcome("HTTP 404: the model `new` does not exist", is_final=True)
    for place in range(30):
        name = f"n{place}"
        decode.arrives(name, adapter="new")
        while decode.is_asked(name) and decode.number(name) in decode.asking.questions.asked:
            decode.answers(name, missing if decode.url(name) == "http://p1" else ANSWER)
        decode.asking.gone(name)
    asked = set()
    for place in range(20):
        decode.arrives(f"base{place}")
        asked.add(decode.url(f"base{place}"))
    assert asked == {"http://p1", "http://p2"}
