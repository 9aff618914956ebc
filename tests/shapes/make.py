# SPDX-License-Identifier: Apache-2.0
"""What a vLLM looks like to this package, without installing it.

    make [VERSION|WHEEL ...]   write the fixture of each to tests/shapes/series/; without arguments, all anew
    check VERSION|WHEEL        say what that vLLM would break: patch by patch, and the names that are read of it

A version is looked up with pip, and only the Python files of its wheel are fetched (some 15 MB). Nothing of vLLM is
imported or run. This package and torch have to be importable, as in any environment of experiments/env.sh.

To support another series: check it; make its fixture; tests/unit/adapter/test_shapes.py then holds every patch to it.

exit status: 0 written, or nothing is broken; 1 something is broken; 2 no such version or wheel
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of the package `experiments`
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the package `support`
from support.shapes.fixture import SERIES, load, make, missing, save, verdicts

from experiments.common.vllm_python import open_source
from kvcached_nixl.vllm.adapter.versions import ROWS, row_of


def write(versions: list[str]) -> int:
    known = sorted((path.stem for path in SERIES.glob("*.json")), key=Version)
    for version in versions or known:
        path = save(make(open_source(version)))
        print(f"{path.name}: {path.stat().st_size} bytes")
    return 0


def check(version: str) -> int:
    source = open_source(version)
    shape = make(source)
    row = row_of(shape["version"])
    taken = "supported" if row else f"not supported; read as if it were one of {ROWS[-1].vllm}"
    print(f"vLLM {shape['version']} ({taken})\n")
    found = verdicts(shape)
    for one in found:
        print(f"{one.word:12} {one.patch}: {one.detail}")
    before = load(ROWS[-1].tested)["callers"]
    for name, callers in shape["callers"].items():
        if callers and (gone := set(before.get(name, ())) - set(callers)):
            print(f"{'calls less':12} {name}: no longer from {', '.join(sorted(gone))}")
    unread = missing(shape)
    print()
    for target, names in unread.items():
        print(f"{'not there':12} {target}: {', '.join(names) or 'the class itself'}")
    broken = [one for one in found if one.is_trouble]
    print(f"{len(broken)} of {len(found)} patches broken, names missing in {len(unread)} places")
    return 1 if broken or unread else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="make|check")
    commands.add_parser("make", help="write fixtures").add_argument("vllm", nargs="*", metavar="VERSION|WHEEL")
    commands.add_parser("check", help="what would break").add_argument("vllm", metavar="VERSION|WHEEL")
    options = parser.parse_args()
    try:
        return write(options.vllm) if options.command == "make" else check(options.vllm)
    except (ValueError, OSError, zipfile.BadZipFile) as cause:
        print(f"tests/shapes/make.py: {cause}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
