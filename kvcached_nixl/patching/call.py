# SPDX-License-Identifier: Apache-2.0
"""One call of a wrapped attribute, with its arguments by name."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["Call", "positions_of"]


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
