# SPDX-License-Identifier: Apache-2.0
"""Insert a wrapper at a `Seat`, and restore the original object later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from kvcached_nixl.patching.call import Call
from kvcached_nixl.patching.contract import Seat
from kvcached_nixl.patching.record import Seam

__all__ = ["Attachment", "attach"]


@dataclass
class Attachment:
    """An inserted wrapper. ``ours`` is the entry that stands at the seat."""

    seat: Seat
    ours: Any = None
    enabled: bool = True

    def is_enabled(self) -> bool:
        return self.enabled

    @property
    def name(self) -> str:
        return f"{self.seat.owner.__name__}.{self.seat.attribute}"

    def is_displaced(self) -> bool:
        """Whether something has replaced it that does not declare our wrapper as wrapped."""
        return not _leads_to(vars(self.seat.owner).get(self.seat.attribute), self.ours)

    def restore(self) -> bool:
        """Restore the original. Returns False where other code has replaced our entry: it stays, with our wrapper
        disabled."""
        self.enabled = False
        is_there = vars(self.seat.owner).get(self.seat.attribute) is self.ours
        if is_there:
            setattr(self.seat.owner, self.seat.attribute, self.seat.entry)
        return is_there


def attach(seam: Seam, seat: Seat, make_call: Callable[..., Call]) -> Attachment:
    """Replace the seat's entry with a wrapper around it."""
    attachment = Attachment(seat)

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return seam.wrapper(make_call(wrapped, instance, args, kwargs))

    def getter_wrapper(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A property passes the instance to its getter as a plain argument.
        return seam.wrapper(make_call(functools.partial(wrapped, args[0]), args[0], args[1:], kwargs))

    if isinstance(seat.entry, property):
        getter = wrapt.FunctionWrapper(seat.function, getter_wrapper, enabled=attachment.is_enabled)
        attachment.ours = property(getter, seat.entry.fset, seat.entry.fdel, seat.entry.__doc__)
    else:
        attachment.ours = wrapt.FunctionWrapper(seat.entry, wrapper, enabled=attachment.is_enabled)
    setattr(seat.owner, seat.attribute, attachment.ours)
    return attachment


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
