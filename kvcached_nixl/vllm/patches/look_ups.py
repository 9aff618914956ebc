# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt an engine has cached, for a decode server that looks for its history; and the KV of that, if
it is enough: then decode computes the rest itself, and no step is needed here.

The API server calls its engine for that, as for other things that are no requests: a request would be counted, be
limited as those of clients (``--max-num-queued-tokens``), and set the ranks of data parallelism going. What takes time
runs on a thread of its own, so that no step waits for it. Blocks are kept between two steps.

Runs in: the API server's process (`looked_up`) and the engine's (`let_look_up`).
Sources: ``v1/engine/core.py`` (``_invoke_utility_method``), ``v1/core/kv_cache_coordinator.py``.
"""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks, bound_sides
from kvcached_nixl.vllm.patches.roles import arrived
from kvcached_nixl.wire.asked_prompt import LEAST_TOKENS, MOST_SECONDS, decode

__all__ = ["let_look_up", "looked_up"]

_METHOD = "kvcached_nixl_look_up"


async def looked_up(body: bytearray, request: Any) -> Any:
    """The endpoint's answer.

    Raises:
        ValueError: this is no prompt, it has more than tokens, or it is one that the model does not take.
    """
    from fastapi import HTTPException
    from starlette.responses import JSONResponse

    one = arrived()
    if one is not None:
        one.gives({"do_remote_decode": True})
        if one.refusal:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, one.refusal)
    asked = await asyncio.get_running_loop().run_in_executor(None, decode, body)
    if asked.features or asked.embeddings is not None:
        raise ValueError("only prompts of tokens are looked up")
    state = request.app.state
    num_tokens, most = len(asked.token_ids) // 4, private(state.engine_client, "model_config").max_model_len
    # vLLM cannot look up an empty one, and hashing one of any size would keep the engine's thread waiting.
    if not 0 < num_tokens <= most:
        raise ValueError(f"a prompt of {num_tokens} tokens; expected 1 to {most} (--max-model-len)")
    adapter = state.openai_serving_models.lora_requests.get(asked.adapter)
    if asked.adapter and adapter is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"The adapter {asked.adapter!r} does not exist here.")
    engine = private(state.engine_client, "engine_core")
    named = asked.request_id, adapter, asked.salt
    least_tokens, most_seconds = _wanted(request.query_params)
    # With data parallelism vLLM would call all ranks, and answer what the first one says: the others would keep theirs.
    call, first = private(engine, "_call_utility_async"), private(engine, "core_engine")
    params = await call(_METHOD, asked.token_ids, *named, least_tokens, most_seconds, engine=first)
    return JSONResponse({"kv_transfer_params": params})


def _wanted(query: Mapping[str, str]) -> tuple[int, float]:
    least_tokens, most_seconds = int(query.get(LEAST_TOKENS, "0")), float(query.get(MOST_SECONDS, "0"))
    # A number of more than 64 bits could not be sent to the engine.
    if not (0 <= least_tokens < 2**31 and 0 <= most_seconds < math.inf):
        raise ValueError(
            f"found {least_tokens} tokens within {most_seconds} s; expected 0 to {2**31 - 1}, and 0 s or more"
        )
    return least_tokens, most_seconds


def let_look_up(core: Any) -> None:
    """Lets API servers call for it. Idempotent."""
    if _METHOD not in vars(core):
        setattr(core, _METHOD, _LookUps(core).begin)


class _LookUps:
    """Those of one engine."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._looker = ThreadPoolExecutor(1, "kvcached_nixl-look-up")

    def begin(
        self, token_ids: bytes, request_id: str, adapter: Any, salt: str, least_tokens: int, most_seconds: float
    ) -> Future[dict[str, Any]]:
        """What an API server calls.

        Args:
            adapter: vLLM's ``LoRARequest`` as it was sent, or None.
            least_tokens: if so many are cached, their KV is wanted; 0 if only their number is.
            most_seconds: how long the peer waits for the answer. Half of that is left for the step before it.
        """
        answer: Future[dict[str, Any]] = Future()
        until_seconds = time.monotonic() + most_seconds / 2
        self._looker.submit(self._look_up, answer, least_tokens, until_seconds, token_ids, request_id, adapter, salt)
        return answer

    def _look_up(
        self, answer: Future[dict[str, Any]], least_tokens: int, until_seconds: float, *of_request: Any
    ) -> None:
        try:
            blocks, (side, *_) = EngineBlocks(self._core.scheduler), bound_sides(self._core.scheduler)
            # While the engine is paused, what is cached is of no use to others.
            if not (blocks.caches_prefixes and blocks.admits):
                answer.set_result(side.look_up(0))
                return
            request = self._request(*of_request)
            num_tokens = blocks.num_cached_tokens_of(request)
            if 0 < least_tokens <= num_tokens:
                side.call_soon(functools.partial(self._offer, answer, until_seconds, request, num_tokens))
            else:
                answer.set_result(side.look_up(num_tokens))
        except Exception as error:  # noqa: BLE001 - the API server gets it
            answer.set_exception(error)

    def _offer(self, answer: Future[dict[str, Any]], until_seconds: float, request: Any, num_tokens: int) -> None:
        """On the engine's thread, between two steps: keep what is cached, if the peer still waits for it."""
        blocks, (side, *_) = EngineBlocks(self._core.scheduler), bound_sides(self._core.scheduler)
        # As for a request: its blocks are cached under the name of its adapter, which may be another one's by now.
        side.read.adapter_arrives(request.lora_request)
        side.outdate_renamed()
        if blocks.admits and side.offers_cached and time.monotonic() < until_seconds:
            num_tokens, block_ids = blocks.keep_cached(request)
            if side.offer_cached(side.read(request), num_tokens, block_ids, answer.set_result):
                return
            blocks.drop(request)
        answer.set_result(side.look_up(num_tokens))

    def _request(self, token_ids: bytes, request_id: str, adapter: Any, salt: str) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            f"{_METHOD}-{request_id}-{secrets.token_hex(4)}",
            np.frombuffer(token_ids, "<u4").tolist(),
            SamplingParams(max_tokens=1),
            None,
            lora_request=None if adapter is None else msgspec.convert(adapter, LoRARequest),
            cache_salt=salt or None,
            block_hasher=private(self._core, "request_block_hasher"),
        )
