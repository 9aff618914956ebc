# SPDX-License-Identifier: Apache-2.0
"""A patch described as data, instead of as the side effect of an import; and the call that its wrapper gets.

A module of patches has

    @Patch(WORKER, "register_kv_caches", "worker", ("self", "kv_caches")).because("...", remove_when="...")
    def register_kv_caches(call: Call) -> None:
        call.proceed(kv_caches=narrow(call.argument("kv_caches")))

after which ``register_kv_caches`` is a `Patch`, ready for a `Registry`. Calling it calls that function, as tests do.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

from kvcached_nixl.errors import Refused


def positions_of(signature: inspect.Signature | None) -> Mapping[str, int]:
    """Of the parameters that may be passed by position or by keyword: name -> position. Read once for a patch, because
    `inspect.Signature.bind` takes 10 microseconds of each call, of which there are several a step."""
    parameters = () if signature is None else signature.parameters.values()
    ordinary = itertools.takewhile(lambda one: one.kind is one.POSITIONAL_OR_KEYWORD, parameters)
    return {one.name: position for position, one in enumerate(ordinary)}


class Call:
    """One call that vLLM made, with its arguments and the original callable.

    A wrapper gets one per call. It lives as long as the call and is used on the calling thread only.

    Attributes:
        instance: ``self`` of a method or property, the class of a classmethod, None otherwise.
    """

    __slots__ = ("_args", "_kwargs", "_name", "_note", "_positions", "_registry", "_signature", "_wrapped", "instance")

    def __init__(
        self,
        wrapped: Callable[..., Any],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        name: str = "",
        signature: inspect.Signature | None = None,
        positions: Mapping[str, int] = MappingProxyType({}),
        registry: Any = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Args: ``wrapped`` is the bound original, ``signature`` its signature without ``self``, read if not given, and
        ``positions`` those of its parameters (`positions_of`)."""
        self.instance = instance
        self._wrapped = wrapped
        self._args = args
        self._kwargs = kwargs
        self._name = name
        self._signature = signature
        self._positions = positions
        self._registry = registry
        self._note = note

    def argument(self, name: str) -> Any:
        """The value of a parameter, passed by position or by keyword; its default if it was not passed.

        Raises:
            TypeError: the original has no such parameter, or the caller omitted a required one.
        """
        position = self._positions.get(name)
        if position is not None:
            if position < len(self._args):
                return self._args[position]
            if name in self._kwargs:
                return self._kwargs[name]
        bound = self._bind()
        bound.apply_defaults()
        try:
            return bound.arguments[name]
        except KeyError:
            raise TypeError(self._no_such(name)) from None

    def proceed(self, **overrides: Any) -> Any:
        """Call the original with the caller's arguments, changed by ``overrides``. Returns its result.

        Raises:
            TypeError: the original has no parameter of that name.
        """
        if not overrides:
            return self._wrapped(*self._args, **self._kwargs)
        if overrides.keys() <= self._positions.keys():
            args = list(self._args)
            kwargs = {**self._kwargs, **overrides}
            for name in overrides:
                if self._positions[name] < len(args):
                    args[self._positions[name]] = kwargs.pop(name)
            return self._wrapped(*args, **kwargs)
        bound = self._bind()
        for name, value in overrides.items():
            if name not in bound.signature.parameters:
                raise TypeError(self._no_such(name))
            bound.arguments[name] = value
        return self._wrapped(*bound.args, **bound.kwargs)

    def note(self, text: str) -> None:
        """Add a line to this patch's outcome in the report. Equal lines are kept once."""
        if self._note is not None:
            self._note(text)

    @property
    def registry(self) -> Any:
        """The `Registry` that applied the patch.

        Raises:
            LookupError: the `Call` was constructed outside a registry.
        """
        if self._registry is None:
            raise LookupError(f"the call of {self._name or self._wrapped!r} does not come from a registry")
        return self._registry

    def _bind(self) -> inspect.BoundArguments:
        if self._signature is None:
            self._signature = inspect.signature(self._wrapped)
        return self._signature.bind(*self._args, **self._kwargs)

    def _no_such(self, name: str) -> str:
        known = ", ".join(self._signature.parameters) if self._signature is not None else ""
        return f"{self._name or self._wrapped!r} has no parameter {name!r}, only ({known})"


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
        module: defines it. A class that a module only re-exports is not found there.
        qualname: of the class; empty for the module itself.
        scope: the attribute must be defined in a module whose dotted name starts with this, so that a patch never
            changes a base class that other classes share. Empty: only ``module``.
    """

    name: str
    module: str
    qualname: str = ""
    scope: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}" if self.qualname else self.module

    def contains(self, module: str) -> bool:
        """Whether code defined in ``module`` may be patched under this target."""
        return module.startswith(self.scope) if self.scope else module == self.module


@dataclass(frozen=True)
class Patch:
    """One attribute of one target, why it has to be wrapped, and what runs in its place.

    Args:
        target: see `Target`.
        attribute: name of the method or function.
        process: where in vLLM it runs: "scheduler" (engine core), "worker" (one per device), "frontend" (API server) or
            "every".
        parameters: the exact parameter names, ``self`` or ``cls`` included, as `parameter_lists` takes them. Others are
            refused before anything is wrapped.
        kind: what the attribute is.
        versions: version specifier of the patched library; empty for every supported one. Read only by `Judge`.
        when_unsupported: apply even if the library's version is not supported. For the gate, which raises the refusal.
        when_absent: whether to refuse or to skip if the target does not exist.
        prepare: runs before the contract is checked; returns notes for the report, may raise `Refused`.
        why, remove_when, wrapper: see `because`.
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
    remove_when: str = ""
    wrapper: Callable[[Call], Any] = Call.proceed

    @property
    def name(self) -> str:
        return f"{self.target.name}.{self.attribute}"

    def because(self, why: str, *, remove_when: str) -> Callable[[Callable[[Call], Any]], Patch]:
        """Decorator for the function that runs in place of the attribute. It decides whether to call the original.

        Args:
            why: what would go wrong without it.
            remove_when: the event after which this patch can be removed.
        """
        return lambda wrapper: replace(self, why=why, remove_when=remove_when, wrapper=wrapper)

    def __call__(self, call: Call) -> Any:
        return self.wrapper(call)


class PatchState(Enum):
    """The state of a patch. `PENDING` is only possible before `Registry.complete`."""

    PENDING = "pending"
    APPLIED = "applied"
    SKIPPED = "skipped"
    REFUSED = "refused"


@dataclass(frozen=True)
class PatchOutcome:
    """The state of one patch with its reason: where it was applied, why it was skipped, or what refused it.

    ``cause`` is set exactly when the state is `PatchState.REFUSED`.
    """

    name: str
    state: PatchState
    reason: str
    cause: Refused | None = None
    notes: tuple[str, ...] = ()
    process: str = ""
