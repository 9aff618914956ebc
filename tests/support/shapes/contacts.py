# SPDX-License-Identifier: Apache-2.0
"""What kvcached touches in a vLLM that is not installed, compared with `vllm.patches.windows`, as it is at start."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from experiments.common.vllm_source import Source
from kvcached_nixl.vllm.patches.windows import CONTACTS, Contact

__all__ = ["differing"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def differing(source: Source, contacts: Iterable[Contact] = CONTACTS) -> list[str]:
    """The contacts that are not there, or have other parameters, each with what was found."""
    return [f"{contact}: {found}" for contact in contacts if (found := _difference(source, contact))]


def _difference(source: Source, contact: Contact) -> str:
    node = _find(source, contact.module, contact.qualname.split("."))
    if node is None:
        return "not there"
    of = node.args
    names = [one.arg for one in (*of.posonlyargs, *of.args)]
    names += [of.vararg.arg] if of.vararg else []
    names += [one.arg for one in of.kwonlyargs] + ([of.kwarg.arg] if of.kwarg else [])
    return "" if tuple(names) in contact.accepted else f"parameters ({', '.join(names)})"


def _find(source: Source, module: str, names: list[str]) -> _Function | None:
    """The definition; a name that a module imports is looked for where it comes from."""
    paths = [f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    path = next((path for path in paths if path in source.paths), None)
    if path is None:
        return None
    body: list[ast.stmt] = ast.parse(source.read(path)).body
    for place, name in enumerate(names):
        found = next((one for one in body if isinstance(one, (ast.ClassDef, _Function)) and one.name == name), None)
        if found is None and not place:
            origin = next((one for one in body if isinstance(one, ast.ImportFrom) and _imports(one, name)), None)
            return None if origin is None else _find(source, _module_of(origin, module), names)
        if isinstance(found, _Function):
            return found
        body = found.body if found is not None else []
    return None


def _imports(node: ast.ImportFrom, name: str) -> bool:
    return any((one.asname or one.name) == name for one in node.names)


def _module_of(node: ast.ImportFrom, module: str) -> str:
    package = module.split(".")[: -node.level] if node.level else []
    return ".".join([*package, *filter(None, [node.module])])
