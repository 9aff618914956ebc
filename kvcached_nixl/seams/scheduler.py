# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's scheduler handles KV that could not be loaded.

Runs in: the engine-core process. Logic lives in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.compat.connector import num_kv_cache_groups
from kvcached_nixl.compat.locate import ENGINE_SCHEDULER
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler import load_failures

INVALID_BLOCKS = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_update_requests_with_invalid_blocks",
    process="scheduler",
    parameters=("self", "requests", "invalid_block_ids", "num_scheduled_tokens", "evict_blocks"),
    needs="layout",
    why="with several KV-cache groups the stock method unpacks one group and raises, so the connector does not report "
    "failed receives at all and the client gets wrong tokens.",
    upstream="vllm#52234",
    remove_when="vLLM's scheduler handles invalid blocks of several groups",
)


@INVALID_BLOCKS.around
def update_requests_with_invalid_blocks(call: Call) -> Any:
    if num_kv_cache_groups(call.instance) == 1:
        return call.proceed()
    return load_failures.restart_affected(
        call.argument("requests"),
        call.argument("invalid_block_ids"),
        call.argument("num_scheduled_tokens"),
        call.instance.kv_cache_manager.get_block_ids,
        call.argument("evict_blocks"),
    )


HANDLE_INVALID_BLOCKS = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_handle_invalid_blocks",
    process="scheduler",
    parameters=("self", "invalid_block_ids", "num_scheduled_tokens"),
    versions="<0.20",
    needs="layout",
    why="a request that fails before it was scheduled reports -1 cached tokens; the metrics counter raises on it and "
    "the whole server dies with one refused peer.",
    upstream="vllm/v1/metrics/loggers.py counts EngineCoreOutput.num_cached_tokens; later versions do not send it",
    remove_when="vLLM 0.19 is no longer supported",
)


@HANDLE_INVALID_BLOCKS.around
def handle_invalid_blocks(call: Call) -> Any:
    failed = call.proceed()
    load_failures.count_no_cached_tokens(call.instance.requests[request_id] for request_id in failed)
    return failed


SEAMS = (update_requests_with_invalid_blocks, handle_invalid_blocks)
