# SPDX-License-Identifier: Apache-2.0
"""Insert a wrapper at a `Seat`, and restore the original object later."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import wrapt

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.patching.call import Call
from kvcached_nixl.patching.contract import Seat
from kvcached_nixl.patching.record import Seam

__all__ = ["Attachment", "attach"]


@dataclass
class Attachment:
    """An inserted wrapper.

    ``replaced`` lists (owner, attribute, original entry, our entry) in the order of replacement; the first is the seat.
    """

    seat: Seat
    enabled: bool = True
    replaced: list[tuple[type | types.ModuleType, str, Any, Any]] = field(default_factory=list)

    def is_enabled(self) -> bool:
        return self.enabled

    def displaced(self) -> tuple[str, ...]:
        """Dotted names that were replaced since by something that does not declare our wrapper as wrapped."""
        return tuple(
            f"{owner.__name__}.{attribute}"
            for owner, attribute, _, ours in self.replaced
            if not _leads_to(vars(owner).get(attribute), ours)
        )

    def restore(self) -> list[str]:
        """Restore the originals, newest first. An entry that other code replaced is left, with our wrapper disabled.

        Returns: the dotted names that could not be restored.
        """
        self.enabled = False
        left: list[str] = []
        while self.replaced:
            owner, attribute, original, ours = self.replaced.pop()
            if vars(owner).get(attribute) is ours:
                setattr(owner, attribute, original)
            else:
                left.append(f"{owner.__name__}.{attribute}")
        return left


def attach(seam: Seam, seat: Seat, make_call: Callable[..., Call]) -> Attachment:
    """Replace the seat's entry, and every retained binding of it, with a wrapper around it.

    Raises:
        ContractChanged: a module named in ``also_bound_in`` is imported and binds another object to that name.
            Nothing is changed then.
    """
    attachment = Attachment(seat)
    retained = _retained(seam, seat)

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return seam.wrapper(make_call(wrapped, instance, args, kwargs))

    def getter_wrapper(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A property passes the instance to its getter as a plain argument.
        return seam.wrapper(make_call(functools.partial(wrapped, args[0]), args[0], args[1:], kwargs))

    ours: Any
    if isinstance(seat.entry, property):
        getter = wrapt.FunctionWrapper(seat.function, getter_wrapper, enabled=attachment.is_enabled)
        ours = property(getter, seat.entry.fset, seat.entry.fdel, seat.entry.__doc__)
    else:
        ours = wrapt.FunctionWrapper(seat.entry, wrapper, enabled=attachment.is_enabled)
    try:
        for owner, attribute in [(seat.owner, seat.attribute), *retained]:
            setattr(owner, attribute, ours)
            attachment.replaced.append((owner, attribute, seat.entry, ours))
    except BaseException:
        attachment.restore()
        raise
    return attachment


def _retained(seam: Seam, seat: Seat) -> list[tuple[types.ModuleType, str]]:
    found: list[tuple[types.ModuleType, str]] = []
    for binding in seam.patch.also_bound_in:
        module_name, _, name = binding.partition(":")
        name = name or seat.attribute
        module = sys.modules.get(module_name)
        # A module imported later gets the wrapper from the source. One that is being imported has no binding yet.
        if module is None or name not in vars(module):
            continue
        if vars(module)[name] is not seat.entry:
            raise ContractChanged(
                found=f"{module_name}.{name} is not {seat.where}",
                expected="the same function, bound by an import",
                consequence=f"Callers in {module_name} would not be patched. {seam.patch.why}",
                remedy="Use a supported version (python -m kvcached_nixl lists them), or remove what replaced it.",
            )
        found.append((module, name))
    return found


def _leads_to(entry: Any, ours: Any) -> bool:
    """Whether ``entry`` is ``ours``, or wraps it according to ``__wrapped__``."""
    seen = 0
    while entry is not None and seen < 32:
        if entry is ours:
            return True
        # A bound wrapt wrapper has the unbound wrapper, which is the class attribute, as its parent.
        if getattr(entry, "_self_parent", None) is ours:
            return True
        # classmethod and staticmethod objects have it as well.
        entry = getattr(entry, "__wrapped__", None)
        seen += 1
    return False
