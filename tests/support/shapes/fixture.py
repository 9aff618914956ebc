# SPDX-License-Identifier: Apache-2.0
"""The parts of a vLLM that this package's patches and reads depend on, as a small JSON object; and a verdict on each.

* version: the vLLM release.
* places: each existing place where a patch looks, "module:qualname" -> the class that this name means.
* bodies: class -> its bases in vLLM, and the patched attributes that its own body defines.
* callers: patch -> functions of vLLM that call the wrapped attribute.
* reads: target -> the names that this package reads from it, "-name" for a missing one; null if the class is missing.
"""

from __future__ import annotations

import json
import types
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from experiments.common.vllm_python import Source
from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.patching import Patch, Target
from kvcached_nixl.patching.patch import find_seat, locate
from kvcached_nixl.vllm import KV_TRANSFER, NIXL_PREFIX
from kvcached_nixl.vllm.adapter.locate import FACADE_CLASS_NAMES, HTTP_MIDDLEWARE, WORKER, WORKER_PROCESS
from kvcached_nixl.vllm.adapter.versions import reason_on
from kvcached_nixl.vllm.patches import PATCHES
from support.shapes.reading import Call, Reader
from support.shapes.reads import READS, Reads

__all__ = ["SERIES", "VLLM_PATCHES", "Verdict", "load", "make", "missing", "save", "troubles", "verdicts"]
SERIES = Path(__file__).parents[2] / "shapes/series"
VLLM_PATCHES: tuple[Patch, ...] = tuple(patch for patch in PATCHES if patch.target.module.startswith("vllm."))
"""All patches except that of kvcached, of which only one version is supported."""
_CONNECTOR = frozenset(
    {"connector", "kv_connector", "connector_cls", "kv_transfer_group", "get_kv_transfer_group", "_KV_CONNECTOR_AGENT"}
)
_SCHEDULER = frozenset({"scheduler"})
_CALLED_ON = {
    "connector": _CONNECTOR,
    "connector base": _CONNECTOR,
    "pull connector": _CONNECTOR,
    "engine scheduler": _SCHEDULER,
    "engine core": frozenset({"engine_core"}),
    "engine core base": frozenset({"engine_core"}),
    "engine client": frozenset({"engine_client", "client", "async_llm"}),
    "HTTP middleware": frozenset(),
    "API routes": frozenset({""}),
    "input processor": frozenset({"input_processor"}),
    "media processing": frozenset({"info"}),
    "output processor": frozenset({"output_processor"}),
    "model loader": frozenset(),
    "renderer": frozenset(),
    "factory": frozenset({"KVConnectorFactory"}),
}
"""Target -> variable names under which vLLM calls its methods. A call by another name shows as "no caller"."""
_CALLERS_IN = (
    "vllm/config/",
    "vllm/entrypoints/",
    "vllm/v1/",
    "vllm/distributed/kv_transfer/",
    "vllm/renderers/",
    "vllm/multimodal/processing/",
    "vllm/model_executor/model_loader/",
)


def save(shape: dict[str, Any]) -> Path:
    path = SERIES / f"{shape['version']}.json"
    path.write_text(_text(shape))
    return path


def _text(shape: dict[str, Any]) -> str:
    """Returns JSON with one class, patch or target per line, so that two series can be compared with diff."""
    parts = [f'"version": {json.dumps(shape["version"])}']
    for part in ("places", "bodies", "callers", "reads"):
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(shape[part].items())]
        parts.append(f'"{part}": {{\n ' + ",\n ".join(lines) + "\n}")
    return "{" + ",\n".join(parts) + "}\n"


def load(version: str) -> dict[str, Any]:
    shape: dict[str, Any] = json.loads((SERIES / f"{version}.json").read_text())
    return shape


def make(source: Source) -> dict[str, Any]:
    reader = Reader(source)
    places = _places(reader)
    return {
        "version": source.version,
        "places": places,
        "bodies": _bodies(reader, places),
        "callers": _callers(reader),
        "reads": {reads.target.name: _read(reader, reads) for reads in READS},
    }


def _places(reader: Reader) -> dict[str, str]:
    found: dict[str, str] = {}
    for target in {patch.target for patch in VLLM_PATCHES}:
        cls = _class_of(reader, target)
        if cls is not None:
            found[f"{target.module}:{target.qualname}"] = cls
    return found


def _bodies(reader: Reader, places: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for patch in VLLM_PATCHES:
        start = places.get(f"{patch.target.module}:{patch.target.qualname}")
        for cls in reader.lineage(start) if start is not None else ():
            body = reader.body(cls)
            methods = found.setdefault(cls, {"bases": list(body.bases), "methods": {}})["methods"]
            if patch.attribute in body.methods:
                methods[patch.attribute] = body.methods[patch.attribute]
    return found


def _class_of(reader: Reader, target: Target) -> str | None:
    """Returns the class or module of a target, if it exists."""
    if target.qualname:
        return reader.resolve(target.module, target.qualname)
    return f"{target.module}:" if reader.has(target.module) else None


def _read(reader: Reader, reads: Reads) -> str | None:
    cls = next((one for target in reads.targets if (one := _class_of(reader, target)) is not None), None)
    if cls is None:
        return None
    stored = {name for one in reader.lineage(cls) for name in reader.body(one).names}
    return " ".join(name if name in stored else f"-{name}" for name in sorted(reads.all_names))


def _callers(reader: Reader) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {patch.name: set() for patch in VLLM_PATCHES}
    patches: dict[str, list[Patch]] = defaultdict(list)
    for patch in VLLM_PATCHES:
        # The factory constructs a registered connector by name, so the registration counts as the call of __init__.
        is_registered = patch.attribute == "__init__" and patch.target.name == "connector"
        name = "register_connector" if is_registered else patch.attribute
        # A class of middleware is constructed and called by the HTTP framework.
        name = "add_middleware" if patch.target is HTTP_MIDDLEWARE else name
        # A worker's methods are called by name through collective_rpc, wherever the worker runs.
        patches["collective_rpc" if patch.target is WORKER_PROCESS else name].append(patch)
        if (patch.target is WORKER and patch.attribute == "__init__") or patch.attribute == "__post_init__":
            # The connector constructs its worker half; a dataclass calls __post_init__ when it is constructed.
            patches[patch.target.qualname].append(patch)
    for call in reader.calls(patches, _CALLERS_IN):
        for patch in patches[call.attribute]:
            if _reaches(reader, call, patch):
                found[patch.name].add(f"{call.module}:{call.qualname}".removesuffix(":"))
    return {name: sorted(callers) for name, callers in found.items()}


def _reaches(reader: Reader, call: Call, patch: Patch) -> bool:
    """Whether the call reaches what the patch wraps, and is not a connector that forwards it to others."""
    if call.attribute == "register_connector":
        return bool(FACADE_CLASS_NAMES & set(call.arguments))
    if patch.target is WORKER_PROCESS:
        return patch.attribute in call.arguments
    if patch.target is HTTP_MIDDLEWARE:
        return patch.target.qualname in call.arguments
    if patch.attribute == "__post_init__" or (not call.receiver and patch.attribute == "__init__"):
        return call.attribute == patch.target.qualname
    if call.attribute == "__init__":
        return call.receiver == "super" and _is_next(reader, call, patch)
    if call.receiver == "self":
        return _is_inherited_caller(reader, call, patch)
    within = call.module.startswith(f"{KV_TRANSFER}.v1.") and call.qualname.rpartition(".")[2] == patch.attribute
    handed_on = within or call.module.startswith(NIXL_PREFIX)
    return call.receiver in _CALLED_ON[patch.target.name] and not handed_on


def _is_next(reader: Reader, call: Call, patch: Patch) -> bool:
    """Whether ``super().__init__`` in that class is what the patch wraps: no class in between defines ``__init__``."""
    cls, _, function = call.qualname.partition(".")
    if function != "__init__":
        return False
    above = reader.lineage(f"{call.module}:{cls}")[1:]
    owners = [one for one in above if "__init__" in reader.body(one).methods]
    return owners[:1] == [_class_of(reader, patch.target)]


def _is_inherited_caller(reader: Reader, call: Call, patch: Patch) -> bool:
    """Whether the target inherits the function that calls ``self.attribute`` without overriding it.

    Whether anything calls that function is not checked.
    """
    cls = _class_of(reader, patch.target)
    owner, _, function = call.qualname.partition(".")
    function = function.partition(".")[0]
    owners = [one for one in reader.lineage(cls) if function in reader.body(one).methods] if cls else []
    return owners[:1] == [f"{call.module}:{owner}"] and function != patch.attribute


HOLDS, SKIPPED, CHANGED, GONE, NO_CALLER = "holds", "not applied", "changed", "gone", "no caller"


@dataclass(frozen=True)
class Verdict:
    """The result for one patch. ``word`` is one of the five above; ``detail`` says where, why or what was found."""

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
    if patch.name not in shape["callers"]:
        raise _too_old(shape, f"the patch {patch.name}")
    version = _version(shape)
    reason = reason_on(patch, version)
    if reason is not None:
        return Verdict(patch.name, SKIPPED, reason)
    module = modules.get(patch.target.module)
    found = None if module is None else locate(patch.target, module)
    if found is None:
        return Verdict(patch.name, GONE, f"no {patch.target}")
    try:
        seat = find_seat(patch, found)
    except ContractChanged as cause:
        is_there = any(patch.attribute in vars(cls) for cls in getattr(found, "__mro__", [found]))
        detail = f"found {cause.found}; expected {cause.expected}"
        return Verdict(patch.name, CHANGED if is_there else GONE, detail)
    callers = shape["callers"][patch.name]
    if not callers:
        return Verdict(patch.name, NO_CALLER, f"{seat.where} is there, and vLLM calls it nowhere")
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
