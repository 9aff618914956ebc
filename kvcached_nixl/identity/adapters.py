# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapters hold: an engine's own numbers of them -> their content. Once per engine, on its thread.

vLLM's workers read an adapter when it is added or first used, again after it had to make room, and whenever a request
says ``load_inplace``; nobody says when. So what is known of an adapter counts as long as its files are those that were
there when it was first seen, before any worker reads them. An adapter whose files have once been replaced since is like
no other one, until it is loaded anew: what replaced them may have been read. Neither is one that could not be loaded,
nor one that may have been loaded past vLLM's own calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcached_nixl.identity.configuration import checksum_of
from kvcached_nixl.identity.files import Signature, checksum, signature

__all__ = ["Adapters", "files_of"]

_CONFIGURATION = "adapter_config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
WHOLE_BYTES = 64 << 20
"""An adapter is read on the engine's thread when it is first seen; larger ones are sampled."""


def files_of(folder: Path) -> list[Path]:
    """An adapter's files, its configuration first.

    Raises:
        OSError: there is no configuration, or no weights.
    """
    found = [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]
    if not found:
        raise FileNotFoundError(f"no weights in {folder}")
    return [folder / _CONFIGURATION, *found]


class _Replaced(Exception):
    """What the workers have read cannot be known."""


@dataclass(frozen=True)
class _Known:
    path: str
    folder: Path
    signature: Signature
    content: str


class Adapters:
    """See the module.

    Args:
        resolve: a path as vLLM takes it (a folder, or a name in a hub), and whether it was never seen before -> the
            folder that a worker would read now. A hub is asked only for what was never seen.
        unknown: called with what is said of an adapter whose content is not known.
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
        """What an adapter holds; None where that is not known.

        Args:
            number: vLLM's ``lora_int_id``.
        """
        if number not in self._doubted:
            try:
                found = self._content(number, path)
                self._unread.discard(number)
                return found
            except _Replaced as error:
                self.doubt(number, f"the adapter at {path}: {error}")
            except (OSError, ValueError) as error:
                # A worker may read what cannot be read here, and be given something else to read later.
                if number not in self._known:
                    self.doubt(number, f"the adapter at {path} cannot be read: {error}")
                elif number not in self._unread:
                    self._unread.add(number)
                    self._unknown(f"the adapter at {path} cannot be read: {error}. It is tried again with each request")
        return None

    def _content(self, number: int, path: str) -> str:
        """Raises OSError, ValueError: it cannot be read; _Replaced: nobody knows what was read. The words say why."""
        known = self._known.get(number)
        if known is None and not self._are_seen and number not in self._seen_since:
            raise _Replaced("a collective RPC may have loaded or replaced it")
        try:
            is_local = known is not None and known.folder == Path(path).absolute()
            folder = known.folder if known is not None and is_local else Path(self._resolve(path, known is None))
            files = files_of(folder)
            found = signature(files)
        except FileNotFoundError:
            if known is None or known.path != path:
                raise
            # Nobody can read it again: it is what it was.
            return known.content
        if known is None:
            known = self._known[number] = _Known(path, folder, found, _read(files))
        if (known.path, known.signature) != (path, found):
            raise _Replaced("its files have been replaced since it was loaded")
        return known.content

    def doubt(self, number: int, reason: str) -> None:
        """What was loaded under this number cannot be known until it is loaded anew."""
        if number not in self._doubted:
            self._doubted.add(number)
            self._unknown(f"{reason}. Load it anew (load_inplace)")

    def loaded(self, number: int) -> None:
        """It was loaded anew, by all workers."""
        self._loaded.add(number)

    def is_loaded(self, number: int, path: str) -> bool:
        """Whether what lies there was loaded anew, so that nobody need load it again."""
        return number in self._loaded and self.content(number, path) is not None

    def forget(self, number: int) -> None:
        """It is about to be loaded anew, or gone."""
        self._known.pop(number, None)
        self._doubted.discard(number)
        self._loaded.discard(number)
        self._seen_since.add(number)

    def forget_all(self) -> None:
        """Any may have been loaded, and its files replaced since: none is known until it is loaded anew."""
        self._known.clear()
        self._loaded.clear()
        self._seen_since.clear()
        self._are_seen = False


def _read(files: Sequence[Path]) -> str:
    configuration = json.loads(files[0].read_bytes())
    if not isinstance(configuration, dict):
        raise ValueError(f"{files[0].name} holds a {type(configuration).__name__}; expected an object")
    return f"{checksum_of(configuration)} {checksum(files[1:], whole_bytes=WHOLE_BYTES)}"
