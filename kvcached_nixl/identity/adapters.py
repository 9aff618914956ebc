# SPDX-License-Identifier: Apache-2.0
"""The content of LoRA adapters, by vLLM's ``lora_int_id``. One `Adapters` per engine, used on the engine's thread.

vLLM does not report when its workers read an adapter. So the checksum that was taken when this package first saw it,
before any worker read it, is valid as long as the files are unchanged. The content is unknown until the adapter is
loaded again, and then matches no other, if its files were replaced, if it could not be loaded, or if it may have been
loaded without vLLM's own calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcached_nixl.identity.files import Signature, checksum, checksum_of, signature

_CONFIGURATION = "adapter_config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
WHOLE_BYTES = 64 << 20
"""Larger adapters are sampled, because an adapter is read on the engine's thread when it is first seen."""


class _Replaced(Exception):
    """It cannot be known which files the workers have read."""


@dataclass(frozen=True)
class _Known:
    path: str
    folder: Path
    signature: Signature
    content: str


class Adapters:
    """See the module. ``unknown`` is called with the reason when an adapter's content is unknown.

    Args:
        resolve: (path as vLLM takes it: a folder, or a name in a hub; whether the adapter is new) -> the folder that a
            worker would read now. The hub is contacted only for a new adapter.
    """

    def __init__(self, resolve: Callable[[str, bool], str], unknown: Callable[[str], None]) -> None:
        self._resolve = resolve
        self._unknown = unknown
        self._known: dict[int, _Known] = {}
        self._doubted: set[int] = set()
        self._unread: set[int] = set()
        self._are_seen = True
        self._seen_since: set[int] = set()
        self._loaded: set[int] = set()

    def content(self, number: int, path: str) -> str | None:
        """Checksum of the content of the adapter with this ``lora_int_id``; None if it is unknown."""
        if number not in self._doubted:
            try:
                found = self._content(number, path)
                self._unread.discard(number)
                return found
            except _Replaced as error:
                self.doubt(number, f"the adapter at {path}: {error}")
            except (OSError, ValueError) as error:
                # A worker may be able to read files that this process cannot, and other files at a later read.
                if number not in self._known:
                    self.doubt(number, f"the adapter at {path} cannot be read: {error}")
                elif number not in self._unread:
                    self._unread.add(number)
                    self._unknown(f"the adapter at {path} cannot be read: {error}. Each request with it tries again")
        return None

    def _content(self, number: int, path: str) -> str:
        """Raises OSError, ValueError: it cannot be read; _Replaced: what the workers read is unknown. Both say why."""
        known = self._known.get(number)
        if known is None and not self._are_seen and number not in self._seen_since:
            raise _Replaced("a collective RPC may have loaded or replaced it")
        try:
            is_local = known is not None and known.folder == Path(path).absolute()
            folder = known.folder if known is not None and is_local else Path(self._resolve(path, known is None))
            weights = [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]
            if not weights:
                raise FileNotFoundError(f"no weights in {folder}")
            found = signature([folder / _CONFIGURATION, *weights])
        except FileNotFoundError:
            if known is None or known.path != path:
                raise
            # No worker can read files that do not exist, so the adapter in memory is still the known one.
            return known.content
        if known is None:
            configuration = json.loads((folder / _CONFIGURATION).read_bytes())
            if not isinstance(configuration, dict):
                kind = type(configuration).__name__
                raise ValueError(f"{_CONFIGURATION} holds a {kind}; expected a JSON object")
            content = f"{checksum_of(configuration)} {checksum(weights, whole_bytes=WHOLE_BYTES)}"
            known = self._known[number] = _Known(path, folder, found, content)
        if (known.path, known.signature) != (path, found):
            raise _Replaced("its files have been replaced since it was loaded")
        return known.content

    def doubt(self, number: int, reason: str) -> None:
        """Mark the content loaded under this number as unknown until it is loaded again."""
        if number not in self._doubted:
            self._doubted.add(number)
            self._unknown(f"{reason}. Load it again (load_inplace)")

    def loaded(self, number: int) -> None:
        """All workers have loaded the adapter again."""
        self._loaded.add(number)

    def is_loaded(self, number: int, path: str) -> bool:
        """Whether all workers have loaded the files at ``path``, so that ``load_inplace`` is not needed."""
        return number in self._loaded and self.content(number, path) is not None

    def forget(self, number: int | None) -> None:
        """The adapter is about to be loaded again, or was removed. None: any may have been loaded, and its files
        replaced: all are unknown until loaded again."""
        if number is None:
            self._known.clear()
            self._loaded.clear()
            self._seen_since.clear()
            self._are_seen = False
        else:
            self._known.pop(number, None)
            self._doubted.discard(number)
            self._loaded.discard(number)
            self._seen_since.add(number)
