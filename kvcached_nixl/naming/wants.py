# SPDX-License-Identifier: Apache-2.0
"""How much memory each engine of a user waits for on its device, so that its neighbours may give way.

    /tmp/kvcached-nixl-wants-UID/    mode 0700
        NAME                         JSON; NAME is the engine's kvcached name. Its age is that of what it says

kvcached tells an engine how much of the device is free, but not who waits for more. Engines of other users, and those
in containers with a /tmp of their own, are not seen. What is said here is a hint: it never decides whether bytes are
right. An engine that cannot use the folder says nothing and hears nothing.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

__all__ = ["FRESH_SECONDS", "Wants"]

FRESH_SECONDS = 3.0
"""An engine that still waits says so again earlier than that."""
OLD_SECONDS = 600.0
"""What is older belongs to no living engine, and is removed."""
_MOST_BYTES = 4096


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
        self._has_said = False

    def say(self, num_bytes: int) -> None:
        """The engine waits for so many bytes; 0: for none any more."""
        if not (num_bytes or self._has_said):
            return
        try:
            if not num_bytes:
                (self._folder / self._name).unlink(missing_ok=True)
            elif self._is_usable(make=True):
                new = self._folder / f".{self._name}"
                new.write_text(json.dumps({"device": self._device, "bytes": num_bytes}))
                new.replace(self._folder / self._name)
        except OSError:
            return
        self._has_said = num_bytes > 0

    def of_others(self) -> int:
        """Returns how many bytes other engines on the device wait for."""
        try:
            if not self._is_usable(make=False):
                return 0
            found = [one for one in os.scandir(self._folder) if not one.name.startswith(".")]
            return sum(self._read(one) for one in found if one.name != self._name)
        except OSError:
            return 0

    def _read(self, entry: os.DirEntry[str]) -> int:
        try:
            status = entry.stat(follow_symlinks=False)
            age_seconds = time.time() - status.st_mtime
            if age_seconds > OLD_SECONDS:
                os.unlink(entry.path)
            if not stat.S_ISREG(status.st_mode) or age_seconds > FRESH_SECONDS or status.st_size > _MOST_BYTES:
                return 0
            found = json.loads(Path(entry.path).read_bytes())
        except (OSError, ValueError):
            # Another engine has just removed it.
            return 0
        if not isinstance(found, dict) or found.get("device") != self._device:
            return 0
        num_bytes = found.get("bytes")
        return num_bytes if type(num_bytes) is int and num_bytes > 0 else 0

    def _is_usable(self, *, make: bool) -> bool:
        if make:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            status = self._folder.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
