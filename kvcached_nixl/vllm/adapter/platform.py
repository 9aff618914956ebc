# SPDX-License-Identifier: Apache-2.0
"""What vLLM and kvcached detect on this host: device, memory, pages. Imports both; starts nothing."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass

from kvcached_nixl.vllm.adapter.locate import METADATA_MODULE
from kvcached_nixl.vllm.adapter.model_runner_policy import named

__all__ = ["Platform", "device_name", "platform"]


@dataclass(frozen=True)
class Platform:
    """Attributes:
    device: vLLM's name of the kind of device.
    memory_type: NIXL's memory type of the KV cache on that device.
    runner: vLLM's model runner, V1 or V2.
    page_bytes: size of kvcached's pages of physical memory.
    is_contiguous: kvcached keeps all layers of a block side by side.
    """

    device: str
    memory_type: str
    runner: str
    page_bytes: int
    is_contiguous: bool


def device_name(data_parallel_rank: int) -> str | None:
    """Identifies the device whose memory an engine's kvcached measures: the one of its first rank. None if it is not
    known: which device another data-parallel rank of this host uses is decided in its workers (vLLM 0.33).

    Raises:
        Exception: of the driver's library.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        return f"hostvmm {os.environ.get('KVCACHED_HOSTVMM_DEVICE') or '0'}"
    return None if data_parallel_rank else str(current_platform.get_device_uuid(0))


def platform() -> Platform:
    """Source of the memory type: ``v1/nixl/base_worker.py``."""
    from kvcached import utils
    from vllm import envs

    # This import sets environment variables of UCX, on which a proof depends.
    importlib.import_module(METADATA_MODULE)
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    stock = current_platform.get_nixl_memory_type()
    return Platform(
        device=device,
        memory_type=stock or ("DRAM" if device == "cpu" else "VRAM"),
        runner=named(envs.VLLM_USE_V2_MODEL_RUNNER),
        page_bytes=int(utils.PAGE_SIZE),
        is_contiguous=bool(utils.CONTIGUOUS_LAYOUT),
    )
