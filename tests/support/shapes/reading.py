# SPDX-License-Identifier: Apache-2.0
"""Python files read as text, with ``ast``: which class a name means, what its body holds, who calls a method.

Definitions under a condition count as present. Of two definitions of a name the later one counts.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from experiments.common.vllm_python import Source

__all__ = ["Body", "Call", "Reader"]

_KINDS = ("classmethod", "staticmethod", "property")
_REPLACES = frozenset({"overload", "setter", "deleter"})
"""Decorators of definitions that are not the method itself."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Body:
    """The contents of a module or of the body of one class.

    Attributes:
        bases: the bases of a class that vLLM defines, as "module:qualname".
        methods: name -> kind and parameters, "classmethod(cls, role, size=...)". "object" is anything but a function.
        names: names that it stores on ``self``, defines or binds.
    """

    bases: tuple[str, ...] = ()
    methods: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Call:
    """A call ``receiver.attribute(...)``. ``receiver``: last part of a dotted name; for a call, its function's name;
    empty for ``attribute(...)``. ``arguments``: constants' values, then variables' names."""

    receiver: str
    attribute: str
    module: str
    qualname: str
    arguments: tuple[object, ...]


class Reader:
    """Answers questions about a source. Parses each file once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._tree = functools.cache(self._parsed)
        self._bindings = functools.cache(self._bindings_of)
        self.body = functools.cache(self._body_of)

    def has(self, module: str) -> bool:
        return self._path(module) is not None

    def _path(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.source.paths), None)

    def _parsed(self, module: str) -> ast.Module:
        path = self._path(module)
        return ast.parse(self.source.read(path)) if path else ast.Module([], [])

    def _bindings_of(self, module: str) -> dict[str, ast.stmt]:
        return {name: node for node in _statements(self._tree(module).body) for name in _bound(node)}

    def resolve(self, module: str, qualname: str) -> str | None:
        """Returns "module:qualname" of the definition of the class or function that a name means; None if it is not
        vLLM's."""
        first, *rest = qualname.split(".")
        seen: set[tuple[str, str]] = set()
        while (module, first) not in seen:
            seen.add((module, first))
            node = self._bindings(module).get(first)
            if isinstance(node, ast.ClassDef):
                found = ".".join((first, *rest))
                return f"{module}:{found}" if self._class(module, found) is not None else None
            if isinstance(node, Function) and not rest:
                return f"{module}:{first}"
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                first = node.value.id
            elif isinstance(node, ast.ImportFrom):
                origin = _origin(node, module, self._path(module) or "")
                name = next(one.name for one in node.names if (one.asname or one.name) == first)
                if self.has(f"{origin}.{name}") and rest:
                    module, (first, *rest) = f"{origin}.{name}", rest
                else:
                    module, first = origin, name
        return None

    def _class(self, module: str, qualname: str) -> ast.ClassDef | None:
        body = self._tree(module).body
        found: ast.ClassDef | None = None
        for part in qualname.split("."):
            classes = [node for node in _statements(body) if isinstance(node, ast.ClassDef) and node.name == part]
            if not classes:
                return None
            found = classes[-1]
            body = found.body
        return found

    def _body_of(self, cls: str) -> Body:
        """Returns the body of the class "module:qualname", or of the module if the qualname is empty."""
        module, _, qualname = cls.partition(":")
        node = self._class(module, qualname) if qualname else self._tree(module)
        if node is None:
            raise ValueError(f"there is no class {cls}")
        body = Body()
        if isinstance(node, ast.ClassDef):
            written = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            named = [self.resolve(module, ast.unparse(base)) for base in written]
            body.bases = tuple(base for base in named if base is not None)
        for one in _statements(node.body):
            for name in _bound(one):
                body.names.add(name)
                _define(body, name, one, "method" if qualname else "function")
        body.names |= {
            one.attr
            for one in (ast.walk(node) if qualname else ())
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and _name(one.value) == "self"
        }
        return body

    def lineage(self, cls: str) -> tuple[str, ...]:
        """Returns the class and its bases in vLLM, depth first. Python's order differs only if two share a base."""
        found = [cls, *(one for base in self.body(cls).bases for one in self.lineage(base))]
        return tuple(dict.fromkeys(found))

    def calls(self, attributes: Iterable[str], folders: tuple[str, ...]) -> Iterator[Call]:
        """Yields every call and every other use of a method with one of these names, in files below these folders."""
        wanted = frozenset(attributes)
        for path in sorted(self.source.paths):
            if not path.startswith(folders):
                continue
            text = self.source.read(path)
            if any(name in text for name in wanted):
                module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                yield from _calls(ast.parse(text), module, (), wanted)


def _calls(node: ast.AST, module: str, inside: tuple[str, ...], wanted: frozenset[str]) -> Iterator[Call]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        inside = (*inside, node.name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in wanted:
        arguments = tuple(one.value for one in node.args if isinstance(one, ast.Constant))
        arguments += tuple(one.id for one in node.args if isinstance(one, ast.Name))
        yield Call(_name(node.func.value), node.func.attr, module, ".".join(inside), arguments)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in wanted:
        yield Call("", node.func.id, module, ".".join(inside), ())
    elif isinstance(node, ast.Attribute) and node.attr in wanted:
        # Properties are read without a call, and methods are passed as arguments.
        yield Call(_name(node.value), node.attr, module, ".".join(inside), ())
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, module, inside, wanted)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a body, including those nested in if, try and with."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for one in getattr(node, part, ()):
                    yield from _statements(one.body if isinstance(one, ast.ExceptHandler) else [one])
        else:
            yield node


def _bound(node: ast.stmt) -> list[str]:
    """Returns the names that a statement binds."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(one.asname or one.name).partition(".")[0] for one in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _define(body: Body, name: str, node: ast.stmt, plain: str) -> None:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)):
        return
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        body.methods[name] = "object()"
        return
    decorators = {_name(one) for one in node.decorator_list}
    if decorators & _REPLACES:
        return
    kind = next((one for one in _KINDS if one in decorators), "object" if "cached_property" in decorators else plain)
    body.methods[name] = f"{kind}({_parameters(node)})"


def _parameters(node: Function) -> str:
    """Returns the parameters without annotations, with ``...`` for every default."""
    given = node.args
    for one in ast.walk(given):
        if isinstance(one, ast.arg):
            one.annotation = None
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [None if one is None else ast.Constant(...) for one in given.kw_defaults]
    return ast.unparse(given)


def _origin(node: ast.ImportFrom, module: str, path: str) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".") if path.endswith("/__init__.py") else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])
