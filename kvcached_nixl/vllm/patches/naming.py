# SPDX-License-Identifier: Apache-2.0
"""Patches that give each engine a unique kvcached name, pass it to its workers, and remove it at shutdown.

Runs in: the engine core and every worker process; with any connector and with none. The logic is in
``kvcached_nixl.vllm.patches.actions.engine_name`` and ``kvcached_nixl.naming``.
"""

from __future__ import annotations

import logging
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.locate import EXECUTOR, KVCACHED_INTERFACES, WORKER_BASE
from kvcached_nixl.vllm.patches.actions.engine_name import give_up_name, join_engine, own_engine, withdraw_name

logger = logging.getLogger(SERVER_LOGGER)

_WHY = "two engines with one KVCACHED_IPC_NAME, or the data-parallel ranks of one server, would map each other's pages."
_UPSTREAM = "kvcached/utils.py _obtain_default_ipc_name, kvcached/tp_ipc_util.py SOCKET_DIR"
_REMOVE = "kvcached gives each engine a unique name, and passes it to its workers"


@Patch(
    target=EXECUTOR,
    attribute="__init__",
    process="scheduler",
    parameters=("self", "vllm_config"),
    why=_WHY,
    upstream=_UPSTREAM,
    remove_when=_REMOVE,
    prepare=withdraw_name,
).around
def make_executor(call: Call) -> None:
    own_engine(call.instance, call.argument("vllm_config"), logger)
    try:
        call.proceed()
    except BaseException:
        give_up_name()
        raise


@Patch(
    target=WORKER_BASE,
    attribute="__init__",
    process="worker",
    parameters=("self", "vllm_config", "local_rank", "rank", "distributed_init_method", "is_driver_worker"),
    why=_WHY,
    upstream=_UPSTREAM,
    remove_when=_REMOVE,
).around
def make_worker(call: Call) -> None:
    join_engine(call.argument("vllm_config"))
    call.proceed()


@Patch(
    target=KVCACHED_INTERFACES,
    attribute="shutdown_kvcached",
    kind="function",
    process="scheduler",
    parameters=(),
    why="an engine's directory of sockets would not be removed.",
    upstream="kvcached#476, kvcached#477",
    remove_when=_REMOVE,
).around
def shut_down(call: Call) -> Any:
    is_over = call.proceed()
    if is_over:
        give_up_name()
    return is_over
