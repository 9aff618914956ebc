# SPDX-License-Identifier: Apache-2.0
"""Put the Python files of a vLLM without a CPU build over the CPU build of another one.

    python vllm_python.py VERSION|WHEEL           replaces them in the environment of this interpreter
    python vllm_python.py --digest VERSION|WHEEL  prints the checksum of the files, for experiments/locks

What is compiled stays that of the other vLLM, which is also the torch that it was built with. The files come from the
wheel for GPUs, of which only they are fetched (some 15 MB), and have to have the checksum that is locked.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments.common.vllm_source import Source, open_source

LOCKS = Path(__file__).resolve().parents[1] / "locks"


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
