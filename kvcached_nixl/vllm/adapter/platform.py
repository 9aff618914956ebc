# SPDX-License-Identifier: Apache-2.0
"""What vLLM and kvcached detect on this host, and choose there: device, memory, pages and side channel.
Imports both; starts nothing.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass

from kvcached_nixl.side_channel_address import PORT, SideChannelAddress
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.locate import METADATA_MODULE


@dataclass(frozen=True)
class Platform:
    """Attributes:
    device: vLLM's name of the kind of device.
    memory_type: NIXL's memory type of the KV cache on that device.
    page_bytes: size of kvcached's pages of physical memory.
    is_contiguous: kvcached keeps all layers of a block side by side.
    """

    device: str
    memory_type: str
    page_bytes: int
    is_contiguous: bool


def platform() -> Platform:
    """Source of the memory type: ``v1/nixl/base_worker.py``."""
    from kvcached import utils

    # This import sets environment variables of UCX, on which a proof depends.
    importlib.import_module(METADATA_MODULE)
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    stock = current_platform.get_nixl_memory_type()
    return Platform(
        device=device,
        memory_type=stock or ("DRAM" if device == "cpu" else "VRAM"),
        page_bytes=int(utils.PAGE_SIZE),
        is_contiguous=bool(utils.CONTIGUOUS_LAYOUT),
    )


def side_channel_address(index: int = 0) -> SideChannelAddress:
    """The side channel of a data-parallel rank, as this process's environment configures it.

    Raises:
        SettingsError: it cannot be used.
    """
    from vllm import envs
    from vllm.utils.network_utils import get_ip

    host = str(private(envs, "VLLM_NIXL_SIDE_CHANNEL_HOST"))
    try:
        port: int | str = int(private(envs, "VLLM_NIXL_SIDE_CHANNEL_PORT"))
    except ValueError:
        # vLLM cannot read it as a number: `SideChannelAddress.of` refuses the text.
        port = os.environ[PORT]
    return SideChannelAddress.of(host, port, index, os.environ, get_ip)
