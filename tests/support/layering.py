# SPDX-License-Identifier: Apache-2.0
"""Which module may import which, read from the source. Imports in functions and under TYPE_CHECKING count as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

PACKAGE = "kvcached_nixl"

BASICS = {"errors", "ids", "deadlines", "settings.TransferMode"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "ids": set(),
    "deadlines": set(),
    "version": set(),
    "processes": {"wire"},
    "settings": {"errors", "vllm"},
    "side_channel_address": {"errors"},
    "wire": BASICS,
    "patching": {"errors"},
    "naming": {"errors", "processes"},
    "wants": set(),
    "identity": {"wire.handshake"},
    "vllm": set(),
    "vllm.adapter": {
        *BASICS,
        "vllm",
        "identity",
        "naming",
        "patching",
        "settings",
        "wire",
        "proof.result",
        "side_channel_address",
        "worker.geometry",
    },
    "proof": {"errors", "settings", "wire", "transport"},
    "transport": {"errors", "ids", "side_channel_address", "settings", "wire"},
    # Of vLLM's requests, blocks and worker, and of the listener, the types only.
    "scheduler": {
        *BASICS,
        "wire",
        "settings",
        "side_channel_address",
        "transport.listener",
        "vllm.adapter.requests",
        "vllm.adapter.tracing",
        "vllm.patches.engine_blocks",
    },
    "worker": {
        *BASICS,
        "wire",
        "settings",
        "transport",
        "proof.result",
        "processes",
        "vllm.adapter.nixl_worker",
    },
    "vllm.patches": {
        *BASICS,
        "vllm",
        "vllm.adapter",
        "wire",
        "settings",
        "transport",
        "naming",
        "wants",
        "patching",
        "processes",
        "scheduler",
        "worker",
        "proof",
    },
    "activation": {"errors", "settings", "vllm", "vllm.adapter", "vllm.patches", "patching", "cli.report"},
    "cli": {
        *("errors", "settings", "vllm.adapter", "patching", "proof", "transport", "version"),
        *("side_channel_address", "scheduler.asking", "wire"),
    },
    "__init__": {"activation.bootstrap", "cli.report", "patching", "version"},
    "__main__": {"errors", "settings", "vllm.adapter", "cli", "install", "status", "version"},
    "sitecustomize": {"activation.autostart"},
}
"""Folder or module -> what of the package it may import. Its own folder is always allowed. A folder that has a row has
to be named itself, not the one around it."""

ROOMS: dict[str, set[str]] = {
    "worker/geometry": set(),
    "worker/transfer": {"geometry", "background", "outcomes"},
    "worker/prefill": {"geometry", "transfer", "outcomes"},
    "worker/decode": {"geometry", "transfer", "background", "outcomes"},
    "activation/__init__.py": set(),
    "activation/autostart.py": {"bootstrap", "raise_barrier", "set_watch"},
}
"""Room (or module) within such a folder -> what else of the folder it may import. What is not here may import all."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "kvcached": ("vllm", "proof"),
    "torch": ("vllm", "identity/memory.py", "worker", "proof", "cli/doctor.py", "transport/agent.py"),
    "nixl": ("transport/agent.py", "proof/__main__.py"),
    "zmq": (),
    "psutil": ("side_channel_address.py", "transport/listener.py"),
    "aiohttp": ("scheduler/asking/asker.py",),
    "prometheus_client": ("vllm/adapter/metrics.py",),
    "hostvmm": (),
}
"""Foreign package -> folders or files below the package that may import it."""


def violations(package: Path) -> list[str]:
    """Returns a line for each import in the package at ``package`` that the tables above do not allow."""
    return [
        f"{file.relative_to(package)}:{line} imports {name}"
        for file in sorted(package.rglob("*.py"))
        for line, name in imports(file, package)
        if not _allowed(file.relative_to(package), name)
    ]


def circles(package: Path) -> list[str]:
    """Returns the shortest import cycle through each module that is in one, each cycle once, as "a -> b -> a".

    Only imports in the source count, not that Python runs a package's __init__ before its modules.
    """
    graph = import_graph(package)
    found = {frozenset(circle): circle for module in graph if (circle := _way_back(module, graph))}
    return [" -> ".join((*circle, circle[0])) for circle in found.values()]


def import_graph(package: Path) -> dict[str, list[str]]:
    """Returns module -> modules of the package that it imports. A package has the name of its folder."""
    files = {_module(file.relative_to(package)): file for file in sorted(package.rglob("*.py"))}
    graph: dict[str, list[str]] = {}
    for module, file in files.items():
        names = [name for _, name in imports(file, package)]
        graph[module] = sorted({origin for name in names if (origin := _longest(name, files)) is not None})
    return graph


def _module(file: Path) -> str:
    parts = (PACKAGE, *file.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _longest(name: str, modules: Mapping[str, object]) -> str | None:
    """Returns the longest prefix of a dotted name that is a module: ``a.b`` for ``a.b.C``."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def _way_back(start: str, graph: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Returns the shortest path of imports from ``start`` to a module that imports it; empty if there is none."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen = {start}
    for way in ways:
        for module in graph[way[-1]]:
            if module == start:
                return way
            if module not in seen:
                seen.add(module)
                ways.append((*way, module))
    return ()


def imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) of every import in ``file``, in any form."""
    parents = (PACKAGE, *file.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _imports_by_name(node.func):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, name) for name in names[:1])


def _imports_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _allowed(file: Path, name: str) -> bool:
    here = _row(file.with_suffix("").parts)
    top, *rest = name.split(".")
    if top in ONLY_IN:
        return any(file.as_posix() == place or file.parts[0] == place for place in ONLY_IN[top])
    if top != PACKAGE:
        return True
    if not rest:
        return "__init__" in MAY_IMPORT[here]
    dotted, there = ".".join(rest), _row(rest)
    if there != here:
        named = (m for m in MAY_IMPORT[here] if _row(m.split(".")) == there)
        return any(dotted == m or dotted.startswith(m + ".") for m in named)
    room = next((room for room in ROOMS if file.as_posix() == room or file.is_relative_to(room)), None)
    return room is None or len(rest) < 2 or rest[1] == PurePosixPath(room).name or rest[1] in ROOMS[room]


def _row(parts: Sequence[str]) -> str:
    """The row of `MAY_IMPORT` for a module, by the parts of its dotted name."""
    folder = ".".join(parts[:2])
    return folder if folder in MAY_IMPORT else parts[0]
