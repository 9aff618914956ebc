# SPDX-License-Identifier: Apache-2.0
"""No connection, or HTTP 503, for what an API server does not serve: new requests of one that is shut down, those that
are not for its role, and requests that its engine has refused because they have waited for ``queue_timeout``.

On SIGTERM vLLM stops the engine first and the HTTP server after it. In between, ``/health`` says 200 and new requests
are answered 200 with ``abort``. Requests that come when the engine has ended never end, nor do those whose last outputs
were not read in time, and the server waits for them. So it takes no new work and no connections, every request gets its
end, and then the engine stops.

vLLM answers a request that fails with the status of its exception, and without headers of its own. Of a stream it sends
status 200 before the engine has said anything. So where requests may be refused, the start of each answer is held back
until its first part is there.

Needed until vLLM refuses new requests from SIGTERM on, and ends those that its engine has not ended.

Runs in: the API server's process.
Sources: ``entrypoints/launcher.py`` (``handle_shutdown``), from 0.29 on ``entrypoints/launchers/launcher.py``,
``v1/engine/async_llm.py``, ``entrypoints/serve/exception_handling``, ``multimodal/cache.py``,
``starlette/responses.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from kvcached_nixl.patching import ANY_PARAMETERS, Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER, Settings
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import ENGINE_CLIENT, HTTP_MIDDLEWARE, HTTP_SERVER
from kvcached_nixl.vllm.adapter.neighbours import with_children
from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS
from kvcached_nixl.vllm.patches.roles import ARRIVED, READY, ROLES, Arrived, Role, Roles, tell_ready
from kvcached_nixl.wire.causes import FAILED, FailureCause
from kvcached_nixl.wire.question import MOST_BODY_BYTES, ROLE_HEADER

logger = logging.getLogger(SERVER_LOGGER)

_LEAVING = "_kvcached_nixl_leaving"
"""Attribute of vLLM's client of the engine: when it begins to refuse requests, by `time.monotonic`. Its output
processor has it, too."""
_LISTENING = "_kvcached_nixl_listening"
"""The same client's attribute: the API server's loop, and its HTTP server. And it has the application's `ROLES`."""
_ACCEPTING = "_kvcached_nixl_accepting"
"""Attribute of an HTTP server: the sockets that it accepts from by itself, each with what ends that."""
_LOOK_SECONDS = 0.05
_CLOSED_BEFORE_SECONDS = 0.5
"""New connections end before requests are refused: what has come over one until then is served."""
_LEAST_SECONDS = 1.0
"""For the engine to stop, however long the requests have taken."""
RETRY_SECONDS = 1
READ_SECONDS = 5.0
"""For the rest of a request that is refused."""
_MESSAGE = "This server is shutting down. Use another one."
_SERVED = ("/health", "/metrics", "/ping")
"""Paths that answer until the end, on connections that are open; ``/health`` with 503."""


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


def _extras(transfer_config: Any) -> Iterator[Mapping[str, Any]]:
    """``kv_connector_extra_config`` of each connector. NIXL's was checked when the engine started; beside it there may
    be anything."""
    found = (one.get("kv_connector_extra_config") for one in with_children(vars(transfer_config)))
    return (one for one in found if isinstance(one, Mapping))


def _delay_seconds(config: Any, timeout: float) -> float:
    given = [extra.get("drain_delay") for extra in _extras(config.kv_transfer_config)]
    usable = (one for one in given if isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0)
    return float(min(next(usable, Settings.drain_delay_seconds), timeout / 2))


def _is_busy(client: Any) -> bool:
    """Whether requests are under way. Between two steps of a beam search, or of tools, the engine has none of them; of
    what runs in the background, HTTP has none."""
    roles = optional(client, ROLES)
    return bool(private(client, "output_processor").has_unfinished_requests() or (roles is not None and roles.is_busy))


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


def _close_all(server: Any) -> None:
    """Closes the sockets that an HTTP server listens on, in each process that has them: API servers share one with
    their parent, and a forked engine has it, too. Closed only here, it would take connections that nobody answers."""
    accepting = optional(server, _ACCEPTING, [])
    listening = [one for each in server.servers for one in each.sockets]
    for one in (*listening, *(one for one, _ in accepting)):
        # uvloop's cannot be shut down.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fileno())) as same:
            same.shutdown(socket.SHUT_RD)
    for cease in (*(each.close for each in server.servers), *(cease for _, cease in accepting)):
        cease()


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


@Patch(ENGINE_CLIENT, "add_request", "frontend", ANY_PARAMETERS)
def add_request(call: Call) -> Any:
    """Without it, a server that is shut down would abort new requests with status 200, and leave some without an end;
    one that has changed its role would serve everybody.

    HTTP requests have been let in, or refused: each gets all its steps."""
    one = ARRIVED.get()
    if one is None and refuses(call.instance):
        from vllm.v1.engine.exceptions import EngineGenerateError

        raise EngineGenerateError(_MESSAGE)
    if one is not None:
        one.gives((optional(call.argument("params"), "extra_args") or {}).get("kv_transfer_params"))
        if one.refusal:
            return _refuse_prompt(call, one.refusal)
    return call.proceed()


async def _refuse_prompt(call: Call, told: str) -> None:
    from vllm.v1.engine.async_llm import InputStreamError

    prompt = call.argument("prompt")
    if isinstance(prompt, Mapping) and "mm_kwargs" in prompt:
        # The API server believes that its engine has these images, sounds, ... from now on, and would not send them
        # with the next request: that one would fail.
        queue = await call.proceed()
        await call.instance.abort(queue.request_id, internal=True)
    error = generation_error()(told)
    error.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    raise InputStreamError(error)


@Patch(HTTP_MIDDLEWARE, "__call__", "frontend", "self scope receive send")
def serve_http(call: Call) -> Any:
    """Without it, a server that is shut down would abort new requests with status 200, and leave some without an end;
    clients of requests that waited too long would not be told when to try again.

    A load balancer tries another server when it gets 503."""
    scope, receive, send = map(call.argument, ("scope", "receive", "send"))
    state = scope["app"].state if scope["type"] in ("http", "lifespan") and "app" in scope else None
    client, roles = optional(state, "engine_client"), optional(state, ROLES)
    if scope["type"] == "lifespan":
        server = optional(state, "server")
        if client is not None and server is not None:
            setattr(client, _LISTENING, (asyncio.get_running_loop(), server))
            setattr(client, ROLES, roles)
    if roles is None or scope["type"] == "lifespan" or scope["path"] in _SERVED:
        return call.proceed()
    if scope["path"] in READY:
        return tell_ready(roles, client, scope, receive, send)
    return _refuse(scope, receive, send) if refuses(client) else _let_in(call, roles, may_refuse=_may_refuse(client))


async def _let_in(call: Call, roles: Roles, *, may_refuse: bool) -> None:
    scope, receive, send = map(call.argument, ("scope", "receive", "send"))
    with roles.let_in(scope["path"]) as one:
        if one.role is Role.BOTH and not may_refuse:
            await call.proceed()
            return
        # Clients are refused while the role is prefill; their streams would begin at once.
        answer = RefusableAnswer(scope, receive, send, one, holds=may_refuse or one.role is Role.PREFILL)
        try:
            await call.proceed(send=answer)
        except Exception:
            # A stream of `/v1/responses` breaks off.
            if not await answer.refused():
                raise


async def _refuse(scope: Any, receive: Any, send: Send) -> None:
    from starlette.requests import ClientDisconnect, Request

    try:
        await asyncio.wait_for(drop_rest(Request(scope, receive).stream()), READ_SECONDS)
    except asyncio.TimeoutError:
        logger.debug("A request that is refused was not read to its end")
    except ClientDisconnect:
        return
    await _unavailable(_MESSAGE, str(RETRY_SECONDS))(scope, receive, send)


async def drop_rest(chunks: AsyncIterator[bytes]) -> None:
    """Reads what is left of a request that is refused. When a connection is closed with bytes that nobody has read, its
    client gets a reset, and may not see the answer. Bounded, since a client may send without an end."""
    num_bytes = 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > MOST_BODY_BYTES:
            return


def _unavailable(message: str, retry_after: str, **headers: str) -> Any:
    """An answer as ASGI application."""
    from starlette.responses import JSONResponse

    error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
    return JSONResponse({"error": error}, 503, {"Retry-After": retry_after, **headers})


# ----------------------------------------------------------------------------------------- what an engine has refused

REFUSED = f"{FAILED}cause={FailureCause.QUEUE_TIMEOUT.label} "
"""How it begins what an engine says of a request that it has refused."""
_TOLD = re.compile(rf'{REFUSED}retry_after=(\d+)[^"]*'.encode())
_STREAMED = b'data: {"error"'
_LOOKED_AT = 500
"""Bytes of an answer in which an error's message begins."""
Send = Callable[[Any], Awaitable[None]]


def generation_error() -> Any:
    """The class of error that vLLM raises for a request that has failed."""
    try:
        from vllm.exceptions import GenerationError
    except ImportError:
        # Below vLLM 0.29.
        from vllm.entrypoints.openai.engine.protocol import GenerationError
    return GenerationError


def _may_refuse(client: Any) -> bool:
    """Whether the engine of this client may refuse requests."""
    config = optional(optional(client, "vllm_config"), "kv_transfer_config")
    return config is not None and any("queue_timeout" in extra for extra in _extras(config))


class RefusableAnswer:
    """Takes an answer's messages in place of ASGI's ``send``.

    Args:
        arrived: its request.
        holds: whether the start of an answer is held back until its first part is there.
    """

    def __init__(self, scope: Any, receive: Any, send: Send, arrived: Arrived, *, holds: bool) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._arrived, self._holds = arrived, holds
        self._held: list[Any] = []
        self._is_refused = False

    async def __call__(self, message: Any) -> None:
        starts = message["type"] == "http.response.start"
        if await self.refused(starts=starts):
            return
        held, self._held = self._held, []
        if (starts and self._holds) or (held and message.get("more_body") and self._is_undecided):
            self._held = [*held, message]
            return
        if held:
            start = held[0]
            body = bytes(message.get("body", b"")[:_LOOKED_AT])
            told = _TOLD.search(body) if start["status"] >= 500 or body.startswith(_STREAMED) else None
            if told is not None and start["status"] < 500:
                await self._refuse(told[0].decode(), told[1].decode())
                return
            if told is not None:
                held[0] = {**start, "headers": [*start.get("headers", ()), (b"retry-after", told[1])]}
        for one in (*held, message):
            await self._send(one)

    async def refused(self, *, starts: bool = False) -> bool:
        """Whether the request was refused. Answers one that is not for the server's role, if nothing was sent yet."""
        if not self._is_refused and (starts or self._held) and self._arrived.refusal:
            await self._refuse(self._arrived.refusal, str(RETRY_SECONDS), **{ROLE_HEADER: str(self._arrived.role)})
        return self._is_refused

    @property
    def _is_undecided(self) -> bool:
        """Whether a stream says something before its prompt is given to the engine, as in ``/v1/responses``."""
        one = self._arrived
        return self._scope["method"] == "POST" and one.role is Role.PREFILL and one.is_for is None

    async def _refuse(self, told: str, retry_after: str, **headers: str) -> None:
        self._is_refused = True
        await _unavailable(told, retry_after, **headers)(self._scope, self._receive, self._send)
