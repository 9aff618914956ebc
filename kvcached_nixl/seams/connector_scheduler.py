# SPDX-License-Identifier: Apache-2.0
"""Where vLLM constructs the scheduler side of its NIXL connector, and where that listens for handshakes.

Runs in: the engine-core process. Logic lives in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

from kvcached_nixl.compat.attached import attach_pull, attach_push
from kvcached_nixl.compat.connector import SchedulerView
from kvcached_nixl.compat.locate import SCHEDULER
from kvcached_nixl.compat.versions import installed_row
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler import listening, pull, push

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


LISTEN = Patch(
    target=SCHEDULER,
    attribute="_nixl_handshake_listener",
    kind="staticmethod",
    process="scheduler",
    parameters=("encoded_data", "ready_event", "stop_event", "port"),
    also_accepts=(("encoded_data", "ready_event", "stop_event", "host", "port"),),
    why="one question that cannot be answered ends the listener, and every later handshake waits in vain.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py, v1/nixl/base_scheduler.py",
    remove_when="vLLM's listener outlives what it cannot read and what it does not know",
)


@LISTEN.around
def listen(call: Call) -> None:
    answers = listening.Answers(call.argument("encoded_data"))
    listening.keep_listening(lambda: call.proceed(encoded_data=answers), call.argument("ready_event").is_set)


SEAMS = (construct, listen)
