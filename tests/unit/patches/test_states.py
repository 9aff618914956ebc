# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.arrival` with states: where prefill stops, with stand-ins for what enters vLLM's engine."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvcached_nixl.patching import Call
from kvcached_nixl.vllm.adapter.requests import RequestView
from kvcached_nixl.vllm.patches.arrival import draft_behind_prompts, stop_before_last
from kvcached_nixl.vllm.patches.connector import config_without_states, make_nixl_worker, zero_first

SEND = {"do_remote_decode": True, "transfer_id": "t"}


class Sampling(msgspec.Struct):
    extra_args: dict[str, Any] | None = None
    max_tokens: int | None = 100
    min_tokens: int = 3
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None


class CoreRequest(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    mm_features: list[Any] | None = None
    sampling_params: Sampling | None = None
    resumable: bool = False


def asked(params: Any = SEND, num_tokens: int = 5, **changed: Any) -> CoreRequest:
    names = [name for name in changed if name.startswith("prompt_logprob")]
    sampling = Sampling({"kv_transfer_params": params, "other": 1}, **{name: changed.pop(name) for name in names})
    return msgspec.structs.replace(CoreRequest(list(range(num_tokens)), sampling_params=sampling), **changed)


def media(offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))


def params_of(request: CoreRequest) -> dict[str, Any]:
    assert request.sampling_params is not None and request.sampling_params.extra_args is not None
    found: dict[str, Any] = request.sampling_params.extra_args["kv_transfer_params"]
    return found


def test_prefill_computes_all_tokens_but_the_last_and_one_of_an_answer() -> None:
    request = asked(prompt_is_token_ids=[True] * 5, prompt_embeds=range(5), mm_features=[media(0, 4)])
    stop_before_last(request)
    assert (request.prompt_token_ids, request.prompt_is_token_ids) == ([0, 1, 2, 3], [True] * 4)
    assert list(request.prompt_embeds) == [0, 1, 2, 3]
    assert request.sampling_params is not None
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (1, 0)
    assert whole_because(params_of(request)) == "" and params_of(request).items() >= SEND.items()
    assert request.sampling_params.extra_args is not None and request.sampling_params.extra_args["other"] == 1


def test_what_the_client_holds_is_left_alone() -> None:
    """Where the engine runs in its client's process, several requests may share these objects."""
    request = asked()
    tokens, sampling = request.prompt_token_ids, request.sampling_params
    assert tokens is not None and sampling is not None
    stop_before_last(request)
    assert len(tokens) == 5 and sampling.max_tokens == 100
    assert sampling.extra_args == {"kv_transfer_params": SEND, "other": 1}


def test_embeddings_alone_are_cut_as_well() -> None:
    request = asked(prompt_token_ids=None, prompt_embeds=range(7))
    stop_before_last(request)
    assert list(request.prompt_embeds) == list(range(6)) and request.prompt_token_ids is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_tokens": 1}, "1 tokens"),
        ({"num_tokens": 2}, "2 tokens"),
        ({"prompt_logprobs": 0}, "log-probabilities"),
        ({"prompt_logprob_token_ids": [[7]] * 5}, "log-probabilities"),
        ({"mm_features": [media(0, 2), media(3, 2)]}, "an image"),
    ],
)
def test_some_prompts_stay_whole_and_it_is_said_why(changed: dict[str, Any], words: str) -> None:
    request = asked(**changed)
    before = list(request.prompt_token_ids or ())
    stop_before_last(request)
    assert request.prompt_token_ids == before
    assert request.sampling_params is not None and request.sampling_params.max_tokens == 100
    assert words in whole_because(params_of(request))


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        [],
        "x",
        {"do_remote_prefill": True},
        {"do_remote_decode": False},
        {"do_remote_decode": 1},
        {"do_remote_decode": True, "do_remote_prefill": 1},
    ],
)
def test_other_requests_are_not_changed(params: Any) -> None:
    """Of a value that is not a boolean, and of both roles, the scheduler says that they are wrong."""
    request, before = asked(params), asked(params)
    stop_before_last(request)
    assert request == before
    for other in (CoreRequest([1, 2]), asked(resumable=True), CoreRequest([1, 2], sampling_params=Sampling())):
        before = msgspec.structs.replace(other)
        stop_before_last(other)
        assert other == before


@pytest.mark.parametrize(
    ("num_drafts", "before", "after"), [(2, None, [2, 2, 2, 2]), (2, [2, 1, 0, 0], [2, 1, 0, 0]), (0, None, None)]
)
def test_the_number_of_drafts_is_looked_up_so_that_vllm_does_not_pad(num_drafts: int, before: Any, after: Any) -> None:
    scheduler = SimpleNamespace(num_spec_tokens=num_drafts, dynamic_sd_lookup=before, max_num_running_reqs=3)
    draft_behind_prompts(scheduler)
    assert scheduler.dynamic_sd_lookup == after


def test_a_client_cannot_claim_that_a_prompt_is_cut() -> None:
    """Its mark is overwritten; and a request without one did not come the usual way."""
    forged = {**SEND, "_kvcached_nixl_whole_because": ""}
    request = asked(forged, num_tokens=1)
    stop_before_last(request)
    assert whole_because(params_of(request)) != ""
    assert whole_because(SEND) != ""


def whole_because(params: Any) -> str:
    """As prefill's scheduler sees it."""
    return RequestView(SimpleNamespace(kv_transfer_params=params), None).whole_because  # type: ignore[arg-type]


class MambaSpec:
    pass


@dataclasses.dataclass
class CacheConfig:
    kv_cache_groups: list[Any]
    num_blocks: int = 7

    @functools.cached_property
    def num_groups(self) -> int:
        return len(self.kv_cache_groups)


def test_vllms_own_worker_does_not_see_states() -> None:
    attention, state = SimpleNamespace(kv_cache_spec="full"), SimpleNamespace(kv_cache_spec=MambaSpec())
    whole = CacheConfig([state, attention])
    assert whole.num_groups == 2
    found = config_without_states(whole)
    assert found.kv_cache_groups == [attention] and (found.num_blocks, found.num_groups) == (7, 1)
    assert whole.kv_cache_groups == [state, attention]
    seen, worker = [], SimpleNamespace(kv_cache_config=found)
    make_nixl_worker(Call(lambda kv_cache_config: seen.append(kv_cache_config), worker, (whole,), {}))
    assert seen == [found] and worker.kv_cache_config is whole
    plain = CacheConfig([attention])
    assert config_without_states(plain) is plain


def test_blocks_to_zero_are_added_to_vllms_own() -> None:
    output = SimpleNamespace(new_block_ids_to_zero=[5, 7])
    zero_first(output, [7, 9])
    assert output.new_block_ids_to_zero == [5, 7, 9]
    output = SimpleNamespace(new_block_ids_to_zero=None)
    zero_first(output, [])
    assert output.new_block_ids_to_zero is None
    zero_first(output, [3])
    assert output.new_block_ids_to_zero == [3]
