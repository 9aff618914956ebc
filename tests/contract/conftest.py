# SPDX-License-Identifier: Apache-2.0
"""Fixtures of contract tests. No test leaves threads, agents or pinned cores to the next one."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support.attention_engines import engine_over, patched
from support.nodes import direction, log, node, pair, parallel_state

from experiments.common.server_side.sitecustomize import use_every_core, wait_for_events

__all__ = ["direction", "engine_over", "log", "node", "pair", "parallel_state", "patched"]
"""Engines and pairs of them; a module that needs others has fixtures of the same names."""
# With two cores torch, gloo and ZeroMQ have about fifty threads; two engines that a test left running add sixteen.
MANY_THREADS = 100 + 8 * (os.cpu_count() or 1)


@pytest.fixture(scope="session", autouse=True)
def agents_wait_for_events_and_no_thread_is_pinned() -> None:
    # vLLM's connector would pin this process, and so every process that a test starts, to one core.
    use_every_core()
    wait_for_events(importlib.import_module("nixl._bindings"))
    # Excludes imported modules from garbage collection: with vLLM a collection takes a second otherwise. Called before
    # the first test, because an engine that a test still holds would be frozen as well, and never freed.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_agent_is_left_over() -> Iterator[None]:
    """Agents keep their threads until they are freed, and an engine is in a reference cycle: collect it first."""
    # Before the test, because after a test pytest still holds the values of its fixtures.
    gc.collect()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads < MANY_THREADS, f"{threads} threads: a test before this one has left its engines or agents running"
    yield


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Exits without destructors: NIXL 1.5.1 sometimes aborts at interpreter exit, after every test has passed."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    status = getattr(getattr(reporter, "_session", None), "exitstatus", None)
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))
