# SPDX-License-Identifier: Apache-2.0
"""Builds the unmodified kvcached on host memory, for the Python that runs this."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hostvmm import BUILD_TAG

NATIVE = Path(__file__).with_name("native")
SOURCES = tuple(
    NATIVE / name for name in ("error.cpp", "device.cpp", "process.cpp", "runtime.cpp", "physical.cpp", "address.cpp")
)


def find_compiler() -> str:
    """The C++ compiler: the first that is installed of $CXX, else of c++, g++ and clang++."""
    names = (os.environ.get("CXX") or "c++ g++ clang++").split()
    return next(filter(shutil.which, names), names[0])


def build_wheel(sdist: Path, wheel_dir: Path) -> Path:
    """Builds kvcached's source archive (about half a minute). Returns the wheel.

    Needs a C++17 compiler, `ar` and Python's headers, and torch 2.10 or newer (any build) and setuptools in this
    environment. Changes torch in this process and its working directory.
    """
    with tempfile.TemporaryDirectory(prefix="kvcached-hostvmm-") as name:
        folder = Path(name)
        _build_runtime_archive(folder / "rocm")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        return wheel_dir / _build_in(source, folder / "rocm", wheel_dir.resolve())


def _build_runtime_archive(rocm_home: Path) -> None:
    """Compiles the runtime into `rocm_home`/lib/libamdhip64.a, and copies its headers.

    It is static, with hidden symbols, so that only kvcached's extension uses it and nothing else in the process.
    """
    shutil.copytree(NATIVE / "include", rocm_home / "include")
    (rocm_home / "lib").mkdir()
    flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{rocm_home / 'include'}"]
    subprocess.run([find_compiler(), *flags, "-c", *map(str, SOURCES)], check=True, cwd=rocm_home)
    objects = [source.with_suffix(".o").name for source in SOURCES]
    subprocess.run([os.environ.get("AR", "ar"), "rcs", "lib/libamdhip64.a", *objects], check=True, cwd=rocm_home)


def _build_in(source: Path, rocm_home: Path, wheel_dir: Path) -> str:
    """Returns the wheel's name.

    kvcached builds for HIP if `torch.version.hip` is set, and torch's build helper finds headers and libraries through
    `ROCM_HOME`. A torch without ROCm reads neither from the environment, so both are set on the imported modules.
    """
    import torch
    from torch.utils import cpp_extension

    torch.version.hip = "0.0.0"
    cpp_extension.ROCM_HOME = cpp_extension.HIP_HOME = str(rocm_home)
    cpp_extension.IS_HIP_EXTENSION = True
    # The build tag is written to the wheel's name and its WHEEL metadata, where `is_hostvmm_build` looks for it.
    config = rocm_home / "build.cfg"
    config.write_text(f"[bdist_wheel]\nbuild_number = {BUILD_TAG}\n")
    os.environ["DIST_EXTRA_CONFIG"] = str(config)
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    os.chdir(source)
    sys.path.insert(0, str(source))
    found: str = importlib.import_module("setuptools.build_meta").build_wheel(str(wheel_dir))
    return found
