# SPDX-License-Identifier: Apache-2.0
"""Builds the unmodified kvcached on host memory, and installs it in an environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import HostvmmError
from .host import available_memory_bytes
from .recognition import BUILD_TAG

_NATIVE = Path(__file__).with_name("native")
SOURCES = ("error.cpp", "device.cpp", "process.cpp", "runtime.cpp", "physical.cpp", "address.cpp")
_BUILD_MEMORY_BYTES = 1 << 30
_BUILD_DISK_BYTES = 512 << 20
_PROBE = """
import json, os, sys, sysconfig
found = {"headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
         "include": sysconfig.get_path("include"), "python": sys.version.split()[0]}
for name in ("torch", "setuptools"):
    try:
        found[name] = __import__(name).__version__
    except ImportError:
        found[name] = None
print(json.dumps(found))
"""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Toolchain:
    """Programs that the build calls."""

    compiler: str
    archiver: str


def find_toolchain() -> Toolchain:
    """The C++ compiler ($CXX, else c++, g++ or clang++) and ar. Raises HostvmmError naming what is missing."""
    wanted = os.environ.get("CXX")
    compiler = (
        shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    )
    if compiler is None:
        found = f"$CXX is {wanted!r}, which is not a command" if wanted else "no c++, g++ or clang++ on PATH"
        raise _cannot_build(found, "a C++17 compiler", "Install one (Debian, Ubuntu: apt-get install g++) or set CXX.")
    archiver = shutil.which(os.environ.get("AR", "ar"))
    if archiver is None:
        raise _cannot_build("no `ar` on PATH or in $AR", "an archiver", "Install binutils or set AR.")
    return Toolchain(compiler, archiver)


def check_environment(python: Path) -> dict[str, str | bool | None]:
    """Returns versions and headers of the environment of `python`. Raises HostvmmError naming what is missing."""
    try:
        probe = subprocess.run([python, "-c", _PROBE], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise _cannot_build(
            f"{python}: {detail}", "a Python that runs", "Pass the environment's bin/python."
        ) from error
    found: dict[str, str | bool | None] = json.loads(probe.stdout)
    if not found["headers"]:
        raise _cannot_build(
            f"no Python.h in {found['include']} (Python {found['python']})",
            "the interpreter's development headers",
            "Install them (Debian, Ubuntu: apt-get install python3-dev).",
        )
    for name in ("torch", "setuptools"):
        if found[name] is None:
            raise _cannot_build(
                f"no {name} in {python}'s environment", f"the {name} to build with", "Install it first."
            )
    return found


def check_room(folder: Path) -> None:
    """Raises HostvmmError if memory or the disk under `folder` is too small for the build."""
    memory_bytes = available_memory_bytes()
    if memory_bytes < _BUILD_MEMORY_BYTES:
        raise _cannot_build(
            f"{memory_bytes >> 20} MiB of memory available", f"{_BUILD_MEMORY_BYTES >> 20} MiB", "Stop other programs."
        )
    disk_bytes = shutil.disk_usage(folder).free
    if disk_bytes < _BUILD_DISK_BYTES:
        raise _cannot_build(
            f"{disk_bytes >> 20} MiB free in {folder}",
            f"{_BUILD_DISK_BYTES >> 20} MiB",
            "Free some, or point TMPDIR at another disk.",
        )


def build_runtime_archive(rocm_home: Path, toolchain: Toolchain) -> Path:
    """Compiles the runtime into `rocm_home`/lib/libamdhip64.a, copies its headers, and returns the archive.

    It is static, with hidden symbols, so that only kvcached's extension uses it and nothing else in the process.
    """
    shutil.copytree(_NATIVE / "include", rocm_home / "include")
    library = rocm_home / "lib" / "libamdhip64.a"
    library.parent.mkdir(parents=True)
    objects = []
    for source in SOURCES:
        target = rocm_home / f"{source}.o"
        flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{rocm_home / 'include'}"]
        _run(
            [toolchain.compiler, *flags, "-c", str(_NATIVE / source), "-o", str(target)],
            "compiling the host-memory runtime",
        )
        objects.append(str(target))
    _run([toolchain.archiver, "rcs", str(library), *objects], "archiving the host-memory runtime")
    return library


def build_wheel(sdist: Path, python: Path, wheel_dir: Path, progress: Progress) -> Path:
    """Builds `sdist` (the archive, or the folder it unpacks to) for the interpreter at `python`; returns the wheel.

    Nothing in `sdist` is changed: it is copied to a temporary folder. Takes about half a minute.
    """
    toolchain = find_toolchain()
    found = check_environment(python)
    with tempfile.TemporaryDirectory(prefix="kvcached-hostvmm-") as name:
        folder = Path(name)
        check_room(folder)
        progress(f"compiling the host-memory runtime with {toolchain.compiler}")
        build_runtime_archive(folder / "rocm", toolchain)
        with _unpacked(sdist, folder / "source") as source:
            progress(
                f"building {source.name} for Python {found['python']}, torch {found['torch']} (about half a minute)"
            )
            wheel_dir.mkdir(parents=True, exist_ok=True)
            before = set(wheel_dir.glob("*.whl"))
            script = Path(__file__).with_name("build_backend.py")
            environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
            environment.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
            _run(
                [str(python), "-s", str(script), str(folder / "rocm"), str(wheel_dir.resolve()), BUILD_TAG],
                "building kvcached",
                cwd=source,
                env=environment,
            )
    built = sorted(set(wheel_dir.glob("*.whl")) - before) or sorted(wheel_dir.glob(f"kvcached-*-{BUILD_TAG}-*.whl"))
    if not built:
        raise _cannot_build(f"no wheel in {wheel_dir} after the build", "a wheel", "Use the sources of kvcached 0.1.6.")
    return built[-1]


def install_wheel(wheel: Path, python: Path) -> None:
    """Installs `wheel` in place of any kvcached in the environment, without using a package cache."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--python", str(python), "--no-cache", "--reinstall-package", "kvcached"]
    elif subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0:
        _run([str(python), "-m", "pip", "uninstall", "--yes", "kvcached"], "removing the present kvcached")
        command = [str(python), "-m", "pip", "install", "--no-cache-dir"]
    else:
        raise HostvmmError(
            found=f"no `uv` on PATH or in $UV, and no pip in {python}'s environment",
            expected="uv or pip",
            consequence="kvcached was built but is not installed.",
            remedy="Install one of them, or build with --wheel-dir and install the wheel yourself.",
        )
    _run([*command, str(wheel)], "installing kvcached")


@contextmanager
def _unpacked(sdist: Path, target: Path) -> Iterator[Path]:
    if sdist.is_dir():
        shutil.copytree(sdist, target / sdist.name, ignore=shutil.ignore_patterns("build", "*.so", ".git"))
    elif sdist.is_file():
        target.mkdir(parents=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(target, filter="data")
    else:
        raise _cannot_build(f"nothing at {sdist}", "kvcached's source archive or its folder", "Correct --sdist.")
    folders = [folder for folder in target.iterdir() if (folder / "setup.py").is_file()]
    if len(folders) != 1 or not (folders[0] / "csrc").is_dir():
        raise _cannot_build(f"{sdist}", "kvcached's source: one folder with setup.py and csrc", "Correct --sdist.")
    yield folders[0]


def _run(command: Sequence[str], doing: str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    finished = subprocess.run(
        command, cwd=cwd, env=env, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if finished.returncode != 0:
        sys.stderr.write(finished.stdout)
        raise HostvmmError(
            found=f"exit status {finished.returncode} from: {' '.join(command)}",
            expected="exit status 0",
            consequence=f"{doing[0].upper()}{doing[1:]} failed; nothing is installed.",
            remedy="Its output is above.",
        )


def _cannot_build(found: str, expected: str, remedy: str) -> HostvmmError:
    return HostvmmError(found=found, expected=expected, consequence="kvcached cannot be built.", remedy=remedy)
