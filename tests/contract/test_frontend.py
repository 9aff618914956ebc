# SPDX-License-Identifier: Apache-2.0
"""The start and the end of a request, through vLLM's own ``InputProcessor`` and ``OutputProcessor``."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

import httpx
import msgspec
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from support.patches import applied, first_bound
from vllm.entrypoints.serve.elastic_ep.middleware import ScalingMiddleware
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvcached_nixl.patching import Call, Registry
from kvcached_nixl.vllm.patches import frontend, leaving, patches_in

ERROR_RESPONSES = (
    "vllm.entrypoints.serve.exception_handling.error_response",
    "vllm.entrypoints.serve.utils.error_response",
)


@pytest.fixture(autouse=True)
def patched() -> Iterator[Registry]:
    with applied((*patches_in(frontend), *patches_in(leaving))) as registry:
        yield registry


def request_of(kind: RequestOutputKind, request_id: str = "inner", **more: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {"external_req_id": "cmpl-outer", "cache_salt": None, "data_parallel_rank": None, **more}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(output_kind=kind, detokenize=False),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        **fields,
    )


def left_for_the_client(
    kind: RequestOutputKind,
    reason: FinishReason,
    *token_ids: int,
    stop_reason: str | None = None,
    of: OutputProcessor | None = None,
    **more: Any,
) -> Any:
    """What is in the queue of a request of that kind after these tokens, one a step, and an end for that reason."""
    processor = of or OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(kind, "inner")
    processor.add_request(request_of(kind, **more), None, queue=queue)
    for token_id in token_ids:
        processor.process_outputs([EngineCoreOutput("inner", [token_id])])
    processor.process_outputs([EngineCoreOutput("inner", [], finish_reason=reason, stop_reason=stop_reason)])
    assert not processor.request_states
    return queue.output


def is_failure(left: object) -> bool:
    """What `AsyncLLM.generate` raises from it is the error that vLLM's endpoints answer with 500."""
    return isinstance(left, InputStreamError) and isinstance(left.cause, frontend.generation_error())


@pytest.mark.parametrize("token_ids", [(), (4, 5)])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_whoever_waits_for_a_request_that_fails_gets_an_error(
    kind: RequestOutputKind, token_ids: tuple[int, ...]
) -> None:
    """However its output is asked for, and behind tokens, too; no endpoint has to look by itself."""
    assert is_failure(left_for_the_client(kind, FinishReason.ERROR, *token_ids))
    told = "KV hand-over failed: cause=lease attempt=7 request=inner prefill_request=p"
    left = left_for_the_client(kind, FinishReason.ERROR, *token_ids, stop_reason=told)
    assert is_failure(left) and str(left.cause) == told, "in the words of the engine's log"
    left = left_for_the_client(kind, FinishReason.ERROR, *token_ids, stop_reason="END")
    assert is_failure(left) and "END" not in str(left.cause), "a stop string of another choice"


REFUSED = "KV hand-over failed: cause=queue_timeout retry_after=7 request=inner"


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_of_several_choices_the_first_one_says_why(kind: RequestOutputKind, steps: int) -> None:
    """In one step or two: a client that asks for two choices is told as much as one that asks for one."""
    processor, queue = OutputProcessor(None, log_stats=False), RequestOutputCollector(kind, "inner")
    whole = request_of(kind)
    whole.sampling_params.n = 2
    parent = ParentRequest(whole)
    names = [parent.get_child_info(index)[0] for index in range(2)]
    for index, name in enumerate(names):
        one = request_of(kind, name)
        processor.add_request(one, None, parent, index, queue)
    ends = [EngineCoreOutput(one, [], finish_reason=FinishReason.ERROR, stop_reason=REFUSED) for one in names]
    for some in [ends] if steps == 1 else [[one] for one in ends]:
        processor.process_outputs(some)
    assert is_failure(queue.output) and str(queue.output.cause) == REFUSED


def of_a_refused_request(path: str, *, is_limited: bool = True) -> httpx.Response:
    """What vLLM answers at an endpoint of its own kind, through its own middleware and conversion of errors."""
    kind = frontend.generation_error()
    make = first_bound(ERROR_RESPONSES, "create_error_response")
    left = left_for_the_client(RequestOutputKind.DELTA, FinishReason.ERROR, stop_reason=REFUSED).cause
    app = FastAPI()
    extra = {"connectors": [{"kv_connector_extra_config": {"queue_timeout": 30} if is_limited else {}}]}
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    app.state.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))
    app.add_middleware(ScalingMiddleware)

    @app.exception_handler(kind)
    async def convert(_: Any, error: Any) -> JSONResponse:
        return JSONResponse(make(error).model_dump(), status_code=make(error).error.code)

    @app.post("/plain")
    async def plain() -> None:
        raise left

    @app.post("/streamed")
    async def streamed(after: int = 0) -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            for place in range(after):
                yield f'data: {{"id": {place}}}\n\n'
            yield f"data: {make(left).model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    with TestClient(app) as http:
        return http.post(path)


@pytest.mark.parametrize("path", ["/plain", "/streamed"])
def test_a_request_that_its_engine_refuses_is_told_when_to_try_again(path: str) -> None:
    """A load balancer may send it elsewhere: nothing of the answer has begun."""
    answer = of_a_refused_request(path)
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "7"
    error = answer.json()["error"]
    assert error["message"] == REFUSED and error["code"] == 503


def test_an_answer_that_has_begun_ends_with_an_error_of_that_code() -> None:
    answer = of_a_refused_request("/streamed?after=2")
    assert answer.status_code == 200 and "Retry-After" not in answer.headers
    *begun, error, done = answer.text.split("\n\n")[:-1]
    assert len(begun) == 2 and done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503


def test_where_nothing_is_refused_no_answer_is_held_back() -> None:
    assert of_a_refused_request("/streamed", is_limited=False).status_code == 200


@pytest.mark.parametrize("token_ids", [(), (4, 5)])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_what_an_engine_aborts_where_the_client_would_not_see_it_is_an_error(
    kind: RequestOutputKind, token_ids: tuple[int, ...]
) -> None:
    """``/v1/responses`` calls it "completed", with the text that there is; a chat with a tool call "tool_calls"."""
    left = left_for_the_client(kind, FinishReason.ABORT, *token_ids, external_req_id="resp_1")
    assert is_failure(left) and "aborted" in str(left.cause)
    processor = OutputProcessor(None, log_stats=False)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    client = SimpleNamespace(vllm_config=config, output_processor=processor, output_handler=None)
    leaving.shut_down(Call(lambda timeout: None, client, (0.0,), {}))
    left = left_for_the_client(kind, FinishReason.ABORT, *token_ids, of=processor)
    assert is_failure(left) and "aborted" in str(left.cause), "the server is being shut down"


def test_what_a_client_aborts_is_no_error() -> None:
    """Nobody waits for it, but a program may."""
    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "inner")
    processor.add_request(request_of(RequestOutputKind.FINAL_ONLY, external_req_id="resp_1"), None, queue=queue)
    processor.abort_requests(["inner"], internal=True)
    assert queue.output.finished and queue.output.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_of_several_choices_one_that_fails_fails_all(kind: RequestOutputKind) -> None:
    """They have one queue. What the others bring later does not take the error's place."""
    processor = OutputProcessor(None, log_stats=False)
    whole = request_of(kind, "whole")
    whole.sampling_params.n = 2
    parent, queue = ParentRequest(whole), RequestOutputCollector(kind, "whole")
    for index in range(2):
        request_id, params = parent.get_child_info(index)
        child = request_of(kind, request_id)
        child.sampling_params = params
        processor.add_request(child, None, parent, index, queue)
    first, second = list(processor.request_states)
    processor.process_outputs([EngineCoreOutput(first, [], finish_reason=FinishReason.ERROR)])
    processor.process_outputs([EngineCoreOutput(second, [4], finish_reason=FinishReason.LENGTH)])
    assert is_failure(queue.output) and not processor.request_states


def test_an_engine_in_its_client_s_process_says_so_in_its_output() -> None:
    """``LLM`` has no queue. An exception would lose the outputs of all other prompts."""
    processor = OutputProcessor(None, log_stats=False)
    processor.add_request(request_of(RequestOutputKind.FINAL_ONLY), None)
    told = processor.process_outputs([EngineCoreOutput("inner", [], finish_reason=FinishReason.ERROR)])
    (output,) = told.request_outputs
    assert output.finished and output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_without_this_package_it_is_an_output_without_tokens(kind: RequestOutputKind, patched: Registry) -> None:
    """What the cases above would not see if vLLM came to say it itself."""
    patched.uninstall()
    left = left_for_the_client(kind, FinishReason.ERROR)
    assert left.finished and left.outputs[0].finish_reason == "error" and not left.outputs[0].token_ids


def test_what_cannot_be_told_ends_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``process_outputs`` raises ends the API server."""

    def put(_: object, output: object) -> None:
        if isinstance(output, Exception):
            raise AttributeError("put")
        real(_, output)

    real = RequestOutputCollector.put
    monkeypatch.setattr(RequestOutputCollector, "put", put)
    left = left_for_the_client(RequestOutputKind.DELTA, FinishReason.ERROR)
    assert left.finished and left.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(
    ("reason", "token_ids"), [(FinishReason.LENGTH, (4, 5)), (FinishReason.STOP, (4,)), (FinishReason.ABORT, ())]
)
def test_any_other_end_is_vllm_s_own(kind: RequestOutputKind, reason: FinishReason, token_ids: tuple[int, ...]) -> None:
    """With every token."""
    left = left_for_the_client(kind, reason, *token_ids)
    assert left.finished and left.outputs[0].finish_reason == str(reason)
    assert list(left.outputs[0].token_ids) == list(token_ids)


WRONG: dict[str, tuple[Any, ...]] = {
    "priority": ("high", "0", 0.5, None, [1], 2**63, -(2**70)),
    "cache_salt": (7, ["x"], b"x"),
    "data_parallel_rank": ("0", 1.5),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_what_an_engine_could_not_read_is_refused_by_its_name(name: str, value: object) -> None:
    """It ends the thread of vLLM's engine that reads requests, and not every endpoint checks every field."""
    request = request_of(RequestOutputKind.FINAL_ONLY, external_req_id=None, **{name: value})
    with pytest.raises(VLLMValidationError, match=name):
        InputProcessor.assign_request_id(request)


@pytest.mark.parametrize("value", ["high", 0.5, None])
def test_an_engine_cannot_read_what_is_refused(value: object) -> None:
    """As its input thread decodes it, outside of any ``try``."""
    request = request_of(RequestOutputKind.FINAL_ONLY, priority=value)
    with pytest.raises(msgspec.ValidationError):
        MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))


UNSENDABLE: list[Any] = [2**70, "\ud800", {"a": ["\udfff"]}]


@pytest.mark.parametrize("value", UNSENDABLE, ids=repr)
def test_what_cannot_be_sent_to_an_engine_is_refused_before_anything_is_kept_of_it(value: object) -> None:
    """vLLM notices when it has noted the request among those that run."""
    request = request_of(RequestOutputKind.FINAL_ONLY, external_req_id=None)
    request.sampling_params.extra_args = {"kv_transfer_params": {"remote_port": value}}
    with pytest.raises(VLLMValidationError, match="kv_transfer_params"):
        InputProcessor.assign_request_id(request)
    with pytest.raises((OverflowError, UnicodeError)):
        MsgpackEncoder().encode(request)


@pytest.mark.parametrize("field", ["stop_token_ids", "bad_words"])
def test_neither_is_any_other_field_that_cannot_be_sent(field: str) -> None:
    request = request_of(RequestOutputKind.FINAL_ONLY, external_req_id=None)
    setattr(request.sampling_params, field, [2**64] if field == "stop_token_ids" else ["\ud800"])
    with pytest.raises(VLLMValidationError, match="another field"):
        InputProcessor.assign_request_id(request)
    with pytest.raises((OverflowError, UnicodeError)):
        MsgpackEncoder().encode(request)


@pytest.mark.parametrize("value", [{"remote_port": 1}, None, object()], ids=["a mapping", "nothing", "a thing"])
def test_what_a_program_hands_on_is_left_to_vllm(value: object) -> None:
    request = request_of(RequestOutputKind.FINAL_ONLY, external_req_id=None)
    request.sampling_params.extra_args = {"kv_transfer_params": value}
    InputProcessor.assign_request_id(request)
    assert request.external_req_id == "inner"


def test_what_it_can_read_gets_its_id() -> None:
    request = request_of(RequestOutputKind.FINAL_ONLY, external_req_id=None, priority=-(2**63), cache_salt="s")
    InputProcessor.assign_request_id(request)
    assert request.external_req_id == "inner" and request.request_id != "inner"


@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True}])
def test_nothing_of_this_package_runs_for_each_output(params: object) -> None:
    """With a thousand streams, a wrapper around each output keeps a tenth of the API server's core busy."""
    processor = OutputProcessor(None, log_stats=False)
    request = request_of(RequestOutputKind.DELTA)
    request.sampling_params.extra_args = {"kv_transfer_params": params}
    processor.add_request(request, None, queue=RequestOutputCollector(RequestOutputKind.DELTA, "inner"))
    processor.process_outputs([EngineCoreOutput("inner", [4])])
    ran: set[str] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        ran.add(frame.f_globals["__name__"])

    sys.setprofile(note)
    try:
        processor.process_outputs([EngineCoreOutput("inner", [5])])
    finally:
        sys.setprofile(None)
    assert not [name for name in ran if name.startswith("kvcached_nixl")]
    assert "vllm.v1.engine.output_processor" in ran
