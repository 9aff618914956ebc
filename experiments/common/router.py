# SPDX-License-Identifier: Apache-2.0
"""Starts another project's router as a process in front of running servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments.common.servers import ServerError

READY_SECONDS = 60.0
STOP_SECONDS = 60.0
_TAIL_CHARACTERS = 4000


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


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
