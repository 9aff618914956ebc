# SPDX-License-Identifier: Apache-2.0
"""Shutting an API server down: no new work, every request gets its end, and then the engine stops.

On SIGTERM vLLM stops the engine first and the HTTP server after it. In between, ``/health`` says 200 and new requests
are answered 200 with ``abort``. Requests that come when the engine has ended never end, nor do those whose last outputs
were not read in time, and the server waits for them. Sources: ``entrypoints/launcher.py`` (``handle_shutdown``),
``v1/engine/async_llm.py``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvcached_nixl.vllm.adapter.nested_connectors import with_children
from kvcached_nixl.vllm.adapter.private import optional, private

__all__ = ["is_leaving", "leave", "not_healthy", "refusal_of", "refuse_new", "refuses"]

logger = logging.getLogger("vllm.kvcached_nixl")

_LEAVING = "_kvcached_nixl_leaving"
"""Attribute of vLLM's client of the engine: when it begins to refuse requests, by `time.monotonic`. Its output
processor has it, too."""
_LOOK_SECONDS = 0.05
_LEAST_SECONDS = 1.0
"""For the engine to stop, however long the requests have taken."""
RETRY_SECONDS = 1
DEFAULT_DELAY_SECONDS = 5.0
_MESSAGE = "This server is shutting down. Use another one."
_SERVED = ("/health", "/metrics", "/ping")
"""Paths that answer until the end; ``/health`` with 503."""


def is_leaving(part: Any) -> bool:
    """Whether an API server is shutting down that has a KV connector, by its client of the engine or its output
    processor. Others are left to vLLM."""
    return optional(part, _LEAVING) is not None


def refuses(client: Any) -> bool:
    """Whether such a server takes no new requests any more. At first it does: load balancers have to notice."""
    since_seconds = optional(client, _LEAVING)
    return since_seconds is not None and time.monotonic() >= since_seconds


def refusal_of(scope: Any) -> Any:
    """What a new HTTP request is answered, as an ASGI application: 503, so that a load balancer tries another server.
    None if it is served."""
    state = scope["app"].state if scope["type"] == "http" and "app" in scope else None
    if state is None or not refuses(optional(state, "engine_client")) or scope["path"] in _SERVED:
        return None
    from starlette.responses import JSONResponse

    error = {"message": _MESSAGE, "type": "ServiceUnavailableError", "param": None, "code": 503}
    return JSONResponse({"error": error}, 503, {"Retry-After": str(RETRY_SECONDS)})


def refuse_new() -> Exception:
    """What a request gets that has come before, and reaches the engine only now."""
    from vllm.v1.engine.exceptions import EngineGenerateError

    return EngineGenerateError(_MESSAGE)


def not_healthy() -> Exception:
    """What vLLM's ``/health`` answers with 503."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError()


def leave(client: Any, timeout: float | None, stop: Callable[[float | None], Any]) -> Any:
    """Wait for the requests of an API server, then stop its engines.

    Args:
        client: vLLM's ``AsyncLLM``.
        timeout: seconds (``--shutdown-timeout``); 0: what is under way is aborted; None: vLLM's default.
        stop: stops the engines, within so many seconds.
    """
    config = optional(client, "vllm_config")
    if config is None or config.kv_transfer_config is None or is_leaving(client):
        return stop(timeout)
    begun_seconds, left = time.monotonic(), timeout
    waits = bool(timeout) and not _is_loop_here()
    setattr(client, _LEAVING, begun_seconds + (_delay_seconds(config, timeout or 0.0) if waits else 0.0))
    processor = private(client, "output_processor")
    # What the engine aborts from now on ends with an error (`frontend.let_fail`).
    setattr(processor, _LEAVING, begun_seconds)
    if timeout and waits:
        logger.info("Shutting down: %d requests are under way", len(private(processor, "request_states")))
        until_seconds = begun_seconds + timeout
        while time.monotonic() < until_seconds and (processor.has_unfinished_requests() or not refuses(client)):
            time.sleep(_LOOK_SECONDS)
        left = max(_LEAST_SECONDS, until_seconds - time.monotonic())
    handler = optional(client, "output_handler")
    try:
        return stop(left)
    finally:
        if handler is not None:
            _end_all(handler.get_loop(), processor)


def _delay_seconds(config: Any, timeout: float) -> float:
    # Of the NIXL connector it was checked when the engine started. Beside it there may be anything.
    extras = [one.get("kv_connector_extra_config") for one in with_children(vars(config.kv_transfer_config))]
    given = [extra.get("drain_delay") for extra in extras if isinstance(extra, Mapping)]
    usable = (one for one in given if isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0)
    return float(min(next(usable, DEFAULT_DELAY_SECONDS), timeout / 2))


def _is_loop_here() -> bool:
    """Whether requests cannot go on meanwhile, because this is the thread that they run on."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _end_all(loop: asyncio.AbstractEventLoop, processor: Any) -> None:
    """End what has no end yet with an error: no engine will end it."""

    def end() -> None:
        if processor.has_unfinished_requests():
            from vllm.v1.engine.exceptions import EngineDeadError

            number = len(private(processor, "request_states"))
            logger.warning("%d requests had not ended when the engine stopped: they end with an error", number)
            processor.propagate_error(EngineDeadError())

    try:
        loop.call_soon_threadsafe(end)
    except RuntimeError:
        # The loop has ended, and its requests with it.
        return
