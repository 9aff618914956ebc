# SPDX-License-Identifier: Apache-2.0
"""A rank of another engine: what is known of it, who is told what happens to it; whether it is a process of this host,
and whether that has ended.

On the same host a peer may write this process's memory through the kernel or a device (``process_vm_writev``, CUDA
IPC), without any endpoint, key or socket of this process; but there the kernel also tells whether the process has
ended. A peer on another host has to write over a network, and the gate it writes through can be closed
(`transport.agent.WriteGate`).

Nothing here blocks: ``/proc`` is served from kernel memory. Linux only, as NIXL is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.handshake import MemoryType, Process, RankHandshake
from kvcached_nixl.wire.messages import Peer

__all__ = ["ConnectedPeer", "Host", "Link", "PeerListener", "Waiting", "own_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROC = Path("/proc")
_XPMEM = Path("/dev/xpmem")
"""XPMEM can map memory of processes in other PID namespaces, too."""

_NETWORKS = {"tcp", "ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "ud", "ud_x", "ud_v", "ud_mlx5", "ud_verbs"} | {
    *("dc", "dc_x", "dc_mlx5", "srd", "gga", "rdmacm", "sockcm", "self")
}
"""UCX's names of transports that go over a network, or only to the process itself (``self``)."""

_STATE, _STARTED = 0, 19
"""Indexes of the fields ``state`` and ``starttime`` in ``/proc/PID/stat``, counted after the name (proc(5))."""


def own_process() -> Process:
    """Returns this process; an empty `Process` where ``/proc`` does not describe it correctly."""
    try:
        namespaces = [os.readlink(_PROC / "self/ns/pid")]
        if (_PROC / "self/ns/time").exists():
            namespaces.append(os.readlink(_PROC / "self/ns/time"))
        pid = os.getpid()
        if os.readlink(_PROC / "self") != str(pid):
            # This /proc belongs to another PID namespace, which numbers processes differently.
            return Process()
        return Process(_BOOT_ID.read_text().strip(), " ".join(namespaces), pid, int(_stat(pid)[_STARTED]))
    except (OSError, ValueError, IndexError):
        return Process()


def only_networks(transports: str) -> bool:
    """Whether a value of ``UCX_TLS`` allows nothing that bypasses the network between two processes."""
    return bool(transports) and {one.strip() for one in transports.split(",")} <= _NETWORKS


@dataclass(frozen=True)
class Host:
    """What this process can find out about others.

    Attributes:
        own: this process.
        memory_type: of the memory that peers write.
        transports: value of ``UCX_TLS``; "" where UCX may use all transports.
    """

    own: Process
    memory_type: MemoryType
    transports: str = ""

    @classmethod
    def here(cls, memory_type: MemoryType, environ: Mapping[str, str]) -> Host:
        """Describe the host as seen by this process."""
        return cls(own_process(), memory_type, environ.get("UCX_TLS", ""))

    def sees(self, process: Process) -> bool:
        """Whether it is a live process of this host that is visible here: only then does its absence later mean that it
        has ended.

        Copies of one virtual machine have the same boot id, but neither has the other's processes: a process with this
        number and start time must exist here as well.
        """
        mine = self.own
        is_here = (process.boot_id, process.namespaces) == (mine.boot_id, mine.namespaces) and process.pid > 0
        return bool(mine.boot_id) and is_here and _started(process.pid) == process.started

    def is_dead(self, process: Process) -> bool:
        """Whether a process for which `sees` was true has ended, with all of its threads."""
        started = _started(process.pid)
        return started is not None and started != process.started

    def is_behind_network(self, process: Process) -> bool:
        """Whether a process can write this process's memory over a network only.

        UCX treats two processes as being on one host if their boot ids are equal. Its `cma` transport also needs a
        shared PID namespace. A transport that may work across namespaces counts as possible unless its device is
        absent.
        """
        mine = self.own
        if only_networks(self.transports):
            return True
        if not mine.boot_id or not process.boot_id:
            return False
        if mine.boot_id != process.boot_id:
            return True
        return mine.namespaces != process.namespaces and self.memory_type == "DRAM" and not _XPMEM.exists()


def _stat(pid: int) -> list[str]:
    found = (_PROC / str(pid) / "stat").read_text(errors="replace")
    # The process name may contain any characters, but no field after it has a bracket.
    return found[found.rindex(")") + 2 :].split()


def _started(pid: int) -> int | None:
    """Returns when the process with this number started, in clock ticks; -1 if there is none, None if unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except OSError:
        # It exists, but belongs to another user.
        pass
    try:
        stat = _stat(pid)
        # A zombie without other threads: it has ended, but its parent has not waited for it.
        if stat[_STATE] in "ZX" and len(os.listdir(_PROC / str(pid) / "task")) <= 1:
            return -1
        return int(stat[_STARTED])
    except (OSError, ValueError, IndexError):
        # It ended just now, or is hidden (mount option hidepid).
        return None


class ConnectedPeer(NamedTuple):
    """A rank after its handshake. ``agent``: its name in the transport, which changes whenever the rank restarts."""

    agent: str
    incarnation: str
    rank: RankHandshake


class Waiting(NamedTuple):
    """Who needs a rank of an incarnation, "" for any."""

    incarnation: str
    known: Callable[[ConnectedPeer], None]
    failed: Callable[[HandOverFailed], None]


@dataclass(eq=False)
class Link:
    """What is known of an address.

    Attributes:
        known: whom it is connected to; None if it is not.
        answer: the handshake that ``known`` was made from.
        process: that of ``known``, if it is one of this host whose end is visible.
        last_agent: whom it was connected to last, until another one answers.
        is_asked: a handshake is under way.
        is_doubted: somebody depends on how it ends, so an equal answer is looked at, too.
        is_failing: the last handshake has failed.
        tries: handshakes in a row without an answer.
        waiting: who is told how the handshake ends.
    """

    address: Peer
    known: ConnectedPeer | None = None
    answer: tuple[str, bytes] | None = None
    process: Process | None = None
    last_agent: str | None = None
    is_asked: bool = False
    is_doubted: bool = False
    is_failing: bool = False
    tries: int = 0
    waiting: list[Waiting] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Log level: a peer that may still write is asked until it answers or is fenced, so warn only once."""
        return logging.INFO if self.is_failing else logging.WARNING


class PeerListener:
    """Depends on peers, and is told what happens to them (`Peers.listen`). Called on the transfer thread. This one
    depends on none."""

    def is_used(self, agent: str) -> bool:
        """Whether something still depends on an agent, although no message was sent to it for FORGOTTEN_SECONDS."""
        return False

    def may_write(self, agent: str) -> bool:
        """Whether an agent may be writing into this rank's memory. Its connection is then kept even if its side channel
        fails: it has to be told to stop, and to answer that it has."""
        return False

    def dead(self, agent: str) -> None:
        """No address leads to an agent any more: another one answers in its place. Its process may still run."""

    def unreachable(self, agent: str) -> None:
        """Nobody listens at an agent's address: its process may have ended, or only its listener."""

    def disconnected(self, agent: str) -> None:
        """The connection to an agent is about to be taken down."""
