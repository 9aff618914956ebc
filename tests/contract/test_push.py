# SPDX-License-Identifier: Apache-2.0
"""What only a push has, on the installed vLLM: decode may ask first, and prefill writes while it still computes."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from support.nodes import CHUNK, DECODE_FILLING, DECODE_ID, NAME, PREFILL_FILLING, PREFILL_ID, SEND, Node
from support.waiting import until
from vllm import envs
from vllm.v1.request import RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvcached_nixl.scheduler.kept_offers import KeptOffers


@pytest.fixture
def direction() -> str:
    return "push"


# ----------------------------------------------------------------------------------------------- while prefill computes


def test_what_a_step_that_raises_was_to_compute_is_not_written(node: Callable[..., Node]) -> None:
    """vLLM's own code around a model: it calls ``wait_for_save`` in a ``finally``, even if the model has raised."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy="fail")
    local = decode.registered(prefill)
    (writing,) = prefill.write_tasks.values()
    until(lambda: writing.known)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    output = prefill.scheduler.schedule()
    with (
        mock.patch.object(mixin, "get_kv_transfer_group", lambda: prefill.engine.worker),
        mock.patch.object(mixin, "get_forward_context", lambda: None),
        pytest.raises(MemoryError, match="planted"),
        mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output),
    ):
        raise MemoryError("planted")
    prefill.settle()
    assert writing.offer is not None and not writing.next_token, "no WRITE was made"
    assert decode.are_filled(local, DECODE_FILLING) and decode.waits(DECODE_ID)
    prefill.abort(PREFILL_ID)
    decode.ends_by("fail", prefill)


@pytest.mark.parametrize("check", ["--all2all-backend nixl_ep", "VLLM_RAISE_ON_LOGIT_NANS"])
def test_what_a_step_has_computed_is_not_written_while_vllm_may_refuse_its_output(
    check: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """An expert-parallel peer has died, or logits are NaN: vLLM finds out after ``wait_for_save``."""
    of_backend = {"all2all_backend": "nixl_ep"} if "nixl_ep" in check else {}
    if not of_backend and not hasattr(envs, check):
        pytest.skip("this vLLM does not look for NaN")
    monkeypatch.setenv("VLLM_RAISE_ON_LOGIT_NANS", str(int(not of_backend)))
    prefill, decode = node(PREFILL_FILLING, **of_backend), node(DECODE_FILLING, policy="fail")
    assert f"with {check} vLLM may refuse" in log.text
    local = decode.registered(prefill)
    (writing,) = prefill.write_tasks.values()
    until(lambda: writing.known)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    output = prefill.scheduler.schedule()
    saved = prefill.run(output)
    prefill.settle()
    assert not writing.next_token and decode.are_filled(local, DECODE_FILLING) and decode.waits(DECODE_ID)
    prefill.take(output, saved)
    decode.step_until(lambda: DECODE_ID in decode.received, prefill)
    assert decode.holds(local)


# --------------------------------------------------------------------------------------------------------- preemption


def test_a_reset_of_the_prefix_cache_revokes_what_is_under_way_and_is_an_error_while_blocks_are_held(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding B12: KV in flight would enter a cache that was cleared. Here no loop waits until it is idle."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local, gate = decode.registered(prefill), prefill.hold_transfers(monkeypatch)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    until(lambda: gate.kept)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    gate.closed = False
    decode.step_until(lambda: DECODE_ID in decode.ended and PREFILL_ID in prefill.ended, prefill)
    assert decode.ended[DECODE_ID] == "error" and PREFILL_ID not in prefill.transfer_params
    assert not decode.holds(local)
    prefill.rest(decode)
    for one in (prefill, decode):
        assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.serves(decode, 8)


# ------------------------------------------------------------------------------------------------ what prefill says


@pytest.mark.parametrize("ends", ["decode registers", "decode has taken the rest", "aborted"])
def test_vllm_asks_again_until_a_prompt_may_begin(ends: str, node: Callable[..., Node]) -> None:
    """Decode leaves KV waiting, so prefill computes only what decode has blocks for. The engine rests meanwhile."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    other = "cmpl-o-0-oooooooo"
    decode.add(other, {**prefill.address(), "transfer_id": "t0"}, first_token=500)
    decode.step()
    until(lambda: prefill.write_tasks)
    leaves = mock.PropertyMock(return_value=True)
    with mock.patch.object(KeptOffers, "is_left_waiting", leaves):
        prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
        plain = "cmpl-n-0-nnnnnnnn"
        prefill.add(plain, None, 1, 900)
        prefill.step_until(lambda: plain in prefill.ended)
        prefill.step()
        prefill.settle()
        prefill.step()
        assert prefill.status(PREFILL_ID) is RequestStatus.WAITING and not prefill.tokens(PREFILL_ID)
        blocks = prefill.side_of_engine.engine.blocks
        assert blocks.starved is None and not blocks.stalled and not prefill.wakes
        if ends == "decode has taken the rest":
            leaves.return_value = False
        if ends == "aborted":
            prefill.abort(PREFILL_ID)
        else:
            decode.add(DECODE_ID, {**prefill.address(), **NAME})
            decode.step_until(lambda: DECODE_ID in decode.received, prefill)
            assert decode.holds(decode.blocks(DECODE_ID))
    decode.abort(other)
    prefill.rest(decode)
