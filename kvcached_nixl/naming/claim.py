# SPDX-License-Identifier: Apache-2.0
"""A name's owner: a folder that only one process could make, and in it a record that its engine holds locked for life.

    /tmp/kvcached-tp-NAME-HASH/    kvcached's folder for the sockets of NAME; here 0700, and made, never found
        owner                      the record, JSON. Every process of the engine holds flock(2) on it, shared
        w0.sock ...                kvcached's
    /dev/shm/NAME, NAME_gN         kvcached's account of its pool

Whoever gets that lock exclusively knows that no process of the engine is left, whatever its pid was and in whichever
namespace, and may remove all of it. Nothing without a record, or of another user, is touched: it is not ours.

Every process of an engine has a lock of its own, so that what a worker uses outlives its engine core. A forked child
has its parent's. The kernel gives a lock back with the last process that has it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcached_nixl.errors import NameRefused
from kvcached_nixl.naming.name import is_name, own_name
from kvcached_nixl.processes import start_ticks

__all__ = ["Claim", "Places", "clear_abandoned", "join", "take"]

RECORD = "owner"
_DRAWS = 16
_LOOK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True)
class Places:
    """Where kvcached keeps what it calls by a name.

    Attributes:
        sockets: name -> the folder of its sockets.
        pattern: of the names of such folders.
        segments: the folder of the segments.
    """

    sockets: Callable[[str], Path]
    pattern: str
    segments: Path

    def of(self, name: str) -> list[Path]:
        """The segments of a name."""
        return [self.segments / name, *self.segments.glob(f"{name}_g[0-9]*")]


@dataclass
class Claim:
    """A part in a name: its owner's, or that of another process of the same engine.

    Attributes:
        pid: of the process that took it. A forked child has it, too, and is not the owner.
    """

    name: str
    folder: Path
    places: Places
    pid: int
    owns: bool
    _descriptor: int

    def release(self) -> None:
        """Give the part back. The owner removes what lies under its name: its workers have ended. Again is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self.owns and self.pid == os.getpid():
            _remove(self.name, self.folder, self.places)
        os.close(descriptor)


def take(wish: str, rank: int | None, places: Places, draw: Callable[[], str] = lambda: secrets.token_hex(4)) -> Claim:
    """Make an engine's own name from a wish, and own it. Clears first what dead engines have left.

    Raises:
        NameRefused: there is no place for it.
    """
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
    raise _no_place(places.sockets(own_name(wish, rank, draw())), "every name that was drawn is in use")


def join(name: str, places: Places) -> Claim:
    """Take part in the name of an engine that lives.

    Raises:
        NameRefused: there is no such engine on this host, or not for this user.
    """
    folder = places.sockets(name)
    try:
        descriptor = _open(folder)
    except OSError as error:
        raise _nobody(name, folder, str(error)) from error
    if _lock(descriptor, fcntl.LOCK_EX):
        os.close(descriptor)
        raise _nobody(name, folder, "no process of the engine is left")
    # Only whoever clears holds it otherwise, and nobody could while the engine lives.
    if not _lock(descriptor, fcntl.LOCK_SH) or os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        raise _nobody(name, folder, "the engine has ended and is being cleared")
    return Claim(name, folder, places, os.getpid(), False, descriptor)


def clear_abandoned(places: Places, patience_seconds: float = 0.0) -> tuple[str, ...]:
    """Remove what engines of this user have left of which no process lives.

    Args:
        patience_seconds: how long to wait for what still holds on to a name whose engine core is gone: it was killed,
            and its workers are about to end.

    Returns: the names.
    """
    deadline = time.monotonic() + patience_seconds
    cleared: list[str] = []
    waiting = list(_folders(places))
    while waiting:
        waiting = [folder for folder in waiting if not _clear(folder, places, cleared)]
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
    return tuple(cleared)


def _folders(places: Places) -> Iterator[Path]:
    root = places.sockets("any").parent
    return root.glob(places.pattern)


def _clear(folder: Path, places: Places, cleared: list[str]) -> bool:
    """Returns: whether there is nothing to wait for: it was cleared, is not ours, or its engine core lives."""
    try:
        descriptor = _open(folder)
    except OSError:
        return True
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            return _owner_lives(descriptor)
        name = _record(descriptor).get("name")
        if os.fstat(descriptor).st_nlink and isinstance(name, str) and is_name(name) and places.sockets(name) == folder:
            _remove(name, folder, places)
            cleared.append(name)
        return True
    finally:
        os.close(descriptor)


def _remove(name: str, folder: Path, places: Places) -> None:
    for path in places.of(name):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _publish(name: str, folder: Path) -> int:
    """Write the record, locked before anybody can see it.

    Returns: its descriptor. It does not pass to another program.
    """
    new = folder / f".{RECORD}"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    pid = os.getpid()
    os.write(descriptor, json.dumps({"name": name, "pid": pid, "start_ticks": start_ticks(pid)}).encode())
    new.rename(folder / RECORD)
    return descriptor


def _open(folder: Path) -> int:
    """The record's descriptor.

    Raises:
        OSError: there is none, or it is another user's.
    """
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


def _record(descriptor: int) -> dict[str, object]:
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(found, dict):
            return found
    return {}


def _owner_lives(descriptor: int) -> bool:
    """As far as its pid can be seen from here. Decides only how long to wait, never what to remove."""
    record = _record(descriptor)
    pid = record.get("pid")
    return isinstance(pid, int) and start_ticks(pid) == record.get("start_ticks")


def _no_place(folder: Path, cause: object) -> NameRefused:
    return NameRefused(
        found=f"{folder} cannot be made: {cause}",
        expected="a new folder for the sockets of this engine's workers",
        consequence="Without a name of its own the engine's pages would be mapped in another engine's workers.",
        remedy=f"Let this user create folders in {folder.parent}, or remove from it what belongs to no engine.",
    )


def _nobody(name: str, folder: Path, cause: str) -> NameRefused:
    return NameRefused(
        found=f"no engine that owns the kvcached name {name!r} here: {cause}",
        expected=f"{folder}/{RECORD}, held by this worker's engine core, on the same host",
        consequence="The engine would map its pages in other workers than this one, and the tokens would be wrong.",
        remedy=f"Run an engine core and its workers on one host, as one user, with one {folder.parent} (containers: a "
        "shared volume); spread over hosts by data parallelism or by more servers.",
    )
