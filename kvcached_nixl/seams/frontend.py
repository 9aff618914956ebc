# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's API server is told that a request has ended.

Runs in: the API server's process.
"""

from __future__ import annotations

import logging

from kvcached_nixl.compat.frontend import let_fail
from kvcached_nixl.compat.locate import OUTPUT_PROCESSOR
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER

UPDATE_STATS_FROM_FINISHED = Patch(
    target=OUTPUT_PROCESSOR,
    attribute="_update_stats_from_finished",
    process="frontend",
    parameters=("self", "req_state", "finish_reason", "iteration_stats"),
    needs="pull",
    why="a request whose hand-over has failed would be answered with status 200 and no token.",
    upstream="vllm/entrypoints: each endpoint looks at finish_reason, or does not; streams pass over outputs without "
    "tokens first",
    remove_when="vLLM raises for a request that ends with an error, whatever endpoint it came through",
)


@UPDATE_STATS_FROM_FINISHED.around
def update_stats_from_finished(call: Call) -> None:
    call.proceed()
    let_fail(call.argument("req_state"), call.argument("finish_reason"), logging.getLogger(SERVER_LOGGER))


SEAMS = (update_stats_from_finished,)
