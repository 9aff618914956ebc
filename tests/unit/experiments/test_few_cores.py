# SPDX-License-Identifier: Apache-2.0
"""A process of the experiments' servers leaves the cores to processes that compute; other processes are unchanged."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from experiments.common.device import CPU_ENVIRONMENT
from experiments.common.servers import ENVIRONMENT, SERVER_SIDE

pytest.importorskip("nixl", reason="needs an environment: bash experiments/env.sh")

IDLE = """
import os, time
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("idle", nixl_agent_config(num_threads=0))

# Seconds that all threads have run, and have waited for a core; and the time.
def now():
    files = [open(f"/proc/self/task/{one}/schedstat").read().split() for one in os.listdir("/proc/self/task")]
    return [*(sum(int(one[place]) for one in files) / 1e9 for place in (0, 1)), time.monotonic()]

before = now()
time.sleep(0.5)
ran, waited, passed = (after - one for after, one in zip(now(), before))
busy = ran / max(passed - waited, ran, 1e-9)
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {max(cores)})
print(busy, os.sched_getaffinity(0) == cores)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be told from all")
@pytest.mark.parametrize("is_asked", [True, False])
def test_an_idle_agent_uses_no_core_and_no_thread_is_pinned(is_asked: bool) -> None:
    """NIXL's progress thread spins unless the servers' environment asks otherwise."""
    environment = {**os.environ, **ENVIRONMENT, **CPU_ENVIRONMENT, "PYTHONPATH": str(SERVER_SIDE)}
    if not is_asked:
        del environment["EXPERIMENT_FEW_CORES"]
    done = subprocess.run(
        [sys.executable, "-c", IDLE], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    busy, has_every_core = done.stdout.split()[-2:]
    assert float(busy) < 0.15 if is_asked else float(busy) > 0.3
    assert has_every_core == str(is_asked)
