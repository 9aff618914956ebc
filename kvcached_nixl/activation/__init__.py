# SPDX-License-Identifier: Apache-2.0
"""Finders for ``sys.meta_path``: a watch for the import of vLLM, and a barrier that blocks an unpatched NIXL connector.

Imported at every interpreter start, so this module imports as little as possible.
"""

from __future__ import annotations

import sys

from kvcached_nixl.vllm import NIXL_PREFIX, ROOTS

# Like typing.TYPE_CHECKING. Importing typing would take longer than everything else this package does at that time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

# One package below kvcached's top level: kvcached's own .pth file searches for the top level in every process.
_AWAITED = frozenset(".".join(root.split(".")[:2]) for root in ROOTS)


class Watch:
    """Calls ``install`` when Python searches for vLLM or kvcached's integration package, until it returns True."""

    def __init__(self, install: Callable[[], bool]) -> None:
        self._install = install
        self._is_over = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AWAITED or self._is_over or not self._install():
            return None
        # Not removed from sys.meta_path: a thread that iterates over the list now would skip the next finder.
        self._is_over = True
        from importlib.util import find_spec

        # This search began before install() added its hooks and would bypass them, so search again.
        return find_spec(fullname)


class Barrier:
    """Makes every import of the NIXL connector fail, because its patches are missing. Other imports are unaffected."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(NIXL_PREFIX):
            raise ImportError(str(self._cause)) from self._cause
        return None


def set_watch(install: Callable[[], bool]) -> None:
    """Call ``install`` before those imports, or at once if one has happened already. A second watch is not added."""
    if any(name in sys.modules for name in _AWAITED):
        install()
    elif not any(isinstance(finder, Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watch(install))


def raise_barrier(cause: Exception) -> None:
    """Make every import of the NIXL connector fail with the text of ``cause``. A second call changes nothing."""
    for name in [name for name in sys.modules if name.startswith(NIXL_PREFIX)]:
        # vLLM's factory imports the connector by name each time, so the next construction meets the barrier.
        del sys.modules[name]
    if not any(isinstance(finder, Barrier) for finder in sys.meta_path):
        sys.meta_path.insert(0, Barrier(cause))


def lift() -> None:
    """Remove the watch and the barrier from ``sys.meta_path``."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, (Watch, Barrier))]
