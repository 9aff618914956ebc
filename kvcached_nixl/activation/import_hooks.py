# SPDX-License-Identifier: Apache-2.0
"""What this package puts on ``sys.meta_path``: a watch for vLLM, and a barrier where patches should be and are not.

Part of every interpreter start with the gate open, so nothing is imported here that is not needed then.
"""

from __future__ import annotations

import sys

from kvcached_nixl.compat.names import NIXL_PREFIX, ROOTS

# As typing has it. Importing typing would take longer than all the rest of an interpreter start of ours.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["Barrier", "Watch", "lift", "raise_barrier", "set_watch"]

# The package one below kvcached's top: for the top itself kvcached's own .pth searches in every process.
_AWAITED = frozenset(".".join(root.split(".")[:2]) for root in ROOTS)


class Watch:
    """Calls ``install`` when vLLM or kvcached's part for it is looked for, until it says that it has installed."""

    def __init__(self, install: Callable[[], bool]) -> None:
        self._install = install
        self._is_over = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AWAITED or self._is_over or not self._install():
            return None
        # It stays on sys.meta_path: taken off, a thread that walks that list now would miss the finder after it.
        self._is_over = True
        from importlib.util import find_spec

        # This search began before there were hooks, so it would pass them by.
        return find_spec(fullname)


class Barrier:
    """Stands where the patches should be: the NIXL connector cannot be imported past it. Other modules can."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(NIXL_PREFIX):
            raise ImportError(str(self._cause)) from self._cause
        return None


def set_watch(install: Callable[[], bool]) -> None:
    """Have ``install`` called in time: at once if that import has happened. A second watch is not set."""
    if any(name in sys.modules for name in _AWAITED):
        install()
    elif not any(isinstance(finder, Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watch(install))


def raise_barrier(cause: Exception) -> None:
    """Let every import of the NIXL connector fail with the text of ``cause``; the first cause stays."""
    for name in [name for name in sys.modules if name.startswith(NIXL_PREFIX)]:
        # vLLM's factory imports the connector by name each time, so the next construction meets the barrier.
        del sys.modules[name]
    if not any(isinstance(finder, Barrier) for finder in sys.meta_path):
        sys.meta_path.insert(0, Barrier(cause))


def lift() -> None:
    """Take off whatever this module has put on."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, (Watch, Barrier))]
