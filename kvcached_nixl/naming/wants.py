# SPDX-License-Identifier: Apache-2.0
"""How much memory each engine of a user waits for on its device, so that its neighbours may give way.

    /tmp/kvcached-nixl-wants-UID/    mode 0700
        NAME                         JSON; NAME is the engine's kvcached name. Its time is that of what it says

kvcached tells an engine how much of the device is free, but not who waits for more. Engines of other users, and those
in containers with a /tmp of their own, are not seen. What is said here is a hint: it never decides whether bytes are
right. An engine that cannot use the folder says nothing and hears nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

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


class Wants:
    """What one engine says and hears. Used on the engine's thread only.

    Args:
        root: folder that all engines of the host can reach.
        name: the engine's kvcached name.
        device: identifies the device.
    """

    def __init__(self, root: Path, name: str, device: str) -> None:
        self._folder = root / f"kvcached-nixl-wants-{os.geteuid()}"
        self._name = name
        self._device = device
        self._said: tuple[Want, float] | None = None
        # Names of engines -> the time of what was served.
        self._served: dict[str, int] = {}
        self._heard: dict[str, int] = {}

    def say(self, want: Want) -> None:
        """What the engine waits for now; 0 bytes: for nothing any more. Writes only what is new, or was said a while
        ago."""
        now = time.monotonic()
        if not want.num_bytes:
            if self._said is not None:
                self._said = None
                with contextlib.suppress(OSError):
                    (self._folder / self._name).unlink(missing_ok=True)
            return
        if self._said is not None and self._said[0] == want and now < self._said[1] + AGAIN_SECONDS:
            return
        with contextlib.suppress(OSError):
            if self._is_usable(make=True):
                new = self._folder / f".{self._name}"
                new.write_text(
                    json.dumps({"device": self._device, "bytes": want.num_bytes, "is_stalled": want.is_stalled})
                )
                new.replace(self._folder / self._name)
        self._said = want, now

    def of_others(self) -> Want:
        """Returns what other engines on the device wait for, without what `served` has answered."""
        self._heard = {}
        try:
            if not self._is_usable(make=False):
                return Want(0, False)
            found = [one for one in os.scandir(self._folder) if not one.name.startswith(".")]
        except OSError:
            return Want(0, False)
        wants = [self._read(one) for one in found if one.name != self._name]
        return Want(sum(one.num_bytes for one in wants), any(one.is_stalled for one in wants))

    def served(self) -> None:
        """This engine gives what it has heard of last. Who still waits says so again."""
        self._served = dict(self._heard)

    def _read(self, entry: os.DirEntry[str]) -> Want:
        nothing = Want(0, False)
        try:
            status = entry.stat(follow_symlinks=False)
            age_seconds = time.time() - status.st_mtime
            if age_seconds > OLD_SECONDS:
                os.unlink(entry.path)
            is_new = self._served.get(entry.name) != status.st_mtime_ns
            if not (stat.S_ISREG(status.st_mode) and age_seconds <= FRESH_SECONDS and status.st_size <= _MOST_BYTES):
                return nothing
            found = json.loads(Path(entry.path).read_bytes())
        except (OSError, ValueError):
            # Another engine has just removed it.
            return nothing
        if not isinstance(found, dict) or found.get("device") != self._device:
            return nothing
        num_bytes = found.get("bytes")
        self._heard[entry.name] = status.st_mtime_ns
        if not is_new or type(num_bytes) is not int or num_bytes <= 0:
            return nothing
        return Want(num_bytes, found.get("is_stalled") is True)

    def _is_usable(self, *, make: bool) -> bool:
        if make:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            status = self._folder.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
