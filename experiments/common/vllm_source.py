# SPDX-License-Identifier: Apache-2.0
"""The Python files of a vLLM that is not installed, from a wheel file or from a wheel on the package index.

Only the parts of an index's wheel that hold Python files are fetched: a few MB of hundreds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

_CHUNK_BYTES = 4 << 20


class Source:
    """The Python files of one vLLM.

    Attributes:
        version: the vLLM version, without a local label.
        paths: every Python file, as in the wheel.
    """

    def __init__(self, version: str, wheel: zipfile.ZipFile) -> None:
        self.version = Version(version).public
        self._wheel = wheel
        self.paths = frozenset(name for name in wheel.namelist() if name.endswith(".py"))

    def read(self, path: str) -> str:
        return self._wheel.read(path).decode()


def open_source(version_or_wheel: str) -> Source:
    """Opens a version of the distribution ``vllm``, or a wheel file.

    Args:
        version_or_wheel: the version, or the path of the wheel.

    Raises:
        ValueError: it is neither, or pip does not find it.
    """
    path = Path(version_or_wheel)
    if path.suffix == ".whl":
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        return Source(str(parse_wheel_filename(path.name)[1]), zipfile.ZipFile(path))
    # Comes with torch; fetches what is read.
    from fsspec.implementations.http import HTTPFileSystem

    index = HTTPFileSystem(client_kwargs={"trust_env": True})
    remote = index.open(_address_of(version_or_wheel), block_size=_CHUNK_BYTES)
    if not remote.seekable():
        raise ValueError("this index gives no parts of files; download the wheel and give its path")
    return Source(version_or_wheel, zipfile.ZipFile(remote))


def _address_of(version: str) -> str:
    """Returns the URL of the wheel, which pip reports without downloading it."""
    pip = shutil.which("pip")
    if pip is None:
        raise ValueError("pip is needed to find a version; give a wheel file instead")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report)]
        # Without --target pip insists on the Python version of its interpreter.
        options += ["--only-binary", ":all:", "--python-version", "3.12", "--target", folder]
        done = subprocess.run(
            [pip, "install", *options, f"vllm=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(f"pip finds no wheel of vllm {version}: {done.stderr.strip().splitlines()[-1]}")
        return str(json.loads(report.read_text())["install"][0]["download_info"]["url"])
