# SPDX-License-Identifier: Apache-2.0
"""Which files a worker has loaded its weights from, and whether they are still what it computes with. Once per worker.

Files are read in the background, while vLLM loads them. What is known of them counts until they are replaced on the
file system, or something else changes the weights.
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
        """ "" where the files cannot be read, or are not those any more that were loaded."""
        try:
            return self.checksum.result() if signature(self.files) == self.signature else ""
        except OSError:
            return ""


class Checkpoint:
    """See the module. Threads: the worker's own."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(1, "kvcached-nixl-checkpoint")
        self._sources: dict[tuple[str, str], _Source] = {}
        self._primaries: set[str] = set()
        self._loads = 0
        self._seen: tuple[int, str] | None = None
        self._is_changed = False

    def load(self, name: str, part: str, folder: Path, files: Sequence[Path]) -> None:
        """vLLM begins to load these.

        Args:
            name: what the model is called there.
            part: of the model, "" where it is one; loaded again under the same names, they replace what was.
        """
        self._loads += 1
        self._sources.pop((name, part), None)
        try:
            found = signature(files)
            # What a link leads to now: it may lead elsewhere when it is read.
            resolved = tuple(path.resolve(strict=True) for path in files)
        except OSError:
            return
        reading = self._readers.submit(checksum, resolved)
        self._sources[name, part] = _Source(folder, resolved, found, reading)

    def folder(self, name: str) -> Path | None:
        """Where the files of this name lie."""
        source = self._sources.get((name, ""))
        return None if source is None else source.folder

    def content(self, primary: str, ignored: str, in_memory: str) -> tuple[str, str]:
        """Of the files that the weights in memory come from: as long as nothing else has changed them, and in any case.

        Either is "" if it is not known.

        Args:
            primary: what the model is called; what was called so before is not looked at.
            ignored: what a draft model is called that computes no KV; "" for none.
            in_memory: what the weights hold, "" where that cannot be read.
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
