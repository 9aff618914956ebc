# SPDX-License-Identifier: Apache-2.0
"""From the first moment of an interpreter to patches in place.

    interpreter start   start.watch(): one entry on sys.meta_path; nothing more of this package is imported
    import vllm begins  (or kvcached's part for it) install(): hooks on both imports; no seam, no torch
    import vllm ends    the seams are loaded and hook the modules they target, the gate first
    import of a target  its patches are decided
    construction        seams/factory.py decides what is left, and stops a NIXL connector if anything was refused

A script may call install() itself, and vLLM's plugin loader does so again; the order does not matter.

Nothing here raises. A post-import hook that raises is dropped by wrapt, and vLLM would go on unpatched. Refusals are
recorded and raised by the gate. If not even the gate can be loaded, a barrier stands in its place: the NIXL connector
cannot be imported any more.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached_nixl.activation.import_hooks import lift, raise_barrier
from kvcached_nixl.compat.names import ROOTS
from kvcached_nixl.errors import Refused, not_importable
from kvcached_nixl.settings import SERVER_LOGGER, Gate, read_gate

if TYPE_CHECKING:
    from kvcached_nixl.hostvmm.activation import Activation
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
        except Exception as error:  # noqa: BLE001 - turned into a refusal at the import of the connector
            refusal = not_importable("the patches of kvcached_nixl cannot be loaded", error)
            self.registry.refuse("seams", refusal)
            raise_barrier(refusal)
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
    except Refused as error:
        gate, refusal = Gate.ON, error
    if gate is not Gate.ON:
        return _Holder.installation
    with _Holder.lock:
        if _Holder.installation is None:
            try:
                _Holder.installation = _start()
            except Exception as error:  # noqa: BLE001 - turned into a refusal at the import of the connector
                raise_barrier(not_importable("kvcached_nixl cannot be started", error))
                return None
            if refusal is not None:
                _Holder.installation.registry.refuse("settings", refusal)
        return _Holder.installation


def uninstall() -> tuple[str, ...]:
    """See `kvcached_nixl.uninstall`."""
    with _Holder.lock:
        installation, _Holder.installation = _Holder.installation, None
    lift()
    return installation.registry.uninstall() if installation is not None else ()


def _start() -> Installation:
    import wrapt

    from kvcached_nixl.patching import Registry

    installation = Installation(Registry(_judge, _announce))
    # As early as this, so that it runs as late: after what ends the engines that this process starts. No finalizer of
    # weakref's: the first one decides when all of them run, and multiprocessing waits before that for engines to end.
    atexit.register(_clear_left)
    for root in ROOTS:
        wrapt.register_post_import_hook(installation.on_root_import, root)
    try:
        installation.hostvmm = _host_memory()
    except Exception as error:  # noqa: BLE001 - recorded as a refusal, which the gate raises
        installation.registry.refuse("hostvmm", not_importable("kvcached on host memory cannot be activated", error))
    return installation


def _host_memory() -> Activation | None:
    """What kvcached on host memory needs. With any other kvcached nothing of it is imported, so it can stop no GPU."""
    from kvcached_nixl.hostvmm.recognition import is_hostvmm_build

    if not is_hostvmm_build():
        return None
    from kvcached_nixl.hostvmm.activation import activate

    return activate()


def _clear_left() -> None:
    from kvcached_nixl.compat.actions.engine_name import clear_left

    clear_left()


def _judge(patch: Patch) -> str | None:
    from kvcached_nixl.compat.versions import reason_to_skip

    return reason_to_skip(patch)


def _announce(registry: Registry) -> None:
    """Record what is wrong with the environment, and say once in the server's log what is in place."""
    from kvcached_nixl.cli import report
    from kvcached_nixl.compat.versions import environment_refusals

    for name, cause in environment_refusals():
        registry.refuse(name, cause)
    installation = current()
    if installation is not None and installation.hostvmm is not None:
        for name, cause in installation.hostvmm.refusals():
            registry.refuse(name, cause)
    level = logging.ERROR if registry.refusals() else logging.INFO
    logging.getLogger(SERVER_LOGGER).log(level, "%s", report.render(report.make(registry)))
