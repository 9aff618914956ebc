# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's NIXL worker calls us.

Runs in: the worker process, once per device. Logic lives in ``kvcached_nixl.worker``.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.clock import MonotonicClock
from kvcached_nixl.compat.attached import attach_pull, attach_push, half_of
from kvcached_nixl.compat.connector import WorkerView
from kvcached_nixl.compat.locate import WORKER
from kvcached_nixl.compat.side_channel import side_channel
from kvcached_nixl.compat.versions import installed_row
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.worker import handshake, load_failures, pull, push_start, registration

REGISTER_KV_CACHES = Patch(
    target=WORKER,
    attribute="register_kv_caches",
    process="worker",
    parameters=("self", "kv_caches"),
    needs="block count",
    why="kvcached reserves more blocks than vLLM planned and keeps K, V or layers apart where the stock worker takes "
    "them for dense; it would move other blocks' bytes.",
    upstream="kvcached#313, kvcached#391, vllm#42095",
    remove_when="vLLM's connector registers the strides of the tensors it is given, up to the planned blocks",
)


@REGISTER_KV_CACHES.around
def register_kv_caches(call: Call) -> None:
    worker, clock = WorkerView(call.instance), MonotonicClock()
    settings = Settings.from_extra_config(worker.extra_config)
    if settings.transfer_mode is TransferMode.PULL:
        attach_pull(call.instance, pull.start(worker, settings, clock, renews=installed_row().renews_leases))
    layout = registration.register(
        worker,
        call.argument("kv_caches"),
        lambda offered: call.proceed(kv_caches=offered),
    )
    if settings.transfer_mode is TransferMode.PUSH:
        query = side_channel(installed_row().side_channel_names_stage)
        attach_push(call.instance, push_start.start(worker, layout, settings, query, clock))
    else:
        registration.sign(worker, layout)
    call.note(
        f"{layout.arrangement.value}, {layout.num_blocks} blocks, {layout.descriptors_per_block} descriptors a block"
    )


NIXL_HANDSHAKE = Patch(
    target=WORKER,
    attribute="_nixl_handshake",
    process="worker",
    parameters=("self", "host", "port", "remote_tp_size", "expected_engine_id"),
    also_accepts=(
        ("self", "host", "port", "remote_tp_size", "expected_engine_id", "remote_pp_size", "notif_agents_only"),
    ),
    needs="layout",
    why="a refused peer would be reported by an assertion or a bare hash, which does not say what to change.",
    upstream="vllm#29503 (compatibility hash)",
    remove_when="vLLM's handshake errors name both sides and the remedy",
)


@NIXL_HANDSHAKE.around
def nixl_handshake(call: Call) -> Any:
    try:
        return call.proceed()
    except (RuntimeError, AssertionError) as cause:
        raise handshake.peer_refused(
            cause,
            host=call.argument("host"),
            port=call.argument("port"),
            engine_id=call.argument("expected_engine_id"),
            local=WorkerView(call.instance).compatibility,
        ) from cause


HANDLE_FAILED_TRANSFER = Patch(
    target=WORKER,
    attribute="_handle_failed_transfer",
    process="worker",
    parameters=("self", "req_id", "handle"),
    needs="layout",
    why="with several KV-cache groups a failed receive is reported as done without its blocks, and the request decodes "
    "whatever they held.",
    upstream="vllm#52234",
    remove_when="vLLM reports the blocks of all groups of a failed receive",
)


@HANDLE_FAILED_TRANSFER.around
def handle_failed_transfer(call: Call) -> None:
    waits = load_failures.report_unwritten(WorkerView(call.instance), call.argument("req_id"))
    if waits or call.argument("handle") is not None:
        call.proceed()


GET_FINISHED = Patch(
    target=WORKER,
    attribute="get_finished",
    process="worker",
    parameters=("self",),
    versions="<0.22",
    needs="layout",
    why="a receive whose peer was refused ends the engine with a KeyError, and one that fails between the stock "
    "worker's read and clear of its set is lost: the request waits for ever.",
    upstream="vLLM 0.22 made the set a queue and skips failed requests",
    remove_when="vLLM 0.21 is no longer supported",
)


@GET_FINISHED.around
def get_finished(call: Call) -> tuple[set[str], set[str]]:
    failed = load_failures.end_failed_receives(WorkerView(call.instance))
    sent, received = call.proceed()
    return sent, received | failed


SHUTDOWN = Patch(
    target=WORKER,
    attribute="shutdown",
    process="worker",
    parameters=("self",),
    needs="push",
    why="the writer thread would use an agent that is gone.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py, v1/nixl/base_worker.py",
    remove_when="the push of this package goes",
)


@SHUTDOWN.around
def shutdown(call: Call) -> None:
    push = half_of(call.instance)
    if push is not None:
        push.close()
    call.proceed()


SEAMS = (register_kv_caches, nixl_handshake, handle_failed_transfer, get_finished, shutdown)
