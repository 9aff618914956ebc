# SPDX-License-Identifier: Apache-2.0
"""From the first moment of an interpreter to patches in place.

    interpreter start   install(): hooks on the import of vLLM and of kvcached's own patch; imports no seam, no torch
    import vllm         the seams are loaded and hook the modules they target, the gate first
    import of a target  its patches are decided
    construction        seams/factory.py decides what is left, and stops a NIXL connector if anything was refused

Nothing here raises. A .pth line that raises is skipped with a traceback nobody reads, and a post-import hook that
raises is dropped by wrapt; in both cases vLLM would go on unpatched. Refusals are recorded and raised by the gate. If
not even the gate can be loaded, a barrier stands in its place: the NIXL connector cannot be imported any more.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached_nixl.compat.names import NIXL_PREFIX, ROOTS
from kvcached_nixl.errors import Refused
from kvcached_nixl.settings import SERVER_LOGGER, Gate, read_gate

if TYPE_CHECKING:
    from kvcached_nixl.hostvmm import Activation
    from kvcached_nixl.patching import Patch, Registry

__all__ = ["Installation", "current", "install", "uninstall"]


@dataclass
class Installation:
    """The patches of this process.

    There is one, held by `_Holder`: patches change classes that exist once in a process, so two installations would
    wrap each other. A forked child inherits it together with the patched classes; a spawned one makes its own.
    """

    registry: Registry
    seams_loaded: bool = False
    hostvmm: Activation | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def on_root_import(self, module: types.ModuleType) -> None:
        """vLLM or kvcached's patch was just imported: load the seams and hook their targets."""
        with self.lock:
            first, self.seams_loaded = not self.seams_loaded, True
        if first:
            self._load_seams()
        # The import system still counts this module as half imported, so add() has left its patches pending.
        self.registry.imported(module)

    def _load_seams(self) -> None:
        try:
            from kvcached_nixl.seams import PATCHES
        except Exception as cause:  # noqa: BLE001 - turned into a refusal at the import of the connector
            refusal = _broken("the patches of kvcached_nixl cannot be loaded", cause)
            self.registry.refuse("seams", refusal)
            _raise_barrier(refusal)
            return
        self.registry.add(PATCHES)


class _Holder:
    """Holds the one installation. A class attribute, so that whoever imports this module twice by accident sees one."""

    installation: Installation | None = None
    lock = threading.RLock()


def current() -> Installation | None:
    """The installation of this process, if there is one."""
    return _Holder.installation


def install() -> Installation | None:
    """See `kvcached_nixl.install`."""
    refusal: Refused | None = None
    try:
        gate = read_gate(os.environ)
    except Refused as cause:
        gate, refusal = Gate.ON, cause
    if gate is not Gate.ON:
        return _Holder.installation
    with _Holder.lock:
        if _Holder.installation is None:
            try:
                _Holder.installation = _start()
            except Exception as cause:  # noqa: BLE001 - turned into a refusal at the import of the connector
                _raise_barrier(_broken("kvcached_nixl cannot be started", cause))
                return None
            if refusal is not None:
                _Holder.installation.registry.refuse("settings", refusal)
        return _Holder.installation


def uninstall() -> tuple[str, ...]:
    """See `kvcached_nixl.uninstall`."""
    with _Holder.lock:
        installation, _Holder.installation = _Holder.installation, None
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Barrier)]
    return installation.registry.uninstall() if installation is not None else ()


def _start() -> Installation:
    import wrapt

    from kvcached_nixl.patching import Registry

    installation = Installation(Registry(_judge, _announce))
    for root in ROOTS:
        wrapt.register_post_import_hook(installation.on_root_import, root)
    try:
        from kvcached_nixl.hostvmm import activate

        installation.hostvmm = activate()
    except Exception as cause:  # noqa: BLE001 - recorded as a refusal, which the gate raises
        installation.registry.refuse("hostvmm", _broken("kvcached on host memory cannot be activated", cause))
    return installation


def _judge(patch: Patch) -> str | None:
    from kvcached_nixl.compat.versions import reason_to_skip

    return reason_to_skip(patch)


def _announce(registry: Registry) -> None:
    """Record what is wrong with the environment, and say once in the server's log what is in place."""
    from kvcached_nixl import report
    from kvcached_nixl.compat.versions import environment_refusals

    for name, cause in environment_refusals():
        registry.refuse(name, cause)
    installation = current()
    if installation is not None and installation.hostvmm is not None:
        for name, cause in installation.hostvmm.refusals():
            registry.refuse(name, cause)
    level = logging.ERROR if registry.refusals() else logging.INFO
    logging.getLogger(SERVER_LOGGER).log(level, "%s", report.render(report.make(current())))


class _Barrier(importlib.abc.MetaPathFinder):
    """Stands where the patches should be: the NIXL connector cannot be imported past it. Other modules can."""

    def __init__(self, refusal: Refused) -> None:
        self._refusal = refusal

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(NIXL_PREFIX):
            raise ImportError(str(self._refusal)) from self._refusal
        return None


def _raise_barrier(refusal: Refused) -> None:
    for name in [name for name in sys.modules if name.startswith(NIXL_PREFIX)]:
        # vLLM's factory imports the connector by name each time, so the next construction meets the barrier.
        del sys.modules[name]
    if not any(isinstance(finder, _Barrier) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Barrier(refusal))


def _broken(found: str, cause: Exception) -> Refused:
    refusal = Refused(
        found=f"{found}: {type(cause).__name__}: {cause}",
        expected="the package and its dependencies (wrapt, packaging, msgspec) to be importable",
        consequence="NixlConnector is not started without its patches.",
        remedy="pip install kvcached-nixl in this environment, or set KVCACHED_NIXL=0 to run without it.",
    )
    refusal.__cause__ = cause
    return refusal
