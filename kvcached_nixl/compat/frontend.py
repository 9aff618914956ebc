# SPDX-License-Identifier: Apache-2.0
"""Named access to what vLLM's API server keeps of a request.

Sources: ``v1/engine/output_processor.py``, ``v1/engine/async_llm.py``, ``renderers/base.py``.
"""

from __future__ import annotations

import logging
from typing import Any

from kvcached_nixl.compat.locate import ERROR_MODULES
from kvcached_nixl.compat.private import first_bound, private

__all__ = ["let_stream_fail", "numbers_media"]


def numbers_media(renderer: Any) -> bool:
    """Whether vLLM numbers images, sounds, ... instead of looking at their content: where nothing of them is cached."""
    media = private(renderer, "model_config").multimodal_config
    caches = bool(renderer.config.cache_config.enable_prefix_caching)
    return media is not None and media.mm_processor_cache_gb == 0 and not caches


def let_stream_fail(request_state: Any, finish_reason: Any, logger: logging.Logger) -> None:
    """Have a stream whose request ends with an error before its first token end with that error.

    vLLM passes over outputs without tokens, which a chunked prefill has, before it looks at why a request has ended:
    ``completion_stream_generator`` and ``chat_completion_stream_generator``, 0.19 to 0.30. The client would get status
    200, ``[DONE]`` and nothing between. An answer that is not streamed is looked at, and so is left alone.

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
        logger.exception("A streamed request has failed, and its client cannot be told: vLLM answers it with [DONE].")


def _fail(request_state: Any) -> None:
    queue, detokenizer = private(request_state, "queue"), private(request_state, "detokenizer")
    is_stream = private(request_state, "output_kind").name == "DELTA"
    if queue is None or detokenizer is None or not is_stream or private(detokenizer, "num_output_tokens")():
        return
    from vllm.v1.engine.async_llm import InputStreamError

    # What is wrapped so reaches the stream as it is: the error that vLLM says of any other request.
    queue.put(InputStreamError(first_bound(ERROR_MODULES, "GenerationError")()))
