# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.arrival`: which request is accepted under which id, and where prefill stops that keeps states."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.clocks import ManualClock
from support.engine_fakes import Pool, context, with_states

from kvcached_nixl.patching import Call
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.scheduler.facade import SchedulerFacade
from kvcached_nixl.vllm.adapter.requests import RequestView
from kvcached_nixl.vllm.patches import arrival
from kvcached_nixl.vllm.patches.arrival import Arrival, add_request, arrival_of, stop_before_last


def of(name: str = "r", *, client: int = 0, ended: bool = False, session: bool = False, **more: Any) -> SimpleNamespace:
    queue = [] if session else None
    fields = {"request_id": name, "client_index": client, "streaming_queue": queue, "abort_immediately": False, **more}
    return SimpleNamespace(is_finished=lambda: ended, **fields)


@pytest.mark.parametrize(
    ("existing", "comes", "expected"),
    [
        (None, of(), Arrival.FIRST),
        (of("another"), of(), Arrival.FIRST),
        (of(), of(), Arrival.REPEATED),
        (of(ended=True), of(), Arrival.REPEATED),
        (of(session=True), of(), Arrival.MORE),
        (of(session=True), of(client=1), Arrival.REPEATED),
        (of(session=True, ended=True), of(), Arrival.REPEATED),
        (of(session=True), of(abort_immediately=True), Arrival.REPEATED),
        (of(ended=True), of(abort_immediately=True), Arrival.REPEATED),
    ],
)
def test_only_a_session_goes_on_under_its_id(existing: Any, comes: Any, expected: Arrival) -> None:
    """What has ended counts while its blocks are kept."""
    scheduler = SimpleNamespace(requests={} if existing is None else {existing.request_id: existing})
    assert arrival_of(scheduler, comes) is expected


@pytest.mark.parametrize(
    "params", [[], "do_remote_prefill", 7, [["do_remote_prefill", True]], {"do_remote_prefill": True}]
)
def test_parameters_that_are_no_mapping_are_dropped(params: Any) -> None:
    """Before vLLM's scheduler reads them: from 0.32 on an error there ends the engine."""
    asked = SimpleNamespace(request_id="r", kv_transfer_params=params)
    taken: list[object] = []
    scheduler = SimpleNamespace(requests={}, connector=None)
    add_request.wrapper(Call(lambda request: taken.append(request.kv_transfer_params), scheduler, (asked,), {}))
    assert taken == [params if isinstance(params, dict) else None]


SEND = {"do_remote_decode": True, "transfer_id": "t"}


class Sampling(msgspec.Struct):
    extra_args: dict[str, Any] | None = None
    max_tokens: int | None = 100
    min_tokens: int = 3
    all_stop_token_ids: set[int] = set()
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None


class CoreRequest(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    mm_features: list[Any] | None = None
    sampling_params: Sampling | None = None
    resumable: bool = False
    abort_immediately: bool = False
    lora_request: Any = None


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


def test_what_the_client_holds_is_left_alone() -> None:
    """Where the engine runs in its client's process, several requests may share these objects."""
    request = asked()
    tokens, sampling = request.prompt_token_ids, request.sampling_params
    assert tokens is not None and sampling is not None
    stop_before_last(request)
    assert len(tokens) == 5 and sampling.max_tokens == 100
    assert sampling.extra_args == {"kv_transfer_params": SEND, "other": 1}


@pytest.mark.parametrize(
    ("servers", "accepts_params", "is_producer", "length"),
    [
        (("http://p",), False, False, 5),
        (("http://p",), True, False, 4),
        (("http://p",), False, True, 4),
        ((), True, False, 4),
        ((), False, False, 5),
    ],
)
def test_a_server_that_offers_nothing_computes_the_whole_prompt(
    servers: tuple[str, ...], accepts_params: bool, is_producer: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a decode server says do_remote_decode: it would get one token, of a prompt without its last one."""
    asks = AskSettings(servers, accepts_params=accepts_params)
    side = SchedulerFacade(context(Pool(), ManualClock(), groups=with_states(), is_producer=is_producer), asks)
    monkeypatch.setattr(arrival, "bound_sides", lambda _: iter([side]))
    for name in ("align_chunks", "draft_behind_prompts", "identify_if_due"):
        monkeypatch.setattr(arrival, name, lambda _: None)

    def preprocess_add_request(request: CoreRequest) -> tuple[Any, int]:
        return SimpleNamespace(kv_transfer_params=None), 0

    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 1000))
    core = SimpleNamespace(scheduler=SimpleNamespace(), vllm_config=config)
    signature, request = inspect.signature(preprocess_add_request), asked()
    arrival.preprocess_add_request.wrapper(Call(preprocess_add_request, core, (request,), {}, signature))
    side.close()
    assert len(request.prompt_token_ids or ()) == length
    assert request.sampling_params is not None and request.sampling_params.max_tokens == (100 if length == 5 else 1)


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


def test_a_client_cannot_claim_that_a_prompt_is_cut() -> None:
    """Its mark is overwritten; and a request without one did not come the usual way."""
    forged = {**SEND, "_kvcached_nixl_whole_because": ""}
    request = asked(forged, num_tokens=1)
    stop_before_last(request)
    assert whole_because(params_of(request)) != ""
    assert whole_because(SEND) != ""


def whole_because(params: Any) -> str:
    """As prefill's scheduler sees it."""
    names = ("resumable", "abort_immediately", "skip_reading_prefix_cache", "lora_request", "trace_headers")
    made = SimpleNamespace(request_id="r", kv_transfer_params=params, **dict.fromkeys(names))
    return RequestView(made, None).whole_because  # type: ignore[arg-type]
