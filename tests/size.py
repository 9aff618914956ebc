# SPDX-License-Identifier: Apache-2.0
"""How much there is to read: ``python tests/size.py`` prints lines, modules and functions by folder.

Lines are all lines: code, comments, docstrings, blanks. That no function has a complexity above 10, ruff checks (C901).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.layering import PACKAGE, import_graph

REPOSITORY = Path(__file__).resolve().parents[1]

SMALL_LINES = 60


def modules_of(folder: Path) -> dict[Path, str]:
    """Returns file -> text of each Python module below a folder."""
    return {file: file.read_text() for file in sorted(folder.rglob("*.py")) if ".venvs" not in file.parts}


def function_sizes(text: str) -> Iterator[int]:
    """Yields how many lines each function and method has."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def num_lines(texts: Iterable[str]) -> int:
    return sum(text.count("\n") for text in texts)


def report() -> Iterator[str]:
    """Yields the lines of the report."""
    package = REPOSITORY / PACKAGE
    found = modules_of(package)
    by_folder: dict[str, list[str]] = {}
    for file, text in found.items():
        by_folder.setdefault(file.relative_to(package).parts[0].removesuffix(".py"), []).append(text)
    for folder, texts in by_folder.items():
        if (package / folder).is_dir():
            yield f"{folder:<24} {num_lines(texts):>7} lines {len(texts):>4} modules"
    sizes = [size for text in found.values() for size in function_sizes(text)]
    importers = Counter(name for names in import_graph(package).values() for name in names)
    bodies = [text for file, text in found.items() if file.name != "__init__.py"]
    yield f"{PACKAGE:<24} {num_lines(found.values()):>7} lines {len(found):>4} modules"
    yield f"  of at most {SMALL_LINES} lines: {sum(text.count(chr(10)) <= SMALL_LINES for text in bodies)}"
    yield f"  with one importer: {sum(count == 1 for count in importers.values())}"
    yield f"  functions: {len(sizes)} of {sum(sizes) / len(sizes):.1f} lines on average"
    for folder in ("tests", "experiments"):
        texts = list(modules_of(REPOSITORY / folder).values())
        yield f"{folder:<24} {num_lines(texts):>7} lines {len(texts):>4} modules"
    pages = [page.read_text() for page in sorted((REPOSITORY / "docs").rglob("*.md"))]
    yield f"{'docs':<24} {num_lines(pages):>7} lines {len(pages):>4} pages"
    yield f"{'README.md':<24} {num_lines([(REPOSITORY / 'README.md').read_text()]):>7} lines"


if __name__ == "__main__":
    print(*report(), sep="\n")
