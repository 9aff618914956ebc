# SPDX-License-Identifier: Apache-2.0
"""The answer to a `Question`: of before, as long as nothing has changed that it follows from, or a prover's.

An answer is kept per boot of the host, versions and settings. Several workers that start at once ask one prover.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from kvcached_nixl.errors import MemoryRefused
from kvcached_nixl.proof.result import LaneFound, Proof, Question
from kvcached_nixl.settings import SERVER_LOGGER

__all__ = ["environment_of", "find"]

logger = logging.getLogger(SERVER_LOGGER)

PROVER_SECONDS = 120.0
_SETTINGS = ("UCX_", "NIXL_", "CUDA_VISIBLE_DEVICES", "KVCACHED_HOSTVMM_REGISTRATION", "LD_PRELOAD")
_PACKAGES = ("kvcached-nixl", "kvcached", "nixl", "torch")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_DRIVER = Path("/proc/driver/nvidia/version")
_CARDS = Path("/sys/class/infiniband")


def find(question: Question, environ: Mapping[str, str] = os.environ, *, is_fresh: bool = False) -> Proof:
    """What holds for this process.

    Args:
        is_fresh: ask a prover, whatever was found before.

    Raises:
        MemoryRefused: the prover cannot tell.
    """
    environment = environment_of(environ)
    known = msgspec.json.encode((question, environment), order="sorted")
    kept = _folder(environ) / f"proof-{hashlib.sha256(known).hexdigest()[:32]}.json"
    with _one_at_a_time(kept):
        found = None if is_fresh else _read(kept, question, environment)
        if found is None:
            found = _ask(question, environment, environ)
            _keep(kept, found)
        return found


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Whatever an answer follows from beside the question."""
    found = {name: _version(name) for name in _PACKAGES}
    found |= {
        "prover": _own_digest(),
        "host": platform.node(),
        "boot": _text(_BOOT),
        "kernel": platform.release(),
        "driver": _text(_DRIVER),
        "cards": ",".join(sorted(one.name for one in _CARDS.iterdir())) if _CARDS.is_dir() else "",
    }
    return found | {name: value for name, value in sorted(environ.items()) if name.startswith(_SETTINGS)}


def _ask(question: Question, environment: dict[str, str], environ: Mapping[str, str]) -> Proof:
    """Have a prover find out."""
    own = f"proof-{uuid.uuid4().hex[:16]}"
    private = {"KVCACHED_HOSTVMM_DEVICE": own, "KVCACHED_HOSTVMM_GIB": "0.125", "KVCACHED_IPC_NAME": own}
    begun = time.monotonic()
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "kvcached_nixl.proof"],
            input=msgspec.json.encode(question),
            env={**environ, **private, "ENABLE_KVCACHED": "true"},
            capture_output=True,
            timeout=PROVER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise _unknown(str(cause)) from cause
    lines = finished.stdout.decode(errors="replace").strip().splitlines()
    if finished.returncode or not lines:
        said = finished.stderr.decode(errors="replace").strip()[-2000:]
        raise _unknown(f"the prover ended with status {finished.returncode}: {said}")
    try:
        lanes = msgspec.json.decode(lines[-1], type=tuple[LaneFound, ...])
    except msgspec.MsgspecError as cause:
        raise _unknown(f"the prover said {lines[-1]:.500}") from cause
    if not lanes:
        raise _unknown("no lane between two processes of this host")
    return Proof(question, environment, lanes, time.monotonic() - begun)


def _unknown(words: str) -> MemoryRefused:
    return MemoryRefused(
        found=f"no proof that NIXL follows kvcached's pages: {words}",
        expected="python -m kvcached_nixl.proof to find out on this host, in some seconds",
        consequence="Decode might be handed bytes of pages that were unmapped, with HTTP 200; the engine stops.",
        remedy="Repair what is said above, or serve without ENABLE_KVCACHED.",
    )


def _folder(environ: Mapping[str, str]) -> Path:
    """As the XDG base directory specification says."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvcached_nixl"


@contextlib.contextmanager
def _one_at_a_time(kept: Path) -> Iterator[None]:
    """Where nothing can be kept, everybody asks for himself."""
    with contextlib.ExitStack() as stack:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(kept.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as cause:
            logger.info("What is proved of NIXL and kvcached's pages is not kept: %s", cause)
        yield


def _read(kept: Path, question: Question, environment: dict[str, str]) -> Proof | None:
    try:
        found = msgspec.json.decode(kept.read_bytes(), type=Proof)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if (found.question, found.environment) == (question, environment) and found.lanes else None


def _keep(kept: Path, proof: Proof) -> None:
    written = kept.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        written.write_bytes(msgspec.json.encode(proof))
        written.replace(kept)


def _version(package: str) -> str:
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    # Builds of one version differ: kvcached on host memory has a build tag.
    return f"{found.version} {hashlib.sha256((found.read_text('RECORD') or '').encode()).hexdigest()[:12]}"


def _own_digest() -> str:
    """An answer is the prover's that gave it; one that is installed in place changes without a version."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
