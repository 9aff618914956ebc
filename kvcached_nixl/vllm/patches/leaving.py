# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server is shut down: its requests get their ends first, then its engine is stopped.

On SIGTERM vLLM stops the engine first and the HTTP server after it. In between, ``/health`` says 200 and new requests
are answered 200 with ``abort``. Requests that come when the engine has ended never end, nor do those whose last outputs
were not read in time, and the server waits for them. So it takes no new work (`admission`) and no connections, every
request gets its end, and then the engine stops.

Needed until vLLM refuses new requests from SIGTERM on, and ends those that its engine has not ended.

Runs in: the API server's process.
Sources: ``entrypoints/launcher.py`` (``handle_shutdown``), from 0.29 on ``entrypoints/launchers/launcher.py``,
``v1/engine/async_llm.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER, Settings
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import ENGINE_CLIENT, HTTP_SERVER
from kvcached_nixl.vllm.adapter.neighbours import extras_of
from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS

logger = logging.getLogger(SERVER_LOGGER)

_LEAVING = "_kvcached_nixl_leaving"
"""Attribute of vLLM's client of the engine: when it begins to refuse requests, by `time.monotonic`. Its output
processor has it, too."""
_LISTENING = "_kvcached_nixl_listening"
"""The same client's attribute: the API server's loop, and its HTTP server."""
_ROLES = "_kvcached_nixl_roles"
"""The same client's attribute: the HTTP requests under way (`admission.Roles`)."""
_ACCEPTING = "_kvcached_nixl_accepting"
"""Attribute of an HTTP server: the sockets that it accepts from by itself, each with what ends that."""
_LOOK_SECONDS = 0.05
_CLOSED_BEFORE_SECONDS = 0.5
"""New connections end before requests are refused: what has come over one until then is served."""
_LEAST_SECONDS = 1.0
"""For the engine to stop, however long the requests have taken."""


@Patch(ENGINE_CLIENT, "shutdown", "frontend", "self timeout")
def shut_down(call: Call) -> Any:
    """Without it, a server that is shut down would abort new requests with status 200, and leave some without an end.

    Wait for the requests of an API server, then stop its engines.

    The timeout is ``--shutdown-timeout`` in seconds; 0: what is under way is aborted; None: vLLM's default.
    """
    client, timeout = call.instance, call.argument("timeout")
    config = optional(client, "vllm_config")
    if config is None or config.kv_transfer_config is None or is_leaving(client):
        return call.proceed()
    begun_seconds, left = time.monotonic(), timeout
    waits = bool(timeout) and not _is_loop_here()
    refuses_at_seconds = begun_seconds + (_delay_seconds(config, timeout or 0.0) if waits else 0.0)
    setattr(client, _LEAVING, refuses_at_seconds)
    processor = private(client, "output_processor")
    # What the engine aborts from now on ends with an error (`frontend.update_stats_from_finished`).
    setattr(processor, _LEAVING, begun_seconds)
    if timeout and waits:
        logger.info("Shutting down: %d requests are under way", len(private(processor, "request_states")))
        until_seconds = begun_seconds + timeout
        while time.monotonic() < until_seconds and (_is_busy(client) or not refuses(client)):
            if time.monotonic() >= refuses_at_seconds - _CLOSED_BEFORE_SECONDS:
                _stop_listening(client)
            time.sleep(_LOOK_SECONDS)
        left = max(_LEAST_SECONDS, until_seconds - time.monotonic())
    _stop_listening(client)
    try:
        return call.proceed(timeout=left)
    finally:
        handler = optional(client, "output_handler")
        if handler is not None:
            _end_all(handler.get_loop(), processor)


def _delay_seconds(config: Any, timeout: float) -> float:
    given = [extra.get("drain_delay") for extra in extras_of(config.kv_transfer_config)]
    usable = (one for one in given if isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0)
    return float(min(next(usable, Settings.drain_delay_seconds), timeout / 2))


def _is_busy(client: Any) -> bool:
    """Whether requests are under way. Between two steps of a beam search, or of tools, the engine has none of them; of
    what runs in the background, HTTP has none."""
    roles = optional(client, _ROLES)
    return bool(private(client, "output_processor").has_unfinished_requests() or (roles is not None and roles.is_busy))


def note_server(client: Any, server: Any, roles: Any) -> None:
    """On the API server's loop, when its HTTP server begins."""
    setattr(client, _LISTENING, (asyncio.get_running_loop(), server))
    setattr(client, _ROLES, roles)


def _is_loop_here() -> bool:
    """Whether requests cannot go on meanwhile, because this is the thread that they run on."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _stop_listening(client: Any) -> None:
    """Connections are refused from now on: each load balancer tries another server then, and few do at 503."""
    found = optional(client, _LISTENING)
    if found is not None:
        loop, server = found
        delattr(client, _LISTENING)
        # Else the loop has ended, and its sockets with it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_close_all, server)


def _close_all(server: Any, num_looks: int = int(_CLOSED_BEFORE_SECONDS / _LOOK_SECONDS)) -> None:
    """Closes the sockets that an HTTP server listens on, in each process that has them: API servers share one with
    their parent, and a forked engine has it, too. Closed only here, it would take connections that nobody answers.

    Connections that wait to be accepted, because the loop was busy, would get a reset: it looks ``num_looks`` times
    whether there are any."""
    accepting = optional(server, _ACCEPTING, [])
    noted = [one for each in server.servers for one in each.sockets] + [one for one, _ in accepting]
    # uvicorn may have closed them by itself since the last look.
    listening = [one for one in noted if one.fileno() >= 0]
    waiting = select.poll()
    for one in listening:
        waiting.register(one.fileno(), select.POLLIN)
    loop = asyncio.get_running_loop()
    if num_looks and waiting.poll(0):
        loop.call_later(_LOOK_SECONDS, _close_all, server, num_looks - 1)
        return
    for one in listening:
        # uvloop's cannot be shut down.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fileno())) as same:
            same.shutdown(socket.SHUT_RD)
    for cease in (*(each.close for each in server.servers), *(cease for _, cease in accepting)):
        # Not at once: what asyncio has just accepted, it begins to serve after this, and only while it is not closed.
        loop.call_soon(cease)


@Patch(HTTP_SERVER, "_accept", "frontend", "self sock", versions=COUNTS_EXTERNAL_WEIGHTS.later)
async def accept(call: Call) -> None:
    """Without it, several API servers that are shut down would go on to take connections, and leave the last of them
    without an answer.

    Note the socket that one of several API servers accepts connections from by itself, and how it ceases to."""
    task = asyncio.current_task()
    assert task is not None
    vars(call.instance).setdefault(_ACCEPTING, []).append((call.argument("sock"), task.cancel))
    await call.proceed()


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


def is_leaving(part: Any) -> bool:
    """Whether an API server is shutting down that has a KV connector, by its client of the engine or its output
    processor. Others are left to vLLM."""
    return optional(part, _LEAVING) is not None


def refuses(client: Any) -> bool:
    """Whether such a server takes no new requests any more. At first it does: load balancers have to notice."""
    since_seconds = optional(client, _LEAVING)
    return since_seconds is not None and time.monotonic() >= since_seconds


@Patch(ENGINE_CLIENT, "check_health", "frontend", "self")
def check_health(call: Call) -> Any:
    """Without it, load balancers would send requests to a server that is shut down."""
    if is_leaving(call.instance):
        from vllm.v1.engine.exceptions import EngineDeadError

        # vLLM's ``/health`` answers this with 503.
        raise EngineDeadError
    return call.proceed()
