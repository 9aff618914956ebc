# SPDX-License-Identifier: Apache-2.0
"""Endpoints that this package adds to an API server: for the role of a server; of prefill, for prompts with images,
sounds, ..., or of embeddings, which ``/v1/completions`` takes none of; and for how much of a prompt its engine has
cached, and the KV of that, if it is enough: then decode computes the rest itself, and no step is needed here.

They are routes below ``/v1``, which vLLM's ``AuthenticationMiddleware`` guards. vLLM's own handlers answer what is
raised here: 400 for a ValueError.

Runs in: the API server's process.
Sources: ``entrypoints/serve/middleware/authenticate.py``, ``entrypoints/scale_out/token_in_token_out/serving.py``,
``v1/engine/core_client.py`` (``_call_utility_async``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from kvcached_nixl.errors import Refused
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.asked_prompts import engine_prompt
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.locate import API_ROUTES
from kvcached_nixl.vllm.patches.admission import ARRIVED, ROLES, Role, Roles, drop_rest
from kvcached_nixl.vllm.patches.arrival import LOOK_UP
from kvcached_nixl.wire.params import params_to_prefill
from kvcached_nixl.wire.question import (
    ASKED_PATH,
    LEAST_TOKENS,
    LOOK_UP_PATH,
    MOST_BODY_BYTES,
    MOST_SECONDS,
    Prompt,
    decode_prompt,
)

logger = logging.getLogger(SERVER_LOGGER)

ROLE_PATH = "/v1/kvcached_nixl/role"
MOST_HELD_BYTES = 4 * MOST_BODY_BYTES
"""Of all requests whose prompts are not computed yet."""
READ_SECONDS = 60.0
LONGEST_LOOK_UP_SECONDS = 10.0
"""How long an engine waits to begin a look-up at most: its caller may have left."""


@Patch(API_ROUTES, "register_scale_out_api_routers", "frontend", "app supported_tasks", kind="function")
def register_scale_out_api_routers(call: Call) -> None:
    """Without it, decode would have to compute prompts with images, sounds, ..., and of embeddings:
    /inference/v1/generate drops kv_transfer_params up to 0.32, says 403 from 0.33 on without --enable-scale-out, and
    loses which tokens of an image are embeddings. Until /inference/v1/generate takes all that a prompt has, and is
    served without --enable-scale-out.

    Add the endpoints to an API server that hands over KV."""
    from starlette.routing import Route

    call.proceed()
    app = call.argument("app")
    transfer = app.state.args.kv_transfer_config
    if transfer is None:
        return
    setattr(app.state, ROLES, role_of(app.state.args))
    routes = [Route(ROLE_PATH, _role, methods=["GET", "POST"], include_in_schema=False)]
    if transfer.is_kv_producer:
        for path, handle in ((ASKED_PATH, _computed), (LOOK_UP_PATH, _looked_up)):
            routes.append(Route(f"/{path}", _Endpoint(handle).answer, methods=["POST"], include_in_schema=False))
    app.router.routes += routes


class _Endpoint:
    """Takes prompts. ``handle`` answers one, by its encoded bytes and its HTTP request."""

    def __init__(self, handle: Callable[[bytearray, Any], Awaitable[Any]]) -> None:
        self._handle = handle
        self._num_held_bytes = 0

    async def answer(self, request: Any) -> Any:
        from starlette.responses import Response
        from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

        sizes: list[int] = []
        try:
            try:
                body = await asyncio.wait_for(self._read(request, sizes), READ_SECONDS)
            except asyncio.TimeoutError:
                raise _error(HTTPStatus.REQUEST_TIMEOUT, f"No prompt in {READ_SECONDS} s.") from None
            # The former takes a peer that leaves off the load that the latter counts.
            answered = await with_cancellation(load_aware_call(self._handle))(body, request)
        finally:
            self._num_held_bytes -= sum(sizes)
        # vLLM answers a client that has left with None.
        return answered or Response()

    async def _read(self, request: Any, held: list[int]) -> bytearray:
        """The body, of which no more is taken than allowed, whatever its headers say. ``held`` gets the sizes of its
        parts."""
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
    from vllm import envs
    from vllm.sampling_params import SamplingParams

    state = request.app.state
    client, renderer = state.engine_client, state.engine_client.renderer
    loop = asyncio.get_running_loop()
    asked = await loop.run_in_executor(None, decode_prompt, body)
    _check_length(asked, client)
    if asked.adapter and private(envs, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        # As ``/v1/completions`` does: an adapter that is not loaded is looked for, and loaded.
        await state.openai_serving_models.resolve_lora(asked.adapter)
    adapter = _adapter_of(state, asked.adapter)
    # vLLM's caches of images, sounds, ... are used on this thread only.
    executor = private(renderer, "_mm_executor")
    prompt = await loop.run_in_executor(executor, engine_prompt, asked, renderer, client.model_config)
    headers = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    wishes = params_to_prefill(asked.transfer_id or "")
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args={"kv_transfer_params": wishes})
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


def _check_length(asked: Prompt, client: Any) -> None:
    """Before the ids are numbers of Python, or are hashed: others wait for it."""
    least, most = int(asked.embeddings is None), private(client, "model_config").max_model_len
    num_tokens = len(asked.token_ids) // 4
    if not least <= num_tokens <= most:
        raise ValueError(f"a prompt of {num_tokens} tokens; expected {least} to {most} (--max-model-len)")


def _adapter_of(state: Any, name: str) -> Any:
    """vLLM's ``LoRARequest`` of a name; None of no name."""
    found = state.openai_serving_models.lora_requests.get(name) if name else None
    if name and found is None:
        raise _error(HTTPStatus.NOT_FOUND, f"The adapter {name!r} does not exist here.")
    return found


def _error(status: HTTPStatus, reason: str) -> Exception:
    from fastapi import HTTPException

    return HTTPException(status, reason)


# -------------------------------------------------------------------------------------------------- what is cached here


async def _looked_up(body: bytearray, request: Any) -> Any:
    """The endpoint's answer.

    Raises:
        ValueError: this is no prompt, it has more than tokens, or it is one that the model does not take.
    """
    from starlette.responses import JSONResponse

    one = ARRIVED.get()
    if one is not None:
        one.gives({"do_remote_decode": True})
        if one.refusal:
            raise _error(HTTPStatus.SERVICE_UNAVAILABLE, one.refusal)
    asked = await asyncio.get_running_loop().run_in_executor(None, decode_prompt, body)
    if asked.features or asked.embeddings is not None:
        raise ValueError("only prompts of tokens are looked up")
    state = request.app.state
    _check_length(asked, state.engine_client)
    adapter = _adapter_of(state, asked.adapter)
    engine = private(state.engine_client, "engine_core")
    named = asked.request_id, adapter, asked.salt
    least_tokens, most_seconds = _wanted(request.query_params)
    # With data parallelism vLLM would call all ranks, and answer what the first one says: the others would keep theirs.
    call, first = private(engine, "_call_utility_async"), private(engine, "core_engine")
    params = await call(LOOK_UP, asked.token_ids, *named, least_tokens, most_seconds, engine=first)
    return JSONResponse({"kv_transfer_params": params})


def _wanted(query: Mapping[str, str]) -> tuple[int, float]:
    least_tokens, most_seconds = int(query.get(LEAST_TOKENS, "0")), float(query.get(MOST_SECONDS, "0"))
    # A number of more than 64 bits could not be sent to the engine.
    if not (0 <= least_tokens < 2**31 and 0 <= most_seconds < math.inf):
        raise ValueError(
            f"found {least_tokens} tokens within {most_seconds} s; expected 0 to {2**31 - 1}, and 0 s or more"
        )
    return least_tokens, min(most_seconds or LONGEST_LOOK_UP_SECONDS, LONGEST_LOOK_UP_SECONDS)


# ------------------------------------------------------------------------------------------------- the role of a server


def role_of(arguments: Any) -> Roles:
    """The role at start of an API server with these arguments of ``vllm serve``, which has a connector."""
    from vllm import envs

    transfer, num_servers = arguments.kv_transfer_config, arguments.api_server_count or 1
    role = Role(bool(transfer.is_kv_producer) + 2 * bool(transfer.is_kv_consumer))
    if role is not Role.BOTH:
        found, expected = f"a server whose kv_role is that of {role} alone", "kv_role kv_both"
    elif num_servers > 1:
        found, expected = f"{num_servers} API servers, of which one has got this call", "--api-server-count 1"
    elif not any(arguments.api_key or [envs.VLLM_API_KEY]):
        found, expected = "a server without a key, whose role anybody could change", "--api-key"
    else:
        return Roles(role, None)
    unchanged, remedy = "The role is unchanged.", "Start the server so, or choose another one."
    return Roles(role, Refused(found=found, expected=expected, consequence=unchanged, remedy=remedy))


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["prefill", "decode", "both"]


async def _role(request: Any) -> Any:
    """The endpoint `ROLE_PATH`, which tells the role, and changes it."""
    from starlette.responses import JSONResponse

    roles: Roles = getattr(request.app.state, ROLES)
    if request.method == "POST":
        body = await request.body()
        if roles.why_fixed is not None:
            raise _error(HTTPStatus.CONFLICT, roles.why_fixed.line)
        try:
            role = Role[msgspec.json.decode(body, type=_Wanted).role.upper()]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            refused = Refused(
                found=f"a body that cannot be used: {error}",
                expected='{"role": "prefill"}, "decode" or "both"',
                consequence=f"The role is still {roles.role}.",
                remedy="Send one of these as JSON.",
            )
            raise _error(HTTPStatus.BAD_REQUEST, refused.line) from error
        if role is not roles.role:
            before, roles.role = roles.role, role
            told = "The role is %s, and was %s: %d requests of that are under way"
            logger.info(told, role, before, roles.num_left)
    return JSONResponse({"role": str(roles.role), "under_way": roles.num_left})
