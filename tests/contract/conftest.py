# SPDX-License-Identifier: Apache-2.0
"""What every contract test owes the next one."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.common.server_side.few_cores import use_every_core, wait_for_events

# Torch's, gloo's and ZeroMQ's own make about fifty with two cores; two engines that are left behind, sixteen.
MANY_THREADS = 100 + 8 * (os.cpu_count() or 1)


@pytest.fixture(scope="session", autouse=True)
def agents_wait_for_events_and_no_thread_is_pinned() -> None:
    # vLLM's connector would pin this process, and with it every process that a test starts, to one core.
    use_every_core()
    wait_for_events(pytest.importorskip("nixl._bindings", reason="needs an environment: bash experiments/env.sh"))
    # What was imported is not looked at again: with vLLM that takes a second each time. Only now: an engine that a test
    # still holds would be frozen, too, and never freed.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_agent_is_left_over() -> Iterator[None]:
    """An agent's threads live as long as it does, and an engine is in a cycle."""
    # Not after the test: then pytest still holds its fixtures' values.
    gc.collect()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads < MANY_THREADS, f"{threads} threads: a test before this one has left its engines or agents running"
    yield


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """NIXL 1.5.1 aborts the process now and then when the interpreter ends, after every test has passed."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    status = getattr(getattr(reporter, "_session", None), "exitstatus", None)
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))
