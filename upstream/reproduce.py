# SPDX-License-Identifier: Apache-2.0
"""Show what each change of this folder mends: its reproduction fails with kvcached 0.1.6, and passes with the change.

usage: python upstream/reproduce.py [--sdist ARCHIVE] [NAME...]

NAME is that of a .diff; all by default. Run it with the Python of an environment that has kvcached 0.1.6
(`bash experiments/env.sh`). The changes are applied to copies. page-flags is C++: it needs a C++ compiler and the
source archive of kvcached, which is downloaded if it is not given.

exit status: 0 each fails without the change and passes with it; 1 one does not; 2 something is missing
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHANGES = tuple(sorted(path.stem for path in HERE.glob("*.diff")))
OF_SOURCE = "page-flags"
KVCACHED = "0.1.6"


def installed(folder: Path) -> None:
    """Copy the installed package ``kvcached`` into ``folder``."""
    found = importlib.util.find_spec("kvcached")
    version = importlib.metadata.version("kvcached") if found is not None else None
    if found is None or found.origin is None or version != KVCACHED:
        print(
            f"found kvcached {version}; expected {KVCACHED}: use an environment of experiments/env.sh", file=sys.stderr
        )
        sys.exit(2)
    shutil.copytree(Path(found.origin).parent, folder / "kvcached")


def unpacked(archive: Path, folder: Path) -> None:
    """Put the content of kvcached's source archive into ``folder``."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    for one in root.iterdir():
        one.rename(folder / one.name)


def fetched(folder: Path) -> Path:
    command = [sys.executable, "experiments/common/fetch_sdist.py", "experiments/locks/kvcached.txt", str(folder)]
    done = subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def passes(name: str, folder: Path) -> bool:
    """Run the reproduction with the kvcached in ``folder``, and print its last line."""
    script = HERE / "reproductions" / f"{name}.py"
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("KVCACHED", "ENABLE_KVCACHED"))}
    environ |= {"PYTHONPATH": str(folder), "KVCACHED_NIXL": "0", "ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "0"}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    # Python's exit status of an exception that nothing has caught is 1, too.
    is_broken = done.returncode not in (0, 1) or "Traceback (most recent call last)" in done.stderr
    said = (done.stderr if is_broken else done.stdout).strip().splitlines()
    print(f"    {said[-1] if said else ''}")
    if is_broken:
        print(f"{script.name} ended with {done.returncode}:\n{done.stderr[-3000:]}", file=sys.stderr)
        sys.exit(2)
    return done.returncode == 0


def shows(name: str, archive: Path | None) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        before, after, download = (Path(scratch, one) for one in ("before", "after", "download"))
        for folder in (before, after, download):
            folder.mkdir()
        if name == OF_SOURCE:
            unpacked(archive or fetched(download), before)
        else:
            installed(before)
        shutil.copytree(before, after, dirs_exist_ok=True)
        subprocess.run(["git", "apply", str(HERE / f"{name}.diff")], cwd=after, check=True)
        print(f"{name}, kvcached {KVCACHED}:")
        without = passes(name, before)
        print(f"{name}, with the change:")
        return not without and passes(name, after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=Path, metavar="ARCHIVE", help="kvcached's source archive, for page-flags")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CHANGES))
    options = parser.parse_args()
    if unknown := set(options.names) - set(CHANGES):
        parser.error(f"found {', '.join(sorted(unknown))}; expected some of {', '.join(CHANGES)}")
    found = {name: shows(name, options.sdist) for name in options.names or CHANGES}
    for name, is_shown in found.items():
        print(f"{name}: {'mended by the change' if is_shown else 'NOT SHOWN'}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
