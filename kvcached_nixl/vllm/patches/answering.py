# SPDX-License-Identifier: Apache-2.0
"""Prefill's endpoint for prompts with images, sounds, ..., or of embeddings, which ``/v1/completions`` takes none of.

With those for the role of a server (`roles`) and for what it has cached (`look_ups`), these are routes below ``/v1``,
which vLLM's ``AuthenticationMiddleware`` guards. vLLM's own handlers answer what is raised here: 400 for a ValueError.

Runs in: the API server's process.
Sources: ``entrypoints/serve/middleware/authenticate.py``, ``entrypoints/scale_out/token_in_token_out/serving.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.asked_prompts import engine_prompt
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.locate import API_ROUTES
from kvcached_nixl.vllm.patches.leaving import drop_rest
from kvcached_nixl.vllm.patches.look_ups import looked_up
from kvcached_nixl.vllm.patches.roles import ROLE_PATH, ROLES, answer, role_of
from kvcached_nixl.wire.asked_prompt import ASKED_PATH, LOOK_UP_PATH, MOST_BODY_BYTES, decode
from kvcached_nixl.wire.params import KvTransferParams

MOST_HELD_BYTES = 4 * MOST_BODY_BYTES
"""Of all requests whose prompts are not computed yet."""
READ_SECONDS = 60.0


@Patch(API_ROUTES, "register_scale_out_api_routers", "frontend", "app supported_tasks", kind="function").because(
    "decode would have to compute prompts with images, sounds, ..., and of embeddings: /inference/v1/generate drops "
    "kv_transfer_params up to 0.32, says 403 from 0.33 on without --enable-scale-out, and loses which tokens of an "
    "image are embeddings.",
    remove_when="/inference/v1/generate takes all that a prompt has, and is served without --enable-scale-out",
)
def register_scale_out_api_routers(call: Call) -> None:
    """Add the endpoints to an API server that hands over KV."""
    from starlette.routing import Route

    call.proceed()
    app = call.argument("app")
    transfer = app.state.args.kv_transfer_config
    if transfer is None:
        return
    setattr(app.state, ROLES, role_of(app.state.args))
    routes = [Route(ROLE_PATH, answer, methods=["GET", "POST"], include_in_schema=False)]
    if transfer.is_kv_producer:
        for path, handle in ((ASKED_PATH, _computed), (LOOK_UP_PATH, looked_up)):
            routes.append(Route(f"/{path}", _Endpoint(handle).answer, methods=["POST"], include_in_schema=False))
    app.router.routes += routes


class _Endpoint:
    """Takes prompts.

    Args:
        handle: answers one, by its encoded bytes and its HTTP request.
    """

    def __init__(self, handle: Callable[[bytearray, Any], Awaitable[Any]]) -> None:
        self._handle = handle
        self._num_held_bytes = 0

    async def answer(self, request: Any) -> Any:
        from starlette.responses import Response
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        with self._held() as held:
            try:
                body = await asyncio.wait_for(self._read(request, held), READ_SECONDS)
            except asyncio.TimeoutError:
                raise _error(HTTPStatus.REQUEST_TIMEOUT, f"No prompt in {READ_SECONDS} s.") from None
            answered = await with_cancellation(self._handle)(body, request)
        # vLLM answers a client that has left with None.
        return answered or Response()

    @contextmanager
    def _held(self) -> Iterator[list[int]]:
        sizes: list[int] = []
        try:
            yield sizes
        finally:
            self._num_held_bytes -= sum(sizes)

    async def _read(self, request: Any, held: list[int]) -> bytearray:
        """The body, of which no more is taken than allowed, whatever its headers say."""
        body, chunks = bytearray(), request.stream()
        async for chunk in chunks:
            held.append(len(chunk))
            self._num_held_bytes += len(chunk)
            body += chunk
            if len(body) > MOST_BODY_BYTES:
                error = _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A prompt has at most {MOST_BODY_BYTES} bytes.")
            elif self._num_held_bytes > MOST_HELD_BYTES:
                error = _error(HTTPStatus.SERVICE_UNAVAILABLE, "Too many prompts wait here. Try again.")
            else:
                continue
            self._num_held_bytes -= sum(held)
            held.clear()
            body.clear()
            await drop_rest(chunks)
            raise error
        return body


async def _computed(body: bytearray, request: Any) -> Any:
    from starlette.responses import JSONResponse
    from vllm.sampling_params import SamplingParams

    state = request.app.state
    client, renderer = state.engine_client, state.engine_client.renderer
    loop = asyncio.get_running_loop()
    asked = await loop.run_in_executor(None, decode, body)
    adapter = None
    if asked.adapter:
        adapter = state.openai_serving_models.lora_requests.get(asked.adapter)
        if adapter is None:
            raise _error(HTTPStatus.NOT_FOUND, f"The adapter {asked.adapter!r} does not exist here.")
    # vLLM's caches of images, sounds, ... are used on this thread only.
    executor = private(renderer, "_mm_executor")
    prompt = await loop.run_in_executor(executor, engine_prompt, asked, renderer, client.model_config)
    headers = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    wishes = msgspec.to_builtins(KvTransferParams.for_prefill(asked.transfer_id))
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        extra_args={"kv_transfer_params": wishes},
    )
    found = None
    async for output in client.generate(
        prompt,
        params,
        asked.request_id,
        lora_request=adapter,
        trace_headers=headers if await client.is_tracing_enabled() else None,
        priority=asked.priority,
    ):
        found = output.kv_transfer_params
    return JSONResponse({"kv_transfer_params": found})


def _error(status: HTTPStatus, reason: str) -> Exception:
    from fastapi import HTTPException

    return HTTPException(status, reason)
