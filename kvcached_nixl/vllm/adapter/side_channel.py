# SPDX-License-Identifier: Apache-2.0
"""vLLM's settings of the side channel, and its opinion of this host's address."""

from __future__ import annotations

import os

from kvcached_nixl.side_channel_address import PORT, SideChannelAddress
from kvcached_nixl.vllm.adapter.private import envs, private

__all__ = ["side_channel_address"]


def side_channel_address(index: int = 0) -> SideChannelAddress:
    """The side channel of a data-parallel rank, as this process's environment configures it.

    Raises:
        SettingsError: it cannot be used.
    """
    host = str(private(envs(), "VLLM_NIXL_SIDE_CHANNEL_HOST"))
    return SideChannelAddress.of(host, _port(), index, os.environ, _own_ip)


def _port() -> int | str:
    """The port; if vLLM cannot read it as a number, the text, which `SideChannelAddress.of` refuses."""
    try:
        return int(private(envs(), "VLLM_NIXL_SIDE_CHANNEL_PORT"))
    except ValueError:
        return os.environ[PORT]


def _own_ip() -> str:
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
