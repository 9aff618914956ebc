# SPDX-License-Identifier: Apache-2.0
"""Change the code in small ways (mutants), one at a time, and count how many of the changes no test notices.

The areas are the wire format, the scheduler and the two roles of the worker. All their mutants would take days, so a
sample of each is tried, chosen by --seed. mutmut does the work (``pip install mutmut``; its settings are in
pyproject.toml) in ``mutants/``, a copy of the code. Nothing else should run meanwhile: a mutant whose tests take many
times longer than usual counts as noticed.

exit status: 0 the score is reached; 1 it is not; 2 mutmut failed
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
AREAS = ("wire", "scheduler", "worker/prefill", "worker/decode")
TARGET_PERCENT = 85.0
SURVIVED = (0, 33)
"""Exit codes that mutmut stores for a mutant: the tests passed, or no test calls the function."""
NOT_TRIED = (None, 37)
"""Not run, or refused by mypy, and so no mutant that anyone could have written."""


def verdicts(area: str) -> dict[str, int | None]:
    """Returns what mutmut has stored of each mutant of an area: the exit code of its tests; None if not run."""
    found: dict[str, int | None] = {}
    for meta in sorted((REPOSITORY / "mutants" / "kvcached_nixl" / area).rglob("*.meta")):
        found |= json.loads(meta.read_text())["exit_code_by_key"]
    return found


def mutmut(*arguments: str) -> str:
    """Runs mutmut in the repository, and shows its progress on a terminal. Raises CalledProcessError if it fails."""
    shown = None if sys.stdout.isatty() else subprocess.PIPE
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=True, text=True, stdout=shown, stderr=subprocess.STDOUT).stdout


def difference(name: str) -> str:
    """Returns the changed lines of a mutant."""
    command = [sys.executable, "-m", "mutmut", "show", name]
    shown = subprocess.run(command, cwd=REPOSITORY, check=True, text=True, capture_output=True).stdout
    changed = [line for line in shown.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join(f"      {line}" for line in changed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="mutants of each area (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="chooses the sample (%(default)s)")
    parser.add_argument("--area", choices=AREAS, action="append", help="only this one; may be repeated")
    parser.add_argument("--report", action="store_true", help="run nothing: print what was found so far")
    options = parser.parse_args(arguments)
    areas = options.area or list(AREAS)
    try:
        if not options.report:
            # Creates the mutants and measures which tests call what. The name must match something.
            mutmut("run", "kvcached_nixl.wire.causes*")
            chosen: list[str] = []
            for area in areas:
                names = sorted(verdicts(area))
                chosen += random.Random(options.seed).sample(names, min(options.sample, len(names)))
            mutmut("run", *chosen)
    except subprocess.CalledProcessError as error:
        print(f"tests/mutation.py: mutmut failed with exit status {error.returncode}\n{error.stdout}", file=sys.stderr)
        return 2
    noticed = tried = 0
    survivors: list[str] = []
    for area in areas:
        results = {name: code for name, code in verdicts(area).items() if code not in NOT_TRIED}
        alive = [name for name, code in results.items() if code in SURVIVED]
        survivors += alive
        noticed, tried = noticed + len(results) - len(alive), tried + len(results)
        print(f"{area:16} {len(results) - len(alive):4} of {len(results):4} mutants noticed")
    if not tried:
        print("tests/mutation.py: found no mutant that was tried; expected some", file=sys.stderr)
        return 2
    for name in survivors:
        print(f"   {name}\n{difference(name)}")
    score = 100 * noticed / tried
    print(f"{score:.1f} % of {tried} mutants were noticed; at least {TARGET_PERCENT:.0f} % is expected")
    return 0 if score >= TARGET_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
