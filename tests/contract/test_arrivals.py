# SPDX-License-Identifier: Apache-2.0
"""Requests and adapters whose id is in use already, through vLLM's own ``EngineCore`` and scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nodes import (
    CHUNK,
    DECODE_FILLING,
    DECODE_ID,
    NAME,
    PREFILL_FILLING,
    PREFILL_ID,
    PROMPT,
    SEND,
    Node,
    core_request,
    prompt,
)
from support.waiting import until
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvcached_nixl.vllm.adapter import requests
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY, HAS_CLIENTS_KEY


def reject(node: Node, request_id: str, params: dict[str, Any]) -> None:
    """What an API server sends for a request that it has rejected (``notify_kv_transfer_request_rejected``)."""
    node.enter(core_request(request_id, params, abort_immediately=True))


def test_stop_tokens_that_the_model_does_not_have_stop_nothing(pair: tuple[Node, Node]) -> None:
    """With min_tokens vLLM masks their logits, and there are none: the engine would end."""
    node, _ = pair
    size = node.scheduler.vllm_config.model_config.get_vocab_size()
    request = core_request(PREFILL_ID)
    stops = [size - 1, size, 1_000_000, 2**40, -1]
    request.sampling_params = SamplingParams(max_tokens=4, min_tokens=1, stop_token_ids=stops)
    node.enter(request)
    found = node.scheduler.requests[PREFILL_ID].sampling_params
    assert found.stop_token_ids == [size - 1] and found.all_stop_token_ids == {size - 1}


def test_embeddings_are_hashed_before_their_request_is_on_the_engine_s_thread(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB take 72 ms, and every other request would wait. vLLM hashes them for its prefix cache there, too."""
    node, _ = pair
    core, request = node.core, core_request(PREFILL_ID, SEND)
    request.prompt_token_ids, request.prompt_embeds = None, torch.zeros(PROMPT, 8)
    made = core.preprocess_add_request(request)
    monkeypatch.setattr(requests, "Embeddings", None)
    core.add_request(*made)
    node.step_until(lambda: PREFILL_ID in node.transfer_params)
    assert node.transfer_params[PREFILL_ID]["do_remote_prefill"]


def test_an_adapter_that_was_loaded_anew_is_not_loaded_by_each_of_its_requests(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    """vLLM's API server goes on saying load_inplace, and its workers would read the files at every step."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"1" * 100)
    node, _ = pair
    side, adapter, found = node.side_of_engine, LoRARequest("a", 1, str(tmp_path), load_inplace=True), []

    def ask() -> None:
        request = core_request(f"cmpl-lora-0-{len(found)}aaaaaaa")
        request.lora_request = adapter
        node.enter(request)
        found.append(node.scheduler.requests[request.request_id].lora_request.load_inplace)

    def load() -> None:
        side.revocations.adapters_changed(1)
        side.read.adapter_arrives(adapter)
        side.read.adapters.loaded(1)

    ask()
    load()
    ask()
    # A program that writes another one there, and asks for it, means it.
    (tmp_path / "adapter_model.bin").write_bytes(b"2" * 101)
    ask()
    load()
    ask()
    side.revocations.adapters_changed(1)
    ask()
    assert found == [True, False, True, False, True] and adapter.load_inplace


ELSEWHERE = {
    "do_remote_prefill": True,
    "remote_engine_id": "elsewhere",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "remote_request_id": "another",
}


def kept(prefill: Node, decode: Node) -> Callable[[], None]:
    params = prefill.prefilled()

    def goes_on() -> None:
        local = decode.asked(params)
        decode.receives(local, prefill)

    return goes_on


def running(prefill: Node, decode: Node) -> Callable[[], None]:
    prefill.add(PREFILL_ID, None, 8)
    prefill.step()
    return lambda: prefill.step_until(lambda: prefill.ended.get(PREFILL_ID) == "length")


def session(prefill: Node, decode: Node) -> Callable[[], None]:
    prefill.add_input(0)
    until(lambda: prefill.step() and prefill.status(PREFILL_ID) == RequestStatus.WAITING_FOR_STREAMING_REQ)

    def goes_on() -> None:
        prefill.add_input(CHUNK)
        prefill.step_until(lambda: prefill.tokens(PREFILL_ID) >= 2 * CHUNK)
        # One prompt, as if it had come at once.
        assert prefill.holds(prefill.blocks(PREFILL_ID), end=2 * CHUNK)
        prefill.add_input(0, is_last=True)

    return goes_on


STATES = {"kept": kept, "running": running, "a session": session}


@pytest.mark.parametrize("state", list(STATES))
def test_a_request_under_another_one_s_id_is_nothing_to_that_one(state: str, pair: tuple[Node, Node]) -> None:
    """Row B1: two rejected requests of any client ended the engine. And API servers' ids may collide: one that vLLM has
    not rejected fails, and is told so by its own index."""
    prefill, decode = pair
    goes_on = STATES[state](prefill, decode)
    for params in (ELSEWHERE, {"do_remote_prefill": "yes"}, {"do_remote_prefill": True}):
        reject(prefill, PREFILL_ID, params)
    assert set(prefill.scheduler.requests) == {PREFILL_ID}
    prefill.enter(core_request(PREFILL_ID, client_index=3))
    assert prefill.scheduler.has_requests()
    told = step_and_tell(prefill)
    assert [(one.request_id, str(one.finish_reason)) for one in told[3].outputs] == [(PREFILL_ID, "error")]
    prefill.ended.pop(PREFILL_ID, None)
    goes_on()
    assert prefill.ended.get(PREFILL_ID, "length") == "length"
    prefill.rest(decode)


def step_and_tell(node: Node) -> dict[int, Any]:
    """One step, and what clients are told of it."""
    told: dict[int, Any] = {}
    real = node.scheduler.update_from_output

    def update_from_output(*args: Any) -> Any:
        told.update(real(*args))
        return dict(told)

    node.scheduler.update_from_output = update_from_output  # type: ignore[method-assign]
    node.step()
    del node.scheduler.update_from_output
    return told


# ----------------------------------------------------------------------------------------------- what is cached is told


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_look_up_is_answered_at_once_and_computes_nothing(is_paused: bool, pair: tuple[Node, Node]) -> None:
    """Of its salt and its adapter only, in whole blocks."""
    node, _ = pair
    size = node.geometry.block_size
    for name, tokens, adapter in (("plain", PROMPT, None), ("adapted", size + 1, LoRARequest("a", 1, "/a"))):
        request = core_request(name)
        request.prompt_token_ids, request.lora_request = prompt(0, tokens), adapter
        node.enter(request)
        node.step_until(lambda name=name: name in node.ended)  # type: ignore[misc]
    if is_paused:
        node.scheduler.set_pause_state(type(node.scheduler.pause_state).PAUSED_ALL)
    told = {}
    plain = {"whole": (None, "", PROMPT), "part": (None, "", size + 1), "short": (None, "", size)}
    adapter, another = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")
    others = {"salt": (None, "s", PROMPT), "adapter": (adapter, "", PROMPT), "another": (another, "", PROMPT)}
    for name, (*whose, tokens) in {**plain, **others}.items():
        # More than is cached is wanted.
        found = node.looked_up(prompt(0, tokens), PROMPT, *whose).result()
        told[name] = found[CACHED_TOKENS_KEY]
        assert found["remote_engine_id"] == node.side_of_engine.engine.own.engine_id and found[HAS_CLIENTS_KEY] is False
    cached = {
        "whole": (PROMPT - 1) // size * size,
        "part": size,
        "short": 0,
        "salt": 0,
        "adapter": size,
        "another": 0,
    }
    assert told == (dict.fromkeys(cached, 0) if is_paused else cached)
    assert not node.scheduler.requests and not node.scheduler.has_unfinished_requests() and node.all_free


def test_a_prompt_that_no_cache_may_serve_is_not_counted_as_missed(pair: tuple[Node, Node]) -> None:
    """vLLM's own counters of its external cache (vllm#57596)."""
    prefill, decode = pair
    for one in pair:
        one.scheduler.log_stats = one.scheduler.kv_cache_manager.log_stats = True
        one.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        one.scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
    for number, request_id in enumerate((DECODE_ID, "plain", "computed")):
        decode.add(request_id, None if number else prefill.prefilled(), first_token=number)
    decode.scheduler.requests["computed"].skip_reading_prefix_cache = True  # as with ``prompt_logprobs``
    counted = PrefixCacheStats()
    while decode.scheduler.requests:
        prefill.step()
        for outputs in step_and_tell(decode).values():
            if outputs.scheduler_stats is not None:
                found = outputs.scheduler_stats.connector_prefix_cache_stats
                counted.queries, counted.hits = counted.queries + found.queries, counted.hits + found.hits
    assert (counted.queries, counted.hits) == (2 * PROMPT, PROMPT)


# --------------------------------------------------------------------------------------- what prefill keeps is released


def test_what_prefill_keeps_for_a_rejected_request_is_free_at_once(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    reject(decode, DECODE_ID, prefill.prefilled())
    decode.step_until(lambda: PREFILL_ID in prefill.sent, prefill)
    assert prefill.all_free and not prefill.side_of_engine.offering.kept.num_kept
    prefill.serves(decode)


@pytest.mark.skipif(not hasattr(EngineCoreProc, "_reject_add_while_paused"), reason="since 0.33")
@pytest.mark.parametrize("is_of_server", [False, True], ids=["engine", "API server, too"])
def test_what_a_paused_engine_rejects_is_served_by_another(node: Callable[..., Node], is_of_server: bool) -> None:
    """It says that the client may try again. The API server takes that for a rejection, and sends a stand-in."""
    prefill, paused, other = node(PREFILL_FILLING), node(DECODE_FILLING), node(DECODE_FILLING)
    params, told = prefill.prefilled(), list[Any]()
    vars(paused.core).update(
        reject_new_requests=True, _send_finish_outputs_to_client=lambda *said: told.append(said[3].retryable)
    )
    request, _ = paused.core.preprocess_add_request(core_request(DECODE_ID, params))
    assert EngineCoreProc._reject_add_while_paused(paused.core, request) and told == [True]
    if is_of_server:
        reject(paused, DECODE_ID, params)
    for _ in range(20):
        paused.step()
        prefill.step()
        time.sleep(0.01)
    assert prefill.side_of_engine.offering.kept.num_kept and not paused.scheduler.requests
    other.asked(params)
    other.step_until(lambda: DECODE_ID in other.ended, prefill)
    assert other.ended[DECODE_ID] == "length"


# ------------------------------------------------------------------------------------------------ sessions are no offer


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_session_is_neither_offered_nor_fetched(policy: str, node: Callable[..., Node]) -> None:
    """Row A9: its request is finished under its last chunk's parameters, with blocks that hold all of them."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy)
    # Of its first chunk: the offer of another prompt is not released.
    params = prefill.prefilled("cmpl-p-0-aaaaaaaa", num_tokens=CHUNK)
    for one, role in ((prefill, {**SEND, **NAME}), (decode, params)):
        for first_token in (0, CHUNK):
            one.add_input(first_token, params=role)
            until(lambda one=one: one.step() and one.status(PREFILL_ID) == RequestStatus.WAITING_FOR_STREAMING_REQ)  # type: ignore[misc]
            assert one.tokens(PREFILL_ID) >= first_token + CHUNK
        assert one.holds(one.blocks(PREFILL_ID), end=2 * CHUNK)
        one.add_input(0, is_last=True, params=role)
        until(lambda one=one: one.step() and PREFILL_ID not in one.scheduler.requests)  # type: ignore[misc]
        assert PREFILL_ID not in one.transfer_params and PREFILL_ID not in one.sent
    assert decode.log.text.count("streaming session (resumable)") == 2
    decode.step_until(lambda: "cmpl-p-0-aaaaaaaa" in prefill.sent, prefill)
    prefill.rest(decode)
    decode.computes_alone()


def test_a_grammar_is_awaited_for_as_long_as_vllm_does(pair: tuple[Node, Node]) -> None:
    """vLLM's scheduler begins a request when it finds a ``grammar``; reading that waits for it below 0.33."""
    node, compiled = pair[0], Future[Any]()
    node.add(PREFILL_ID, None, 1)
    request = node.scheduler.requests[PREFILL_ID]
    view = node.side_of_engine.read(request)
    assert not view.awaits_grammar
    request.structured_output_request = found = StructuredOutputRequest(StructuredOutputsParams(json="{}"))
    assert view.awaits_grammar and found.grammar is None
    found.grammar = compiled
    assert view.awaits_grammar and found.grammar is None
    compiled.set_result(object())
    assert not view.awaits_grammar and found.grammar is not None
