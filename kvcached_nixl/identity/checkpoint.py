# SPDX-License-Identifier: Apache-2.0
"""The files that a worker loaded its weights from, and whether the weights still match them. One per worker.

Files are read in the background while vLLM loads them. Their checksum is valid until they are replaced on the file
system or something else changes the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvcached_nixl.identity.files import Signature, checksum, signature

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class _Source:
    folder: Path
    files: tuple[Path, ...]
    signature: Signature
    checksum: Future[str]

    def content(self) -> str:
        """Checksum of the files; "" if they cannot be read, or were replaced since they were loaded."""
        try:
            return self.checksum.result() if signature(self.files) == self.signature else ""
        except OSError:
            return ""


class Checkpoint:
    """See the module. Called on the worker's thread only."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(1, "kvcached-nixl-checkpoint")
        self._sources: dict[tuple[str, str], _Source] = {}
        self._primaries: set[str] = set()
        self._loads = 0
        self._seen: tuple[int, str] | None = None
        self._is_changed = False

    def load(self, name: str, part: str, folder: Path, files: Sequence[Path]) -> None:
        """Called when vLLM begins to load these files. Replaces the files known under the same name and part.

        Args:
            name: the model's name in vLLM.
            part: a part of the model; "" if the model has only one.
        """
        self._loads += 1
        self._sources.pop((name, part), None)
        try:
            found = signature(files)
            # Links are resolved now: they may point to other files by the time these are read.
            resolved = tuple(path.resolve(strict=True) for path in files)
        except OSError:
            return
        reading = self._readers.submit(checksum, resolved)
        self._sources[name, part] = _Source(folder, resolved, found, reading)

    def folder(self, name: str) -> Path | None:
        """The folder of the files that were loaded under this name; None if there are none."""
        source = self._sources.get((name, ""))
        return None if source is None else source.folder

    def content(self, primary: str, ignored: str, in_memory: str) -> tuple[str, str]:
        """Checksums (current, origin) of the files that the weights in memory were loaded from.

        ``current`` becomes "" when something else changes the weights, ``origin`` does not. Either is "" if unknown.

        Args:
            primary: the model's name. Files of an earlier primary model are dropped.
            ignored: name of a draft model that computes no KV; "" for none.
            in_memory: checksum of the weights in memory; "" if they cannot be read.
        """
        seen = self._loads, in_memory
        if self._seen is None or self._seen[0] != self._loads:
            self._is_changed = False
        elif self._seen != seen or not in_memory:
            self._is_changed = True
        self._seen = seen
        for before in self._primaries - {primary}:
            self._sources = {key: source for key, source in self._sources.items() if key[0] != before}
        self._primaries = {primary}
        if not any(name == primary for name, _ in self._sources):
            return "", ""
        found = [source.content() for (name, _), source in self._sources.items() if name == primary or name != ignored]
        if "" in found:
            return "", ""
        origin = hashlib.blake2b("".join(sorted(found)).encode(), digest_size=16).hexdigest()
        return ("" if self._is_changed else origin), origin
