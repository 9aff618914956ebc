# SPDX-License-Identifier: Apache-2.0
"""Where vLLM constructs the scheduler side of its NIXL connector.

Runs in: the engine-core process. Logic lives in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

from kvcached_nixl.compat.connector import SchedulerView, attach_push
from kvcached_nixl.compat.locate import SCHEDULER
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler import push

CONSTRUCT = Patch(
    target=SCHEDULER,
    attribute="__init__",
    process="scheduler",
    parameters=("self", "vllm_config", "engine_id", "kv_cache_config"),
    needs="push",
    why="an engine that is to push would pull.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py, v1/nixl/base_scheduler.py",
    remove_when="the push of this package goes",
)


@CONSTRUCT.around
def construct(call: Call) -> None:
    call.proceed()
    attach_push(call.instance, push.start(SchedulerView(call.instance)))


SEAMS = (construct,)
