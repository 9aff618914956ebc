# SPDX-License-Identifier: Apache-2.0
"""Settings for several servers on few cores: no thread busy-waits, and no two servers are pinned to one core.

NIXL's progress thread polls its sockets without a pause: NIXL's Python API passes a delay of 0 to its C++ agent and
offers no way to change it. That keeps one core per engine busy, so with two engines on two cores every measurement is
mostly waiting for a core. With a delay, the same thread sleeps in the same poll until an event arrives.

vLLM's NIXL connector pins the main thread of a CPU worker to the last core of its NUMA node, away from the OpenMP
threads that compute. Without such threads (``VLLM_CPU_OMP_THREADS_BIND=nobind``, one thread) the main thread computes,
and all servers of a machine would compute on that one core.

Most of a server's start is importing vLLM, and on a CPU every process that it spawns imports vLLM again.
"""

from __future__ import annotations

import multiprocessing
import os
from types import ModuleType
from typing import Any

BINDINGS = ("nixl_cu12._bindings", "nixl_cu13._bindings")
WAIT_MICROSECONDS = 10000


def wait_for_events(bindings: ModuleType) -> None:
    """Make progress threads of agents created later wait for events, at most ``WAIT_MICROSECONDS`` at a time."""
    make_agent = bindings.nixlAgent

    def agent(name: str, configuration: Any) -> Any:
        configuration.pthrDelay = WAIT_MICROSECONDS
        return make_agent(name, configuration)

    bindings.nixlAgent = agent


def use_every_core() -> None:
    """Disable pinning: threads of this process stay where the kernel's scheduler puts them."""
    os.sched_setaffinity = lambda pid, mask: None


def fork_processes(system_utils: ModuleType) -> None:
    """Fork engines and workers from the process that has imported vLLM; vLLM's CPU build would spawn them."""
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
