# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcached_nixl doctor``: test whether NIXL can use kvcached's pages on this host, without a server."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvcached_nixl.proof.find import find
from kvcached_nixl.proof.result import SLOW, LaneFound, Proof, Question
from kvcached_nixl.transport.agent import Ranges, Transport, TransportError, make_agent, register, select_device
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.version import __version__
from kvcached_nixl.vllm.adapter.attributes import Platform, platform
from kvcached_nixl.wire.handshake import read_answer, read_rank
from kvcached_nixl.wire.planes import Planes

Limits = Mapping[str, int | str]
"""Name -> value; a text if it is unlimited or not known."""

LOCKED, FILES, MAPPINGS, SHARED = "ulimit -l, bytes", "ulimit -n", "max_map_count", "/dev/shm, bytes"
UNLIMITED = "unlimited"
_SHARED_BYTES = 1 << 30
"""With less than this in /dev/shm, UCX may fail to create shared memory in a container."""
_MAPPINGS = 65_530
"""Linux's default for vm.max_map_count."""
_INFINIBAND = Path("/sys/class/infiniband")

BYTES = 8 << 20
SMALL_BYTES = 4096
MOST_ROWS = 4096
READ_SECONDS = 30.0
TRIES = 3


def limits() -> Limits:
    def limit(which: int) -> int | str:
        soft, _ = resource.getrlimit(which)
        return UNLIMITED if soft == resource.RLIM_INFINITY else soft

    def known(look: Callable[[], int]) -> int | str:
        try:
            return look()
        except OSError as error:
            return f"not known: {error}"

    return {
        LOCKED: limit(resource.RLIMIT_MEMLOCK),
        FILES: limit(resource.RLIMIT_NOFILE),
        MAPPINGS: known(lambda: int(Path("/proc/sys/vm/max_map_count").read_text())),
        SHARED: known(lambda: shutil.disk_usage("/dev/shm").free),
    }


def shortfalls(found: Limits, *, pins: bool | None = None) -> Iterator[str]:
    """What to change about each limit that is too low. ``pins``: whether this host has network cards that pin
    registered memory; None to look."""
    locked, mappings, shared = (found[name] for name in (LOCKED, MAPPINGS, SHARED))
    if (_INFINIBAND.is_dir() if pins is None else pins) and locked != UNLIMITED:
        yield "ulimit -l unlimited: network cards pin registered memory"
    if isinstance(mappings, int) and mappings < _MAPPINGS:
        yield f"sysctl -w vm.max_map_count={_MAPPINGS}: each of kvcached's pages is a mapping"
    if isinstance(shared, int) and shared < _SHARED_BYTES:
        yield (
            "give the container more shared memory (--shm-size=1g, or an emptyDir of medium Memory): UCX and vLLM's "
            "processes create some"
        )


class PeerFound(msgspec.Struct, frozen=True):
    """A rank of a running engine.

    Attributes:
        compatibility: the tag that a peer of this rank must match.
        memory: its planes, of all KV-cache groups.
        read: bytes per second, with one descriptor per block of a plane.
        descriptors: descriptors per second, of at most 4 KiB each.
    """

    compatibility: str
    engine_id: str
    tp_rank: int
    tp_size: int
    memory: tuple[Planes, ...]
    read: float
    descriptors: float


@dataclass(frozen=True)
class Findings:
    """What was found on this host. ``limits`` are the kernel's for this process; ``advice`` says what the operator
    should change; ``peer`` is there if the caller named one."""

    platform: Platform
    proof: Proof
    limits: Limits
    advice: tuple[str, ...]
    peer: PeerFound | None = None


def examine(backends: Sequence[str], device_index: int, peer: tuple[str, int, int] | None = None) -> Findings:
    """Run the test again, without using a stored result. ``peer``: (host, port, rank) of a running engine's side
    channel. Raises MemoryRefused: it could not be completed; ValueError: the peer cannot be reached, or cannot be read
    from."""
    here = platform()
    question = Question(here.device, device_index, here.memory_type, tuple(backends))
    proof = find(question, is_fresh=True)
    of_host = limits()
    met = None
    if peer is not None:
        channel = SideChannel()
        try:
            met = read_from(channel, *peer, question)
        except (OSError, ValueError, TransportError) as error:
            host, port, _ = peer
            reason = str(error) or type(error).__name__
            raise ValueError(f"could not read from {host}:{port}: {reason}") from error
        finally:
            channel.close()
    advice = [*proof.why_not, *proof.why_slow]
    if proof.why_not:
        advice.append(proof.remedy)
    if proof.why_slow:
        advice.append(f"more than {SLOW:g} times as slow as a slab means a copy path: check the build of UCX")
    return Findings(here, proof, of_host, (*advice, *shortfalls(of_host)), met)


def read_from(channel: SideChannel, host: str, port: int, tp_rank: int, question: Question) -> PeerFound:
    """Handshake with a rank as decode does, and read some of its blocks into the device of ``question``, whatever they
    contain. Nothing is written to it. Raises OSError, TimeoutError, ValueError, TransportError: the rank does not
    answer, its answer is invalid, or it cannot be read from."""
    compatibility, metadata = channel.ask(host, port, tp_rank).result()
    if not metadata:
        raise ValueError(f"{host}:{port} answers: {compatibility:.500}")
    rank = read_rank(read_answer(metadata).rank)
    import torch

    select_device(question.device, question.device_index)
    landing = torch.zeros(BYTES, dtype=torch.uint8, device=question.torch_device)
    extent = [(landing.data_ptr(), BYTES)]
    try:
        agent = make_agent(question.backends)
        register(agent, extent, question.backends, question.memory_type, question.device_index)
    except Exception as error:
        # NIXL's exceptions have no common base.
        raise TransportError(f"memory could not be registered here: {type(error).__name__}: {error}") from error
    transport = Transport(agent, question.memory_type, question.device_index)
    peer = transport.add_peer(rank.agent_metadata, rank.device_id, rank.memory_type)
    planes = tuple(planes for group in rank.groups for planes in group.planes)
    whole = _ranges(planes)
    small: list[tuple[int, int]] = []
    for begin, length in whole.tolist():
        small += [(begin + at, min(SMALL_BYTES, length - at)) for at in range(0, length, SMALL_BYTES)]
    cut = np.array(small[: BYTES // SMALL_BYTES], np.int64)

    def seconds(remote: Ranges) -> float:
        begins = landing.data_ptr() + np.concatenate(([0], np.cumsum(remote[:-1, 1])))
        local = np.stack((begins, remote[:, 1]), axis=1)
        return min(transport.move("READ", peer, local, remote, READ_SECONDS) for _ in range(TRIES))

    rates = int(whole[:, 1].sum()) / seconds(whole), len(cut) / seconds(cut)
    transport.remove_peer(peer)
    return PeerFound(compatibility, rank.engine_id, rank.tp_rank, rank.tp_size, planes, *rates)


def _ranges(kinds: Sequence[Planes]) -> Ranges:
    """(address, bytes) of blocks of the first plane of each kind; of a block, the part whose cells are contiguous."""
    rows: list[tuple[int, int]] = []
    for planes in kinds:
        dense = planes.cell_bytes * planes.num_heads * planes.block_size
        length = min(dense, planes.block_stride_bytes, BYTES // len(kinds))
        if length <= 0:
            raise ValueError(
                f"found blocks {planes.block_stride_bytes} bytes apart; expected blocks that are not empty"
            )
        count = min(planes.num_blocks, BYTES // len(kinds) // length, MOST_ROWS // len(kinds))
        rows += [(planes.bases[0] + block * planes.block_stride_bytes, length) for block in range(count)]
    return np.array(rows, np.int64)


def render(findings: Findings, *, colour: bool = False) -> str:
    """The findings as text of several lines, without a newline at the end."""
    here, proof = findings.platform, findings.proof
    order = "contiguous" if here.is_contiguous else "non-contiguous"
    names = [name for name in proof.environment if not name.isupper()]
    lines = [f"kvcached_nixl {__version__} doctor", "", "this host"]
    lines += [f"  {name:<16} {proof.environment[name].split()[0]}" for name in names if proof.environment[name]]
    lines += [
        f"  {'device':<16} {here.device} {proof.question.device_index}, which NIXL calls {here.memory_type}",
        f"  {'kvcached':<16} pages of {here.page_bytes >> 20} MiB, {order} layout",
    ]
    lines += [f"  {name:<16} {value}" for name, value in proof.environment.items() if name.isupper()]
    lines += ["", f"lanes that could be chosen to carry KV, each tested alone ({proof.seconds:.1f} s)"]
    lines += [_row(("lane", "follows", "kvcached's pages", "other memory", "host memory", "descriptors/s"))]
    lines += [_row(("", "", *(["READ / WRITE, GB/s"] * 3), ""))]
    for lane in proof.lanes:
        cells = _row(_cells(lane))
        lines.append(f"\x1b[{'31' if lane.why_not else '32'}m{cells}\x1b[0m" if colour else cells)
    lines += ["", "limits"]
    lines += [
        f"  {name:<16} {value:,}" if isinstance(value, int) else f"  {name:<16} {value}"
        for name, value in findings.limits.items()
    ]
    if findings.peer is not None:
        lines += _of_peer(findings.peer)
    if findings.advice:
        lines += ["", "what to change", *(f"  - {reason}" for reason in findings.advice)]
    verdict = "kvcached's pages are registered with NIXL" if proof.is_direct else "KV is copied through a slab"
    return "\n".join([*lines, "", f"memory path of a server: {proof.memory_path.value}: {verdict}"])


def to_json(findings: Findings) -> dict[str, Any]:
    return {
        "kvcached_nixl": __version__,
        "memory_path": findings.proof.memory_path.value,
        "platform": asdict(findings.platform),
        "proof": msgspec.to_builtins(findings.proof),
        "refused": list(findings.proof.why_not),
        "limits": dict(findings.limits),
        "advice": list(findings.advice),
        "peer": msgspec.to_builtins(findings.peer),
    }


def _row(cells: Sequence[str]) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, (16, 10, 20, 20, 20, 14), strict=True))
    return f"  {' '.join(padded).rstrip()}"


def _cells(lane: LaneFound) -> tuple[str, ...]:
    if lane.unusable or lane.never:
        return lane.name, "not known" if lane.unusable else "not used", "", "", "", ""
    places = [lane.rates.get(place) for place in ("elastic", "ordinary", "host")]
    return (
        lane.name,
        "no" if lane.wrong else "yes",
        *("" if one is None else f"{one.read / 1e9:.3g} / {one.write / 1e9:.3g}" for one in places),
        f"{lane.rates['elastic'].descriptors:,.0f}",
    )


def _of_peer(peer: PeerFound) -> list[str]:
    lines = [
        "",
        f"engine {peer.engine_id}, rank {peer.tp_rank} of {peer.tp_size}",
        f"  READ from here   {peer.read / 1e9:.3g} GB/s, {peer.descriptors:,.0f} descriptors/s",
        f"  must be equal    {peer.compatibility}",
    ]
    for planes in peer.memory:
        lines += [
            f"  registered       {len(planes.bases)} planes of {planes.num_blocks:,} blocks",
            f"    a block        {planes.block_size} tokens of {planes.num_heads} heads from {planes.first_head} on, "
            f"{planes.cell_bytes} bytes each",
            f"    strides        {planes.block_stride_bytes:,} bytes a block, {planes.token_stride_bytes:,} a token, "
            f"{planes.head_stride_bytes:,} a head",
        ]
    return lines
