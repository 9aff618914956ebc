# SPDX-License-Identifier: Apache-2.0
"""Environment and arguments of servers for this machine's device, a GPU where torch finds one, else the CPU; and the
value of ``--kv-transfer-config``."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping

from packaging.version import Version

from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, LOADS_BEHIND, found_version

MODES = ("pull", "push")
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
EXTRA = "kv_connector_extra_config"
LAYOUT = "KVCACHED_CONTIGUOUS_LAYOUT"
REGISTRATION = "NIXL_HOSTVMM_REGISTRATION"
PINNED: Mapping[str, str] = {REGISTRATION: "pinned"}
"""A registration covers the pages that were mapped at that time, as a network card's does, so KV must be staged."""
FOLLOWS: Mapping[str, str] = {REGISTRATION: "follows"}
"""A registration follows the pages as they are remapped, so KV need not be staged."""
RUNNERS: Mapping[str, Mapping[str, str]] = {"V1": {SWITCH: "0"}, "V2": {SWITCH: "1"}}
"""vLLM's model runners. Without a GPU, Triton interprets the kernels of V2 (server_side/sitecustomize.py)."""
INTERPRETED: Mapping[str, str] = {"TRITON_INTERPRET": "1"}
MEMORY_PATHS = {"pinned": "device", "follows": "direct"}
"""On a GPU the behaviour of registrations cannot be set, so ``memory_path`` sets the path that it would lead to."""
GPU_ENVIRONMENT: Mapping[str, str] = {
    # FlashInfer compiles its sampler at first use, for minutes; the experiments decode greedily.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Triton's attention rounds float32 to TF32 by default, so that a prompt's last token differs by 1e-3 nats with the
    # number of rows it is computed among.
    "TRITON_F32_DEFAULT": "ieee",
}
GPU_MEMORY_FRACTION = 0.12
"""Fraction of the GPU's memory for each server: six servers share it."""

CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Without it, each idle server keeps a core busy, and all servers compute on one core (see sitecustomize.py).
    "EXPERIMENT_FEW_CORES": "1",
}


def role(name: str) -> str:
    """Return the ``kv_role`` of a server by its name: a prefill server's, a decode server's, or that of both."""
    return "kv_producer" if "prefill" in name else "kv_consumer" if "decode" in name else "kv_both"


def nixl(name: str, extra: Mapping[str, object] | None = None, **more: object) -> dict[str, object]:
    """Return the config of a NIXL connector in the role of ``name``; ``more`` are further fields.

    With ``num_threads`` 0, NIXL has no threads besides its progress thread: servers here share few cores.
    """
    config = {"kv_connector": "NixlConnector", "kv_role": role(name), EXTRA: {"num_threads": 0, **(extra or {})}}
    return {**config, **more}


def extra_of(config: Mapping[str, object]) -> Mapping[str, object]:
    extra = config.get(EXTRA) or {}
    assert isinstance(extra, Mapping)
    return extra


def with_extra(config: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, object]:
    """Return ``config`` with ``extra`` merged into its extra config; ``extra`` wins where both have a key."""
    return {**config, EXTRA: {**extra_of(config), **extra}}


@functools.cache
def num_gpus() -> int:
    """Return how many GPUs torch finds; 0 if torch is not installed. Imports torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def has_gpu() -> bool:
    return num_gpus() > 0


def accepted(vllm: str | None) -> tuple[str, ...]:
    """Return the model runners that kvcached accepts with a vLLM, the usual one of the servers here first."""
    if vllm is None:
        return ("V1",)
    found, v1_until, v2_since = map(Version, (vllm, LOADS_BEHIND.since, HITS_DIVERGE.since))
    return (*["V1"] * (found < v1_until), *["V2"] * (found >= v2_since))


def serves_contiguous(vllm: str | None) -> bool:
    """Return whether kvcached's contiguous layout can be served here: since 0.29 an attention backend declares its
    layouts, and the CPU's has none with all layers in a block."""
    return vllm is None or "V1" in accepted(vllm) or has_gpu()


def layout() -> dict[str, str]:
    """Return kvcached's variable for the contiguous layout, or for the other one if this cannot be served here."""
    return {LAYOUT: str(serves_contiguous(found_version("vllm"))).lower()}


def runner_of(asked: Mapping[str, str], vllm: str | None) -> str:
    """Return the model runner of a server: the one set in ``asked``, else the first that kvcached accepts with
    ``vllm``."""
    return ("V1", "V2")[int(asked[SWITCH])] if SWITCH in asked else accepted(vllm)[0]


def environment(asked: Mapping[str, str], kv_space_gib: int, *, forks: bool) -> dict[str, str]:
    """Return the environment of a server: the device's variables, then those of ``asked`` that apply to the device.

    Args:
        asked: environment variables of its arm.
        kv_space_gib: vLLM's KV budget, in GiB; on a GPU, `arguments` sets it.
        forks: whether its engine is forked; ignored on a GPU, since a process that has used one cannot be forked.
    """
    runner = runner_of(asked, found_version("vllm"))
    if has_gpu():
        known = {name: value for name, value in asked.items() if "HOSTVMM" not in name}
        return {**GPU_ENVIRONMENT, **RUNNERS[runner], **known}
    of_cpu = {**CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib)}
    more = {**({"EXPERIMENT_FORK": "1"} if forks else {}), **(INTERPRETED if runner == "V2" else {})}
    return {**of_cpu, **more, **RUNNERS[runner], **asked}


def arguments(kv_space_gib: int) -> list[str]:
    """Return the arguments of ``vllm serve`` for the device.

    With a KV budget in bytes vLLM does not measure the GPU's free memory, which other servers change at the same time.
    """
    if not has_gpu():
        return []
    budget = str(kv_space_gib << 30)
    return ["--gpu-memory-utilization", str(GPU_MEMORY_FRACTION), "--kv-cache-memory-bytes", budget]


def transfer(asked: Mapping[str, str], config: Mapping[str, object]) -> dict[str, object]:
    """Return the value of ``--kv-transfer-config``; on a GPU, with the ``memory_path`` that ``asked`` stands for."""
    registration = asked.get(REGISTRATION)
    if not has_gpu() or registration is None:
        return dict(config)
    return with_extra(config, {"memory_path": MEMORY_PATHS[registration], **extra_of(config)})
