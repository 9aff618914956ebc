# SPDX-License-Identifier: Apache-2.0
"""How often tests name private attributes of other objects: what they name cannot be renamed without them."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MOST_ACCESSES = 115
"""What is left: vLLM's own names that are pinned, planted faults, and one access for many tests in
`support.internals`. Lower it when there are fewer."""


def accesses(source: str) -> list[str]:
    """Returns each ``thing._name`` in a module, except those on ``self`` and ``cls``."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_an_access_to_a_private_attribute_is_found() -> None:
    """Also one below another one, but no special method, and nothing of the object itself."""
    source = "self._own\ncls._own\nthing.__dict__\nthing.public\nself.thing._first._second = 1"
    assert accesses(source) == ["5: self.thing._first._second", "5: self.thing._first"]


def test_tests_name_few_private_attributes() -> None:
    """A test says what it means with a public name, through behaviour, or with a function of `support.internals`."""
    found = {str(path.relative_to(TESTS)): accesses(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    counts = {path: len(lines) for path, lines in found.items() if lines}
    assert sum(counts.values()) <= MOST_ACCESSES, counts
