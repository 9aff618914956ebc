# SPDX-License-Identifier: Apache-2.0
"""Check this package's patches against a fixture, as activation checks them against the installed vLLM.

Builds classes with the fixture's bases and parameter lists, and lets ``patching.seat`` judge them.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.patching import Patch
from kvcached_nixl.patching.seat import find_seat, locate
from kvcached_nixl.vllm.adapter.versions import reason_on
from support.shapes.fixture import VLLM_PATCHES
from support.shapes.reads import READS

__all__ = ["Verdict", "missing", "troubles", "verdicts"]

HOLDS, SKIPPED, CHANGED, GONE = "holds", "not applied", "changed", "gone"


@dataclass(frozen=True)
class Verdict:
    """The result for one patch. ``word`` is one of the four above; ``detail`` says where, why or what was found."""

    patch: str
    word: str
    detail: str

    @property
    def is_trouble(self) -> bool:
        return self.word not in (HOLDS, SKIPPED)


def verdicts(shape: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """Returns one verdict per patch of vLLM. An unsupported version is treated as the newest supported series.

    Raises:
        ValueError: the fixture is older than one of the patches.
    """
    modules = _modules(shape)
    return tuple(_verdict(patch, shape, modules) for patch in VLLM_PATCHES)


def troubles(shape: Mapping[str, Any]) -> dict[str, str]:
    """Returns patch -> the ``word`` of its verdict, for each patch that does not hold."""
    return {one.patch: one.word for one in verdicts(shape) if one.is_trouble}


def missing(shape: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns target -> names that this package reads and that vLLM lacks. The list is empty if the class is missing.

    Raises:
        ValueError: the fixture is older than one of the reads.
    """
    found: dict[str, list[str]] = {}
    for reads in READS:
        read = shape["reads"].get(reads.target.name, "?")
        names = list(reads.all_names) if read is None else read.split()
        if {name.removeprefix("-") for name in names} != set(reads.all_names):
            raise _too_old(shape, f"what is read of {reads.target.name}")
        if not SpecifierSet(reads.versions).contains(_version(shape)):
            continue
        gone = [name[1:] for name in names if name.startswith("-")]
        lacking = [one for one in gone if SpecifierSet(reads.sometimes.get(one, "")).contains(_version(shape))]
        if lacking or read is None:
            found[reads.target.name] = lacking
    return found


def _verdict(patch: Patch, shape: Mapping[str, Any], modules: Mapping[str, types.ModuleType]) -> Verdict:
    if patch.name not in shape["patches"]:
        raise _too_old(shape, f"the patch {patch.name}")
    version = _version(shape)
    reason = reason_on(patch, version)
    if reason is not None:
        return Verdict(patch.name, SKIPPED, reason)
    module = modules.get(patch.target.module)
    found = None if module is None else locate(patch.target, module)
    if found is None:
        return Verdict(patch.name, SKIPPED if patch.when_absent == "skip" else GONE, f"no {patch.target}")
    try:
        seat = find_seat(patch, found)
    except ContractChanged as cause:
        is_there = any(patch.attribute in vars(cls) for cls in getattr(found, "__mro__", [found]))
        detail = f"found {cause.found}; expected {cause.expected}"
        return Verdict(patch.name, CHANGED if is_there else GONE, detail)
    return Verdict(patch.name, HOLDS, seat.where)


def _version(shape: Mapping[str, Any]) -> str:
    """Returns the release; a release candidate counts as the release."""
    return Version(shape["version"]).base_version


def _modules(shape: Mapping[str, Any]) -> dict[str, types.ModuleType]:
    """Returns module objects with the fixture's classes and functions at their places."""
    classes: dict[str, Any] = {}
    modules: dict[str, types.ModuleType] = {}
    for place, cls in shape["places"].items():
        name, _, qualname = place.partition(":")
        module = modules.setdefault(name, types.ModuleType(name))
        if qualname:
            setattr(module, qualname, _class(cls, shape["bodies"], classes))
        else:
            vars(module).update(_members(shape["bodies"][cls], name))
    return modules


def _class(cls: str, bodies: Mapping[str, Any], classes: dict[str, Any]) -> Any:
    if cls not in classes:
        module, _, qualname = cls.partition(":")
        bases = tuple(_class(base, bodies, classes) for base in bodies[cls]["bases"])
        members = {"__module__": module, "__qualname__": qualname, **_members(bodies[cls], module)}
        classes[cls] = type(qualname.rpartition(".")[2], bases, members)
    return classes[cls]


def _members(body: Mapping[str, Any], module: str) -> dict[str, Any]:
    return {name: _member(name, text, module) for name, text in body["methods"].items()}


def _member(name: str, text: str, module: str) -> Any:
    kind, _, parameters = text.partition("(")
    if kind == "object":
        return object()
    made: dict[str, Any] = {"__name__": module}
    exec(f"def {name}({parameters}: ...", made)
    wrap = {"classmethod": classmethod, "staticmethod": staticmethod, "property": property}.get(kind)
    return made[name] if wrap is None else wrap(made[name])


def _too_old(shape: Mapping[str, Any], what: str) -> ValueError:
    return ValueError(
        f"the fixture of vLLM {shape['version']} does not know {what}; make all anew: python tests/shapes/make.py make"
    )
