# SPDX-License-Identifier: Apache-2.0
"""Separate virtual environments, and the programs that run in them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import fake_trees

REPOSITORY = fake_trees.REPOSITORY
SITECUSTOMIZE = REPOSITORY / "kvcached_nixl" / "sitecustomize"
PROBE = Path(__file__).with_name("probe.py")
DEPENDENCIES = ("wrapt", "packaging", "msgspec", "xxhash", "numpy", "numpy.libs")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the runtime dependencies of the package and nothing else."""

    python: Path
    site_packages: Path

    def run(self, *arguments: str, path: tuple[Path, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs this environment's Python. ``environ`` is added to variables that have none of this package's."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVCACHED", "ENABLE_KVCACHED"))}
        clean |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", **environ}
        return subprocess.run([str(self.python), *arguments], env=clean, capture_output=True, text=True, check=False)

    def probe(self, *actions: str, path: tuple[Path, ...] = (), **environ: str) -> dict[str, Any]:
        """Runs ``probe.py`` with these actions (listed there) and returns the state that it prints."""
        done = self.run(str(PROBE), *actions, path=path, **environ)
        assert done.returncode == 0, done.stderr
        state: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return state


def make_environment(folder: Path, without: str = "") -> Environment:
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name in DEPENDENCIES:
        spec = importlib.util.find_spec(name) if "." not in name else None
        origin = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
        if name == "numpy.libs" and (numpy := importlib.util.find_spec("numpy")) is not None and numpy.origin:
            libraries = Path(numpy.origin).parents[1] / name
            origin = libraries if libraries.is_dir() else None
        if origin is not None and name != without:
            (site_packages / name).symlink_to(origin)
    return Environment(python, site_packages)


def install_wheel(environment: Environment, wheel: Path) -> Environment:
    """Unpacks a wheel where an installer would."""
    zipfile.ZipFile(wheel).extractall(environment.site_packages)
    return environment
