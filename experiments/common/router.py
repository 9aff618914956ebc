# SPDX-License-Identifier: Apache-2.0
"""Starts the router as a process in front of running servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx

from experiments.common.servers import HOST, Server, ServerError, free_ports

READY_SECONDS = 60.0
STOP_SECONDS = 60.0
ADMIN_KEY = "of-this-run"
ADMINISTRATOR = MappingProxyType({"Authorization": f"Bearer {ADMIN_KEY}"})
"""Headers of a request to ``/instances`` of a router that `routed` has started."""
_TAIL_CHARACTERS = 4000


@contextlib.contextmanager
def routed(
    prefills: Sequence[Server], decodes: Sequence[Server], log: Path, *options: str, files: int | None = None
) -> Iterator[str]:
    """Start ``kvcached-nixl proxy``; yields its URL, without a path, when it reports all servers as up.

    Args:
        files: how many files it may open; None for as many as this process.

    Raises:
        ServerError: the router did not start, or ended with a status other than 0.
    """
    (port,) = free_ports(1)
    servers = [f"--prefill={one.base_url}" for one in prefills] + [f"--decode={one.base_url}" for one in decodes]
    command = [sys.executable, "-m", "kvcached_nixl", "proxy", "--port", str(port), *servers, *options]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    url = f"http://{HOST}:{port}"
    expected, environ = f"its {len(servers)} servers up", {**os.environ, "KVCACHED_NIXL_ADMIN_KEY": ADMIN_KEY}
    with running_router(command, log, lambda: _is_up(url, len(servers)), expected, environ) as process:
        yield url
        process.terminate()
        if (status := process.wait(STOP_SECONDS)) != 0:
            raise ServerError(f"found the router ended with status {status}; expected 0. Its log:\n{_tail(log)}")


@contextlib.contextmanager
def running_router(
    command: Sequence[str],
    log: Path,
    is_up: Callable[[], bool],
    expected: str,
    environ: Mapping[str, str] | None = None,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a router's process in a session of its own, and yield it when ``is_up``. At the end the session is killed.

    Args:
        environ: its environment variables; None for this process's.

    Raises:
        ServerError: it ended, or was not up in time; the message says what was ``expected``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        deadline = time.monotonic() + ready_seconds
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(
                    f"found {Path(command[0]).name} ended ({process.poll()}) or not ready after {ready_seconds:.0f} s; "
                    f"expected {expected}. Nothing is asked through it. Its log ends with:\n{_tail(log)}"
                )
            time.sleep(0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(url: str, count: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        found = httpx.get(f"{url}/instances", headers=ADMINISTRATOR, trust_env=False).json()["instances"]
        return sum(one["state"] == "up" for one in found) == count
    return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
