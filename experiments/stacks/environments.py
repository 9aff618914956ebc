# SPDX-License-Identifier: Apache-2.0
"""What other projects' stacks need: small, pinned with hashes in ``experiments/locks/``, made on first use.

``stack-NAME.txt``      an environment of its own, for a stack that does not import vLLM
``overlay-NAME.txt``    packages beside this environment's vLLM, in a folder for ``PYTHONPATH``
``sources-NAME.txt``    a source archive, unpacked and not installed
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from experiments.common.fetch_sdist import fetch
from experiments.common.servers import ServerError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venvs"
LOCKS = ROOT / "experiments" / "locks"
UV = ENVIRONMENTS / "tools" / "bin" / "uv"

Say = Callable[[str], None]


def environment(name: str, say: Say) -> Path:
    """Return the folder of programs of the environment that ``stack-NAME.txt`` locks."""

    def make(folder: Path, lock: Path) -> None:
        _run(str(UV), "venv", "--quiet", "--python", sys.executable, str(folder))
        _install(lock, "--python", str(folder / "bin" / "python"))

    return _made(f"stack-{name}", say, make) / "bin"


def overlay(name: str, say: Say) -> Path:
    """Return the folder with the packages that ``overlay-NAME.txt`` locks."""

    def make(folder: Path, lock: Path) -> None:
        _install(lock, "--python", sys.executable, "--target", str(folder))

    return _made(f"overlay-{name}", say, make)


def sources(name: str, say: Say) -> Path:
    """Return the folder with the files of the archive that ``sources-NAME.txt`` locks."""

    def make(folder: Path, lock: Path) -> None:
        folder.mkdir()
        try:
            with tarfile.open(fetch(lock, folder, UV)) as archive:
                archive.extractall(folder, filter="data")
        except (ValueError, OSError, subprocess.CalledProcessError) as error:
            raise ServerError(f"{error}. The stack is not run.") from error

    (top,) = [one for one in _made(f"sources-{name}", say, make).iterdir() if one.is_dir()]
    return top


def _made(name: str, say: Say, make: Callable[[Path, Path], None]) -> Path:
    """Return a folder, for one process at a time, after having it made of its lock if it was made of another one."""
    if not UV.is_file():
        raise ServerError(
            f"found no {UV}; expected the tools that experiments/env.sh installs. The stack is not run. Start it with "
            "bash experiments/stacks/run.sh, or run experiments/env.sh once."
        )
    with (ENVIRONMENTS / f".lock-{name}").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folder, lock = ENVIRONMENTS / name, LOCKS / f"{name}.txt"
        # Packages with compiled parts are for one version of Python.
        wanted = f"{sys.version_info[0]}.{sys.version_info[1]} {hashlib.sha256(lock.read_bytes()).hexdigest()}"
        stamp = folder / ".stamp"
        if not stamp.is_file() or stamp.read_text() != wanted:
            say(f"installing {name}")
            shutil.rmtree(folder, ignore_errors=True)
            make(folder, lock)
            stamp.write_text(wanted)
    return folder


def _install(lock: Path, *options: str) -> None:
    command = [str(UV), "pip", "install", "--quiet", "--no-deps", "--require-hashes", *options]
    _run(*command, "--requirement", str(lock))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(
            f"found {command[0]} ended with status {done.returncode}; expected an environment. The stack is not run. "
            f"Its output:\n{done.stdout}{done.stderr}"
        )
