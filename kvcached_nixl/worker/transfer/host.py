# SPDX-License-Identifier: Apache-2.0
"""Whether a peer is a process of this host, and whether that process is gone.

On one host a peer may write this process's memory through the kernel or a device (``process_vm_writev``, CUDA IPC), and
no endpoint, key or socket of ours has a part in it. There the kernel also knows whether the process is gone. Elsewhere
it has to go over a network, and what it writes through can be closed (`transport.base.Gate`).

Nothing here blocks: ``/proc`` is the kernel's own memory. Linux only, as NIXL is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcached_nixl.wire.handshake import MemoryType, Process

__all__ = ["Host", "own_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROC = Path("/proc")
_XPMEM = Path("/dev/xpmem")
"""Maps memory of processes of other namespaces, too."""

_NETWORKS = {"tcp", "ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "ud", "ud_x", "ud_v", "ud_mlx5", "ud_verbs"} | {
    *("dc", "dc_x", "dc_mlx5", "srd", "gga", "rdmacm", "sockcm", "self")
}
"""UCX's names of transports that go over a network, or nowhere."""

_STATE, _STARTED = 0, 19
"""Places in ``/proc/PID/stat``, after the name (proc(5))."""


def own_process() -> Process:
    """This process; an empty one where ``/proc`` does not show it as it is."""
    try:
        namespaces = [os.readlink(_PROC / "self/ns/pid")]
        if (_PROC / "self/ns/time").exists():
            namespaces.append(os.readlink(_PROC / "self/ns/time"))
        pid = os.getpid()
        if os.readlink(_PROC / "self") != str(pid):
            # It is another namespace's, whose numbers are others.
            return Process()
        return Process(_BOOT_ID.read_text().strip(), " ".join(namespaces), pid, int(_stat(pid)[_STARTED]))
    except (OSError, ValueError, IndexError):
        return Process()


@dataclass(frozen=True)
class Host:
    """What can be known here of other processes.

    Attributes:
        own: this process.
        memory_type: of the memory that peers write.
        transports: ``UCX_TLS``; "" where UCX chooses among all.
    """

    own: Process
    memory_type: MemoryType
    transports: str = ""

    @classmethod
    def here(cls, memory_type: MemoryType, environ: Mapping[str, str]) -> Host:
        """As this process finds itself."""
        return cls(own_process(), memory_type, environ.get("UCX_TLS", ""))

    def sees(self, process: Process) -> bool:
        """Whether it is a process of this host that lives and can be looked after: only then is its absence its end.

        Copies of one virtual machine have one boot id; but none has the other's processes.
        """
        mine = self.own
        is_here = (process.boot_id, process.namespaces) == (mine.boot_id, mine.namespaces) and process.pid > 0
        return bool(mine.boot_id) and is_here and _started(process.pid) == process.started

    def is_dead(self, process: Process) -> bool:
        """Whether one that was seen has ended, with all of its threads."""
        started = _started(process.pid)
        return started is not None and started != process.started

    def is_behind_network(self, process: Process) -> bool:
        """Whether it has no way into this process's memory but over a network.

        UCX takes two processes for one host's if their kernels have one boot id. `cma` needs one namespace of processes
        beside that; of what is said to need less, only what is not there is ruled out.
        """
        mine = self.own
        chosen = {one.strip() for one in self.transports.split(",")}
        if self.transports and chosen <= _NETWORKS:
            return True
        if not mine.boot_id or not process.boot_id:
            return False
        if mine.boot_id != process.boot_id:
            return True
        return mine.namespaces != process.namespaces and self.memory_type == "DRAM" and not _XPMEM.exists()


def _stat(pid: int) -> list[str]:
    found = (_PROC / str(pid) / "stat").read_text(errors="replace")
    # The name may have any letters, but nothing after it has a bracket.
    return found[found.rindex(")") + 2 :].split()


def _started(pid: int) -> int | None:
    """When the process of a number was started, in ticks; -1 if there is none, None if that cannot be known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except OSError:
        # It is there, and somebody else's.
        pass
    try:
        stat = _stat(pid)
        # One that nobody has waited for, none of whose threads is left.
        if stat[_STATE] in "ZX" and len(os.listdir(_PROC / str(pid) / "task")) <= 1:
            return -1
        return int(stat[_STARTED])
    except (OSError, ValueError, IndexError):
        # Ended this moment, or hidden (hidepid).
        return None
