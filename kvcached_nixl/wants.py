# SPDX-License-Identifier: Apache-2.0
"""Which engines of a host wait for memory, by files: kvcached tells an engine how much of a device is free, but not who
waits for more.

    /tmp/kvcached-nixl-wants-UID/  mode 0700
        NAME                       JSON: what the engine NAME waits for. Its time is that of what it says

Engines of other users, and those in containers with a /tmp of their own, are not seen. What is said is a hint: it never
decides whether bytes are right. An engine that cannot use the folder says nothing and hears nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

AGAIN_SECONDS = 1.0
"""How often an engine that still waits says so again."""
FRESH_SECONDS = 3.0
"""What is older does not count."""
OLD_SECONDS = 600.0
"""What is older belongs to no living engine, and is removed."""
_MOST_BYTES = 4096


class Want(NamedTuple):
    """What engines wait for together.

    Attributes:
        num_bytes: of the device.
        is_stalled: one of them runs nothing, so it goes on only if others give it memory.
    """

    num_bytes: int
    is_stalled: bool


class _Said(msgspec.Struct):
    device: str
    bytes: Annotated[int, msgspec.Meta(gt=0)]
    is_stalled: bool = False


class Wants:
    """What one engine says and hears. Used on the engine's thread only.

    Args:
        root: folder that all engines of the host can reach.
        name: the engine's kvcached name.
        device: identifies the device.
    """

    def __init__(self, root: Path, name: str, device: str) -> None:
        self._folder = root / f"kvcached-nixl-wants-{os.geteuid()}"
        self._name, self._device = name, device
        self._said: tuple[Want, float] | None = None
        # Names of engines -> the time of what was served.
        self._served: dict[str, int] = {}
        self._heard: dict[str, int] = {}

    def say(self, want: Want) -> None:
        """What the engine waits for now; 0 bytes: for nothing any more. Writes only what is new, or was said a while
        ago."""
        now, before = time.monotonic(), self._said
        self._said = (want, now) if want.num_bytes else None
        with contextlib.suppress(OSError):
            if not want.num_bytes:
                if before is not None:
                    (self._folder / self._name).unlink(missing_ok=True)
            elif before is not None and before[0] == want and now < before[1] + AGAIN_SECONDS:
                self._said = before
            else:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                if self._is_usable():
                    new = self._folder / f".{self._name}"
                    new.write_bytes(msgspec.json.encode(_Said(self._device, want.num_bytes, want.is_stalled)))
                    new.replace(self._folder / self._name)

    def of_others(self) -> Want:
        """Returns what other engines on the device wait for, without what `served` has answered."""
        self._heard, num_bytes, is_stalled = {}, 0, False
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder) if self._is_usable() else ():
                said = None if entry.name.startswith(".") or entry.name == self._name else self._read(entry)
                if said is not None:
                    num_bytes, is_stalled = num_bytes + said.bytes, is_stalled or said.is_stalled
        return Want(num_bytes, is_stalled)

    def served(self) -> None:
        """This engine gives what it has heard of last. Who still waits says so again."""
        self._served = self._heard

    def _read(self, entry: os.DirEntry[str]) -> _Said | None:
        # Another engine may just have removed it.
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeError):
            status = entry.stat(follow_symlinks=False)
            age_seconds = time.time() - status.st_mtime
            if age_seconds > OLD_SECONDS:
                os.unlink(entry.path)
            if stat.S_ISREG(status.st_mode) and age_seconds <= FRESH_SECONDS and status.st_size <= _MOST_BYTES:
                said = msgspec.json.decode(Path(entry.path).read_bytes(), type=_Said)
                if said.device == self._device:
                    self._heard[entry.name] = status.st_mtime_ns
                    return None if self._served.get(entry.name) == status.st_mtime_ns else said
        return None

    def _is_usable(self) -> bool:
        status = self._folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
