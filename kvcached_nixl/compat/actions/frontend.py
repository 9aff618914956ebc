# SPDX-License-Identifier: Apache-2.0
"""Named access to what vLLM's API server sends to its engine, and keeps of a request.

Sources: ``v1/engine/input_processor.py``, ``v1/engine/output_processor.py``, ``v1/engine/async_llm.py``,
``renderers/base.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from kvcached_nixl.compat.locate import ERROR_MODULES
from kvcached_nixl.compat.private import first_bound, private

__all__ = ["let_fail", "numbers_media", "require_readable"]

_READABLE: Mapping[str, Any] = MappingProxyType(
    {
        "request_id": str,
        "cache_salt": str | None,
        "data_parallel_rank": int | None,
        "priority": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    }
)
"""What comes from a body or a header, and is not checked behind every endpoint."""


def numbers_media(renderer: Any) -> bool:
    """Whether vLLM numbers images, sounds, ... instead of looking at their content: where nothing of them is cached."""
    media = private(renderer, "model_config").multimodal_config
    caches = bool(renderer.config.cache_config.enable_prefix_caching)
    return media is not None and media.mm_processor_cache_gb == 0 and not caches


def require_readable(core_request: Any) -> None:
    """Refuse a request that the engine's process could not read, or that cannot be sent to it.

    The thread that reads there ends at the first, and all requests wait for ever: ``/v1/chat/completions/batch`` hands
    on any ``priority`` up to vLLM 0.24. Of the second, numbers above 64 bits and text that is no Unicode, vLLM keeps
    the state for ever.

    Args:
        core_request: an ``EngineCoreRequest`` that is about to be sent.

    Raises:
        VLLMValidationError: which an endpoint answers with 400; the message names the field.
    """
    for name, kind in _READABLE.items():
        try:
            msgspec.convert(private(core_request, name), kind)
        except msgspec.ValidationError as error:
            raise _refusal(f"{name}: {error}. Send a value of that kind, or leave it out.") from error
    sampling = private(core_request, "sampling_params")
    if sampling is None:
        return
    try:
        msgspec.msgpack.encode((core_request.request_id, core_request.cache_salt, sampling))
    except (OverflowError, UnicodeError, RecursionError) as error:
        reason = "expected numbers of 64 bits, Unicode text, and nothing nested hundreds deep"
        raise _refusal(f"request_id, cache_salt, kv_transfer_params or another field: {error}; {reason}.") from error
    except TypeError:
        # A program of one's own may hand on what vLLM's own encoder knows, as tensors.
        return


def _refusal(reason: str) -> Exception:
    found: Exception = first_bound(("vllm.exceptions",), "VLLMValidationError")(reason)
    return found


def let_fail(request_state: Any, finish_reason: Any, logger: logging.Logger) -> None:
    """Have whoever waits for a request that ends with an error get that error, as an exception.

    Each of vLLM's endpoints looks by itself, or does not look, at why a request has ended. What is streamed passes over
    outputs without tokens first (``completion_stream_generator``, ``chat_completion_stream_generator``, 0.19 to 0.30):
    status 200, ``[DONE]`` and nothing between. ``/inference/v1/generate`` and ``/v1/responses`` with Harmony answer
    200 with no token. An exception passes nobody by: 500 where nothing was sent yet, else an error event or a stream
    that breaks off. Of ``n`` choices one that fails fails all, as vLLM has it where it looks.

    An engine in its client's own process (``LLM``) has no queue: its outputs say ``finish_reason`` "error" themselves.

    Args:
        request_state: a ``RequestState`` whose last output was just put on its queue; nobody has taken it yet.
        finish_reason: a ``FinishReason``, or None.
        logger: is told what goes wrong here; nothing is raised.
    """
    if finish_reason is None or finish_reason.name != "ERROR":
        return
    try:
        _fail(request_state)
    except Exception:
        # Whatever is raised here ends vLLM's output handler, and with it every request of this server.
        logger.exception("A request has failed, and its client cannot be told: vLLM may answer it as if it had not.")


def _fail(request_state: Any) -> None:
    queue = private(request_state, "queue")
    # A pooling model's request has no text, and its waiter other exceptions.
    if queue is None or private(request_state, "detokenizer") is None:
        return
    from vllm.v1.engine.async_llm import InputStreamError

    # What is wrapped so reaches the endpoint as it is: the error that vLLM says of any other request. It takes the
    # place of what nobody has fetched yet, tokens among it: they are of a request that has failed.
    told = _told(private(queue, "output"))
    error = first_bound(ERROR_MODULES, "GenerationError")
    queue.put(InputStreamError(error(told) if told else error()))


def _told(output: Any) -> str:
    """What the engine says of a failure, with the end of a request; "" if it says nothing."""
    from vllm.outputs import RequestOutput

    said = [private(one, "stop_reason") for one in output.outputs] if isinstance(output, RequestOutput) else []
    return next((one for one in said if isinstance(one, str) and one), "")
