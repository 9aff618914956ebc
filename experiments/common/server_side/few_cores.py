# SPDX-License-Identifier: Apache-2.0
"""For several servers on few cores: no thread spins, and no two servers are sent to one core.

NIXL's progress thread polls its sockets without a pause: NIXL's Python API gives its C++ agent a delay of 0 and no way
to ask for another. That keeps one core per engine busy, and where two engines share two cores, everything that is
measured or tested is the queue for those. With a delay, the same thread sleeps in the same poll until an event comes.

vLLM's NIXL connector moves the main thread of a CPU worker to the last core of its NUMA node, away from the OpenMP
threads that compute. Without those (``VLLM_CPU_OMP_THREADS_BIND=nobind``, one thread) it is the main thread that
computes, and all servers of a machine would do so on one core.

A start is little else than importing vLLM, and on a CPU it does so once more in every process it spawns.
"""

from __future__ import annotations

import multiprocessing
import os
from types import ModuleType
from typing import Any

BINDINGS = ("nixl_cu12._bindings", "nixl_cu13._bindings")
WAIT_MICROSECONDS = 10000
DELAY_PLACE = 5
"""Of the delay among the arguments of a configuration, up to NIXL 0.10; later it is an attribute."""


def wait_for_events(bindings: ModuleType) -> None:
    """Progress threads of agents made from ``bindings`` from now on wait for events, and look around once a while."""
    make_config, make_agent = bindings.nixlAgentConfig, bindings.nixlAgent
    is_attribute = "pthrDelay" in vars(make_config)

    def config(*arguments: Any) -> Any:
        if not is_attribute:
            arguments = (*arguments[:DELAY_PLACE], WAIT_MICROSECONDS, *arguments[DELAY_PLACE + 1 :])
        return make_config(*arguments)

    def agent(name: str, configuration: Any) -> Any:
        if is_attribute:
            configuration.pthrDelay = WAIT_MICROSECONDS
        return make_agent(name, configuration)

    bindings.nixlAgentConfig, bindings.nixlAgent = config, agent


def use_every_core() -> None:
    """Threads of this process stay where the scheduler puts them."""
    os.sched_setaffinity = lambda pid, mask: None


def fork_processes(system_utils: ModuleType) -> None:
    """Engines and workers are forked from a process that has imported everything, where vLLM for CPUs spawns them."""
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
