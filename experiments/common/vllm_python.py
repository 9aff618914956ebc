# SPDX-License-Identifier: Apache-2.0
"""Read the Python files of a vLLM that is not installed; or put them over the CPU build of another one.

    python vllm_python.py VERSION|WHEEL           replaces them in the environment of this interpreter
    python vllm_python.py --digest VERSION|WHEEL  prints the checksum of the files, for experiments/locks

The latter is for a vLLM without a CPU build. What is compiled stays that of the other vLLM, and so does its torch. The
files come from the wheel for GPUs, of which only they are fetched (some 15 MB), and have to have the checksum that is
locked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

LOCKS = Path(__file__).resolve().parents[1] / "locks"
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


def digest_of(source: Source) -> str:
    found = hashlib.sha256()
    for path in sorted(source.paths):
        content = source.read(path).encode()
        found.update(f"{path} {len(content)}\n".encode() + content)
    return found.hexdigest()


def replace(source: Source, site_packages: Path) -> None:
    """Replace the Python files of the package ``vllm`` in ``site_packages``; what is compiled stays.

    Files are replaced, not written to: an installer may have linked them from its cache.
    """
    package = site_packages / "vllm"
    for old in [*package.rglob("*.py"), *package.rglob("*.pyc")]:
        old.unlink()
    for path in source.paths:
        place = site_packages / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source.read(path))
    # Not in this process: its workers would be forked, from whatever threads this one has.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-q", "-j", "0", str(package)], check=False)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or (len(arguments) == 2 and arguments[0] != "--digest"):
        sys.exit(f"usage: vllm_python.py [--digest] VERSION|WHEEL   (found: {' '.join(arguments)})")
    try:
        source = open_source(arguments[-1])
        found = digest_of(source)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        print(f"found no Python files of vLLM {arguments[-1]}: {error}. Nothing was changed.", file=sys.stderr)
        return 2
    if len(arguments) == 2:
        print(found)
        return 0
    lock = LOCKS / f"vllm-{source.version}-python.sha256"
    if found != lock.read_text().strip():
        print(
            f"found Python files of vLLM {source.version} with the checksum {found}; expected that of {lock.name}. "
            "Nothing was changed. Check where the package index gets its wheels; experiments/locks/update.sh locks "
            "what it has.",
            file=sys.stderr,
        )
        return 2
    replace(source, Path(sysconfig.get_paths()["purelib"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
