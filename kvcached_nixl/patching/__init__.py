# SPDX-License-Identifier: Apache-2.0
"""Applies patches in order, keeps one of three outcomes for each, and restores the originals. Knows nothing of vLLM.

`patch` describes one as data, compares it with the live callable, and inserts and removes its wrapper.

A patch is decided when its target module was just imported, and at the latest in `Registry.complete`. Deciding never
raises: wrapt drops a post-import hook that raises, and the next import of the module would succeed unpatched.

Locks: one re-entrant lock guards the state. It is never held while a module is imported, because a thread that waits
for it may hold the import lock of that module.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import wrapt

from kvcached_nixl.errors import ContractChanged, Refused
from kvcached_nixl.patching.patch import (
    ANY_PARAMETERS,
    SUPPORTED,
    Call,
    Patch,
    Seat,
    Target,
    find_seat,
    locate,
    name_of,
    parameter_lists,
)

__all__ = ["ANY_PARAMETERS", "Call", "Patch", "PatchOutcome", "PatchState", "Registry", "Target", "parameter_lists"]

Judge = Callable[[Patch], "str | None"]
"""Returns why a patch must be skipped, or None to apply it. The only reader of versions."""


class PatchState(Enum):
    """The state of a patch. `PENDING` is only possible before `Registry.complete`."""

    PENDING = "pending"
    APPLIED = "applied"
    SKIPPED = "skipped"
    REFUSED = "refused"


@dataclass
class PatchOutcome:
    """The state of one patch with its reason: where it was applied, why it was skipped, or what refused it.

    ``cause`` is set exactly when the state is `PatchState.REFUSED`.
    """

    patch: Patch
    state: PatchState = PatchState.PENDING
    reason: str = "its module is not imported yet"
    cause: Refused | None = None
    notes: tuple[str, ...] = ()
    seat: Seat | None = None

    @property
    def name(self) -> str:
        return self.patch.name

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes += (text,)

    def skip(self, reason: str | None) -> bool:
        """Skip the patch if there is a reason. Returns whether there is."""
        if reason is not None:
            self.state, self.reason = PatchState.SKIPPED, reason
        return reason is not None

    def refuse(self, cause: Refused) -> None:
        self.state, self.reason, self.cause = PatchState.REFUSED, cause.line, cause


class Registry:
    """The patches of one process. Thread-safe."""

    def __init__(
        self, judge: Judge = lambda patch: None, when_first_complete: Callable[[Registry], None] = lambda registry: None
    ) -> None:
        """Args: ``when_first_complete`` runs once, after everything was decided for the first time."""
        self._judge = judge
        self._when_first_complete: Callable[[Registry], None] | None = when_first_complete
        self._entries: list[PatchOutcome] = []
        self._refusals: list[tuple[str, Refused]] = []
        self._active = True
        self._lock = threading.RLock()

    def add(self, patches: Iterable[Patch]) -> None:
        """Register patches in order; those whose module is imported already are decided at once. Never raises."""
        for patch in patches:
            with self._lock:
                if any(entry.patch == patch for entry in self._entries):
                    continue
                self._entries.append(PatchOutcome(patch))
            module = sys.modules.get(patch.target.module)
            if module is None:
                # Once for each patch: a module whose patches are decided is looked at in vain.
                wrapt.register_post_import_hook(self.imported, patch.target.module)
            # A module that is still being imported may not have the class yet: complete() decides that patch.
            elif not getattr(module.__spec__, "_initializing", False):
                self.imported(module)

    def imported(self, module: types.ModuleType) -> None:
        """Called when ``module`` was just imported. Decides every pending patch of it. Never raises."""
        with self._lock:
            if not self._active:
                return
            for entry in self._entries:
                if entry.state is PatchState.PENDING:
                    self._decide(entry, module)

    def complete(self) -> None:
        """Decide every patch; imports targets that are not imported yet. Never raises; read `refusals` afterwards."""
        for entry in tuple(self._entries):
            if entry.state is PatchState.PENDING:
                self._seek(entry)
        with self._lock:
            for entry in self._entries:
                if entry.seat is not None and entry.seat.is_displaced():
                    entry.refuse(
                        ContractChanged(
                            found=f"{entry.seat.name} was replaced after this package had wrapped it",
                            expected="this package's wrapper, or another one around it with __wrapped__ set",
                            consequence=f"The patch may no longer run. {entry.patch.why}",
                            remedy="Remove what replaced it, or let it run before this package is installed.",
                        )
                    )
            first, self._when_first_complete = self._when_first_complete, None
        if first is not None:
            first(self)

    def refuse(self, name: str, cause: Refused) -> None:
        """Record a refusal that is not of a patch: a version, a dependency, a setting. The first per name is kept."""
        with self._lock:
            if all(name != known for known, _ in self._refusals):
                self._refusals.append((name, cause))

    def outcomes(self) -> tuple[PatchOutcome, ...]:
        """One outcome per patch, in order of registration."""
        with self._lock:
            return tuple(map(replace, self._entries))

    def refusals(self) -> tuple[tuple[str, Refused], ...]:
        """Everything that was refused, by name: first what `refuse` recorded, then patches."""
        with self._lock:
            patches = [(e.patch.name, e.cause) for e in self._entries if e.cause is not None]
            return (*self._refusals, *patches)

    def bypassed(self, cls: type, *targets: Target) -> tuple[tuple[str, Refused], ...]:
        """A refusal for each applied patch of ``targets`` that calls on an instance of ``cls`` do not reach, by name.
        ``cls`` is used in the place of the targets' own, such as a subclass that a user has written."""
        found: list[tuple[str, Refused]] = []
        with self._lock:
            applied = [(e.patch, e.seat) for e in self._entries if e.patch.target in targets]
        for patch, seat in applied:
            if seat is not None and (way := _way_around(cls, seat)):
                refusal = ContractChanged(
                    found=way,
                    expected=f"the {patch.attribute} that was patched, or one that calls it",
                    consequence=f"The patch would not run. {patch.why}",
                    remedy=f"Call super().{patch.attribute}() there, or use the class that it replaces.",
                )
                found.append((patch.name, refusal))
        return tuple(found)

    def uninstall(self) -> tuple[str, ...]:
        """Restore every entry in reverse order; import hooks that have not run yet do nothing from now on. Returns
        dotted names that other code replaced since: these are left as they are, with our wrapper disabled."""
        left: list[str] = []
        with self._lock:
            self._active = False
            for entry in reversed(self._entries):
                if entry.seat is not None:
                    left += [] if entry.seat.restore() else [entry.seat.name]
                    entry.seat = None
                    entry.state, entry.reason = PatchState.SKIPPED, "uninstalled"
        return tuple(left)

    def _decide(self, entry: PatchOutcome, module: types.ModuleType) -> None:
        patch = entry.patch
        container = locate(patch.target, module) if patch.target.module == module.__name__ else None
        if container is None:
            return
        try:
            if entry.skip(self._judge(patch)):
                return
            for note in patch.prepare() if patch.prepare is not None else ():
                entry.note(note)
            seat = find_seat(patch, container)
            seat.insert(patch, functools.partial(Call, name=patch.name, registry=self, note=entry.note))
            entry.seat = seat
            entry.state, entry.reason = PatchState.APPLIED, seat.where
        except Refused as error:
            entry.refuse(error)
        except Exception as error:  # noqa: BLE001 - recorded as a refusal, which stops the start
            entry.refuse(_unforeseen(patch, error))

    def _seek(self, entry: PatchOutcome) -> None:
        patch = entry.patch
        try:
            self.imported(importlib.import_module(patch.target.module))
        except Exception as error:  # noqa: BLE001 - recorded as a refusal, which stops the start
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{patch.target.module}.".startswith(f"{missing}."):
                entry.refuse(_unforeseen(patch, error))
                return
        with self._lock:
            if entry.state is not PatchState.PENDING or not self._active:
                return
            if entry.skip(self._judge(patch)):
                return
            entry.refuse(
                ContractChanged(
                    found=f"no {patch.target.name} in {patch.target}",
                    expected=f"one that defines {patch.attribute}",
                    consequence=f"Without this patch: {patch.why}",
                    remedy=SUPPORTED,
                )
            )


def _unforeseen(patch: Patch, cause: Exception) -> Refused:
    refusal = Refused(
        found=f"{type(cause).__name__}: {cause}",
        expected=f"{patch.name} to be patched",
        consequence=f"Without this patch: {patch.why}",
        remedy="Fix the error above if you can; otherwise report it with the output of python -m kvcached_nixl.",
    )
    refusal.__cause__ = cause
    return refusal


def _way_around(cls: type, seat: Seat) -> str:
    """How a call on an instance of ``cls`` does not reach the entry at a class's seat, as text; "" if it does. A class
    that redefines the attribute has to name it together with ``super``, or with a class that it extends. One of the
    seat's own top-level package is not looked at: it is known as well as the seat."""
    owner, name = seat.owner, seat.attribute
    assert isinstance(owner, type)
    if owner not in cls.__mro__:
        return f"{name_of(cls)} does not extend {name_of(owner)}"
    for one in cls.__mro__[: cls.__mro__.index(owner)]:
        is_known = one.__module__.partition(".")[0] == owner.__module__.partition(".")[0]
        if name in vars(one) and not is_known and not _calls(vars(one)[name], one, name):
            return f"{name_of(one)}.{name} does not call super().{name}"
    return ""


def _calls(entry: Any, cls: type, name: str) -> bool:
    function = entry.fget if isinstance(entry, property) else getattr(entry, "__func__", entry)
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if not isinstance(code, types.CodeType):
        return False
    named = set(code.co_names)
    return name in named and bool({"super", *(base.__name__ for base in cls.__mro__[1:])} & named)
