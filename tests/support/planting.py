# SPDX-License-Identifier: Apache-2.0
"""Faults to plant into the package, each a decorated function whose name says what is wrong then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patcher = pytest.MonkeyPatch
Fault = Callable[[Patcher], None]
Decorator = Callable[[Callable[..., Any]], None]


def nothing(*_: Any, **__: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class Faults(dict[str, Fault]):
    """Every fault, by its name."""

    def planted(self, fault: Fault) -> None:
        """The decorated function plants it."""
        self[fault.__name__] = fault

    def instead(self, owner: Any, name: str) -> Decorator:
        """The decorated function is called in place of a method or function."""
        return lambda function: self.replace(function.__name__, owner, name, function)

    def replace(self, fault: str, owner: Any, name: str, value: Any) -> None:
        self[fault] = lambda patch: patch.setattr(owner, name, value)

    def around(self, owner: Any, name: str) -> Decorator:
        """The decorated function is called in place of a method or function, which is its first argument."""

        def note(function: Callable[..., Any]) -> None:
            def plant(patch: Patcher) -> None:
                real = getattr(owner, name)
                patch.setattr(owner, name, lambda *arguments, **named: function(real, *arguments, **named))

            self[function.__name__] = plant

        return note

    def then(self, owner: Any, name: str) -> Decorator:
        """The decorated function is called with the same arguments after each call of a method."""

        def note(function: Callable[..., Any]) -> None:
            def both(real: Any, *arguments: Any, **named: Any) -> Any:
                found = real(*arguments, **named)
                function(*arguments, **named)
                return found

            both.__name__ = function.__name__
            self.around(owner, name)(both)

        return note
