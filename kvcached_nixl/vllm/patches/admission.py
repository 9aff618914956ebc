# SPDX-License-Identifier: Apache-2.0
"""Which HTTP requests an API server takes: those of clients, of decode servers that ask for KV, or both; none once it
is shut down (`leaving`). Others get HTTP 503, as do those that its engine has refused because they have waited for
``queue_timeout``.

A ``kv_both`` engine serves both at any time, so its role is a matter of its API server alone. A request keeps the role
that the server had when it came, with all its prompts, choices and steps of a beam search; so a stream ends as it would
have. Who asks is seen where a prompt is given to the engine, whatever endpoint it came through (`add_request`).

vLLM answers a request that fails with the status of its exception, and without headers of its own. Of a stream it sends
status 200 before the engine has said anything. So where requests may be refused, the start of each answer is held back
until its first part is there.

Needed until vLLM refuses new requests from SIGTERM on, and asks its connector which prompts to take.

Not refused and not counted: WebSockets. Not counted: what `/v1/responses` computes in the background.

Runs in: the API server's process, on its loop.
Sources: ``v1/engine/async_llm.py``, ``entrypoints/serve/exception_handling``, ``multimodal/cache.py``,
``starlette/responses.py``.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from kvcached_nixl.errors import Refused
from kvcached_nixl.patching import ANY_PARAMETERS, Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import optional
from kvcached_nixl.vllm.adapter.locate import ENGINE_CLIENT, HTTP_MIDDLEWARE
from kvcached_nixl.vllm.adapter.neighbours import extras_of
from kvcached_nixl.vllm.patches.leaving import note_server, refuses
from kvcached_nixl.wire.causes import FAILED, FailureCause
from kvcached_nixl.wire.params import asks
from kvcached_nixl.wire.question import MOST_BODY_BYTES, ROLE_HEADER

logger = logging.getLogger(SERVER_LOGGER)

ROLES = "kvcached_nixl_roles"
"""Attribute of the HTTP application's state."""
RETRY_SECONDS = 1
READ_SECONDS = 5.0
"""For the rest of a request that is refused."""
_MESSAGE = "This server is shutting down. Use another one."
_SERVED = ("/health", "/metrics", "/ping")
"""Paths that answer until the end, on connections that are open; ``/health`` with 503."""


class Role(enum.Flag):
    """What a server takes new requests for: ``PREFILL`` for decode servers that ask it, ``DECODE`` for clients."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3

    def __str__(self) -> str:
        return str(self.name).lower()


READY: Mapping[str, Role] = MappingProxyType(
    {"/kvcached_nixl/ready/clients": Role.DECODE, "/kvcached_nixl/ready/questions": Role.PREFILL}
)
"""Path of a probe -> what it asks for. Outside ``/v1``: probes have no key."""

_REFUSALS: Mapping[Role, str] = MappingProxyType(
    {
        Role.DECODE: "This server takes no requests of clients while its role is prefill. Use another one.",
        Role.PREFILL: "This server computes no prompts for others while its role is decode. Ask another one.",
    }
)


_SAYS_ABORT = ("/completions", "/completions/batch", "/inference/v1/generate")
"""How paths end whose answers have a ``finish_reason`` of "abort"; behind ``--root-path``, too."""


@dataclass(eq=False)
class Arrived:
    """An HTTP request.

    Attributes:
        path: of its URL.
        role: that the server had when it came; `Role.BOTH` where it cannot change.
        is_for: `Role.PREFILL` or `Role.DECODE`; None until its first prompt is given to the engine.
    """

    path: str
    role: Role
    is_for: Role | None = None

    @property
    def says_abort(self) -> bool:
        """Whether its client sees that the engine has aborted it. Other endpoints call what there is of it whole."""
        return self.path.endswith(_SAYS_ABORT)

    def gives(self, params: object) -> None:
        """A prompt of it is about to be given to the engine, with these ``kv_transfer_params``."""
        self.is_for = Role.PREFILL if asks(params, "do_remote_decode") else Role.DECODE

    @property
    def refusal(self) -> str:
        """Why it is refused; "" if it is not."""
        return "" if self.is_for is None or self.is_for in self.role else _REFUSALS[self.is_for]


ARRIVED: ContextVar[Arrived | None] = ContextVar("kvcached_nixl_arrived", default=None)
"""The HTTP request that this task works for, or did when it began; None if it works for none."""


@dataclass(eq=False)
class Roles:
    """The role of one API server.

    Attributes:
        role: at this moment.
        why_fixed: why it cannot change; None if it can. Then every request is taken, as the engine does.
    """

    role: Role
    why_fixed: Refused | None
    _arrived: set[Arrived] = field(default_factory=set)

    @contextmanager
    def let_in(self, path: str) -> Iterator[Arrived]:
        """Runs around the whole of an HTTP request, in its own task."""
        one = Arrived(path, self.role if self.why_fixed is None else Role.BOTH)
        self._arrived.add(one)
        ARRIVED.set(one)
        try:
            yield one
        finally:
            self._arrived.discard(one)

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way. On any thread."""
        return bool(self._arrived)

    @property
    def num_left(self) -> int:
        """Requests under way that came while the role was another, and would be refused now, or may be."""
        if self.why_fixed is not None:
            return 0
        others = (one for one in self._arrived if one is not ARRIVED.get() and one.role is not self.role)
        return sum(one.is_for is None or one.is_for not in self.role for one in others)


async def tell_ready(roles: Roles, client: Any, scope: Any, receive: Any, send: Any) -> None:
    """Answers a probe, a path of `READY`: with 503 in the other role, and where ``/health`` says 503."""
    from starlette.responses import Response
    from vllm.v1.engine.exceptions import EngineDeadError

    is_ready = READY[scope["path"]] in roles.role
    try:
        await client.check_health()
    except EngineDeadError:
        is_ready = False
    await Response(status_code=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)


# ----------------------------------------------------------------------------------------------------- the patches


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
            note_server(client, server, roles)
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
    return config is not None and any("queue_timeout" in extra for extra in extras_of(config))


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
