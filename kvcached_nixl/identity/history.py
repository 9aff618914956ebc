# SPDX-License-Identifier: Apache-2.0
"""What a worker's weights are: in memory, as they were loaded, and of which files. One per worker, on its thread.

Three sources, because each fails somewhere. Memory is *whole* if every tensor that computes is read, and nothing that
was there when the weights were loaded has vanished from sight; only then does it have a content. What was loaded is
known until memory changes, and so are the files; if something is out of sight, until a call that may have changed it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kvcached_nixl.identity.files import Checksums, Signature, checksums, signature
from kvcached_nixl.identity.memory import Read, Reading, described
from kvcached_nixl.wire.handshake import MOST_NAMED_FILES, Tensors, Weights

__all__ = ["ModelReading", "WeightsHistory"]

_LOADING = frozenset({"load_model", "reload_weights"})
"""Calls that leave nothing of what was there before, if they load."""


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


@dataclass
class _Loaded:
    """A model.

    Attributes:
        tensors: with elements, as they were loaded, before kernels rewrote them.
        is_known: ``tensors`` are what was loaded last.
        built: what kernels made of them, except parameters; None if it is unknown.
        scratch: names of what computing writes; None before the first look.
    """

    tensors: Reading
    is_known: bool = True
    built: Reading | None = None
    scratch: frozenset[str] | None = None

    def vanished(self, visible: Reading) -> Reading:
        """Tensors that were loaded, and are not in sight."""
        return {name: one for name, one in self.tensors.items() if name not in visible or not visible[name].num_bytes}

    def rewritten(self, vanished: Reading, visible: Reading) -> set[str]:
        """Those of them that are in sight in another form: their module holds as much that was not loaded."""
        made, lost = Counter[str](), Counter[str]()
        for name in vanished:
            lost[name.rpartition(".")[0]] += vanished[name].num_bytes
        for name in visible.keys() - self.tensors.keys():
            # Attributes of a module's objects have longer names.
            parts = name.split(".")
            for end in range(len(parts)):
                if (module := ".".join(parts[:end])) in lost:
                    made[module] += visible[name].num_bytes
        return {name for name in vanished if made[module := name.rpartition(".")[0]] >= lost[module]}


@dataclass(frozen=True)
class ModelReading:
    """A model now.

    Attributes:
        prefix: of its tensors' names.
        tensors: every one that it holds.
        parameters: names of those that computing does not write.
        moves: names of tensors whose content vLLM moves between ranks.
    """

    model: Any
    prefix: str
    tensors: Reading
    parameters: Collection[str]
    moves: Collection[str] = ()


@dataclass
class WeightsHistory:
    """See the module."""

    _readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kvcached-nixl-checkpoint"))
    _sources: dict[tuple[str, str], _Source] = field(default_factory=dict)
    _primary: str | None = None
    _models: WeakKeyDictionary[Any, _Loaded] = field(default_factory=WeakKeyDictionary)
    _loads: int = 0
    _is_loading: bool = False
    _called: set[str] = field(default_factory=set)
    _seen: tuple[int, Reading] | None = None
    _doubt: str = ""

    # ---------------------------------------------------------------------------------------------------------- loading

    def reads_files(self, name: str, part: str, files: Sequence[Path]) -> None:
        """vLLM begins to load these files. Replaces the files known under the same name and part.

        Args:
            name: the model's name in vLLM.
            part: a part of the model; "" if the model has only one.
        """
        self._loads += 1
        if not self._is_loading:
            # reload_weights: kernels rewrite tensor by tensor, so there is no moment with all of them as loaded.
            for model in self._models.values():
                model.is_known = False
        self._sources.pop((name, part), None)
        try:
            found = signature(files)
            # Links are resolved now: they may point to other files by the time these are read.
            resolved = tuple(path.resolve(strict=True) for path in files)
        except OSError:
            return
        self._sources[name, part] = _Source(resolved, found, self._readers.submit(checksums, resolved))

    @property
    def has_loaded(self) -> bool:
        """Whether anything was loaded."""
        return bool(self._loads)

    def begins(self) -> None:
        """A loader begins to load a model; `ends` follows."""
        self._is_loading = True

    def ends(self, model: Any, tensors: Reading | None) -> None:
        """A loader has loaded these tensors, which no kernel has rewritten yet; None if it has failed."""
        self._is_loading = False
        self._loads += 1
        if tensors is not None:
            self._models[model] = _Loaded({name: one for name, one in tensors.items() if one.num_bytes})

    def built(self, model: Any, others: Reading) -> None:
        """Kernels have rewritten a model's weights, and nothing was computed yet. ``others``: without parameters."""
        if model in self._models:
            self._models[model].built = others

    def called(self, names: Iterable[str]) -> None:
        """These calls, which may change weights, have run since the last `weights`."""
        self._called.update(names)

    def vanished(self, model: Any, visible: Reading) -> Reading:
        """Tensors that were loaded into a model and are not in sight, as they were loaded."""
        return self._models[model].vanished(visible) if model in self._models else {}

    # ------------------------------------------------------------------------------------------------------------- now

    def weights(
        self, models: Sequence[ModelReading], place: str, primary: str, ignored: str, code: str
    ) -> tuple[Weights, Mapping[str, Sequence[str]]]:
        """What a worker computes with now, and the names that `Weights.misfit` takes.

        Args:
            models: of this worker, as they are.
            place: as in `described`.
            primary: the served model's name. Files of an earlier one are dropped.
            ignored: name of a draft model that computes no KV; "" for none.
            code: as in `Weights`.
        """
        visible: dict[str, Read] = {}
        loaded: dict[str, Read] = {}
        rewritten: dict[str, Read] = {}
        hidden: dict[str, Read] = {}
        for one in models:
            for found, all_found in zip(self._of_model(one), (visible, loaded, rewritten, hidden), strict=True):
                all_found.update((f"{one.prefix}{name}", value) for name, value in found.items())
        self._look(visible, hidden)
        vanished = {} if self._doubt else rewritten | hidden
        whole = visible | {f"{name} as loaded": value for name, value in vanished.items()}
        memory = described(whole, place)
        if hidden and self._doubt:
            memory = Tensors(memory.layout)
        source = None if self._doubt else self._files(primary, ignored)
        note = self._doubt or next((f"{name} is out of sight" for name in hidden), "")
        as_loaded = Tensors() if self._doubt or not loaded else described(loaded, place)
        files, each = source or ("", ())
        names = {as_loaded.layout: sorted(loaded), memory.layout: sorted(whole)}
        return Weights(memory, as_loaded, files, each[:MOST_NAMED_FILES], code, note[:1000]), names

    def _of_model(self, one: ModelReading) -> tuple[Reading, Reading, Reading, Reading]:
        """What is in sight, what was loaded, what of that is in sight in another form, and what has vanished."""
        known = self._models.get(one.model)
        if known is None:
            # Nothing says what was loaded. An empty parameter may stand for what a kernel keeps elsewhere.
            lost = {name: one.tensors[name] for name in one.parameters if not one.tensors[name].num_bytes}
            lost |= {name: one.tensors[name] for name in one.moves}
            return _without(one.tensors, lost), {}, {}, _unknown(lost)
        if known.scratch is None:
            built = one.tensors if known.built is None else known.built
            changed = {name for name, value in one.tensors.items() if built.get(name) != value}
            known.scratch = frozenset(changed - set(one.parameters))
        visible = _without(one.tensors, {*known.scratch, *one.moves})
        vanished = known.vanished(visible)
        rewritten = known.rewritten(vanished, visible)
        hidden = _without(vanished, rewritten)
        if not known.is_known:
            return visible, {}, {}, _unknown(hidden)
        return visible, known.tensors, {name: vanished[name] for name in rewritten}, hidden

    def _look(self, visible: Reading, hidden: Reading) -> None:
        """Find out whether weights have changed since they were loaded."""
        called, self._called = self._called, set()
        loads, before = self._seen or (-1, {})
        self._seen = self._loads, visible
        others = called if loads == self._loads else called - _LOADING
        if loads != self._loads:
            self._doubt = ""
        elif differ := [name for name in {*visible, *before} if visible.get(name) != before.get(name)]:
            self._doubt = f"{min(differ)} has changed since it was loaded"
        unread = [*hidden, *(name for name, value in visible.items() if value.checksum is None)]
        if others and unread:
            self._doubt = f"{', '.join(sorted(others))} may have changed {unread[0]}, which is out of sight"
        elif others and loads != self._loads:
            self._doubt = f"{', '.join(sorted(others))} may have changed what was loaded"

    def _files(self, primary: str, ignored: str) -> tuple[str, tuple[tuple[str, str], ...]] | None:
        """Checksum of the files that the weights were loaded from, and of each; None if it is unknown."""
        if self._primary not in (None, primary):
            self._sources = {key: source for key, source in self._sources.items() if key[0] != self._primary}
        self._primary = primary
        if not any(name == primary for name, _ in self._sources):
            return None
        # The draft model may be the served model itself.
        found = [source.content() for (name, _), source in self._sources.items() if name == primary or name != ignored]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        joined = hashlib.blake2b("".join(sorted(one.content for one in known)).encode(), digest_size=16).hexdigest()
        return joined, tuple(sorted(one for source in known for one in source.each))


def _without(reading: Reading, names: Collection[str]) -> dict[str, Read]:
    return {name: value for name, value in reading.items() if name not in names}


def _unknown(reading: Reading) -> dict[str, Read]:
    return {name: one._replace(checksum=None) for name, one in reading.items()}
