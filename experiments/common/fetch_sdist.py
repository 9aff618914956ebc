# SPDX-License-Identifier: Apache-2.0
"""Download the source archive that a lock pins: ``python fetch_sdist.py LOCK FOLDER``; prints its path.

Installers read a source archive's metadata by running its ``setup.py``, which for kvcached and vLLM imports torch. So
uv, which lies beside the interpreter, only says where the package index has it.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

DOWNLOAD_SECONDS = 300.0


def fetch(lock: Path, folder: Path, uv: Path) -> Path:
    """Download the only archive of ``lock`` into ``folder`` and return it.

    Raises:
        ValueError: the index has none, or another one.
    """
    described = folder / "pylock.toml"
    subprocess.run([uv, "pip", "compile", "--quiet", "--no-deps", lock, "--output-file", described], check=True)
    found = re.search(r'sdist = \{ url = "([^"]+)"', described.read_text())
    expected = re.search(r"--hash=sha256:(\w+)", lock.read_text())
    if found is None or expected is None:
        raise ValueError(f"found no source archive for {lock.name}; expected one on the package index, and its hash")
    with urllib.request.urlopen(found[1], timeout=DOWNLOAD_SECONDS) as response:
        content = response.read()
    if (digest := hashlib.sha256(content).hexdigest()) != expected[1]:
        raise ValueError(
            f"found an archive with SHA-256 {digest}; expected {expected[1]} ({lock.name}). Check where the package "
            "index gets its archives"
        )
    archive = folder / found[1].rpartition("/")[2]
    archive.write_bytes(content)
    return archive


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: fetch_sdist.py LOCK FOLDER   (found: " + " ".join(sys.argv[1:]) + ")")
    sys.stdout.write(f"{fetch(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.executable).with_name('uv'))}\n")
