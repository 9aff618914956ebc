# SPDX-License-Identifier: Apache-2.0
"""Environments of other projects' routers: small, pinned with hashes in ``experiments/locks/``, made on first use."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.common.servers import ServerError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venvs"


def environment(stack: str, say: Callable[[str], None]) -> Path:
    """Return the folder of programs of a stack's environment; create or renew it if its lock has changed.

    Args:
        stack: ``experiments/locks/stack-STACK.txt`` has its packages.

    Raises:
        ServerError: it cannot be created; the message has the installer's output.
    """
    lock = ROOT / "experiments" / "locks" / f"stack-{stack}.txt"
    # It does not import vLLM, so it need not have the same packages; its Python must be one that the lock is for.
    place = ENVIRONMENTS / f"stack-{stack}"
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]} {hashlib.sha256(lock.read_bytes()).hexdigest()}"
    stamp = place / ".stamp"
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f".lock-stack-{stack}").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != wanted:
            say(f"installing {stack} into {place}")
            uv = str(ENVIRONMENTS / "tools" / "bin" / "uv")
            _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)])
            install = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python"]
            _run([*install, str(place / "bin" / "python"), "--requirement", str(lock)])
            stamp.write_text(wanted)
    return place / "bin"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(
            f"found {command[0]} ended with status {done.returncode}; expected an environment. The stack is not run. "
            f"Its output:\n{done.stdout}{done.stderr}"
        )
