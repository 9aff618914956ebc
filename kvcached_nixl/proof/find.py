# SPDX-License-Identifier: Apache-2.0
"""The answer to a `Question`: of before, as long as nothing has changed that it follows from, or a prover's.

An answer is kept per boot of the host, versions, settings, and what UCX could choose from, also where lanes could not
be used: with kvcached's pages on a GPU some never can. As a busy host makes a lane unusable, too, such an answer is
asked for again after UNUSABLE_SECONDS, or where a start would end for it. Several workers that start at once ask one
prover.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from kvcached_nixl.errors import Unproved
from kvcached_nixl.proof.lanes import ucx_of_this_process
from kvcached_nixl.proof.result import LaneFound, Proof, Question, Said, Ucx
from kvcached_nixl.settings import SERVER_LOGGER

__all__ = ["environment_of", "find", "find_here"]

logger = logging.getLogger(SERVER_LOGGER)

PROVER_SECONDS = 300.0
UNUSABLE_SECONDS = 24 * 3600.0
LOOK_SECONDS = 0.2
_SETTINGS = ("UCX_", "NIXL_", "FI_", "CUDA_", "NVIDIA_", "PYTORCH_", "LD_PRELOAD", "KVCACHED_HOSTVMM_REGISTRATION")
_PACKAGES = ("kvcached-nixl", "kvcached", "nixl", "nixl-cu12", "nixl-cu13", "torch")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_DRIVER = Path("/proc/driver/nvidia/version")
_START = "import sys; sys.path[0] or sys.path.pop(0); from kvcached_nixl.proof.__main__ import main; sys.exit(main())"
"""``python -m`` looks for kvcached in the folder that a server was started in, where the server itself does not."""


def find(
    question: Question,
    environ: Mapping[str, str] = os.environ,
    *,
    here: Ucx | None = None,
    is_fresh: bool = False,
    is_needed: bool = False,
) -> Proof:
    """What holds for this process.

    Args:
        here: what UCX could choose from in this process, where that is known: nothing else may have been proved.
        is_fresh: ask a prover, whatever was found before.
        is_needed: every lane has to be usable: ask a prover again if one was not.

    Raises:
        Unproved: the prover cannot tell.
    """
    environment = environment_of(environ)
    known = msgspec.json.encode((question, environment), order="sorted")
    # What other backends could choose from is not known, so an answer of before may be of something else.
    is_fresh = is_fresh or question.backends != ("UCX",)
    try:
        kept = _folder(environ) / f"proof-{hashlib.sha256(known).hexdigest()[:32]}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        logger.info("What is proved of NIXL and kvcached's pages is not kept: %s", error)
        return _seen(_ask(question, environment, environ), here)

    def read() -> Proof | None:
        before = None if is_fresh else _read(kept, question, environment, here)
        return None if is_needed and before is not None and before.unusable else before

    found = read()
    if found is None:
        with _one_at_a_time(kept):
            found = read()
            if found is None:
                found = _ask(question, environment, environ)
                _keep(kept, found)
    return _seen(found, here)


def find_here(question: Question, *, is_needed: bool = False) -> Proof:
    """What holds for this process, in which a NIXL agent was made.

    Args:
        is_needed: as `find`.

    Raises:
        Unproved: it cannot be told.
    """
    here = None
    if "UCX" in question.backends:
        try:
            here = ucx_of_this_process()
        except (OSError, RuntimeError) as error:
            raise _unknown(str(error)) from error
    return find(question, here=here, is_needed=is_needed)


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Whatever an answer follows from beside the question, and beside what UCX could choose from."""
    found = {name: _version(name) for name in _PACKAGES}
    found |= {
        "prover": _own_digest(),
        "host": platform.node(),
        "boot": _text(_BOOT),
        "kernel": platform.release(),
        "driver": _text(_DRIVER),
        "ucx.conf": _digest(filter(None, map(_text, _ucx_files(environ)))),
    }
    return found | {name: value for name, value in sorted(environ.items()) if name.startswith(_SETTINGS)}


def _ask(question: Question, environment: dict[str, str], environ: Mapping[str, str]) -> Proof:
    """Have a prover find out."""
    own = f"proof-{uuid.uuid4().hex[:16]}"
    private = {"KVCACHED_HOSTVMM_DEVICE": own, "KVCACHED_HOSTVMM_GIB": "0.125", "KVCACHED_IPC_NAME": own}
    # Where UCX writes what it has chosen is the prover's to say.
    inherited = {name: value for name, value in environ.items() if name not in ("UCX_LOG_FILE", "UCX_LOG_LEVEL")}
    begun = time.monotonic()
    try:
        finished = _run(
            [sys.executable, "-c", _START],
            msgspec.json.encode(question),
            {**inherited, **private, "ENABLE_KVCACHED": "true"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unknown(str(error)) from error
    finally:
        for left in Path("/dev/shm").glob(f"*{own}*"):
            left.unlink(missing_ok=True)
    lines = finished.stdout.decode(errors="replace").strip().splitlines()
    if finished.returncode or not lines:
        reason = finished.stderr.decode(errors="replace").strip()[-2000:]
        raise _unknown(f"the prover ended with status {finished.returncode}: {reason}")
    try:
        said = msgspec.json.decode(lines[-1], type=Said)
    except msgspec.MsgspecError as error:
        raise _unknown(f"the prover said {lines[-1]:.500}") from error
    if not said.lanes:
        raise _unknown("no lane between two processes of this host")
    return Proof(question, environment, said.lanes, said.ucx, time.monotonic() - begun)


def _run(command: list[str], said: bytes, environ: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    """As `subprocess.run`; whatever it has started ends with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(environ), start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(said, PROVER_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _seen(found: Proof, here: Ucx | None) -> Proof:
    """With what this process could choose, and the prover could not."""
    if here is None:
        return found
    proved = {lane.name for lane in found.lanes}
    unseen = (LaneFound(name, "", "the prover could not choose it") for name in here.lanes if name not in proved)
    return msgspec.structs.replace(found, lanes=(*found.lanes, *unseen))


def _unknown(reason: str) -> Unproved:
    return Unproved(
        found=f"no proof that NIXL follows kvcached's pages: {reason}",
        expected="a prover that finds out on this host, in some seconds",
        consequence="Decode might be handed bytes of pages that were unmapped, with HTTP 200; the engine stops.",
        remedy="Repair what is said above (python -m kvcached_nixl doctor asks again), or stage KV, which needs no "
        'proof: "kv_connector_extra_config": {"memory_path": "device"} or "host".',
    )


def _folder(environ: Mapping[str, str]) -> Path:
    """As the XDG base directory specification says."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvcached_nixl"


def _ucx_files(environ: Mapping[str, str]) -> list[Path]:
    """Where UCX looks for settings beside the environment."""
    folders = [environ.get("UCX_CONFIG_DIR", ""), environ.get("HOME", ""), "/etc/ucx", "."]
    return [Path(folder) / "ucx.conf" for folder in folders if folder]


@contextlib.contextmanager
def _one_at_a_time(kept: Path) -> Iterator[None]:
    """Whoever comes first asks; but not even somebody who has it and stands still holds up a start for ever."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(kept.with_suffix(".lock").open("w"))
            until = time.monotonic() + PROVER_SECONDS
            while not _is_locked(lock) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
        except OSError as error:
            logger.info("Others may be asking for the same proof: %s", error)
        yield


def _is_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(kept: Path, question: Question, environment: dict[str, str], here: Ucx | None) -> Proof | None:
    try:
        found = msgspec.json.decode(kept.read_bytes(), type=Proof)
        age_seconds = time.time() - kept.stat().st_mtime
    except (OSError, msgspec.MsgspecError):
        return None
    if (found.question, found.environment) != (question, environment) or not found.lanes:
        return None
    if found.unusable and age_seconds > UNUSABLE_SECONDS:
        return None
    return found if here is None or found.ucx == here else None


def _keep(kept: Path, proof: Proof) -> None:
    written = kept.with_suffix(f".{uuid.uuid4().hex}")
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
    return _digest(map(_text, sorted(Path(__file__).parent.glob("*.py"))))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
