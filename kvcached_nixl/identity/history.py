# SPDX-License-Identifier: Apache-2.0
"""What a model's weights are: in memory, as they were loaded, and of which files. One per model, on a worker's thread.

Three sources, because each fails somewhere. Memory is *whole* if every tensor that computes is read, and nothing that
was there when the weights were loaded has vanished from sight; only then does it have a content. What was loaded is
known until memory changes, and so are the files; if something is out of sight, until a call that may have changed it.
Files that are loaded later count if nothing is left of what the model was built from.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvcached_nixl.identity.files import Checksums, Signature, checksums, signature
from kvcached_nixl.identity.memory import Reading, described
from kvcached_nixl.wire.handshake import MOST_NAMED_FILES, Tensors, Weights

_LOADING = frozenset({"load_model", "reload_weights"})
"""Calls that leave nothing of what was there before, if they load files and no other call was made since the last look:
one of the same name may have loaded tensors after them."""


@dataclass(frozen=True)
class _Source:
    files: tuple[Path, ...]
    signature: Signature
    checksums: Future[Checksums]

    def content(self) -> Checksums | None:
        """None if the files cannot be read, or were replaced since they were loaded."""
        try:
            return self.checksums.result() if signature(self.files) == self.signature else None
        except OSError:
            return None


class ModelReading(NamedTuple):
    """A model now.

    Attributes:
        tensors: every one that it holds.
        parameters: names of those that computing does not write.
        moves: names of tensors whose content vLLM moves between ranks.
    """

    tensors: Reading
    parameters: Collection[str]
    moves: Collection[str] = ()


class ModelWeights(NamedTuple):
    """What is known of a model's weights.

    Attributes:
        memory: what computes, with what stands for tensors that are out of sight.
        is_whole: nothing that computes may differ from that.
        loaded: empty if it is not known, or if weights have changed since.
        files: of the files that they were loaded from; None as for ``loaded``.
        note: why something is not known.
    """

    memory: Reading
    is_whole: bool
    loaded: Reading
    files: Checksums | None
    note: str


@dataclass
class WeightsHistory:
    """``computes``: by what the model computes, besides its weights (`adapter.weights`); None until that was read."""

    computes: frozenset[str] | None = None
    _readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kvcached-nixl-checkpoint"))
    # Files that are loaded together, and what the model was built from: names of the tensors in its files.
    _load: object = None
    _sources: dict[tuple[Path, ...], _Source | None] = field(default_factory=dict)
    _built_from: Counter[str] = field(default_factory=Counter)
    # With elements, as they were loaded, before kernels rewrote them; whether that is what was loaded last, or why not.
    _tensors: Reading = field(default_factory=dict)
    _is_known: bool = False
    _distrust: str = ""
    # What kernels made of them, or the last look has seen; and what has happened since.
    _seen: Reading = field(default_factory=dict)
    _called: list[str] = field(default_factory=list)
    _is_reloaded: bool = False
    # Names of what computing writes.
    _scratch: frozenset[str] | None = None
    # Names of what has changed since it was loaded, or may have; and why the latter does not count any more.
    _changed: set[str] = field(default_factory=set)
    _doubt: str = ""

    # ---------------------------------------------------------------------------------------------------------- loading

    def reads_files(self, files: Sequence[Path], load: object) -> None:
        """vLLM begins to load these files: the model's, or those of a part of it.

        Args:
            files: empty if they do not say what is loaded.
            load: the same object for all files that are loaded together.
        """
        # reload_weights: kernels rewrite tensor by tensor, so there is no moment with all of them as loaded.
        self._is_known, self._is_reloaded = False, True
        if load is not self._load:
            self._load = load
            self._sources.clear()
        self._sources[source := tuple(files)] = None
        if not files:
            return
        try:
            found = signature(files)
            # Links are resolved now: they may point to other files by the time these are read.
            resolved = tuple(path.resolve(strict=True) for path in files)
        except OSError:
            return
        self._sources[source] = _Source(resolved, found, self._readers.submit(checksums, resolved))

    def built(self, loaded: Reading, distrust: str = "") -> None:
        """A loader has built the model of what it has ``loaded``, before kernels rewrote it; `begins` follows.
        ``distrust``: why neither that nor the files that it has read are what computes; "" if they are."""
        self._tensors = {**self._tensors, **{name: one for name, one in loaded.items() if one.num_bytes}}
        self._is_known, self._is_reloaded, self._distrust = not distrust, False, distrust
        self._scratch, self._changed = None, set()
        if distrust:
            self._sources.clear()
        files = self._files()
        self._built_from = Counter(files.tensors if files else ())

    def begins(self, tensors: Reading) -> None:
        """These are in sight of a model that was just built, and nothing was computed yet."""
        self._seen = tensors

    def called(self, names: Iterable[str]) -> None:
        """These calls, which may change weights, have run since the last `now`. Each has a name in ``names``."""
        self._called.extend(names)

    def vanished(self, visible: Reading) -> Reading:
        """Tensors that were loaded and are not in sight, as they were loaded."""
        return {name: one for name, one in self._tensors.items() if name not in visible or not visible[name].num_bytes}

    # ------------------------------------------------------------------------------------------------------------- now

    def now(self, found: ModelReading) -> ModelWeights:
        """What is known of the weights, which were just read."""
        files, is_reloaded = self._files(), self._is_reloaded
        is_loaded, self._is_reloaded = is_reloaded or self._scratch is None, False
        if is_loaded:
            self._doubt = ""
        if is_reloaded and (files is None or not self._built_from):
            self._doubt = "weights were loaded again, perhaps not all of them"
        elif is_reloaded and files is not None and (left := self._built_from - Counter(files.tensors)):
            # Part of what the model was built from.
            self._doubt = f"{min(left)} was not loaded again with the other weights"
        if self._scratch is None:
            self._scratch = self._find_scratch(found)
        left_out = {*self._scratch, *found.moves}
        visible = {name: one for name, one in found.tensors.items() if name not in left_out}
        hidden = self._hidden(found, visible)
        self._look(visible, hidden, is_loaded)
        known = {} if self._doubt else self.vanished(visible)
        is_whole = not hidden or not (self._doubt or {*hidden} - {*known} or not self._is_known)
        memory = visible | {f"{name} as loaded": one for name, one in known.items() if self._is_known}
        loaded = self._tensors if self._is_known and not self._doubt else {}
        note = self._doubt or next((f"{name} is out of sight" for name in hidden), self._distrust)
        return ModelWeights(memory, is_whole, loaded, None if self._doubt else files, note)

    def _find_scratch(self, found: ModelReading) -> frozenset[str]:
        """Before the first look, only forward passes have run since kernels have rewritten the weights."""
        built = self._seen or found.tensors
        changed = {name for name, one in found.tensors.items() if built.get(name) != one}
        altered = sorted(name for name in changed.intersection(found.parameters, self._tensors, built))
        if altered:
            self._doubt = f"{altered[0]} was changed after it was loaded"
        return frozenset(changed - set(found.parameters))

    def _hidden(self, found: ModelReading, visible: Reading) -> Reading:
        """What was loaded, and is not in sight in any form."""
        if not self._tensors:
            # Nothing says what was loaded. An empty parameter may stand for what a kernel keeps elsewhere.
            lost = [name for name in found.parameters if not found.tensors[name].num_bytes]
            return {name: found.tensors[name] for name in (*lost, *found.moves)}
        vanished = self.vanished(visible)
        made, lost_bytes = Counter[str](), Counter[str]()
        for name, one in vanished.items():
            lost_bytes[name.rpartition(".")[0]] += one.num_bytes
        for name in visible.keys() - self._tensors.keys():
            # Attributes of a module's objects have longer names.
            parts = name.split(".")
            for end in range(len(parts)):
                if (module := ".".join(parts[:end])) in lost_bytes:
                    made[module] += visible[name].num_bytes
        # In sight in another form is what a module holds as much of that was not loaded.
        return {
            name: one for name, one in vanished.items() if made[module := name.rpartition(".")[0]] < lost_bytes[module]
        }

    def _look(self, visible: Reading, hidden: Reading, is_loaded: bool) -> None:
        """Find out whether weights have changed since they were loaded."""
        called, self._called = self._called, []
        before, self._seen = self._seen, visible
        if "load_model" in called:
            # Into memory that may have held an earlier model, so what was written cannot be told from what was there.
            self._is_known = False
        differ = {one for one in {*visible, *before} if visible.get(one) != before.get(one)}
        if is_loaded:
            self._changed -= differ | {*self._tensors}
        else:
            self._changed |= differ
        if self._changed and not self._doubt:
            again = " and was not loaded again" if is_loaded else ""
            self._doubt = f"{min(self._changed)} has changed since it was loaded{again}"
        is_alone = len(called) == 1 and called[0] in _LOADING
        others = set() if is_loaded and is_alone else {*called}
        unread = [*hidden, *(name for name, one in visible.items() if one.checksum is None)]
        if others and unread:
            self._changed.update(unread)
            self._doubt = f"{', '.join(sorted(others))} may have changed {unread[0]}, which is out of sight"
        elif others and is_loaded:
            self._doubt = f"{', '.join(sorted(others))} may have changed what was loaded"

    def _files(self) -> Checksums | None:
        """Checksums of the files that the weights were loaded from; None if they are unknown."""
        found = [None if source is None else source.content() for source in self._sources.values()]
        return _joined([one for one in found if one is not None]) if found and None not in found else None


def joined(models: Mapping[str, ModelWeights], place: str, code: str) -> tuple[Weights, Mapping[str, Sequence[str]]]:
    """What a worker computes with, and the names that `Weights.misfit` takes. ``models`` are given by the prefix of
    their tensors' names; ``place`` is as in `described`, ``code`` as in `Weights`."""
    found = models.values()
    memory = {f"{prefix}{name}": one for prefix, of in models.items() for name, one in of.memory.items()}
    loaded = {f"{prefix}{name}": one for prefix, of in models.items() for name, one in of.loaded.items()}
    in_memory, as_loaded = described(memory, place), Tensors()
    if not all(one.is_whole for one in found):
        in_memory = Tensors(in_memory.layout)
    if all(one.loaded for one in found):
        as_loaded = described(loaded, place)
    files = [one.files for one in found if one.files is not None]
    of_all = _joined(files) if files and len(files) == len(models) else Checksums("", ())
    note = next((one.note for one in found if one.note), "")
    names = {as_loaded.layout: sorted(loaded), in_memory.layout: sorted(memory)}
    return Weights(in_memory, as_loaded, of_all.content, of_all.each[:MOST_NAMED_FILES], code, note[:1000]), names


def _joined(found: Sequence[Checksums]) -> Checksums:
    content = "".join(sorted(one.content for one in found)).encode()
    each = tuple(sorted(one for source in found for one in source.each))
    tensors = tuple(name for source in found for name in source.tensors)
    return Checksums(hashlib.blake2b(content, digest_size=16).hexdigest(), each, tensors)
