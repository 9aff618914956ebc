# SPDX-License-Identifier: Apache-2.0
"""The parts of a vLLM that this package's patches and reads depend on, as a small JSON object that `judging` reads.

* version: the vLLM release.
* places: each existing place where a patch looks, "module:qualname" -> the class that this name means.
* bodies: class -> its bases in vLLM, and the patched attributes that its own body defines.
* patches: their names; others were not looked for.
* reads: target -> the names that this package reads from it, "-name" for a missing one; null if the class is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.common.vllm_source import Source
from kvcached_nixl.patching import Patch, Target
from kvcached_nixl.vllm.patches import PATCHES
from support.shapes.reading import Reader
from support.shapes.reads import READS, Reads

__all__ = ["SERIES", "VLLM_PATCHES", "load", "make", "save"]

SERIES = Path(__file__).parents[2] / "shapes/series"

VLLM_PATCHES: tuple[Patch, ...] = tuple(patch for patch in PATCHES if patch.target.module.startswith("vllm."))
"""All patches except that of kvcached, of which only one version is supported."""


def save(shape: dict[str, Any]) -> Path:
    path = SERIES / f"{shape['version']}.json"
    path.write_text(_text(shape))
    return path


def _text(shape: dict[str, Any]) -> str:
    """Returns JSON with one class, patch or target per line, so that two series can be compared with diff."""
    parts = [f'"{part}": {json.dumps(shape[part])}' for part in ("version", "patches")]
    for part in ("places", "bodies", "reads"):
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
        "patches": sorted(patch.name for patch in VLLM_PATCHES),
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
