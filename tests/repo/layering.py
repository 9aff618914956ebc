# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, read from the source: an import inside a function or under TYPE_CHECKING counts as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "kvcached_nixl"

BASICS = {"errors", "ids", "clock", "deadlines", "idle"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "ids": set(),
    "clock": set(),
    "deadlines": set(),
    "idle": set(),
    "settings": {"errors"},
    "wire": BASICS,
    "patching": {"errors"},
    "compat": {*BASICS, "patching"},
    "transport": {"errors", "ids"},
    "scheduler": {*BASICS, "wire", "settings"},
    "worker": {*BASICS, "wire", "settings", "transport"},
    "seams": {*BASICS, "wire", "settings", "transport", "compat", "patching", "scheduler", "worker"},
    "proxy": {"errors", "settings", "wire.params"},
    "hostvmm": {"errors"},
    "report": {"errors", "settings", "compat", "patching", "bootstrap", "__version__"},
    "bootstrap": {"errors", "settings", "compat", "patching", "seams", "report", "hostvmm"},
    "__init__": {"bootstrap", "report"},
    "__main__": {"errors", "settings", "compat", "report", "install", "status", "__version__"},
    "sitecustomize": {"__init__"},
}
"""First folder or module below the package -> what of the package it may import. Its own folder is always allowed."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "vllm": ("compat", "seams", "hostvmm"),
    "kvcached": ("compat", "seams", "hostvmm"),
    "torch": ("compat", "seams", "worker", "hostvmm"),
    "nixl": ("transport/agent.py",),
    "zmq": ("compat",),
    "starlette": ("proxy",),
    "httpx": ("proxy",),
    "uvicorn": ("proxy",),
}
"""Foreign package -> folders or files below the package that may import it."""


def violations(package: Path) -> list[str]:
    """One line for each import that the tables above do not allow, in the package at ``package``."""
    return [
        f"{file.relative_to(package)}:{line} imports {name}"
        for file in sorted(package.rglob("*.py"))
        for line, name in imports(file, package)
        if not _allowed(file.relative_to(package), name)
    ]


def imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything ``file`` imports, however it does it."""
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
    here = file.parts[0].removesuffix(".py")
    top, *rest = name.split(".")
    if top in ONLY_IN:
        return any(file.as_posix() == place or here == place for place in ONLY_IN[top])
    if top != PACKAGE:
        return True
    if not rest:
        return "__init__" in MAY_IMPORT[here]
    dotted = ".".join(rest)
    return rest[0] == here or any(dotted == m or dotted.startswith(m + ".") for m in MAY_IMPORT[here])
