# SPDX-License-Identifier: Apache-2.0
"""Find the entry that a `Patch` replaces, compare it with what the patch expects before anything is changed, insert a
wrapper there, and restore the original object later."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.patching.record import ANY_PARAMETERS, Call, Kind, Patch, Target, parameter_lists, positions_of

SUPPORTED = "Use a supported version (python -m kvcached_nixl lists them), or report this if yours is one."


@dataclass
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
        return f"{_name_of(self.owner)}.{self.attribute}"

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


def _name_of(owner: type | types.ModuleType) -> str:
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


def way_around(cls: type, seat: Seat) -> str:
    """How a call on an instance of ``cls`` does not reach the entry at a class's seat, as text; "" if it does. A class
    that redefines the attribute has to name it together with ``super``, or with a class that it extends. One of the
    seat's own top-level package is not looked at: it is known as well as the seat."""
    owner, name = seat.owner, seat.attribute
    assert isinstance(owner, type)
    if owner not in cls.__mro__:
        return f"{_name_of(cls)} does not extend {_name_of(owner)}"
    for one in cls.__mro__[: cls.__mro__.index(owner)]:
        is_known = one.__module__.partition(".")[0] == owner.__module__.partition(".")[0]
        if name in vars(one) and not is_known and not _calls(vars(one)[name], one, name):
            return f"{_name_of(one)}.{name} does not call super().{name}"
    return ""


def _calls(entry: Any, cls: type, name: str) -> bool:
    function = entry.fget if isinstance(entry, property) else getattr(entry, "__func__", entry)
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if not isinstance(code, types.CodeType):
        return False
    named = set(code.co_names)
    return name in named and bool({"super", *(base.__name__ for base in cls.__mro__[1:])} & named)


def _owner(patch: Patch, container: type | types.ModuleType) -> type | types.ModuleType:
    if isinstance(container, types.ModuleType):
        if patch.attribute not in vars(container):
            raise _changed(patch, container, "no such attribute", f"a {patch.kind}")
        return container
    for cls in container.__mro__:
        if patch.attribute in vars(cls):
            if cls.__module__ != patch.target.module:
                raise _changed(patch, container, f"inherited from {_name_of(cls)}", "defined by the target itself")
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
        found=f"{_name_of(owner)}.{patch.attribute}: {found}",
        expected=f"{patch.attribute}: {expected}",
        consequence=f"Without this patch: {patch.why}",
        remedy=SUPPORTED,
    )
