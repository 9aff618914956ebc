# SPDX-License-Identifier: Apache-2.0
"""What the experiments' servers are given for the device of this machine: a GPU where torch finds one, else the CPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping

from experiments.common.transfer_config import extra_of, with_extra
from kvcached_nixl.compat.model_runner_policy import SWITCH, accepted, named
from kvcached_nixl.compat.versions import found_version

REGISTRATION = "KVCACHED_HOSTVMM_REGISTRATION"
PINNED: Mapping[str, str] = {REGISTRATION: "pinned"}
"""A registration is of the pages that were mapped then, as a network card's is, so that KV has to be staged."""
FOLLOWS: Mapping[str, str] = {REGISTRATION: "follows"}
"""A registration follows the pages, so that KV need not be staged."""
RUNNERS: Mapping[str, Mapping[str, str]] = {"V1": {SWITCH: "0"}, "V2": {SWITCH: "1"}}
"""vLLM's model runners; without a GPU Triton interprets the second one's kernels (server_side/triton_kernels.py)."""
INTERPRETED: Mapping[str, str] = {"TRITON_INTERPRET": "1"}
MEMORY_PATHS = {"pinned": "device", "follows": "direct"}
"""On a GPU nobody can choose how registrations behave; the path that they would lead to is asked for instead."""
GPU_MEMORY_FRACTION = 0.12
"""Of the GPU, for each server: six of them share it."""

CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Else each server keeps a core busy by doing nothing, and all compute on one (server_side/few_cores.py).
    "EXPERIMENT_FEW_CORES": "1",
}


@functools.cache
def has_gpu() -> bool:
    """Whether torch, if it is there, finds one; imports torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def num_gpus() -> int:
    """How many torch finds, if it is there; imports torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())


def runner_of(asked: Mapping[str, str], vllm: str | None) -> str:
    """Return the model runner of a server: what is asked for, else the first that kvcached accepts with this vLLM."""
    return named(bool(int(asked[SWITCH]))) if SWITCH in asked else (accepted(vllm) or ("V1",))[0]


def runner_environment(asked: Mapping[str, str]) -> dict[str, str]:
    """Return what a server of the installed vLLM is told so that it has that runner."""
    runner = runner_of(asked, found_version("vllm"))
    return {**RUNNERS[runner], **(INTERPRETED if runner == "V2" and not has_gpu() else {})}


def environment(asked: Mapping[str, str], kv_space_gib: int, *, forks: bool) -> dict[str, str]:
    """Return the environment of a server: the device's, then what is asked for as far as the device knows it.

    Args:
        asked: what its arm asks for.
        kv_space_gib: vLLM's KV budget on a CPU, in GiB.
        forks: whether its engine is to be forked; a process that has used a GPU cannot be.
    """
    if has_gpu():
        known = {name: value for name, value in asked.items() if "HOSTVMM" not in name}
        return {**runner_environment(asked), **known}
    forking = {"EXPERIMENT_FORK": "1"} if forks else {}
    space = {"VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib)}
    return {**CPU_ENVIRONMENT, **space, **forking, **runner_environment(asked), **asked}


def arguments() -> list[str]:
    """Return what ``vllm serve`` is told of the device."""
    return ["--gpu-memory-utilization", str(GPU_MEMORY_FRACTION)] if has_gpu() else []


def transfer(asked: Mapping[str, str], config: Mapping[str, object]) -> dict[str, object]:
    """Return the value of ``--kv-transfer-config``: on a GPU, with the path that ``asked``'s registrations lead to."""
    registration = asked.get(REGISTRATION)
    if not has_gpu() or registration is None:
        return dict(config)
    return with_extra(config, {"memory_path": MEMORY_PATHS[registration], **extra_of(config)})
