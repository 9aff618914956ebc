# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.naming` with kvcached's constants: which engine gets which name, or is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.errors import ContractChanged, NameRefused
from kvcached_nixl.vllm.patches import naming

HOLDER = naming._NameHolder
"""Keeps the name that this process holds."""


class Executor:
    pass


def config(**parallel: object) -> Any:
    found = {
        "distributed_executor_backend": "mp",
        "world_size": 1,
        "nnodes_within_dp": 1,
        "data_parallel_rank_local": None,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
    }
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**found, **parallel}))


@pytest.fixture
def kvcached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """kvcached's modules, as after an import; the requested name is "wish"."""
    modules: dict[str, Any] = {
        name: ModuleType(f"kvcached.{name}")
        for name in ("utils", "kv_cache_manager", "mem_info_tracker", "tp_ipc_util")
    }
    monkeypatch.setitem(sys.modules, "kvcached", ModuleType("kvcached"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"kvcached.{name}", module)
    utils = modules["utils"]
    (tmp_path / "shm").mkdir()
    utils.SHM_DIR = str(tmp_path / "shm")
    utils._obtain_default_ipc_name = lambda: "wish"
    utils.get_tp_socket_dir = lambda name=None: str(tmp_path / f"kvcached-tp-{name or utils.DEFAULT_IPC_NAME}")
    for name in ("utils", "kv_cache_manager", "mem_info_tracker"):
        modules[name].DEFAULT_IPC_NAME = "wish"
    modules["tp_ipc_util"].SOCKET_DIR = utils.get_tp_socket_dir()
    monkeypatch.setattr(HOLDER, "held", None)
    yield modules
    naming.give_up_name()


def names(kvcached: dict[str, Any]) -> set[str]:
    """What each reader would use."""
    folder = kvcached["tp_ipc_util"].SOCKET_DIR
    return {Path(folder).name.removeprefix("kvcached-tp-")} | {
        module.DEFAULT_IPC_NAME for name, module in kvcached.items() if name != "tp_ipc_util"
    }


def in_another_process() -> None:
    """Forget what this process holds, and keep it."""
    kept.append(HOLDER.held)
    HOLDER.held = None


kept: list[Any] = []


@pytest.mark.parametrize(
    ("parallel", "begins"),
    [
        ({}, "wish-"),
        ({"data_parallel_rank_local": 0}, "wish-dp0-"),
        ({"data_parallel_rank_local": 0, "data_parallel_index": 3}, "wish-dp3-"),
        ({"data_parallel_size": 2, "data_parallel_index": 1}, "wish-dp1-"),
    ],
)
def test_every_reader_has_the_own_name_and_the_configuration_says_it(
    kvcached: dict[str, Any], parallel: dict[str, object], begins: str
) -> None:
    """Copies that other modules took at import as well."""
    naming.withdraw_name()
    executor, made = Executor(), config(**parallel)
    naming.own_engine(executor, made)
    (name,) = names(kvcached)
    assert name.startswith(begins) and made.kvcached_nixl_name == name
    naming.join_engine(made)
    assert names(kvcached) == {name}


def test_a_worker_elsewhere_takes_the_name_of_its_engine(kvcached: dict[str, Any]) -> None:
    """A module of kvcached's that it has not imported yet takes it from the one that it has."""
    made = config()
    executor = Executor()
    naming.own_engine(executor, made)
    in_another_process()
    naming.withdraw_name()
    del sys.modules["kvcached.mem_info_tracker"], kvcached["mem_info_tracker"]
    name = made.kvcached_nixl_name
    naming.join_engine(made)
    assert names(kvcached) == {name}
    # The worker's own copies of its configuration, for images and drafts, fail on what is no field of vLLM's.
    assert not hasattr(made, "kvcached_nixl_name")


def test_a_second_engine_in_a_process_is_refused_while_the_first_is_there(kvcached: dict[str, Any]) -> None:
    """kvcached would map the first one's pages in the second one's workers."""
    executor, other, made = Executor(), Executor(), config()
    naming.own_engine(executor, made)
    with pytest.raises(NameRefused, match="VLLM_ENABLE_V1_MULTIPROCESSING"):
        naming.own_engine(other, config())
    assert names(kvcached) == {made.kvcached_nixl_name}
    del executor
    naming.own_engine(other, config())


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"distributed_executor_backend": "external_launcher", "world_size": 2}, "external_launcher with 2 ranks"),
        ({"nnodes_within_dp": 2}, "an engine over 2 hosts"),
    ],
)
def test_where_the_ranks_cannot_agree_the_start_is_refused(
    kvcached: dict[str, Any], parallel: dict[str, object], said: str
) -> None:
    """With what can be done instead."""
    with pytest.raises(NameRefused, match=f"(?s){said}.*ENABLE_KVCACHED=false"):
        naming.own_engine(Executor(), config(**parallel))


def test_a_worker_that_was_told_no_name_is_refused(kvcached: dict[str, Any]) -> None:
    """Its executor did not hand the configuration on, or never called Executor's constructor."""
    with pytest.raises(NameRefused, match="whose configuration has no kvcached name"):
        naming.join_engine(config())


def test_a_worker_of_another_engine_than_the_process_holds_is_refused(kvcached: dict[str, Any]) -> None:
    """Nothing of that name is here."""
    executor, made = Executor(), config()
    naming.own_engine(executor, made)
    made.kvcached_nixl_name = "wish-elsewhere"
    with pytest.raises(NameRefused, match="'wish-elsewhere' here"):
        naming.join_engine(made)


def test_another_kvcached_is_refused(kvcached: dict[str, Any]) -> None:
    """A kvcached that keeps its name elsewhere would continue with the requested name."""
    del kvcached["kv_cache_manager"].DEFAULT_IPC_NAME
    with pytest.raises(ContractChanged, match=r"kvcached\.kv_cache_manager without 'DEFAULT_IPC_NAME'"):
        naming.own_engine(Executor(), config())


@pytest.mark.parametrize(("devices", "is_known"), [(None, True), ([4, 5], True), ([6, 7], False)])
def test_engines_of_other_devices_are_no_neighbours(
    kvcached: dict[str, Any], devices: list[int] | None, is_known: bool, make_module: Callable[..., ModuleType]
) -> None:
    """``--device-ids`` counts in vLLM's workers, which may be other processes; here the first device is number 4."""
    platform = SimpleNamespace(
        get_device_uuid=lambda device: f"uuid{device}", device_id_to_physical_device_id=lambda device: 4 + device
    )
    make_module("vllm.platforms").current_platform = platform  # type: ignore[attr-defined]
    executor, made = Executor(), config(assigned_physical_gpu_ids=devices)
    assert naming.wants_of(made.parallel_config) is None, "no engine has a name here"
    naming.own_engine(executor, made)
    found = naming.wants_of(made.parallel_config)
    assert (found._device if found else None) == ("uuid0" if is_known else None)


def test_without_kvcached_there_is_nothing_to_withdraw(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is refused elsewhere, once."""
    monkeypatch.setattr(HOLDER, "held", None)
    monkeypatch.setitem(sys.modules, "kvcached", None)
    monkeypatch.delitem(sys.modules, "kvcached.utils", raising=False)
    assert naming.withdraw_name() == ("kvcached is not installed",)
