# SPDX-License-Identifier: Apache-2.0
"""HTTP 503 with ``Retry-After`` for requests that an engine has refused: they have waited for ``queue_timeout``.

vLLM answers a request that fails with the status of its exception, and without headers of its own. Of a stream it sends
status 200 before the engine has said anything. So where requests may be refused, the start of each answer is held back
until its first part is there. Sources: ``entrypoints/serve/exception_handling``, ``starlette/responses.py``.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvcached_nixl.vllm.adapter.nested_connectors import with_children
from kvcached_nixl.vllm.adapter.private import optional
from kvcached_nixl.wire.causes import FAILED, FailureCause

__all__ = ["RefusableAnswer", "is_refusal", "may_refuse"]

_REFUSED = f"{FAILED}cause={FailureCause.QUEUE_TIMEOUT.label} "
_TOLD = re.compile(rf'{_REFUSED}retry_after=(\d+)[^"]*'.encode())
_STREAMED = b'data: {"error"'
_LOOKED_AT = 500
"""Bytes of an answer in which an error's message begins."""

Send = Callable[[Any], Awaitable[None]]


def is_refusal(told: str) -> bool:
    """Whether this is what an engine says of a request that it has refused."""
    return told.startswith(_REFUSED)


def may_refuse(scope: Any) -> bool:
    """Whether the engine of an API server that gets this request may refuse it."""
    state = scope["app"].state if scope["type"] == "http" and "app" in scope else None
    config = optional(optional(optional(state, "engine_client"), "vllm_config"), "kv_transfer_config")
    extras = [] if config is None else [one.get("kv_connector_extra_config") for one in with_children(vars(config))]
    return any(isinstance(one, Mapping) and "queue_timeout" in one for one in extras)


class RefusableAnswer:
    """Takes an answer's messages in place of ASGI's ``send``; see the module."""

    def __init__(self, scope: Any, receive: Any, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Any = None
        self._is_refused = False

    async def __call__(self, message: Any) -> None:
        if self._is_refused:
            return
        start, self._start = self._start, None
        if message["type"] == "http.response.start":
            self._start = message
            return
        if start is not None:
            body = bytes(message.get("body", b"")[:_LOOKED_AT])
            told = _TOLD.search(body) if start["status"] >= 500 or body.startswith(_STREAMED) else None
            if told is not None and start["status"] < 500:
                self._is_refused = True
                await _refusal(told)(self._scope, self._receive, self._send)
                return
            if told is not None:
                start = {**start, "headers": [*start.get("headers", ()), (b"retry-after", told[1])]}
            await self._send(start)
        await self._send(message)


def _refusal(told: re.Match[bytes]) -> Any:
    from starlette.responses import JSONResponse

    error = {"message": told[0].decode(), "type": "ServiceUnavailableError", "param": None, "code": 503}
    return JSONResponse({"error": error}, 503, {"Retry-After": told[1].decode()})
