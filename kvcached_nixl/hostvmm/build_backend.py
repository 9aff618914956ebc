# SPDX-License-Identifier: Apache-2.0
"""Builds kvcached's wheel inside the target environment's interpreter. Run as a script, by path.

    python build_backend.py ROCM_HOME WHEEL_DIR BUILD_TAG        (working directory: the unpacked kvcached)

kvcached builds for HIP if `torch.version.hip` is set, and torch's build helper finds headers and libraries through
`ROCM_HOME`. A torch without ROCm reads neither from the environment, so both are set on the imported modules, in this
process only.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def main(rocm_home: str, wheel_dir: str, build_tag: str) -> None:
    import torch
    from torch.utils import cpp_extension

    torch.version.hip = "0.0.0"
    cpp_extension.ROCM_HOME = rocm_home
    cpp_extension.HIP_HOME = rocm_home
    cpp_extension.IS_HIP_EXTENSION = True

    # The build tag is written to the wheel's name and its WHEEL metadata, where `recognition` looks for it.
    config = Path(rocm_home, "build.cfg")
    config.write_text(f"[bdist_wheel]\nbuild_number = {build_tag}\n")
    os.environ["DIST_EXTRA_CONFIG"] = str(config)
    sys.path.insert(0, os.getcwd())

    build_meta = importlib.import_module("setuptools.build_meta")

    build_meta.build_wheel(wheel_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
