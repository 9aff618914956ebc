# SPDX-License-Identifier: Apache-2.0
"""vLLM's side channel, on the installed vLLM: who reaches whom at which address, and what ends the stock listener.

Wrong questions and answers: unit/transport/test_side_channel.py, unit/worker/transfer/test_peers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import zmq
from support import attention_engines, engine_node, handover_node, stock_pair
from support.handover_node import (
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    Node,
    served,
)
from support.transports import until
from vllm import envs
from vllm.utils.network_utils import get_ip

from experiments.common.servers import free_ports
from kvcached_nixl.patching import Registry

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node, pair = handover_node.direction, handover_node.node, handover_node.pair

ASK = b"get_meta_msg"


def asking(prefill: Node, *frames: bytes, kind: int = zmq.REQ) -> None:
    """On a connection of its own; waits for nothing."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"tcp://127.0.0.1:{prefill.engine.port}")
        socket.send_multipart(frames)


# --------------------------------------------------------------------------------------- bound and advertised addresses

HOST, ADVERTISE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE"


class Forwarder:
    """Forwards connections from one address to a port at 127.0.0.1, as a NAT does. ``num_forwarded``: connections."""

    def __init__(self, host: str, port: int, to: int) -> None:
        self.num_forwarded = 0
        self._to = to
        self._server = socket.create_server((host, port))
        self._open = [self._server]
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._server.accept()
                self.num_forwarded += 1
                onward = socket.create_connection(("127.0.0.1", self._to))
                self._open += [taken, onward]
                for pair in ((taken, onward), (onward, taken)):
                    self._threads.append(threading.Thread(target=self._carry, args=pair, daemon=True))
                    self._threads[-1].start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while said := one.recv(1 << 16):
                other.sendall(said)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


@pytest.fixture
def behind_nat(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Node, Forwarder]]]:
    """behind_nat(filling): an engine whose side channel peers only get at another address and port."""
    with contextlib.ExitStack() as stack:

        def make(filling: int) -> tuple[Node, Forwarder]:
            inside, outside = free_ports(2)
            forwarder = Forwarder("127.0.0.2", outside, inside)
            stack.callback(forwarder.close)
            monkeypatch.setattr(stock_pair, "free_ports", lambda count: [inside])
            monkeypatch.setenv(f"{ADVERTISE}_HOST", "127.0.0.2")
            monkeypatch.setenv(f"{ADVERTISE}_PORT", str(outside))
            return node(filling), forwarder

        yield make


def test_peers_behind_nat_are_reached_at_what_they_advertise(
    direction: str, behind_nat: Callable[..., tuple[Node, Forwarder]], patched: Registry
) -> None:
    """vllm#53018. In push decode's address goes to prefill with its registration."""
    (prefill, to_prefill), (decode, to_decode) = behind_nat(PREFILL_FILLING), behind_nat(DECODE_FILLING)
    before = to_prefill.num_forwarded, to_decode.num_forwarded
    assert before >= (1, 1), "each engine has asked itself there"
    noted = [note for outcome in patched.outcomes() for note in outcome.notes]
    for one in (prefill, decode):
        assert [note for note in noted if f"side channel listens at 127.0.0.1:{one.engine.port}, and peers" in note]
    served(prefill, decode)
    given = prefill.transfer_params["cmpl-w-0-aaaaaaa7"]
    assert given["remote_host"] == "127.0.0.2" and given["remote_port"] != prefill.engine.port
    assert to_prefill.num_forwarded > before[0] and (to_decode.num_forwarded > before[1]) is (direction == "push")


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost"])
def test_addresses_and_names_serve_both_ends(
    host: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_pair, "LISTENS_AT", host)
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    served(prefill, decode)
    assert prefill.transfer_params["cmpl-w-0-aaaaaaa7"]["remote_host"] == host.strip("[]")


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "question",
    [b"\xff", msgspec.msgpack.encode([ASK, 3]), msgspec.msgpack.encode([ASK, 0, 3])],
    ids=["nothing", "a rank that is not there", "the same, of a stage"],
)
def test_the_stock_listener_is_over(question: bytes, patched: Registry, node: Callable[..., Node]) -> None:
    """What the tests before this one are about; if this fails, vLLM has learned it."""
    patched.uninstall()
    prefill = node(PREFILL_FILLING, dataclasses.replace(RESERVED, reserved_blocks=RESERVED.num_blocks))
    thread = prefill.connector_scheduler._nixl_handshake_listener_t
    assert thread.is_alive()
    asking(prefill, question)
    until(lambda: not thread.is_alive())
