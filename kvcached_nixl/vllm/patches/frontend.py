# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server: it identifies media, gives requests to its engine, and is told that they have ended.

Runs in: the API server's process.
Sources: ``v1/engine/input_processor.py``, ``v1/engine/output_processor.py``, ``v1/engine/async_llm.py``,
``renderers/base.py``, ``multimodal/processing/context.py`` (a path identifies media).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import (
    ENGINE_CLIENT,
    INPUT_PROCESSOR,
    MEDIA_PROCESSING,
    OUTPUT_PROCESSOR,
    RENDERER,
)
from kvcached_nixl.vllm.adapter.tracing import add_server_spans
from kvcached_nixl.vllm.adapter.versions import HASHES_AHEAD, installed_has
from kvcached_nixl.vllm.patches.admission import ARRIVED, REFUSED, Arrived, Role, failure
from kvcached_nixl.vllm.patches.leaving import is_leaving
from kvcached_nixl.wire.causes import FAILED, STARVED

logger = logging.getLogger(SERVER_LOGGER)

_READABLE: Mapping[str, Any] = MappingProxyType(
    {
        "request_id": str,
        "cache_salt": str | None,
        "data_parallel_rank": int | None,
        "priority": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    }
)
"""Fields from a body or a header that not every endpoint checks, and their types."""
MOST_LEVELS = 100
"""Of lists and mappings in one another. vLLM pickles parameters for several workers, on the engine's thread, and pickle
ends at less than 500."""

_ARRIVED = "_kvcached_nixl_arrived"
"""Attribute of the queue of a request: the HTTP request that it is of."""
_ABORTED = "The server has aborted this request before its end. Try again."
_FAILURES = ("ERROR", "ABORT")
"""Names of the reasons of an end that did not come from what was generated."""


@Patch(INPUT_PROCESSOR, "assign_request_id", "frontend", "request", kind="staticmethod")
def assign_request_id(call: Call) -> None:
    """Without it, a body whose priority is no number would end the engine's input thread, and all requests would wait
    forever. Until vLLM's engine answers requests that it cannot decode.

    Refuse a request that the engine's process could not decode, or that cannot be encoded for it (numbers above 64
    bits, text that is not Unicode) or by it for its workers (deeply nested), before vLLM counts it for a data-parallel
    rank, for ever.

    Raises:
        VLLMValidationError: answered with HTTP 400; the message names the field.
    """
    from vllm.exceptions import VLLMValidationError

    core_request = call.argument("request")
    for name, kind in _READABLE.items():
        try:
            msgspec.convert(private(core_request, name), kind)
        except msgspec.ValidationError as error:
            raise VLLMValidationError(f"{name}: {error}. Send a value of that type, or omit the field.") from error
    # What may hold what cannot be encoded; a later vLLM may have more of it.
    sent = [core_request.request_id, core_request.cache_salt]
    sent += [private(core_request, "sampling_params"), core_request.pooling_params]
    sent += [optional(core_request, "session_id"), optional(core_request, "reasoning_parser_kwargs")]
    sent += [(one.identifier, one.mm_hash) for one in core_request.mm_features or ()]
    try:
        msgspec.msgpack.encode(sent)
        _check_levels(msgspec.to_builtins(sent))
    except (OverflowError, UnicodeError, RecursionError) as error:
        raise _not_sendable(error) from error
    except TypeError:
        # A program that uses vLLM as a library may pass values that only vLLM's own encoder supports, as tensors.
        pass
    call.proceed()


def _check_levels(sent: Any) -> None:
    level = [sent]
    for _ in range(MOST_LEVELS):
        nested = (one for one in level if isinstance(one, (dict, list, tuple)))
        level = [inner for one in nested for inner in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return
    raise RecursionError(f"more than {MOST_LEVELS} levels")


def _not_sendable(error: Exception) -> Exception:
    from vllm.exceptions import VLLMValidationError

    expected = f"expected numbers of 64 bits, Unicode text, and at most {MOST_LEVELS} levels of nesting"
    refusal: Exception = VLLMValidationError(f"a field of the request cannot be sent: {error}; {expected}.")
    return refusal


@Patch(ENGINE_CLIENT, "_add_request", "frontend", "self request prompt parent_req index queue")
async def give_to_engine(call: Call) -> None:
    """Without it, a request that cannot be sent to the engine, for whatever reason, would count as under way for ever;
    and a streaming session that has ended would begin anew with its next input. Until vLLM forgets a request that it
    could not send, and reads no input of a session that has ended (0.32).

    vLLM notes a request before it sends it. What is noted delays a shutdown, and counts for ``--max-num-queued-reqs``.

    Raises:
        VLLMValidationError: it cannot be encoded; answered with HTTP 400.
    """
    queue, states = call.argument("queue"), private(private(call.instance, "output_processor"), "request_states")
    # Only a session gives more than one to a queue; below 0.33 the choices of one request do, too.
    is_more = hasattr(queue, _ARRIVED) and call.argument("parent_req") is None
    if is_more and call.argument("request").request_id not in states:
        return
    try:
        await call.proceed()
    except BaseException as error:
        # Of several choices the engine may have some already.
        noted = call.argument("parent_req") or call.argument("request")
        await call.instance.abort(noted.request_id, internal=True)
        if isinstance(error, (OverflowError, UnicodeError, RecursionError)):
            raise _not_sendable(error) from error
        raise


@Patch(OUTPUT_PROCESSOR, "add_request", "frontend", "self request prompt parent_req request_index queue")
def note_arrived(call: Call) -> None:
    """Without it, clients of requests that waited too long would not be told when to try again, and what the engine has
    aborted would pass for whole where its client cannot see that. Until a request of vLLM's knows its HTTP request.

    Each request and each choice passes here, before the engine has it, in the task of its HTTP request."""
    queue = call.argument("queue")
    # An engine in its client's own process has none.
    if queue is not None and not hasattr(queue, _ARRIVED):
        # /v1/realtime, no HTTP request, calls what there is of an aborted session whole.
        session = Arrived("", Role.BOTH) if call.argument("request").resumable else None
        setattr(queue, _ARRIVED, ARRIVED.get() or session)
    call.proceed()


@Patch(
    OUTPUT_PROCESSOR,
    "process_outputs",
    "frontend",
    "self engine_core_outputs engine_core_timestamp iteration_stats weight_version?",
    versions=HASHES_AHEAD.earlier,
)
def process_outputs(call: Call) -> Any:
    """Without it, a streaming session that the engine has ended would go on without its beginning: its client would get
    wrong tokens, or wait for ever. Until every supported vLLM takes an error for the end of a session.

    Below 0.33 vLLM takes each end of a session's request for that of one input. Inputs that are on their way reach the
    engine as another session, or are refused there (`Failures.sessions`): the engine is told to abort them.
    """
    states, ended = private(call.instance, "request_states"), []
    for output in call.argument("engine_core_outputs"):
        if output.finish_reason is not None and output.finish_reason.name in _FAILURES:
            state = states.get(output.request_id)
            if state is not None and private(state, "streaming_input"):
                state.streaming_input = False
                ended.append(output.request_id)
    processed = call.proceed()
    private(processed, "reqs_to_abort").extend(ended)
    return processed


@Patch(OUTPUT_PROCESSOR, "_update_stats_from_finished", "frontend", "self req_state finish_reason iteration_stats")
def update_stats_from_finished(call: Call) -> None:
    """Without it, a request whose hand-over has failed would be answered with status 200 and no token. Until vLLM
    raises for a request that ends with an error, whatever endpoint it came through.

    Raise an exception in the endpoint that waits for a request which ended with an error.

    Each of vLLM's endpoints checks by itself, or does not check, why a request has ended. Streaming endpoints skip
    outputs without tokens first (``completion_stream_generator``, ``chat_completion_stream_generator``, 0.26 to 0.30):
    the client gets status 200 and ``[DONE]`` with nothing between. ``/inference/v1/generate`` and ``/v1/responses``
    with Harmony answer 200 with no token. No endpoint ignores an exception: the client gets 500 if nothing was sent
    yet, otherwise an error event or a stream that breaks off. If one of ``n`` choices fails, all fail, as in the
    endpoints of vLLM that do check.

    What the engine itself has aborted, in the middle of its answer, counts as well while the server is shut down, and
    where the client could not see it: ``/v1/responses`` calls it "completed", a transcription has no word for it, and
    streams below 0.33 may leave it out. Where a pause that aborts is answered with a ``finish_reason`` of "abort", its
    callers may expect that. What the client has aborted does not come here.

    An engine in its client's own process (``LLM``) has no queue: its outputs have ``finish_reason`` "error" already.
    """
    call.proceed()
    # Its last output was just put on its queue, and not taken yet.
    request_state, finish_reason = call.argument("req_state"), call.argument("finish_reason")
    name = None if finish_reason is None else finish_reason.name
    if name not in _FAILURES:
        return
    try:
        arrived = optional(private(request_state, "queue"), _ARRIVED)
        if name == "ERROR":
            _fail(request_state)
        elif is_leaving(call.instance) or (arrived is not None and not _sees_abort(arrived, request_state)):
            _fail(request_state, _ABORTED)
    except Exception:
        # An exception raised here would end vLLM's output handler, and with it every request of this server.
        logger.exception("The client of a failed request cannot be told: vLLM may answer it as if it had not failed.")


def _sees_abort(arrived: Arrived, request_state: Any) -> bool:
    if private(request_state, "output_kind").name != "DELTA" or installed_has(HASHES_AHEAD):
        return arrived.says_abort
    # Below 0.33 streams leave out an end without a token: ``/inference/v1/generate`` always, others before their first.
    detokenizer = private(request_state, "detokenizer")
    has_begun = detokenizer is not None and detokenizer.num_output_tokens() > 0
    return has_begun and arrived.says_abort and not arrived.path.endswith("/generate")


def _fail(request_state: Any, told: str = "") -> None:
    queue = private(request_state, "queue")
    # A pooling model's request has no text, and its caller expects other exceptions.
    if queue is None or private(request_state, "detokenizer") is None:
        return
    if isinstance(private(queue, "output"), Exception):
        # Another choice of the same request has failed in the same step, and has said why.
        return
    try:
        told = told or _told(request_state)
    except Exception:
        # The client gets vLLM's own text then: an error without a reason is better than no error.
        logger.exception("The reason of a failed request cannot be read")
    is_refused, arrived = told.startswith(REFUSED), optional(queue, _ARRIVED)
    if is_refused and arrived is not None:
        arrived.engine_said = told
    # It replaces outputs that were not fetched yet, including tokens, since the request has failed.
    queue.put(failure(told, is_refused=is_refused))


def _told(request_state: Any) -> str:
    """What the engine sent with the end of a failed request; "" if this package has not ended it."""
    from vllm.outputs import RequestOutput

    output, parent = private(private(request_state, "queue"), "output"), private(request_state, "parent_req")
    found = output.outputs if isinstance(output, RequestOutput) else ()
    if parent is not None and not found:
        # One of several choices that are not streamed: they are put on the queue together, when all have ended.
        found = private(parent, "output_aggregator")
    said = [private(one, "stop_reason") for one in found if one is not None]
    return next((one for one in said if isinstance(one, str) and one.startswith((FAILED, STARVED))), "")


@Patch(OUTPUT_PROCESSOR, "do_tracing", "frontend", "self engine_core_output req_state iteration_stats")
def do_tracing(call: Call) -> None:
    """Without it, a trace would not say how long the API server had a request, and its first token. Until vLLM's own
    spans say when a request has entered its engine, and when its first token was there.

    Called where requests are traced only, once a request has ended."""
    call.proceed()
    add_server_spans(call.argument("engine_core_output"), call.argument("req_state"))


@Patch(RENDERER, "_process_mm_uuids", "frontend", "self mm_data mm_data_items mm_uuid_items mm_req_id")
def process_mm_uuids(call: Call) -> Any:
    """Without it, two servers would identify different images, sounds, ... as equal, or equal ones as different, and a
    client could put its own in place of another's. Until vLLM identifies media by their content, with and without
    caches."""
    # vLLM identifies media by counting, not by content, where both caches are off.
    found = call.proceed()
    media = private(call.instance, "model_config").multimodal_config
    caches = bool(call.instance.config.cache_config.enable_prefix_caching)
    are_counted = media is not None and media.mm_processor_cache_gb == 0 and not caches
    # If there are no identifiers, vLLM makes them from the content.
    return {} if are_counted else {modality: _of_client(names) for modality, names in found.items()}


def _of_client(names: Iterable[str | None] | None) -> list[str | None] | None:
    """What a client calls its media. No name is a content hash, nor one of what decode asks for (`asked_prompts`): a
    cache would give its images, sounds, ... to the requests of others."""
    return None if names is None else [None if one is None else f"client:{one}" for one in names]


@Patch(MEDIA_PROCESSING, "model_id", "frontend", "self", kind="property")
def model_id(call: Call) -> str:
    """Without it, two servers would identify different images, sounds, ... as equal, or equal ones as different. Until
    vLLM identifies media by their content alone."""
    # An engine has one model, and the handshake compares models by their content.
    return "the model of this engine"
