# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt an engine has cached, for a decode server that looks for its history.

The API server calls its engine for that, as for other things that are no requests: a request would be counted, be
limited as those of clients (``--max-num-queued-tokens``), and set the ranks of data parallelism going. What takes time
runs on a thread of its own, so that no step waits for it.

Runs in: the API server's process (`looked_up`) and the engine's (`let_look_up`).
Sources: ``v1/engine/core.py`` (``_invoke_utility_method``), ``v1/core/kv_cache_coordinator.py``.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import numpy as np

from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks, bound_sides
from kvcached_nixl.vllm.patches.roles import arrived
from kvcached_nixl.wire.asked_prompt import decode

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
    # Blocks are cached under an adapter's name, and later under its path, too.
    named = ("", "") if adapter is None else (adapter.lora_name, adapter.lora_path)
    engine = private(state.engine_client, "engine_core")
    params = await engine.call_utility_async(_METHOD, asked.token_ids, *named, asked.salt)
    return JSONResponse({"kv_transfer_params": params})


def let_look_up(core: Any) -> None:
    """Lets API servers call for it. Idempotent."""
    if _METHOD not in vars(core):
        looker = ThreadPoolExecutor(1, "kvcached_nixl-look-up")
        setattr(core, _METHOD, functools.partial(_begin, core, looker))


def _begin(
    core: Any, looker: ThreadPoolExecutor, token_ids: bytes, adapter: str, path: str, salt: str
) -> Future[dict[str, Any]]:
    return looker.submit(_look_up, core, token_ids, adapter, path, salt)


def _look_up(core: Any, token_ids: bytes, adapter: str, path: str, salt: str) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    blocks, (side, *_) = EngineBlocks(core.scheduler), bound_sides(core.scheduler)
    # While the engine is paused, what is cached is of no use to others.
    if not (blocks.caches_prefixes and blocks.admits):
        return dict(side.look_up(0))
    request = Request(
        _METHOD,
        np.frombuffer(token_ids, "<u4").tolist(),
        SamplingParams(max_tokens=1),
        None,
        lora_request=LoRARequest(adapter, 1, path) if adapter else None,
        cache_salt=salt or None,
        block_hasher=private(core, "request_block_hasher"),
    )
    return dict(side.look_up(blocks.num_cached_tokens_of(request)))
