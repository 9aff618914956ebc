# SPDX-License-Identifier: Apache-2.0
"""Who owns which kvcached name on a host, by files. Knows nothing of vLLM.

kvcached uses one name for its sockets, its shared-memory segment and its memory accounting. Two engines with the same
name answer at the same socket, and pages are mapped in the wrong worker. So each engine makes a unique name, in a
folder that only one process can create, with a record that the engine keeps locked.

    /tmp/kvcached-tp-NAME-HASH/    kvcached's folder for the sockets of NAME. Created here with mode 0700, never reused
        owner                      the record, JSON. Every process of the engine holds a shared flock(2) on it
        w0.sock ...                kvcached's sockets
    /dev/shm/NAME, NAME_gN         kvcached's accounting of its pool

A process that gets the lock exclusively knows that no process of the engine is left, independent of pid namespaces, and
may remove all of its files. Folders without a record, or of another user, are left alone. A forked child shares its
parent's lock. The kernel releases a lock when the last process that holds it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvcached_nixl.errors import NameRefused
from kvcached_nixl.processes import start_ticks

LONGEST = 64
"""Most characters in a name: kvcached's own limit. The path of a socket is limited to 108 (``unix(7)``)."""

_OTHERS = re.compile(r"[^A-Za-z0-9_-]")
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{LONGEST}}}")


def own_name(wish: str, rank: int | None, drawn: str) -> str:
    """``WISH-DRAWN``, or ``WISH-dpRANK-DRAWN`` for a data-parallel rank. A long ``wish`` is cut at its end."""
    suffix = f"-{drawn}" if rank is None else f"-dp{rank}-{drawn}"
    return f"{_OTHERS.sub('-', wish)[: LONGEST - len(suffix)]}{suffix}"


def is_name(text: str) -> bool:
    """Whether ``text`` is a valid name: none of its characters can lead to another folder."""
    return _NAME.fullmatch(text) is not None


class _Record(msgspec.Struct):
    name: str
    pid: int | None = None
    start_ticks: int | None = None


RECORD = "owner"
_DRAWS = 16
_LOOK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True)
class Places:
    """Where kvcached keeps the files of a name.

    Attributes:
        sockets: name -> the folder of its sockets.
        pattern: glob pattern for the names of such folders.
        segments: the folder of the shared-memory segments.
    """

    sockets: Callable[[str], Path]
    pattern: str
    segments: Path

    def of(self, name: str) -> list[Path]:
        """The shared-memory segments of a name."""
        return [self.segments / name, *self.segments.glob(f"{name}_g[0-9]*")]


@dataclass
class Claim:
    """A lock on a name, held by the engine core (the owner) or by another process of the same engine. ``pid`` has made
    it: a forked child inherits the claim but is not the owner."""

    name: str
    folder: Path
    places: Places
    pid: int
    owns: bool
    _descriptor: int

    def release(self) -> None:
        """Release the lock. Idempotent. The owner also removes the files of the name: its workers have ended."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self.owns and self.pid == os.getpid():
            _remove(self.name, self.folder, self.places)
        os.close(descriptor)


def take(wish: str, rank: int | None, places: Places, draw: Callable[[], str] = lambda: secrets.token_hex(4)) -> Claim:
    """Make a unique name from ``wish`` and own it. First removes what dead engines left behind. Raises `NameRefused`:
    the folder for its sockets cannot be created."""
    clear_abandoned(places)
    for _ in range(_DRAWS):
        name = own_name(wish, rank, draw())
        folder = places.sockets(name)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _no_place(folder, error) from error
        if any(path.exists() for path in places.of(name)):
            folder.rmdir()
            continue
        return Claim(name, folder, places, os.getpid(), True, _publish(name, folder))
    raise _no_place(places.sockets(own_name(wish, rank, draw())), "every name that was tried is in use")


def join(name: str, places: Places) -> Claim:
    """Claim the name of a living engine for another of its processes. Raises `NameRefused`: there is no such engine on
    this host, or it belongs to another user."""
    folder = places.sockets(name)
    try:
        descriptor = _open(folder)
    except OSError as error:
        raise _nobody(name, folder, str(error)) from error
    if _lock(descriptor, fcntl.LOCK_EX):
        os.close(descriptor)
        raise _nobody(name, folder, "no process of the engine is left")
    # This fails only while another process clears the folder, which is impossible while the engine lives.
    if not _lock(descriptor, fcntl.LOCK_SH) or os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        raise _nobody(name, folder, "the engine has ended and is being cleared")
    return Claim(name, folder, places, os.getpid(), False, descriptor)


def clear_abandoned(places: Places, patience_seconds: float = 0.0) -> tuple[str, ...]:
    """Remove the files of this user's engines that have no living process, and return their names.
    ``patience_seconds``: how long to wait for the workers of an engine whose core was killed: they are about to end and
    still hold the lock."""
    deadline = time.monotonic() + patience_seconds
    cleared: list[str] = []
    waiting = list(places.sockets("any").parent.glob(places.pattern))
    while waiting:
        waiting = [folder for folder in waiting if not _clear(folder, places, cleared)]
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
    return tuple(cleared)


def _clear(folder: Path, places: Places, cleared: list[str]) -> bool:
    """Returns whether there is nothing to wait for: it was cleared, is not ours, or its engine core lives."""
    try:
        descriptor = _open(folder)
    except OSError:
        return True
    try:
        record = msgspec.json.decode(os.pread(descriptor, 4096, 0), type=_Record)
        if not _lock(descriptor, fcntl.LOCK_EX):
            # As seen from this pid namespace. It decides only how long to wait, never what to remove.
            return record.pid is not None and start_ticks(record.pid) == record.start_ticks
        name = record.name
        if os.fstat(descriptor).st_nlink and is_name(name) and places.sockets(name) == folder:
            _remove(name, folder, places)
            cleared.append(name)
        return True
    except (msgspec.MsgspecError, UnicodeError):
        # Of no engine, or of one that has not written it yet.
        return True
    finally:
        os.close(descriptor)


def _remove(name: str, folder: Path, places: Places) -> None:
    for path in places.of(name):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _publish(name: str, folder: Path) -> int:
    """Write the record, locked before another process can see it. Returns its descriptor, which is closed on exec."""
    new = folder / f".{RECORD}"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    pid = os.getpid()
    os.write(descriptor, msgspec.json.encode(_Record(name, pid, start_ticks(pid))))
    new.rename(folder / RECORD)
    return descriptor


def _open(folder: Path) -> int:
    """Open the record and return its descriptor. Raises OSError: there is none, or it is another user's."""
    status = folder.lstat()
    descriptor = os.open(folder / RECORD, os.O_RDWR | os.O_NOFOLLOW)
    if {status.st_uid, os.fstat(descriptor).st_uid} != {os.geteuid()}:
        os.close(descriptor)
        raise PermissionError(f"{folder} is another user's")
    return descriptor


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _no_place(folder: Path, cause: object) -> NameRefused:
    return NameRefused(
        found=f"{folder} cannot be created: {cause}",
        expected="a new folder for the sockets of this engine's workers",
        consequence="Without a unique name the engine's pages would be mapped in another engine's workers.",
        remedy=f"Let this user create folders in {folder.parent}, or remove from it what belongs to no engine.",
    )


def _nobody(name: str, folder: Path, cause: str) -> NameRefused:
    return NameRefused(
        found=f"no engine that owns the kvcached name {name!r} here: {cause}",
        expected=f"{folder}/{RECORD}, held by this worker's engine core, on the same host",
        consequence="The engine would map its pages in workers of another engine, and the tokens would be wrong.",
        remedy=f"Run an engine core and its workers on one host, as one user, with one {folder.parent} (containers: a "
        "shared volume); spread over hosts by data parallelism or by more servers.",
    )
