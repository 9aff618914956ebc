# SPDX-License-Identifier: Apache-2.0
"""Undo kvcached's own ``NixlConnectorPatch`` (0.1.6).

The patches of this package supersede it. If it is loaded later, its ``patch_connector`` does nothing. If it was applied
already (ENABLE_KVCACHED set in a script, this package loaded by vLLM's plugin loader), its three changes are undone:

* ``get_required_kvcache_layout``, replaced on the class that the name ``NixlConnector`` refers to. That is the pull
  connector, which only inherits the method, so there it is deleted;
* ``register_kv_caches`` on the class that defines it;
* ``__init__`` of ``TransferTopology``, whose original is only in the closure of the replacement.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.vllm import KV_TRANSFER, NIXL_PREFIX

__all__ = ["take_off"]

_NAMES = ((f"{NIXL_PREFIX}.connector", "NixlConnector"), (f"{NIXL_PREFIX}.worker", "NixlConnectorWorker"))
"""The classes that kvcached's patch changes, by the names that it uses: the pull classes, and their bases."""
_LAYOUT = "get_required_kvcache_layout"
_LAYOUT_SAVED = "_original_get_layout"
_REGISTER = "register_kv_caches"
_REGISTER_SAVED = "_kvcached_original_register_kv_caches"
_REGISTER_MARK = "_kvcached_register_patched"
_TOPOLOGY_MARK = "_kvcached_topology_patched"
_TOPOLOGY_CELL = "_orig_init"


def take_off() -> tuple[str, ...]:
    """Undo kvcached's patch wherever it was applied in this process.

    Checks only modules that are imported already: kvcached imports what it patches.

    Returns: one note per restored attribute; empty if kvcached had changed nothing.

    Raises:
        ContractChanged: kvcached left traces that this function does not know how to undo exactly.
    """
    notes: list[str] = []
    for module, name in _NAMES:
        cls = _find(module, name)
        for owner in cls.__mro__ if cls is not None else ():
            if _LAYOUT_SAVED in vars(owner):
                notes.append(_restore_layout(owner))
            if _REGISTER_SAVED in vars(owner):
                notes.append(_restore_register(owner))
    topology = _find(f"{KV_TRANSFER}.utils", "TransferTopology")
    if topology is not None and _TOPOLOGY_MARK in vars(topology):
        notes.append(_restore_topology(topology))
    return tuple(notes)


def _restore_layout(owner: type) -> str:
    saved = vars(owner)[_LAYOUT_SAVED]
    replacement = vars(owner).get(_LAYOUT)
    if not isinstance(saved, types.MethodType) or not isinstance(replacement, classmethod):
        raise _cannot_undo(owner, _LAYOUT, f"{_LAYOUT_SAVED} is a {type(saved).__name__}")
    inherited = getattr(super(owner, owner), _LAYOUT, None)
    if not isinstance(inherited, types.MethodType) or inherited.__func__ is not saved.__func__:
        raise _cannot_undo(owner, _LAYOUT, "the class did not inherit it")
    delattr(owner, _LAYOUT_SAVED)
    delattr(owner, _LAYOUT)
    return f"{owner.__qualname__}.{_LAYOUT}: kvcached's override removed, inherited again"


def _restore_register(owner: type) -> str:
    saved = vars(owner)[_REGISTER_SAVED]
    if not isinstance(saved, types.FunctionType) or _REGISTER_MARK not in vars(owner):
        raise _cannot_undo(owner, _REGISTER, f"{_REGISTER_SAVED} is a {type(saved).__name__}")
    setattr(owner, _REGISTER, saved)
    delattr(owner, _REGISTER_SAVED)
    delattr(owner, _REGISTER_MARK)
    return f"{owner.__qualname__}.{_REGISTER}: kvcached's wrapper removed"


def _restore_topology(owner: type) -> str:
    replacement = vars(owner).get("__init__")
    original = _closure(replacement).get(_TOPOLOGY_CELL) if isinstance(replacement, types.FunctionType) else None
    if not isinstance(original, types.FunctionType):
        raise _cannot_undo(owner, "__init__", f"its replacement keeps no {_TOPOLOGY_CELL}")
    owner.__init__ = original  # type: ignore[misc]
    delattr(owner, _TOPOLOGY_MARK)
    return f"{owner.__qualname__}.__init__: kvcached's wrapper removed"


def _closure(function: types.FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _find(module: str, name: str) -> type | None:
    cls = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return cls if isinstance(cls, type) else None


def _cannot_undo(owner: type, attribute: str, found: str) -> ContractChanged:
    return ContractChanged(
        found=f"kvcached has patched {owner.__module__}.{owner.__qualname__}.{attribute} in an unknown way: {found}",
        expected="the patch of kvcached 0.1.6",
        consequence="Two patches of one method would contradict each other about the address of a block.",
        remedy="Set ENABLE_KVCACHED in the environment before Python starts, so that this package is loaded first, "
        "or install kvcached 0.1.6.",
    )
