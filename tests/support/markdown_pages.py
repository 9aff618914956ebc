# SPDX-License-Identifier: Apache-2.0
"""Reads the Markdown of the documentation: headings, links, rows of tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)( {4}.*\n)+")
"""Code, but for what follows the title of an admonition at once."""
_CODE = re.compile(r"(`+)(.+?)\1")
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$", re.MULTILINE)


def headings(text: str) -> list[tuple[int, str]]:
    """Returns (level, text) of each heading, in order. Code spans lose their backticks."""
    found = _HEADING.findall(_FENCE.sub("", text))
    return [(len(marks), _LINK.sub(r"\1", title).replace("`", "")) for marks, title in found]


def section(text: str, title: str) -> str:
    """Returns the text below the heading ``title``, up to the next one of its level or above; "" without a heading."""
    text = _FENCE.sub("", text)
    places = list(_HEADING.finditer(text))
    for number, one in enumerate(places):
        if one[2].replace("`", "") == title:
            later = (other.start() for other in places[number + 1 :] if len(other[1]) <= len(one[1]))
            return text[one.end() : next(later, len(text))]
    return ""


def anchors(text: str) -> set[str]:
    """Returns the anchors of headings that are the same on the site and on a repository's web page."""
    titles = [title for _, title in headings(text)]
    named = set(re.findall(r'<a id="([^"]+)"></a>', text))
    return named | _numbered(map(_of_site, titles), "_") & _numbered(map(_of_repository, titles), "-")


def links(text: str) -> list[str]:
    """Returns the targets of links and images that stay in the repository. Those in code are none."""
    for code in (_COMMENT, _FENCE, _INDENTED, _CODE):
        text = code.sub("", text)
    return [target for _, target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def broken_links(page: Path, root: Path) -> list[str]:
    """Returns the links of a page whose file or anchor does not exist.

    Args:
        root: links that leave this folder are broken as well.
    """
    found = []
    for target in links(page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.is_relative_to(root.resolve()):
            found.append(f"{target}: leads out of {root.name}")
        elif not file.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(file.read_text()):
            found.append(f"{target}: no such heading")
    return found


def rows(text: str) -> dict[str, list[str]]:
    """Returns name -> the row's cells, for every table. Each code span in the first cell is a name, else its text."""
    found: dict[str, list[str]] = {}
    for line in _FENCE.sub("", text).splitlines():
        if line.startswith("|") and not _is_ruler(line):
            cells = cells_of(line)
            for name in re.findall(r"`([^`]+)`", cells[0]) or [cells[0]]:
                found.setdefault(name, cells)
    return found


def cells_of(line: str) -> list[str]:
    """Returns the cells of a table's row."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _is_ruler(line: str) -> bool:
    return re.fullmatch(r"[\s|:-]+", line) is not None


def _of_site(title: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _of_repository(title: str) -> str:
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.strip().lower()))


def _numbered(names: Iterator[str], separator: str) -> set[str]:
    """Numbers the second and later anchors of a name."""
    count: Counter[str] = Counter()
    found = set()
    for name in names:
        found.add(f"{name}{separator}{count[name]}" if count[name] else name)
        count[name] += 1
    return found
