# SPDX-License-Identifier: Apache-2.0
"""Download the source archive that a lock pins: ``python fetch_sdist.py LOCK FOLDER``; prints its path.

pip downloads it and checks the hash. ``pip download`` always reads a source archive's metadata, which for kvcached
means running a ``setup.py`` that imports torch. A stub of torch is enough for that; nothing is built with it. Run it
with an interpreter that has pip and setuptools.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

STAND_IN = {
    "torch/__init__.py": """
from types import SimpleNamespace
from . import version
__version__ = "2.10.0"
_C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
""",
    "torch/version.py": 'hip = None\ncuda = "12"\n',
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": """
from setuptools import Extension
from setuptools.command.build_ext import build_ext as BuildExtension
def CUDAExtension(name, sources, **ignored):
    return Extension(name, sources)
CppExtension = CUDAExtension
def include_paths(*ignored, **also_ignored):
    return []
library_paths = include_paths
""",
}


def fetch(lock: Path, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="stand-in-torch-") as stand_in:
        for name, text in STAND_IN.items():
            path = Path(stand_in, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--require-hashes", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        command += ["--requirement", str(lock), "--dest", str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": stand_in})
    (archive,) = folder.glob("*.tar.gz")
    return archive


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: fetch_sdist.py LOCK FOLDER   (found: " + " ".join(sys.argv[1:]) + ")")
    sys.stdout.write(f"{fetch(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
