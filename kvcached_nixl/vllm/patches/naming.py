# SPDX-License-Identifier: Apache-2.0
"""Give each engine a unique kvcached name, pass it to its workers, and remove it at shutdown.

kvcached 0.1.6 reads the name at import in every process (``utils.DEFAULT_IPC_NAME``, ``tp_ipc_util.SOCKET_DIR``, copies
of the first in ``kv_cache_manager`` and ``mem_info_tracker``). It uses the name when a worker listens, when the engine
core maps pages, and when it creates the memory accounting. All of that happens after vLLM has constructed the executor
and the worker, where `own_engine` and `join_engine` set the name. Until then it is a placeholder that no engine uses.
The environment is not changed: an engine that is started from this process asks for the same name and gets another one.

One name per process, because kvcached's state exists once per process. Needed until kvcached gives each engine a unique
name, and passes it to its workers.

Runs in: the engine core and every worker process; with any connector and with none.
Sources: kvcached 0.1.6, ``utils.py`` (``_obtain_default_ipc_name``), ``tp_ipc_util.py``; kvcached#476, kvcached#477.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached_nixl.errors import ContractChanged, NameRefused
from kvcached_nixl.naming import Claim, Places, clear_abandoned, join, take
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.locate import EXECUTOR, KVCACHED_INTERFACES, WORKER_BASE
from kvcached_nixl.wants import Wants

logger = logging.getLogger(SERVER_LOGGER)

_RIDES = "kvcached_nixl_name"
"""Attribute for the engine's name on vLLM's configuration, which vLLM sends to every worker, wherever it runs."""
_NAME = "DEFAULT_IPC_NAME"
_FOLDER = "SOCKET_DIR"
_READERS = ("kv_cache_manager", "mem_info_tracker")
DYING_SECONDS = 2.0
"""How long a process that ends waits for workers whose engine core was killed."""


@dataclass
class _Held:
    claim: Claim
    executor: weakref.ref[Any] | None


class _NameHolder:
    held: _Held | None = None


def withdraw_name() -> tuple[str, ...]:
    """Give this process a placeholder name that no other process has, until an engine owns a name.

    Otherwise a process without an engine would use the configured name, and kvcached's client removes the accounting
    under its name when it ends. Returns a note for the report.
    """
    if _NameHolder.held is not None:
        return ()
    try:
        utils = importlib.import_module("kvcached.utils")
    except ModuleNotFoundError:
        return ("kvcached is not installed",)
    wish = private(utils, "_obtain_default_ipc_name")()
    _set(f"{wish[:40]}-none-{os.getpid()}")
    return (f"every engine makes a unique kvcached name from {wish!r}",)


@Patch(EXECUTOR, "__init__", "scheduler", "self vllm_config", prepare=withdraw_name)
def make_executor(call: Call) -> None:
    """Without it, two engines with one KVCACHED_IPC_NAME, or the data-parallel ranks of one server, would map each
    other's pages."""
    own_engine(call.instance, call.argument("vllm_config"))
    try:
        call.proceed()
    except BaseException:
        give_up_name()
        raise


def own_engine(executor: Any, config: Any) -> None:
    """Give the engine of this process a unique kvcached name, before its workers start, and add it to vLLM's
    configuration. Raises NameRefused if there can be no such name."""
    _refuse_spread(config.parallel_config)
    _refuse_second()
    utils = importlib.import_module("kvcached.utils")
    wish = private(utils, "_obtain_default_ipc_name")()
    parallel = config.parallel_config
    # vLLM runs each rank of a dense model as an engine of size 1.
    is_rank = private(parallel, "data_parallel_rank_local") is not None or private(parallel, "data_parallel_size") > 1
    rank = int(private(parallel, "data_parallel_index")) if is_rank else None
    claim = take(wish, rank, _places(utils))
    try:
        _set(claim.name)
    except ContractChanged:
        claim.release()
        raise
    _NameHolder.held = _Held(claim, weakref.ref(executor))
    setattr(config, _RIDES, claim.name)
    logger.info("kvcached's name of this engine is %s (as shown by kvctl; requested: %s).", claim.name, wish)


@Patch(WORKER_BASE, "__init__", "worker", "self vllm_config local_rank rank distributed_init_method is_driver_worker")
def make_worker(call: Call) -> None:
    """Without it, two engines with one KVCACHED_IPC_NAME, or the data-parallel ranks of one server, would map each
    other's pages."""
    join_engine(call.argument("vllm_config"))
    call.proceed()


def join_engine(config: Any) -> None:
    """Set kvcached's name of the worker that is being constructed in this process to its engine's name.

    Takes the name off the configuration: the worker copies it for a model with images and for a draft model, and vLLM's
    own ``replace`` (``vllm/config/utils.py``) fails on attributes that are no fields.

    Raises:
        NameRefused: the configuration has no name, or the engine is not on this host.
    """
    name = vars(config).pop(_RIDES, None)
    if name is None:
        raise NameRefused(
            found="a worker whose configuration has no kvcached name",
            expected="the name that its engine core has made, on the configuration that vLLM gives its workers",
            consequence="The engine would map its pages in another engine's workers, and the tokens would be wrong.",
            remedy="Use one of vLLM's own executors (mp, ray, uni), or one that calls the constructor of Executor and "
            "passes vllm_config on; with kvcached and this package in the environment of every process.",
        )
    held = _NameHolder.held
    if held is None or held.claim.name != name:
        held = _NameHolder.held = _Held(join(name, _places(importlib.import_module("kvcached.utils"))), None)
    _set(held.claim.name)


@Patch(KVCACHED_INTERFACES, "shutdown_kvcached", "scheduler", "", kind="function")
def shut_down(call: Call) -> Any:
    """Without it, an engine's directory of sockets would not be removed."""
    is_over = call.proceed()
    if is_over:
        give_up_name()
    return is_over


def wants_of(parallel: Any) -> Wants | None:
    """Where the engine of this process says how much memory of its device it waits for, and hears its neighbours. None
    without an engine, or if the device is not known."""
    held = _NameHolder.held
    # kvcached measures the memory of the first rank's device. Which one another data-parallel rank of this host uses is
    # decided in its workers (vLLM 0.33).
    if held is None or private(parallel, "data_parallel_rank_local"):
        return None
    from vllm.platforms import current_platform

    devices = private(parallel, "assigned_physical_gpu_ids")
    try:
        # vLLM maps devices where its workers are, which may be other processes.
        if devices and devices[0] != current_platform.device_id_to_physical_device_id(0):
            raise LookupError(f"its workers use devices {devices} (--device-ids)")
        return Wants(held.claim.folder.parent, held.claim.name, str(current_platform.get_device_uuid(0)))
    except Exception as error:  # noqa: BLE001 - drivers raise anything, and no engine may end for a hint
        logger.warning("Engines on one device do not give way to each other: it cannot be identified: %r", error)
        return None


def give_up_name() -> None:
    """Called when the engine of this process has ended, and kvcached with it. Removes the files under its name."""
    held, _NameHolder.held = _NameHolder.held, None
    if held is not None:
        held.claim.release()
        withdraw_name()


def clear_left() -> None:
    """Called at the end of a process. Removes what ended engines, of this process or others, left behind."""
    utils = sys.modules.get("kvcached.utils")
    if utils is not None:
        clear_abandoned(_places(utils), DYING_SECONDS)


def _refuse_second() -> None:
    held = _NameHolder.held
    if held is None or held.claim.pid != os.getpid():
        return
    if held.executor is not None and held.executor() is not None:
        raise NameRefused(
            found=f"an engine in this process already, {held.claim.name}",
            expected="one engine per process: kvcached has one set of pages and one name per process",
            consequence="The pages of the first engine would be mapped in the workers of the second.",
            remedy="End the first one (its engine core's shutdown()), or run each engine in a separate process "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=1, vLLM's default).",
        )
    give_up_name()


def _refuse_spread(parallel: Any) -> None:
    """Raises NameRefused if kvcached cannot reach all ranks from this engine core, or each rank has an engine core."""
    if private(parallel, "distributed_executor_backend") == "external_launcher" and private(parallel, "world_size") > 1:
        raise NameRefused(
            found=f"the executor external_launcher with {private(parallel, 'world_size')} ranks",
            expected="one engine core that maps the pages of all its ranks",
            consequence="Each rank has an engine core, and each of them would map and unmap pages in all ranks, even "
            "pages that those ranks use.",
            remedy="Use --distributed-executor-backend mp, or set ENABLE_KVCACHED=false.",
        )
    if private(parallel, "nnodes_within_dp") > 1:
        raise NameRefused(
            found=f"an engine over {private(parallel, 'nnodes_within_dp')} hosts",
            expected="the ranks of an engine on one host: kvcached reaches them through sockets in a folder",
            consequence="The pages of ranks on other hosts would never be mapped.",
            remedy="Spread over hosts by data parallelism or by more servers, or set ENABLE_KVCACHED=false.",
        )


def _places(utils: Any) -> Places:
    folder = private(utils, "get_tp_socket_dir")
    return Places(lambda name: Path(folder(name)), "kvcached-tp-*", Path(private(utils, "SHM_DIR")))


def _set(name: str) -> None:
    utils = importlib.import_module("kvcached.utils")
    private(utils, _NAME)
    setattr(utils, _NAME, name)
    for reader in _READERS:
        # A module that is imported later copies the name from utils.
        module = sys.modules.get(f"kvcached.{reader}")
        if module is not None:
            private(module, _NAME)
            setattr(module, _NAME, name)
    sockets = sys.modules.get("kvcached.tp_ipc_util")
    if sockets is not None:
        private(sockets, _FOLDER)
        setattr(sockets, _FOLDER, private(utils, "get_tp_socket_dir")())
