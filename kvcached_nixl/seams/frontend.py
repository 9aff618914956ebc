# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's API server is told that a request has ended.

Runs in: the API server's process.
"""

from __future__ import annotations

import logging

from kvcached_nixl.compat.frontend import let_stream_fail
from kvcached_nixl.compat.locate import OUTPUT_PROCESSOR
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER

UPDATE_STATS_FROM_FINISHED = Patch(
    target=OUTPUT_PROCESSOR,
    attribute="_update_stats_from_finished",
    process="frontend",
    parameters=("self", "req_state", "finish_reason", "iteration_stats"),
    needs="pull",
    why="a streamed request whose hand-over has failed would be answered with status 200 and no token.",
    upstream="vllm/entrypoints/openai/completion/serving.py: outputs without tokens are passed over first",
    remove_when="vLLM looks at a streamed output's finish_reason before it passes over what has no token",
)


@UPDATE_STATS_FROM_FINISHED.around
def update_stats_from_finished(call: Call) -> None:
    call.proceed()
    let_stream_fail(call.argument("req_state"), call.argument("finish_reason"), logging.getLogger(SERVER_LOGGER))


SEAMS = (update_stats_from_finished,)
