# SPDX-License-Identifier: Apache-2.0
"""A patch described as data, instead of as the side effect of an import; and the call that its wrapper gets.

A module of patches has

    @Patch(WORKER, "register_kv_caches", "worker", "self kv_caches")
    def register_kv_caches(call: Call) -> None:
        '''Without it, other bytes would be moved. Until vLLM narrows them itself.'''
        call.proceed(kv_caches=narrow(call.argument("kv_caches")))

after which ``register_kv_caches`` is a `Patch`, ready for a `Registry`. What it prevents is in every refusal. When it
can be removed is said here, or by its module for all of its patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from kvcached_nixl.errors import Refused


def positions_of(signature: inspect.Signature) -> Mapping[str, int]:
    """Of the parameters that may be passed by position: name -> position. Read once for a patch, because
    `inspect.Signature.bind` takes 10 microseconds of each call, of which there are several a step."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {one.name: position for position, one in enumerate(signature.parameters.values()) if one.kind in kinds}


@dataclass(slots=True, eq=False)
class Call:
    """One call that vLLM made, with its arguments and the original callable. Used on the calling thread only.

    Attributes:
        wrapped: the bound original.
        instance: ``self`` of a method or property, the class of a classmethod, None otherwise.
        signature: of ``wrapped``, without ``self``, and ``positions`` of its parameters (`positions_of`); read if they
            are not given.
        name: of the patch.
        registry: the `Registry` that applied the patch.
        note: adds a line to this patch's outcome in the report. Equal lines are kept once.
    """

    wrapped: Callable[..., Any]
    instance: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    signature: inspect.Signature = inspect.Signature()
    positions: Mapping[str, int] | None = None
    name: str = ""
    registry: Any = None
    note: Callable[[str], None] = lambda text: None

    def argument(self, name: str) -> Any:
        """The value of a parameter, passed by position or by keyword; its default if it was not passed. Raises
        TypeError: the original has no such parameter, or the caller omitted a required one."""
        position = self._positions(name).get(name, len(self.args))
        if position < len(self.args):
            return self.args[position]
        found = self.kwargs.get(name, self.signature.parameters[name].default)
        if found is inspect.Parameter.empty:
            raise TypeError(f"{self.name or self.wrapped!r} was called without {name!r}")
        return found

    def proceed(self, **overrides: Any) -> Any:
        """Call the original with the caller's arguments, changed by ``overrides``. Returns its result. Raises
        TypeError: the original has no parameter of that name."""
        args, kwargs = list(self.args), {**self.kwargs, **overrides}
        for name in overrides:
            position = self._positions(name).get(name, len(args))
            if position < len(args):
                args[position] = kwargs.pop(name)
        return self.wrapped(*args, **kwargs)

    def _positions(self, name: str) -> Mapping[str, int]:
        if self.positions is None:
            self.signature = inspect.signature(self.wrapped)
            self.positions = positions_of(self.signature)
        if name not in self.signature.parameters:
            known = ", ".join(self.signature.parameters)
            raise TypeError(f"{self.name or self.wrapped!r} has no parameter {name!r}, only ({known})")
        return self.positions


Kind = Literal["method", "classmethod", "staticmethod", "property", "function"]
Process = Literal["scheduler", "worker", "frontend", "every"]

ANY_PARAMETERS = "..."
"""For a wrapper that neither reads nor overrides arguments by name: every parameter list is accepted."""


def parameter_lists(text: str) -> tuple[tuple[str, ...], ...]:
    """The parameter lists that a text stands for. Its names with a question mark are in all of them, or in none."""
    names = text.split()
    always = tuple(name for name in names if not name.endswith("?"))
    everything = tuple(name.rstrip("?") for name in names)
    return (always,) if always == everything else (always, everything)


@dataclass(frozen=True)
class Target:
    """A class or module to patch.

    Args:
        name: our name for it in reports.
        module: defines it, and the attribute. A class that a module only re-exports is not found there, and a patch
            never changes a base class in another module that other classes share.
        qualname: of the class; empty for the module itself.
    """

    name: str
    module: str
    qualname: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}" if self.qualname else self.module


@dataclass(frozen=True)
class Patch:
    """One attribute of one target, why it has to be wrapped, and what runs in its place.

    Args:
        process: where in vLLM it runs: engine core, one per device, API server, or everywhere.
        parameters: the exact parameter names, ``self`` or ``cls`` included, as `parameter_lists` takes them. Others are
            refused before anything is wrapped.
        versions: specifier of the patched library's; empty for every supported one.
        when_unsupported: apply even if the library's version is not supported. For the gate, which raises the refusal.
        when_absent: whether to refuse or to skip if the target does not exist.
        prepare: runs before the contract is checked; returns notes for the report, may raise `Refused`.
        why: what would go wrong without it; "" where Python leaves docstrings out (``-OO``).
        wrapper: runs in place of the attribute, and decides whether to call the original.
    """

    target: Target
    attribute: str
    process: Process
    parameters: str
    kind: Kind = "method"
    versions: str = ""
    when_unsupported: bool = False
    when_absent: Literal["refuse", "skip"] = "refuse"
    prepare: Callable[[], tuple[str, ...]] | None = field(default=None, compare=False)
    why: str = ""
    wrapper: Callable[[Call], Any] = Call.proceed

    @property
    def name(self) -> str:
        return f"{self.target.name}.{self.attribute}"

    def __call__(self, wrapper: Callable[[Call], Any]) -> Patch:
        """Decorates the wrapper, whose docstring begins with "Without it, " and may go on with " Until "."""
        said = " ".join((wrapper.__doc__ or "").partition("\n\n")[0].split())
        return replace(self, why=said.removeprefix("Without it, ").partition(" Until ")[0], wrapper=wrapper)


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
