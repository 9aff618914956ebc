# SPDX-License-Identifier: Apache-2.0
"""Part of update.sh: move torch and its CUDA libraries out of NAME-cpu.txt into locks of their own.

CPU wheels of torch carry a local version (2.13.0+cpu) and are not on the main index. Where PIP_FIND_LINKS offers one,
its hash is written to NAME-torch-cpu-wheel.txt; an earlier one stays.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = re.compile(r"nvidia-|cuda-|triton$")
UNUSED = re.compile(r"nixl-cu13$")


def requirements(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, whole requirement with its hashes) of a compiled lock."""
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", text):
        if block.strip() and not block.startswith("#"):
            yield re.split(r"[=\[ ]", block, maxsplit=1)[0], block.rstrip() + "\n"


def cpu_wheel_hashes(version: str) -> set[str]:
    """Return the SHA-256 of every CPU wheel of torch ``version`` in the folders of PIP_FIND_LINKS."""
    folders = [Path(word) for word in os.environ.get("PIP_FIND_LINKS", "").split() if "://" not in word]
    wheels = (wheel for folder in folders for wheel in folder.glob(f"torch-{version}+cpu-cp311-*x86_64.whl"))
    return {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}


def main(name: str) -> None:
    """Rewrite NAME-cpu.txt and write the NAME-torch*.txt beside it."""
    whole = Path(f"{name}-cpu.txt")
    parts: dict[str, list[str]] = {"rest": [], "torch": [], "libraries": []}
    for package, text in requirements(whole.read_text()):
        if package == "torch":
            parts["torch"].append(text)
        elif LIBRARIES.match(package):
            parts["libraries"].append(text)
        elif not UNUSED.match(package):
            parts["rest"].append(text)
    (torch,) = parts["torch"]
    version = torch.split("==", 1)[1].split()[0]
    Path(f"{name}-torch.txt").write_text(torch)
    hashes = sorted(cpu_wheel_hashes(version))
    if hashes:
        pins = "".join(f" \\\n    --hash=sha256:{one}" for one in hashes)
        Path(f"{name}-torch-cpu-wheel.txt").write_text(f"torch=={version}+cpu{pins}\n")
    Path(f"{name}-torch-libraries.txt").write_text("".join(parts["libraries"]))
    whole.write_text("".join(parts["rest"]))


if __name__ == "__main__":
    main(sys.argv[1])
