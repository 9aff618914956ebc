# SPDX-License-Identifier: Apache-2.0
"""Steps from the start of the interpreter until the patches are applied.

    interpreter start   autostart.watch(): one entry on sys.meta_path; nothing more of this package is imported
    import vllm begins  (or kvcached's NIXL patch) if the gate is open, install(): hooks on both imports, and no torch
    import vllm ends    the patches are loaded and hook the modules they target, the factory gate first
    import of a target  its patches are decided
    construction        patches/factory.py decides the rest, and stops a NIXL connector if anything was refused

A script may call install() itself, and vLLM's plugin loader calls it again. The order does not matter.

Nothing here raises: wrapt drops a post-import hook that raises, and vLLM would continue unpatched. Refusals are
recorded, and the gate in patches/factory.py raises them. If that gate cannot be loaded, a barrier takes its place:
every import of the NIXL connector fails.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import types
from typing import TYPE_CHECKING

from kvcached_nixl.activation import lift, raise_barrier
from kvcached_nixl.errors import Refused, not_importable
from kvcached_nixl.settings import SERVER_LOGGER, ActivationGate, read_gate
from kvcached_nixl.vllm import ROOTS

if TYPE_CHECKING:
    from kvcached_nixl.patching import Patch, Registry


class _Holder:
    """One registry per process: patches change classes that exist once per process, so two would wrap each other. A
    forked child inherits it with the patched classes; a spawned child makes a new one."""

    registry: Registry | None = None
    lock = threading.RLock()


def current() -> Registry | None:
    return _Holder.registry


def install() -> Registry | None:
    """See `kvcached_nixl.install`."""
    refusal: Refused | None = None
    try:
        gate = read_gate(os.environ)
    except Refused as error:
        gate, refusal = ActivationGate.ON, error
    if gate is not ActivationGate.ON:
        return _Holder.registry
    with _Holder.lock:
        if _Holder.registry is None:
            try:
                _Holder.registry = _start()
            except Exception as error:  # noqa: BLE001 - turned into a refusal at the import of the connector
                raise_barrier(not_importable("kvcached_nixl cannot be started", error))
                return None
            if refusal is not None:
                _Holder.registry.refuse("settings", refusal)
        return _Holder.registry


def uninstall() -> tuple[str, ...]:
    """See `kvcached_nixl.uninstall`."""
    with _Holder.lock:
        registry, _Holder.registry = _Holder.registry, None
    lift()
    return registry.uninstall() if registry is not None else ()


def _start() -> Registry:
    import wrapt

    from kvcached_nixl.patching import Registry

    registry = Registry(_judge, _announce)
    # atexit handlers run in reverse order. Registered this early, ours runs after those that end the engines that this
    # process starts. Not weakref.finalize: its first use fixes when all finalizers run, and multiprocessing waits for
    # engines to end before that.
    atexit.register(_clear_left)
    for root in ROOTS:
        wrapt.register_post_import_hook(functools.partial(_load_patches, registry), root)
    return registry


def _load_patches(registry: Registry, module: types.ModuleType) -> None:
    """Called when vLLM or kvcached's patch was just imported. Loads the patches and hooks their targets; the second
    call adds none."""
    try:
        from kvcached_nixl.vllm.patches import PATCHES
    except Exception as error:  # noqa: BLE001 - turned into a refusal at the import of the connector
        refusal = not_importable("the patches of kvcached_nixl cannot be loaded", error)
        registry.refuse("patches", refusal)
        raise_barrier(refusal)
        return
    registry.add(PATCHES)
    # To the import system this module is still being imported, so add() has left its patches pending.
    registry.imported(module)


def _clear_left() -> None:
    # Nothing is imported while a process ends. Where the patches were not loaded, no engine has had a name.
    naming = sys.modules.get("kvcached_nixl.vllm.patches.naming")
    if naming is not None:
        naming.clear_left()


def _judge(patch: Patch) -> str | None:
    from kvcached_nixl.vllm.adapter.versions import reason_to_skip

    return reason_to_skip(patch)


def _announce(registry: Registry) -> None:
    """Record refusals of the environment, and write the report to the server's log, once."""
    from kvcached_nixl.cli import report
    from kvcached_nixl.vllm.adapter.versions import elasticity_refusal, environment_refusals

    for name, cause in environment_refusals():
        registry.refuse(name, cause)
    # Not there if the patches cannot be loaded, which is refused already.
    windows = sys.modules.get("kvcached_nixl.vllm.patches.windows")
    if windows is not None and windows.WINDOWS.refusal is not None:
        registry.refuse("kvcached's version windows", windows.WINDOWS.refusal)
    elif (refusal := elasticity_refusal()) is not None:
        registry.refuse("kvcached's patches", refusal)
    level = logging.ERROR if registry.refusals() else logging.INFO
    logging.getLogger(SERVER_LOGGER).log(level, "%s", report.render(report.make(registry)))
