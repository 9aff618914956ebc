# SPDX-License-Identifier: Apache-2.0
"""A request that ends before its first token, through vLLM's own ``OutputProcessor``: what its client's queue holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from kvcached_nixl.compat.locate import ERROR_MODULES
from kvcached_nixl.compat.private import first_bound
from kvcached_nixl.patching import Registry
from kvcached_nixl.seams import frontend


@pytest.fixture(autouse=True)
def patched() -> Iterator[Registry]:
    registry = Registry()
    registry.add(frontend.SEAMS)
    registry.complete()
    assert not registry.refusals()
    yield registry
    registry.uninstall()


def left_for_the_client(kind: RequestOutputKind, reason: FinishReason, *token_ids: int) -> Any:
    """What is in the queue of a request of that kind after these tokens, one a step, and an end for that reason."""
    processor = OutputProcessor(None, log_stats=False)
    request = EngineCoreRequest(
        request_id="inner",
        external_req_id="outer",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(output_kind=kind, detokenize=False),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    queue = RequestOutputCollector(kind, "inner")
    processor.add_request(request, None, queue=queue)
    for token_id in token_ids:
        processor.process_outputs([EngineCoreOutput("inner", [token_id])])
    processor.process_outputs([EngineCoreOutput("inner", [], finish_reason=reason)])
    assert not processor.request_states
    return queue.output


def test_a_stream_that_fails_before_its_first_token_fails() -> None:
    left = left_for_the_client(RequestOutputKind.DELTA, FinishReason.ERROR)
    assert isinstance(left, InputStreamError) and isinstance(left.cause, first_bound(ERROR_MODULES, "GenerationError"))


def test_without_this_package_it_is_an_output_without_tokens(patched: Registry) -> None:
    """Which the streams of vLLM's API pass over; what the case above would not see if vLLM came to say it itself."""
    patched.uninstall()
    left = left_for_the_client(RequestOutputKind.DELTA, FinishReason.ERROR)
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


@pytest.mark.parametrize(
    ("kind", "reason", "token_ids"),
    [
        (RequestOutputKind.FINAL_ONLY, FinishReason.ERROR, ()),
        (RequestOutputKind.CUMULATIVE, FinishReason.ERROR, ()),
        (RequestOutputKind.DELTA, FinishReason.ERROR, (4, 5)),
        (RequestOutputKind.DELTA, FinishReason.LENGTH, (4, 5)),
        (RequestOutputKind.DELTA, FinishReason.ABORT, ()),
    ],
)
def test_anything_else_is_vllm_s_own(kind: RequestOutputKind, reason: FinishReason, token_ids: tuple[int, ...]) -> None:
    """An answer as a whole is looked at by vLLM, and so is what comes behind tokens, none of which may be lost."""
    left = left_for_the_client(kind, reason, *token_ids)
    assert left.finished and left.outputs[0].finish_reason == str(reason)
    assert list(left.outputs[0].token_ids) == list(token_ids)
