# SPDX-License-Identifier: Apache-2.0
"""vLLM's side channel, on the installed vLLM: who reaches whom at which address.

Wrong questions and answers: unit/transport/test_side_channel.py, unit/worker/transfer/test_peers.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node, stock_pair
from support.handover_node import DECODE_FILLING, PREFILL_FILLING, Node, served
from vllm import envs
from vllm.utils.network_utils import get_ip

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node = handover_node.direction, handover_node.node

HOST, ADVERTISED = "VLLM_NIXL_SIDE_CHANNEL_HOST", "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE_HOST"


@pytest.mark.parametrize(
    ("listens_at", "advertised", "reached_at"),
    [("0.0.0.0", "127.0.0.2", "127.0.0.2"), ("[::1]", "", "::1"), ("localhost", "", "localhost")],
)
def test_peers_are_reached_at_what_is_advertised(
    listens_at: str, advertised: str, reached_at: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#53018. In push decode's address goes to prefill with its registration."""
    monkeypatch.setattr(stock_pair, "LISTENS_AT", listens_at)
    if advertised:
        monkeypatch.setenv(ADVERTISED, advertised)
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    served(prefill, decode)
    assert prefill.transfer_params["cmpl-w-0-aaaaaaa7"]["remote_host"] == reached_at


def test_vllm_finds_this_hosts_address_as_the_package_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_HOST_IP, or that of the way out, or 0.0.0.0."""
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.5")
    assert get_ip() == "10.0.0.5"
    monkeypatch.delenv("VLLM_HOST_IP")

    def no_network(*_: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.warns(UserWarning, match="Failed to get the IP address"):
        assert get_ip() == "0.0.0.0"


def test_vllm_has_no_setting_of_its_own_for_the_advertised_address() -> None:
    """When this fails, use that one (vllm#53018), and keep this package's only for the vLLMs before."""
    names = [name for name in envs.environment_variables if "SIDE_CHANNEL" in name and "NIXL" in name]
    assert sorted(names) == [HOST, HOST.replace("HOST", "PORT")]
