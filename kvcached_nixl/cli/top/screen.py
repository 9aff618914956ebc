# SPDX-License-Identifier: Apache-2.0
"""Lines of text from the fleet. Columns have fixed widths, so that nothing jumps; those of least use are left out."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

from rich.text import Text

from kvcached_nixl.cli.top.attention import Note, notes
from kvcached_nixl.cli.top.cells import NOTHING, Cell, cell
from kvcached_nixl.cli.top.columns import ENGINE_COLUMNS, ROUTER_COLUMNS, Column, Figure
from kvcached_nixl.cli.top.fleet import Engine, Fleet
from kvcached_nixl.cli.top.look import Span

__all__ = ["Frame", "frame"]

LEAST_NAME, MOST_NAME, ROLE_WIDTH, FITS_WIDTH = 14, 36, 7, 7
NARROW_NAME = 22
"""Longer names are shortened where a column would have to be left out for them."""
NEARLY_FULL = 0.95
MARK, BAD, DIM, HEAD, TITLE = "!", "bold red", "dim", "bold", "bold cyan"
_TEXTS = (Figure.BAR, Figure.TOKENS, Figure.BY_LABEL, Figure.RATE_BY_LABEL, Figure.COUNT_BY_LABEL, Figure.MEAN_BY_LABEL)


class Frame(NamedTuple):
    """What is on the screen.

    Attributes:
        head: summary, the routers' table, and the titles of the engines' table.
        rows: one line per engine.
        marked: indexes of the rows that need attention.
        notes: what needs attention, in words.
    """

    head: list[Text]
    rows: list[Text]
    marked: list[int]
    notes: list[Text]


def frame(fleet: Fleet, width: int, *, is_ascii: bool = False) -> Frame:
    """Draw the fleet, at most ``width`` characters wide.

    Args:
        is_ascii: the output has no characters for bars.
    """
    width = max(1, width)
    told = notes(fleet)
    names = {note.name for note in told}
    engines, routers = fleet.engines, fleet.routers
    marked = [place for place, one in enumerate(engines) if not names.isdisjoint((one.name, one.server.name))]
    places = frozenset(marked)
    head = [_summary(fleet, engines, len(names), width)]
    if routers:
        table = _Table("router", ROUTER_COLUMNS, [one.span for one in routers], [one.name for one in routers], width)
        head += [Text(""), table.titles()]
        for one in routers:
            error = f"does not answer: {one.error}" if one.error else ""
            head.append(table.row(one.name, "", one.span, one.name in names, error, is_ascii=is_ascii))
    fits = fleet.fits()
    table = _Table("engine", ENGINE_COLUMNS, [one.span for one in engines], [one.name for one in engines], width, fits)
    rows = [
        table.row(one.name, one.server.role, one.span, place in places, _error(one), is_ascii=is_ascii)
        for place, one in enumerate(engines)
    ]
    head += [Text(""), table.titles()] if engines else []
    return Frame(head, rows, marked, [_note(one, width) for one in told])


def _summary(fleet: Fleet, engines: Sequence[Engine], marked: int, width: int) -> Text:
    silent = sum(1 for one in fleet if one.error)
    waited = sum(1 for one in fleet if not one.error and one.span is None)
    up = sum(1 for one in engines if one.span is not None and not one.server.error)
    parts = [_counted(len(fleet.routers), "router")] if fleet.routers else []
    parts += [f"{_counted(up, 'engine')} up"]
    parts += [f"{_counted(silent, 'server')} silent"] if silent else []
    parts += [f"{_counted(waited, 'server')} not heard yet"] if waited else []
    line = Text.assemble((", ".join(parts), HEAD))
    line.append(f"   {MARK} {marked} to look at" if marked else "   nothing to look at", BAD if marked else "")
    return _cut(line, width)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _error(engine: Engine) -> str:
    if engine.server.error:
        return f"does not answer: {engine.server.error}"
    return "" if engine.span is not None else "not heard yet"


def _note(note: Note, width: int) -> Text:
    return _cut(Text.assemble((f"{MARK} ", BAD), (note.name, HEAD), f"  {note.text}"), width)


def _cut(line: Text, width: int) -> Text:
    """The line without what does not fit. All characters are one cell wide."""
    line.rstrip()
    if len(line) > width:
        line.right_crop(len(line) - width + 1)
        line.append("~")
    return line


class _Table:
    def __init__(
        self,
        title: str,
        columns: Sequence[Column],
        spans: Sequence[Span | None],
        names: Sequence[str],
        width: int,
        fits: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        self._title, self._width, self._fits = title, width, fits
        self._roles = ROLE_WIDTH + 1 if fits is not None else 0
        present = {name for span in spans if span is not None for name in span.now.series}
        known = [one for one in columns if present & {*one.samples}]
        self._names = _Names(names)
        longest = self._names.longest
        least = min(max(longest, LEAST_NAME), NARROW_NAME)
        left = width - 2 - least - self._roles
        chosen = []
        for one in sorted(known, key=lambda column: column.rank):
            if one.width + 2 <= left:
                chosen.append(one)
                left -= one.width + 2
        self._shows_fits = bool(fits) and left >= FITS_WIDTH + 2
        left -= (FITS_WIDTH + 2) * self._shows_fits
        self._columns = [one for one in columns if one in chosen]
        self._name_width = max(1, min(max(longest, LEAST_NAME), least + max(0, left), MOST_NAME, width - 2))

    def titles(self) -> Text:
        line = Text("  " + _left(self._title, self._name_width), TITLE)
        if self._roles:
            line.append(" " + _left("role", ROLE_WIDTH))
        if self._shows_fits:
            line.append("  " + _right("fits", FITS_WIDTH))
        for one in self._columns:
            line.append("  " + (_left if one.figure in _TEXTS else _right)(one.title, one.width))
        return _cut(line, self._width)

    def row(self, name: str, role: str, span: Span | None, marked: bool, error: str, *, is_ascii: bool) -> Text:
        line = Text.assemble((f"{MARK} ", BAD) if marked else "  ")
        line.append(self._names.short(name, self._name_width), HEAD if marked else "")
        if self._roles:
            line.append(" " + _left(role or NOTHING, ROLE_WIDTH), DIM if not role else "")
        if error or span is None:
            line.append(f"  {error}", BAD if marked else DIM)
            return _cut(line, self._width)
        if self._shows_fits:
            found = (self._fits or {}).get(name)
            line.append("  " + _right(NOTHING if found is None else f"{found[0]}/{found[1]}", FITS_WIDTH))
        for one in self._columns:
            line.append("  ")
            line.append_text(_drawn(one, cell(one, span), is_ascii=is_ascii))
        return _cut(line, self._width)


def _drawn(column: Column, found: Cell, *, is_ascii: bool) -> Text:
    if column.figure is Figure.BAR and isinstance(found.value, float):
        full, empty = ("#", ".") if is_ascii else ("\u2588", "\u2591")
        filled = min(column.width, round(found.value * column.width))
        return Text(
            full * filled + empty * (column.width - filled), "yellow" if found.value >= NEARLY_FULL else "green"
        )
    align = _left if column.figure in _TEXTS else _right
    is_bad = column.figure is Figure.COUNT and "+" in found.text
    return Text(align(found.text, column.width), BAD if is_bad else DIM if found.text in (NOTHING, "0") else "")


class _Names:
    """Shortens the names of one table: what they have in common goes first, since the rest tells servers apart."""

    def __init__(self, names: Sequence[str]) -> None:
        self.longest = max((len(name) for name in names), default=0)
        self._before = len(commonprefix(list(names)))

    def short(self, name: str, width: int) -> str:
        """The name in exactly so many characters."""
        if len(name) <= width:
            return name.ljust(width)
        first = min(self._before, len(name) - width + 1)
        return _left("~" + name[first:] if first else name, width)


def _left(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: max(0, width - 1)] + "~"


def _right(text: str, width: int) -> str:
    return text.rjust(width) if len(text) <= width else text[: max(0, width - 1)] + "~"
