# SPDX-License-Identifier: Apache-2.0
"""Answer a `Question` with a stored proof, as long as nothing that it depends on has changed, or with a prover's.
Workers that start at the same time share one prover.

A proof is stored even if some lanes were unusable: with kvcached's pages on a GPU some lanes never work. A busy host
can make a lane unusable, too, so such a proof is renewed after UNUSABLE_SECONDS, or when it would stop a start.
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
import sysconfig
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kvcached_nixl.errors import Unproved
from kvcached_nixl.proof.result import LaneFound, Proof, Question, Ucx, ucx_of_this_process
from kvcached_nixl.settings import SERVER_LOGGER

logger = logging.getLogger(SERVER_LOGGER)

PROVER_SECONDS = 300.0
UNUSABLE_SECONDS = 24 * 3600.0
_LOOK_SECONDS = 0.2
_SETTINGS = ("UCX_", "NIXL_", "FI_", "CUDA_", "NVIDIA_", "PYTORCH_", "LD_", "KVCACHED_")
_NO_SETTINGS = ("KVCACHED_IPC_NAME", "KVCACHED_NIXL_")
"""Of these: another engine's, and what changes neither pages nor transports."""
_PACKAGES = ("kvcached-nixl", "kvcached", "nixl", "nixl-cu12", "nixl-cu13", "torch")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_DRIVER = Path("/proc/driver/nvidia/version")
_START = "import sys; sys.path[0] or sys.path.pop(0); from kvcached_nixl.proof.__main__ import main; sys.exit(main())"
"""Not ``python -m``: it would search for kvcached in the current folder, which the server itself does not do."""


def find(
    question: Question,
    environ: Mapping[str, str] = os.environ,
    *,
    here: Ucx | None = None,
    is_fresh: bool = False,
    is_needed: bool = False,
) -> Proof:
    """Return the proof that holds for this process. Raises `Unproved`: the prover found no answer.

    Args:
        here: what UCX can choose from in this process, if known: a stored proof must be for exactly that.
        is_fresh: start a prover even if there is a stored proof.
        is_needed: every lane has to be usable: start a prover again if a lane of the stored proof was unusable.
    """
    environment = environment_of(environ)
    known = msgspec.json.encode((question, environment), order="sorted")
    # It is not known what other backends could choose from, so a stored proof may not match them.
    is_fresh = is_fresh or question.backends != ("UCX",)
    try:
        # The cache folder, by the XDG base directory specification.
        base = Path(environ.get("XDG_CACHE_HOME", ""))
        folder = (base if base.is_absolute() else Path.home() / ".cache") / "kvcached_nixl"
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"proof-{hashlib.sha256(known).hexdigest()[:32]}.json"
    except (OSError, RuntimeError) as error:
        logger.info("The proof of NIXL with kvcached's pages is not stored: %s", error)
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
                written = kept.with_suffix(f".{uuid.uuid4().hex}")
                with contextlib.suppress(OSError):
                    written.write_bytes(msgspec.json.encode(found))
                    written.replace(kept)
    return _seen(found, here)


def find_here(question: Question, *, is_needed: bool = False) -> Proof:
    """`find` for this process, which must have a NIXL agent already. Raises `Unproved`, also if UCX does not say what
    it could choose from."""
    here = None
    if "UCX" in question.backends:
        try:
            here = ucx_of_this_process()
        except (OSError, RuntimeError) as error:
            raise _unknown(str(error)) from error
    return find(question, here=here, is_needed=is_needed)


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Everything that a proof depends on besides the question and the transports that UCX could choose from."""
    found = {name: _version(name) for name in _PACKAGES}
    # The last one is beside UCX's library in NIXL's wheel.
    beside = f"{sysconfig.get_path('platlib')}/etc/ucx"
    folders = [environ.get("UCX_CONFIG_DIR", ""), environ.get("HOME", ""), "/etc/ucx", ".", beside]
    found |= {
        # Of the prover's source: an editable installation changes without a new version.
        "prover": _digest(map(_text, sorted(Path(__file__).parent.glob("*.py")))),
        "host": platform.node(),
        "boot": _text(_BOOT),
        "kernel": platform.release(),
        "driver": _text(_DRIVER),
        "ucx.conf": _digest(filter(None, (_text(Path(folder) / "ucx.conf") for folder in folders if folder))),
    }
    settings = {name: value for name, value in sorted(environ.items()) if name.startswith(_SETTINGS)}
    return found | {name: value for name, value in settings.items() if not name.startswith(_NO_SETTINGS)}


def _ask(question: Question, environment: dict[str, str], environ: Mapping[str, str]) -> Proof:
    own = f"proof-{uuid.uuid4().hex[:16]}"
    # The prover reads UCX's choices from its log output, so the operator's settings must not redirect it.
    inherited = {name: value for name, value in environ.items() if name not in ("UCX_LOG_FILE", "UCX_LOG_LEVEL")}
    begun = time.monotonic()
    try:
        status, out, err = _run(question, {**inherited, "KVCACHED_IPC_NAME": own, "ENABLE_KVCACHED": "true"})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unknown(str(error)) from error
    finally:
        for left in Path("/dev/shm").glob(f"*{own}*"):
            left.unlink(missing_ok=True)
    lines = out.decode(errors="replace").strip().splitlines()
    if status or not lines:
        raise _unknown(f"the prover ended with status {status}: {err.decode(errors='replace').strip()[-2000:]}")
    try:
        found = msgspec.json.decode(lines[-1], type=Proof)
    except msgspec.MsgspecError as error:
        raise _unknown(f"the prover printed {lines[-1]:.500}") from error
    if not found.lanes:
        raise _unknown("no lane between two processes of this host")
    return msgspec.structs.replace(found, environment=environment, seconds=time.monotonic() - begun)


def _run(question: Question, environ: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Run the prover. After a timeout or an exception all processes that it has started are killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _START], stdin=pipe, stdout=pipe, stderr=pipe, env=dict(environ), start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(msgspec.json.encode(question), PROVER_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err


def _seen(found: Proof, here: Ucx | None) -> Proof:
    """Add the lanes that this process could choose and the prover could not."""
    if here is None:
        return found
    proved = {lane.name for lane in found.lanes}
    unseen = (LaneFound(name, "", "the prover could not choose it") for name in here.lanes if name not in proved)
    return msgspec.structs.replace(found, lanes=(*found.lanes, *unseen))


def _unknown(reason: str) -> Unproved:
    return Unproved(
        found=f"no proof that NIXL follows kvcached's pages: {reason}",
        expected="a prover that completes its test on this host within some seconds",
        consequence="Decode might receive bytes of unmapped pages, with HTTP 200; the engine stops.",
        remedy="Fix the problem above (python -m kvcached_nixl doctor tests again), or stage KV, which needs no "
        'proof: "kv_connector_extra_config": {"memory_path": "device"} or "host".',
    )


@contextlib.contextmanager
def _one_at_a_time(kept: Path) -> Iterator[None]:
    """Hold a file lock, so that one process runs the prover. Continues without the lock after PROVER_SECONDS, so that a
    hanging holder cannot block a start for ever.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(kept.with_suffix(".lock").open("w"))
            until = time.monotonic() + PROVER_SECONDS
            while time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_LOOK_SECONDS)
        except OSError as error:
            logger.info("Other workers may run the same proof at the same time: %s", error)
        yield


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


def _version(package: str) -> str:
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    # Builds of one version differ.
    return f"{found.version} {hashlib.sha256((found.read_text('RECORD') or '').encode()).hexdigest()[:12]}"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
