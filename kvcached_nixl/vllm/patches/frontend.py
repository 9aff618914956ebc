# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM's API server: it identifies media, gives requests to its engine, and is told that they have ended.

Runs in: the API server's process.
"""

from __future__ import annotations

import logging
from typing import Any

from kvcached_nixl.patching import ANY_PARAMETERS, Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.locate import (
    API_ROUTES,
    ENGINE_CLIENT,
    HTTP_MIDDLEWARE,
    INPUT_PROCESSOR,
    MEDIA_PROCESSING,
    OUTPUT_PROCESSOR,
    RENDERER,
)
from kvcached_nixl.vllm.adapter.tracing import add_server_spans
from kvcached_nixl.vllm.patches.actions.answering import add_route
from kvcached_nixl.vllm.patches.actions.frontend import let_fail, numbers_media, require_readable
from kvcached_nixl.vllm.patches.actions.leaving import is_leaving, leave, not_healthy, refusal_of, refuse_new, refuses
from kvcached_nixl.vllm.patches.actions.refusing import RefusableAnswer, may_refuse

_LEAVES = "a server that is shut down would abort new requests with status 200, and leave some without an end."
_LEAVES_UPSTREAM = "vllm/entrypoints/launcher.py: handle_shutdown stops the engine before the HTTP server"
_LEAVES_UNTIL = "vLLM refuses new requests from SIGTERM on, and ends those that its engine has not ended"


@Patch(
    target=ENGINE_CLIENT,
    attribute="shutdown",
    process="frontend",
    parameters=("self", "timeout"),
    why=_LEAVES,
    upstream=_LEAVES_UPSTREAM,
    remove_when=_LEAVES_UNTIL,
).around
def shut_down(call: Call) -> Any:
    return leave(call.instance, call.argument("timeout"), lambda timeout: call.proceed(timeout=timeout))


@Patch(
    target=ENGINE_CLIENT,
    attribute="check_health",
    process="frontend",
    parameters=("self",),
    why="load balancers would send requests to a server that is shut down.",
    upstream=_LEAVES_UPSTREAM,
    remove_when=_LEAVES_UNTIL,
).around
def check_health(call: Call) -> Any:
    if is_leaving(call.instance):
        raise not_healthy()
    return call.proceed()


@Patch(
    target=HTTP_MIDDLEWARE,
    attribute="__call__",
    process="frontend",
    parameters=("self", "scope", "receive", "send"),
    why=f"{_LEAVES[:-1]}; clients of requests that waited too long would not be told when to try again.",
    upstream=_LEAVES_UPSTREAM,
    remove_when=_LEAVES_UNTIL,
).around
def serve_http(call: Call) -> Any:
    scope, receive, send = map(call.argument, ("scope", "receive", "send"))
    refusal = refusal_of(scope)
    if refusal is not None:
        return refusal(scope, receive, send)
    return call.proceed(send=RefusableAnswer(scope, receive, send)) if may_refuse(scope) else call.proceed()


@Patch(
    target=ENGINE_CLIENT,
    attribute="add_request",
    process="frontend",
    parameters=ANY_PARAMETERS,
    why=_LEAVES,
    upstream=_LEAVES_UPSTREAM,
    remove_when=_LEAVES_UNTIL,
).around
def add_request(call: Call) -> Any:
    if refuses(call.instance):
        raise refuse_new()
    return call.proceed()


@Patch(
    target=INPUT_PROCESSOR,
    attribute="assign_request_id",
    kind="staticmethod",
    process="frontend",
    parameters=("request",),
    why="a body whose priority is no number would end the engine's input thread, and all requests would wait forever.",
    upstream="vllm/v1/engine/core.py: process_input_sockets decodes a request outside of its try",
    remove_when="vLLM's engine answers requests that it cannot decode",
).around
def assign_request_id(call: Call) -> None:
    require_readable(call.argument("request"))
    call.proceed()


@Patch(
    target=OUTPUT_PROCESSOR,
    attribute="_update_stats_from_finished",
    process="frontend",
    parameters=("self", "req_state", "finish_reason", "iteration_stats"),
    why="a request whose hand-over has failed would be answered with status 200 and no token.",
    upstream="vllm/entrypoints: some endpoints check finish_reason, others do not; streams skip outputs without tokens "
    "before they could",
    remove_when="vLLM raises for a request that ends with an error, whatever endpoint it came through",
).around
def update_stats_from_finished(call: Call) -> None:
    call.proceed()
    let_fail(
        call.argument("req_state"),
        call.argument("finish_reason"),
        logging.getLogger(SERVER_LOGGER),
        is_leaving=is_leaving(call.instance),
    )


@Patch(
    target=OUTPUT_PROCESSOR,
    attribute="do_tracing",
    process="frontend",
    parameters=("self", "engine_core_output", "req_state", "iteration_stats"),
    why="a trace would not say how long the API server had a request, and its first token.",
    upstream="vllm/v1/engine/output_processor.py: do_tracing makes one span of a whole request",
    remove_when="vLLM's own spans say when a request has entered its engine, and when its first token was there",
).around
def do_tracing(call: Call) -> None:
    """Called where requests are traced only, once a request has ended."""
    call.proceed()
    add_server_spans(call.argument("engine_core_output"), call.argument("req_state"))


_OTHER_MEDIA = "two servers would identify different images, sounds, ... as equal, or equal ones as different."


@Patch(
    target=RENDERER,
    attribute="_process_mm_uuids",
    process="frontend",
    parameters=("self", "mm_data", "mm_data_items", "mm_uuid_items", "mm_req_id"),
    why=_OTHER_MEDIA,
    upstream="vllm/renderers/base.py: identifies media by counting, not by content, where both caches are off",
    remove_when="vLLM identifies media by their content, with and without caches",
).around
def process_mm_uuids(call: Call) -> Any:
    found = call.proceed()
    # If there are no identifiers, vLLM makes them from the content.
    return {} if numbers_media(call.instance) else found


@Patch(
    target=MEDIA_PROCESSING,
    attribute="model_id",
    kind="property",
    process="frontend",
    parameters=("self",),
    why=_OTHER_MEDIA,
    upstream="vllm/multimodal/processing/context.py: a model's path is part of what identifies its media",
    remove_when="vLLM identifies media by their content alone",
).around
def model_id(call: Call) -> str:
    # An engine has one model, and the handshake compares models by their content.
    return "the model of this engine"


@Patch(
    target=API_ROUTES,
    attribute="register_scale_out_api_routers",
    kind="function",
    process="frontend",
    parameters=("app", "supported_tasks"),
    why="decode would have to compute prompts with images, sounds, ..., and of embeddings.",
    upstream="vllm/entrypoints/scale_out: /inference/v1/generate drops kv_transfer_params up to 0.32, and says 403 "
    "from 0.33 on without --enable-scale-out; it loses which tokens of an image are embeddings",
    remove_when="/inference/v1/generate takes all that a prompt has, and is served without --enable-scale-out",
).around
def register_scale_out_api_routers(call: Call) -> None:
    call.proceed()
    add_route(call.argument("app"))
