# SPDX-License-Identifier: Apache-2.0
"""Where vLLM constructs the scheduler side of its NIXL connector.

Runs in: the engine-core process. Logic lives in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

from kvcached_nixl.compat.attached import attach_pull, attach_push
from kvcached_nixl.compat.connector import SchedulerView
from kvcached_nixl.compat.locate import SCHEDULER
from kvcached_nixl.compat.versions import installed_row
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler import pull, push

CONSTRUCT = Patch(
    target=SCHEDULER,
    attribute="__init__",
    process="scheduler",
    parameters=("self", "vllm_config", "engine_id", "kv_cache_config"),
    needs="push",
    why="an engine that is to push would pull; one that pulls would keep blocks whose lease has ended.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py, v1/nixl/base_scheduler.py",
    remove_when="the push of this package goes",
)


@CONSTRUCT.around
def construct(call: Call) -> None:
    call.proceed()
    view = SchedulerView(call.instance)
    pushing = push.start(view)
    if pushing is not None:
        attach_push(call.instance, pushing)
    else:
        attach_pull(call.instance, pull.start(view.extra_config, renews=installed_row().renews_leases))


SEAMS = (construct,)
