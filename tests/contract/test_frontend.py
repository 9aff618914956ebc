# SPDX-License-Identifier: Apache-2.0
"""The start and the end of a request, through vLLM's own ``InputProcessor`` and ``OutputProcessor``."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.nodes import core_request
from support.patches import applied
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM, InputStreamError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

from kvcached_nixl.patching import Call, Registry
from kvcached_nixl.vllm.adapter.versions import HASHES_AHEAD, installed_has
from kvcached_nixl.vllm.patches import admission, frontend, leaving, patches_in
from kvcached_nixl.vllm.patches.admission import ARRIVED, Arrived, RefusableAnswer, Role


@pytest.fixture(autouse=True)
def patched() -> Iterator[Registry]:
    with applied((*patches_in(frontend), *patches_in(leaving), *patches_in(admission))) as registry:
        yield registry


def request_of(kind: RequestOutputKind, request_id: str = "inner", **more: Any) -> EngineCoreRequest:
    sampling = SamplingParams(output_kind=kind, detokenize=False)
    fields: dict[str, Any] = {"external_req_id": "cmpl-outer", "sampling_params": sampling, **more}
    return core_request(request_id, prompt_token_ids=[1, 2, 3], **fields)


class Core:
    """In place of vLLM's client of the engine's process: it encodes what it is to send, as that does."""

    num_sent = 0

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        MsgpackEncoder().encode(request)
        self.num_sent += 1

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """The engine has none."""

    def shutdown(self, timeout: float | None = None) -> None:
        """When its owner is collected."""


def give(
    processor: OutputProcessor,
    request: EngineCoreRequest,
    queue: RequestOutputCollector,
    parent: ParentRequest | None = None,
    arrived: Arrived | None = None,
) -> int:
    """As vLLM's client of the engine does, for that HTTP request, or for none. Returns how many the engine gets."""
    client: Any = object.__new__(AsyncLLM)
    core = Core()
    vars(client).update(output_processor=processor, engine_core=core, log_requests=False)
    client.check_admission = lambda **_: None

    async def in_its_task() -> None:
        ARRIVED.set(arrived)
        await client._add_request(request, None, parent, 0, queue)

    asyncio.run(in_its_task())
    return core.num_sent


def left_for_the_client(
    kind: RequestOutputKind,
    reason: FinishReason,
    *token_ids: int,
    stop_reason: str | None = None,
    of: OutputProcessor | None = None,
    path: str = "",
    arrived: Arrived | None = None,
    **more: Any,
) -> Any:
    """What is in the queue of a request of that kind after these tokens, one a step, and an end for that reason."""
    processor = of or OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(kind, "inner")
    give(processor, request_of(kind, **more), queue, arrived=Arrived(path, Role.BOTH) if path else arrived)
    for token_id in token_ids:
        processor.process_outputs([EngineCoreOutput("inner", [token_id])])
    processor.process_outputs([EngineCoreOutput("inner", [], finish_reason=reason, stop_reason=stop_reason)])
    assert not processor.request_states
    return queue.output


def is_failure(left: object) -> bool:
    """What `AsyncLLM.generate` raises from it is the error that vLLM's endpoints answer with 500."""
    return isinstance(left, InputStreamError) and isinstance(left.cause, admission.generation_error())


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


SAY_ABORT = ("/v1/completions", "/v1/chat/completions", "/behind/v1/completions", "/inference/v1/generate", "")
HIDE_ABORT = ("/v1/responses", "/v1/messages", "/v1/audio/transcriptions", "/cohere/v2/chat")


@pytest.mark.parametrize("token_ids", [(), (4, 5)])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_what_an_engine_aborts_where_the_client_would_not_see_it_is_an_error(
    kind: RequestOutputKind, token_ids: tuple[int, ...]
) -> None:
    """``/v1/responses`` calls it "completed", with the text that there is. A client may choose a request's id."""
    for path in HIDE_ABORT:
        left = left_for_the_client(kind, FinishReason.ABORT, *token_ids, path=path)
        assert is_failure(left) and "aborted" in str(left.cause), path
    is_stream = kind is RequestOutputKind.DELTA and not installed_has(HASHES_AHEAD)
    for path in SAY_ABORT:
        left = left_for_the_client(kind, FinishReason.ABORT, *token_ids, path=path, external_req_id="resp_1")
        # Some streams leave out an end without a token.
        if is_stream and path and (not token_ids or path.endswith("/generate")):
            assert is_failure(left) and "aborted" in str(left.cause), path
        else:
            assert left.finished and left.outputs[0].finish_reason == "abort", path
    processor = OutputProcessor(None, log_stats=False)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    client = SimpleNamespace(vllm_config=config, output_processor=processor, output_handler=None)
    leaving.shut_down.wrapper(Call(lambda timeout: None, client, (0.0,), {}))
    left = left_for_the_client(kind, FinishReason.ABORT, *token_ids, of=processor)
    assert is_failure(left) and "aborted" in str(left.cause), "the server is being shut down"


@pytest.mark.parametrize("inputs", [[True], [True, True], [True, False], [True, True, False], []], ids=str)
@pytest.mark.parametrize("has_answered", [False, True])
@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_session_that_its_engine_ends_does_not_go_on(
    reason: FinishReason, has_answered: bool, inputs: list[bool]
) -> None:
    """Below 0.33 vLLM would have its next input computed without those before. False: no more input follows."""
    processor, queue = OutputProcessor(None, log_stats=False), RequestOutputCollector(RequestOutputKind.DELTA, "inner")

    def add(is_session: bool) -> int:
        return give(processor, request_of(RequestOutputKind.DELTA, resumable=is_session), queue)

    if has_answered or not inputs:
        assert add(True)
        processor.process_outputs([EngineCoreOutput("inner", [4], finish_reason=FinishReason.LENGTH)])
        assert processor.request_states and not queue.get_nowait().finished
    assert all(map(add, inputs))
    told = processor.process_outputs([EngineCoreOutput("inner", [], finish_reason=reason)])
    assert is_failure(queue.output)
    assert told.reqs_to_abort == ([] if inputs == [True, False] else ["inner"]), "what is on its way"
    assert not (processor.request_states or processor.external_req_ids)
    # Its client has been told, and has not stopped to give it input yet.
    assert not add(True) and not add(False) and not processor.request_states


REFUSAL = "KV hand-over failed: cause=queue_timeout retry_after=7 request=inner"


@pytest.mark.parametrize(
    ("said", "status", "body", "expected"),
    [
        (REFUSAL, 503, b'{"error": "vLLM\'s"}', (503, "7", "vLLM's")),
        (REFUSAL, 200, b'data: {"error": 1}\n\n', (503, "7", REFUSAL)),
        (REFUSAL, 200, b'data: {"choices": "KV hand-over failed: cause=queue_timeout"}', (200, "", "choices")),
        (REFUSAL.replace(" retry_after=7", ""), 200, b'data: {"error": 1}\n\n', (200, "", "error")),
        (REFUSAL.replace("queue_timeout", "lease"), 500, b'{"error": "vLLM\'s"}', (500, "", "vLLM's")),
    ],
)
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_whoever_is_refused_because_it_has_waited_is_told_when_to_try_again(
    kind: RequestOutputKind, said: str, status: int, body: bytes, expected: tuple[int, str, str]
) -> None:
    """With 503 also where vLLM begins a stream with an error. What a model or a client writes is no refusal."""
    arrived, sent = Arrived("/v1/completions", Role.BOTH), list[Any]()
    left = left_for_the_client(kind, FinishReason.ERROR, stop_reason=said, arrived=arrived)
    assert getattr(left.cause, "status_code", 500) == (503 if "queue_timeout" in said else 500)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        answer = RefusableAnswer({"type": "http", "method": "POST"}, None, send, arrived, holds=True)
        await answer({"type": "http.response.start", "status": status, "headers": []})
        await answer({"type": "http.response.body", "body": body, "more_body": status < 500})

    asyncio.run(run())
    start, answered = sent
    headers = {name.lower(): value for name, value in start["headers"]}
    assert (start["status"], headers.get(b"retry-after", b"").decode()) == expected[:2]
    assert expected[2].encode() in answered["body"]


@pytest.mark.parametrize("n", [1, 3])
def test_the_choices_of_a_request_are_of_its_http_request(n: int) -> None:
    """From 0.33 on they do not pass where a single one does. The first may be refused before the last is sent."""
    processor, arrived, refused = OutputProcessor(None, log_stats=False), Arrived("/v1/completions", Role.BOTH), []

    class Refusing(Core):
        resources = SimpleNamespace(engine_dead=False)

        async def add_request_async(self, request: EngineCoreRequest) -> None:
            refused.append(request.request_id)
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=REFUSAL)
            processor.process_outputs([output])

    client: Any = object.__new__(AsyncLLM)
    inputs = SimpleNamespace(
        assign_request_id=InputProcessor.assign_request_id,
        apply_watermarking=lambda *_: None,
        resolve_watermarking=lambda *_: None,
    )
    caches = SimpleNamespace(kv_sharing_fast_prefill=False)
    config = SimpleNamespace(cache_config=caches, kv_transfer_config=None, model_config=None)
    vars(client).update(output_processor=processor, engine_core=Refusing(), log_requests=False, input_processor=inputs)
    vars(client).update(vllm_config=config, model_config=None, _client_count=1, output_handler=None)
    client.check_admission = lambda *_, **__: None
    client._run_output_handler = lambda: None
    sampling = SamplingParams(n=n, output_kind=RequestOutputKind.DELTA, detokenize=False)
    request = request_of(RequestOutputKind.DELTA, sampling_params=sampling, external_req_id=None)

    async def in_its_task() -> RequestOutputCollector:
        ARRIVED.set(arrived)
        queue: RequestOutputCollector = await client.add_request("inner", request, sampling, prompt_text=None)
        return queue

    assert is_failure(asyncio.run(in_its_task()).output)
    assert len(refused) == n and arrived.engine_said == REFUSAL


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


def sampling_with(value: object) -> SamplingParams:
    # From 0.33 on, vLLM refuses the number itself.
    sampling = SamplingParams(detokenize=False)
    sampling.extra_args = {"kv_transfer_params": {"remote_port": value}}
    return sampling


UNSENDABLE: dict[str, dict[str, Any]] = {
    "a number": {"sampling_params": sampling_with(2**70)},
    "text": {"sampling_params": sampling_with("\ud800")},
    "nested text": {"sampling_params": sampling_with({"a": ["\udfff"]})},
    "its id": {"request_id": "\ud800"},
    "chat_template_kwargs": {"reasoning_parser_kwargs": {"chat_template_kwargs": {"a": 2**70}}},
    "an image": {"mm_features": [MultiModalFeatureSpec(None, "image", "\ud800", PlaceholderRange(0, 1))]},
}
if "session_id" in EngineCoreRequest.__struct_fields__:
    UNSENDABLE["session_id"] = {"session_id": "\ud800"}


@pytest.mark.parametrize("of_choices", [False, True])
@pytest.mark.parametrize("fields", UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_cannot_be_sent_to_an_engine_is_refused_and_nothing_is_kept_of_it(
    fields: dict[str, Any], of_choices: bool
) -> None:
    """What is kept would be under way for ever: shutdowns would wait for it, and ``--max-num-queued-reqs`` count it."""
    processor = OutputProcessor(None, log_stats=False)
    request = request_of(RequestOutputKind.FINAL_ONLY, **fields)
    parent = ParentRequest(request) if of_choices else None
    if parent is not None:
        request.request_id, _ = parent.get_child_info(0)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
    with pytest.raises(VLLMValidationError, match="cannot be sent"):
        InputProcessor.assign_request_id(request_of(RequestOutputKind.FINAL_ONLY, external_req_id=None, **fields))
    with pytest.raises(VLLMValidationError, match="cannot be sent"):
        give(processor, request, queue, parent)
    assert not (processor.request_states or processor.parent_requests or processor.external_req_ids)


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"a": found}
    return found


NESTED = {
    "kv_transfer_params": lambda found: {"sampling_params": sampling_with(found)},
    "a schema": lambda found: {
        "sampling_params": SamplingParams(structured_outputs=StructuredOutputsParams(json=found), detokenize=False)
    },
    "pooling": lambda found: {"sampling_params": None, "pooling_params": PoolingParams(extra_kwargs=found)},
}


@pytest.mark.parametrize("fields", NESTED.values(), ids=NESTED)
def test_what_an_engine_could_not_send_to_its_workers_is_refused(fields: Any) -> None:
    """It pickles parameters on its own thread, and takes two levels of Python's stack for one of JSON's."""
    for levels in (50, 101, 200, 400, 500, 800):
        request = request_of(RequestOutputKind.FINAL_ONLY, external_req_id=None, **fields(nested(levels)))
        if levels == 50:
            InputProcessor.assign_request_id(request)
            pickle.dumps(NewRequestData.from_request(Request.from_engine_core_request(request, None), ([0],)))
            continue
        with pytest.raises(VLLMValidationError, match="cannot be sent"):
            InputProcessor.assign_request_id(request)


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

    def num_calls(num_outputs: int) -> Counter[str]:
        """By package."""
        ran, outputs = Counter[str](), [EngineCoreOutput("inner", [5]) for _ in range(num_outputs)]
        sys.setprofile(lambda frame, event, _: ran.update([frame.f_globals["__name__"].partition(".")[0]]))
        try:
            processor.process_outputs(outputs)
        finally:
            sys.setprofile(None)
        return ran

    of_one, of_many = num_calls(1), num_calls(9)
    assert of_one["kvcached_nixl"] == of_many["kvcached_nixl"] and of_one["vllm"] < of_many["vllm"]


def test_an_engine_in_its_client_s_process_says_so_in_its_output() -> None:
    """``LLM`` has no queue. An exception would lose the outputs of all other prompts."""
    processor = OutputProcessor(None, log_stats=False)
    processor.add_request(request_of(RequestOutputKind.FINAL_ONLY), None)
    told = processor.process_outputs([EngineCoreOutput("inner", [], finish_reason=FinishReason.ERROR)])
    (output,) = told.request_outputs
    assert output.finished and output.outputs[0].finish_reason == "error"
