# SPDX-License-Identifier: Apache-2.0
"""A patch described as data, instead of as the side effect of an import; the call that its wrapper gets; and the seat
where that wrapper is inserted, once the live callable was compared with what the patch expects.

A module of patches has

    @Patch(WORKER, "register_kv_caches", "worker", "self kv_caches")
    def register_kv_caches(call: Call) -> None:
        '''Without it, other bytes would be moved. Until vLLM narrows them itself.'''
        call.proceed(kv_caches=narrow(call.argument("kv_caches")))

after which ``register_kv_caches`` is a `Patch`, ready for a `Registry`. What it prevents is in every refusal. When it
can be removed is said here, or by its module for all of its patches.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import wrapt

from kvcached_nixl.errors import ContractChanged


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


# ------------------------------------------------------------------------------------------------------------- the seat

SUPPORTED = "Use a supported version (python -m kvcached_nixl lists them), or report this if yours is one."


@dataclass(eq=False)
class Seat:
    """The exact ``__dict__`` entry that a patch replaces, and the wrapper that was inserted there.

    Attributes:
        owner: the class or module whose ``__dict__`` has the attribute. Wrapping it anywhere else would pin an
            inherited method on one subclass and leave its siblings unpatched.
        entry: the object in that ``__dict__``, such as a ``classmethod`` object. ``getattr`` would return a bound
            method, which cannot be restored later.
        function: the plain function behind ``entry``.
        signature: the parameters that a caller passes, without ``self`` or ``cls``.
        ours: the entry that stands there since `insert`.
    """

    owner: type | types.ModuleType
    attribute: str
    entry: Any
    function: Callable[..., Any]
    signature: inspect.Signature
    ours: Any = None
    enabled: bool = True

    @property
    def where(self) -> str:
        return f"{name_of(self.owner)}.{self.attribute}"

    @property
    def name(self) -> str:
        return f"{self.owner.__name__}.{self.attribute}"

    def insert(self, patch: Patch, make_call: Callable[..., Call]) -> None:
        described = self.signature, positions_of(self.signature)

        def wrapper(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return patch.wrapper(make_call(wrapped, instance, args, kwargs, *described))

        def getter_wrapper(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # A property passes the instance to its getter as a plain argument.
            return patch.wrapper(make_call(functools.partial(wrapped, args[0]), args[0], args[1:], kwargs, *described))

        if isinstance(self.entry, property):
            getter = wrapt.FunctionWrapper(self.function, getter_wrapper, enabled=lambda: self.enabled)
            self.ours = property(getter, self.entry.fset, self.entry.fdel, self.entry.__doc__)
        else:
            self.ours = wrapt.FunctionWrapper(self.entry, wrapper, enabled=lambda: self.enabled)
        setattr(self.owner, self.attribute, self.ours)

    def is_displaced(self) -> bool:
        """Whether something has replaced our wrapper that does not declare it as wrapped."""
        entry = vars(self.owner).get(self.attribute)
        for _ in range(32):
            # A bound wrapt wrapper has the unbound wrapper, which is the class attribute, as its parent.
            if entry is self.ours or getattr(entry, "_self_parent", None) is self.ours:
                return False
            # classmethod and staticmethod objects have it as well.
            entry = getattr(entry, "__wrapped__", None)
        return True

    def restore(self) -> bool:
        """Restore the original. Returns False where other code has replaced our entry: it stays, with our wrapper
        disabled."""
        self.enabled = False
        is_there = vars(self.owner).get(self.attribute) is self.ours
        if is_there:
            setattr(self.owner, self.attribute, self.entry)
        return is_there


def name_of(owner: type | types.ModuleType) -> str:
    return owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def locate(target: Target, module: types.ModuleType) -> type | types.ModuleType | None:
    """The target's class or module, or None if ``module`` does not define it (a re-export does not count)."""
    if not target.qualname:
        return module
    found: Any = module
    for part in target.qualname.split("."):
        found = vars(found).get(part)
        if found is None:
            return None
    if not isinstance(found, type) or found.__module__ != module.__name__:
        return None
    return found


def find_seat(patch: Patch, container: type | types.ModuleType) -> Seat:
    """Find and check the entry to replace. Raises ContractChanged: the attribute does not exist, is defined outside the
    target, or has another kind or parameter list."""
    owner = _owner(patch, container)
    entry = vars(owner)[patch.attribute]
    kind, function = _kind(patch, owner, entry)
    if kind != patch.kind:
        raise _changed(patch, owner, f"a {kind}", f"a {patch.kind}")
    signature = inspect.signature(function)
    found = tuple(signature.parameters)
    accepted = parameter_lists(patch.parameters)
    if patch.parameters != ANY_PARAMETERS and found not in accepted:
        expected = " or ".join(f"({', '.join(names)})" for names in accepted)
        raise _changed(patch, owner, f"parameters ({', '.join(found)})", expected)
    bound = kind in ("method", "classmethod", "property")
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    return Seat(owner, patch.attribute, entry, function, signature.replace(parameters=parameters))


def _owner(patch: Patch, container: type | types.ModuleType) -> type | types.ModuleType:
    if isinstance(container, types.ModuleType):
        if patch.attribute not in vars(container):
            raise _changed(patch, container, "no such attribute", f"a {patch.kind}")
        return container
    for cls in container.__mro__:
        if patch.attribute in vars(cls):
            if cls.__module__ != patch.target.module:
                raise _changed(patch, container, f"inherited from {name_of(cls)}", "defined by the target itself")
            return cls
    raise _changed(patch, container, "no such attribute", f"a {patch.kind}")


def _kind(patch: Patch, owner: type | types.ModuleType, entry: Any) -> tuple[Kind, Callable[..., Any]]:
    # isinstance looks through another tool's wrapt proxy, so a method that is already traced keeps its kind.
    if isinstance(entry, classmethod):
        return "classmethod", entry.__func__
    if isinstance(entry, staticmethod):
        return "staticmethod", entry.__func__
    if isinstance(entry, property) and entry.fget is not None:
        return "property", entry.fget
    if isinstance(entry, types.FunctionType):
        return ("function" if isinstance(owner, types.ModuleType) else "method"), entry
    raise _changed(patch, owner, f"an object of type {type(entry).__name__}", f"a {patch.kind}")


def _changed(patch: Patch, owner: type | types.ModuleType, found: str, expected: str) -> ContractChanged:
    return ContractChanged(
        found=f"{name_of(owner)}.{patch.attribute}: {found}",
        expected=f"{patch.attribute}: {expected}",
        consequence=f"Without this patch: {patch.why}",
        remedy=SUPPORTED,
    )
