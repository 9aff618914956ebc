# SPDX-License-Identifier: Apache-2.0
"""vLLM's side channel, on the installed vLLM: a wrong question or answer fails only the requests of its sender.

Sections B6 to B8 of the review of the earlier implementation; each test names its finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import zmq
from support import attention_engines, engine_node, handover_node, stock_pair
from support.engine_node import DECODE_ID, PREFILL_ID
from support.handover_node import (
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    Node,
    computed_alone,
    ends_by_policy,
    prefilled,
    served,
)
from support.internals import listener_of
from support.transports import until
from vllm import envs
from vllm.utils.network_utils import get_ip

from experiments.common.servers import free_ports
from kvcached_nixl.patching import Registry
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.handshake import Answer, RankHandshake, read_rank

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node, pair = handover_node.direction, handover_node.node, handover_node.pair

ASK = b"get_meta_msg"
NESTED = b"\x91" * 1000 + b"\xc0"
UNREADABLE = [
    *(b"", b"\xff", NESTED, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *map(msgspec.msgpack.encode, [5, [ASK], [ASK, 0, 0, 0], [ASK, {}], [ASK, {}, {}], [ASK, 0, 2**63], "x" * 5000]),
]


def asking(prefill: Node, *frames: bytes, kind: int = zmq.REQ) -> None:
    """On a connection of its own; waits for nothing."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"tcp://127.0.0.1:{prefill.engine.port}")
        socket.send_multipart(frames)


def test_what_one_peer_asks_in_a_wrong_way_ends_no_handshake(pair: tuple[Node, Node]) -> None:
    """Finding B7: nothing to read, nested without end, no question, one of a rank that is not there."""
    prefill, decode = pair
    for question in UNREADABLE:
        asking(prefill, question)
        asking(prefill, question, question)
        asking(prefill, question, kind=zmq.DEALER)
        asking(prefill, b"", question, b"", kind=zmq.DEALER)
    said, _ = SideChannel().ask("127.0.0.1", prefill.engine.port, 3).result(10)
    assert "no rank" in said and "3" in said and "tp_size" in said
    assert listener_of(prefill.side_of_engine)._thread.is_alive()
    served(prefill, decode)


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


# ----------------------------------------------------------------------------------------------------- hostile answers


class Impostor:
    """Listens as a prefill does, and answers what it was told to."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.reply = b""
        self.asked = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{self.port}")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(20):
                frames = self._socket.recv_multipart()
                self.asked += 1
                self._socket.send_multipart([frames[0], b"", self.reply])


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    one = Impostor()
    yield one
    one.close()


def reply(compatibility: object, metadata: object) -> bytes:
    return msgspec.msgpack.encode({"compatibility_hash": compatibility, "agent_metadata_bytes": metadata})


def planes(rank: RankHandshake, **changes: Any) -> bytes:
    """The rank's handshake with other planes, told as it is: unchecked."""
    told = msgspec.to_builtins(rank)
    told["agent_metadata"] = rank.agent_metadata
    (group,) = told["groups"]
    told["groups"] = [{**group, "planes": [{**group["planes"][0], **changes}]}]
    return msgspec.msgpack.encode(told)


def with_changes(rank: RankHandshake, **changes: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.to_builtins(rank), "agent_metadata": rank.agent_metadata, **changes})


def of_group(rank: RankHandshake, **changes: Any) -> bytes:
    (group,) = msgspec.to_builtins(rank)["groups"]
    return with_changes(rank, groups=[{**group, **changes}])


LIES: dict[str, Callable[[RankHandshake], bytes]] = {
    "B6 bases beyond 63 bits": lambda rank: planes(rank, bases=[2**63 - 1] * len(rank.groups[0].planes[0].bases)),
    "bases below zero": lambda rank: planes(rank, bases=[-1] * len(rank.groups[0].planes[0].bases)),
    "bases beyond 64 bits": lambda rank: planes(rank, bases=[2**64 - 1] * len(rank.groups[0].planes[0].bases)),
    "a stride beyond 63 bits": lambda rank: planes(rank, block_stride_bytes=2**62),
    "a stride below zero": lambda rank: planes(rank, token_stride_bytes=-(2**40)),
    "no plane": lambda rank: planes(rank, bases=[]),
    "more planes": lambda rank: planes(rank, bases=list(range(0, 2**20, 16))),
    "blocks of nothing": lambda rank: planes(rank, block_size=0),
    "blocks of a prime": lambda rank: planes(rank, block_size=31),
    "other cells": lambda rank: planes(rank, cell_bytes=2**39),
    "no heads": lambda rank: planes(rank, num_heads=0),
    "heads from elsewhere": lambda rank: planes(rank, first_head=1000),
    "no group": lambda rank: with_changes(rank, groups=[]),
    "another group": lambda rank: with_changes(rank, groups=msgspec.to_builtins(rank)["groups"] * 2),
    "no planes": lambda rank: of_group(rank, planes=[]),
    "words nowhere": lambda rank: with_changes(rank, token_table_address=2**63),
    "a rank beyond its size": lambda rank: with_changes(rank, tp_rank=1),
    "another rank": lambda rank: with_changes(rank, tp_rank=1, tp_size=2),
    "another engine": lambda rank: with_changes(rank, engine_id="another"),
    "no engine": lambda rank: with_changes(rank, engine_id=7),
    "metadata that NIXL does not know": lambda rank: with_changes(rank, agent_metadata=b"nixlSerDes|nothing"),
    "no metadata": lambda rank: with_changes(rank, agent_metadata=b""),
    "half of the metadata": lambda rank: with_changes(rank, agent_metadata=rank.agent_metadata[:60]),
    "kernel blocks of nothing": lambda rank: of_group(rank, kernel_blocks_per_block=0),
    "kernel blocks without end": lambda rank: of_group(rank, kernel_blocks_per_block=2**31),
    "nested without end": lambda rank: NESTED * 3,
    "nothing": lambda rank: b"",
}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_what_a_peer_answers_in_a_wrong_way_costs_the_requests_that_name_it(
    policy: str, impostor: Impostor, node: Callable[..., Node]
) -> None:
    """Finding B6: one lie after the other on the same engine, which serves others rightly all the same."""
    prefill = node(PREFILL_FILLING, kv_lease_duration=0.4)
    decode = node(DECODE_FILLING, policy=policy, handover_timeout=5)
    given = prefilled(prefill, PREFILL_ID)
    envelope = prefill.worker.xfer_handshake_metadata
    metadata = envelope.agent_metadata_bytes
    start, rank = prefill.side_of_engine.incarnation, read_rank(metadata)

    def told(handshake: bytes) -> bytes:
        return reply(prefill.tag, msgspec.msgpack.encode(Answer(start, handshake)))

    replies = {name: told(lie(rank)) for name, lie in LIES.items()}
    replies |= {
        "an answer that is none": b"\xff",
        "an answer nested without end": NESTED * 3,
        "an empty answer": b"",
        "a tag that is a number": reply(7, metadata),
        "a tag without end": reply("x" * 100_000, metadata),
        "a start that is none": reply(prefill.tag, msgspec.msgpack.encode({"incarnation": "x", "rank": metadata})),
        "metadata without its start": reply(prefill.tag, metadata),
    }
    expected = {FailureCause.PROTOCOL, FailureCause.REFUSED, FailureCause.UNREACHABLE, FailureCause.RANGE}
    for number, (name, lie) in enumerate(replies.items(), 1):
        impostor.reply, before = lie, impostor.asked
        decode.ended.pop(DECODE_ID, None)
        # Another engine each time, so that there is a new handshake.
        wanted = {**given, "remote_port": impostor.port}
        decode.add(DECODE_ID, wanted)
        ends_by_policy(policy, decode, prefill)
        # A heartbeat may have started another handshake, which would give this wrong answer to the next request.
        until(lambda: not len(decode.context.peers))
        failures = [FailureCause(one) for one in decode.account["kvcached_nixl_failures"]]
        assert len(failures) == number and failures[-1] in expected and impostor.asked > before, (name, failures[-1])
        decode.scheduler.reset_prefix_cache()
    assert decode.dropped("defect") == 0
    served(prefill, decode, 8)
    computed_alone(decode)


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
