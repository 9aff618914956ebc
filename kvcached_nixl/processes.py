# SPDX-License-Identifier: Apache-2.0
"""Whether a process is of this host and lives, what it could write here, and which programs have started this one.

On the same host a peer may write this process's memory through the kernel or a device, without any endpoint, key or
socket of this process; but there the kernel also tells whether the process has ended. Over a network, the gate that it
writes through can be closed (`transport.agent.WriteGate`). Nothing here blocks: ``/proc`` is served from kernel memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcached_nixl.wire.handshake import MemoryType, Process

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


def has_ancestor(program: str) -> bool:
    """Whether a program of this name has started this process, be it through others."""
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            if name == program:
                return True
            pid = int(rest.split()[1])
    return False


def start_ticks(pid: int) -> int | None:
    """Start time of a process whose main thread lives, in clock ticks since boot; else None. Tells a reused pid apart.
    Of other threads, which may still write, see `Host.is_dead`."""
    try:
        stat = _stat(pid)
    except OSError:
        return None
    return None if stat[_STATE] in "ZX" else int(stat[_STARTED])


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
        return cls(own_process(), memory_type, environ.get("UCX_TLS", ""))

    def sees(self, process: Process) -> bool:
        """Whether it is a live process of this host that is visible here: only then does its absence later mean that it
        has ended. Copies of one virtual machine have the same boot id, but neither has the other's processes."""
        mine = self.own
        is_here = (process.boot_id, process.namespaces) == (mine.boot_id, mine.namespaces) and process.pid > 0
        return bool(mine.boot_id) and is_here and _started(process.pid) == process.started

    def is_dead(self, process: Process) -> bool:
        """Whether a process for which `sees` was true has ended, with all of its threads."""
        started = _started(process.pid)
        return started is not None and started != process.started

    def is_behind_network(self, process: Process) -> bool:
        """Whether a process can write this process's memory over a network only. UCX treats two processes as being on
        one host if their boot ids are equal. Its `cma` transport also needs a shared PID namespace. A transport that
        may work across namespaces counts as possible unless its device is absent."""
        mine = self.own
        if self.transports and {one.strip() for one in self.transports.split(",")} <= _NETWORKS:
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
    """Returns when the process with this number started, in clock ticks; None if unknown; -1 if there is none, or none
    of its threads is left."""
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
