# SPDX-License-Identifier: Apache-2.0
"""The keyboard of a terminal while the screen is live. The terminal's settings are put back, whatever happens."""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Any

__all__ = ["Key", "Keys"]

_MOST_BYTES = 64


class Key(Enum):
    """What a key asks for."""

    QUIT = "quit"
    UP = "up"
    DOWN = "down"
    PAGE_UP = "page up"
    PAGE_DOWN = "page down"
    FIRST = "first"
    LAST = "last"
    ATTENTION = "attention"


_KEYS = MappingProxyType(
    {
        **{b"q": Key.QUIT, b"Q": Key.QUIT, b"\x03": Key.QUIT, b"\x04": Key.QUIT},
        **{b"k": Key.UP, b"\x1b[A": Key.UP, b"\x1bOA": Key.UP},
        **{b"j": Key.DOWN, b"\x1b[B": Key.DOWN, b"\x1bOB": Key.DOWN},
        **{b"b": Key.PAGE_UP, b"\x1b[5~": Key.PAGE_UP, b" ": Key.PAGE_DOWN, b"\x1b[6~": Key.PAGE_DOWN},
        **{b"g": Key.FIRST, b"\x1b[H": Key.FIRST, b"\x1b[1~": Key.FIRST, b"\x1bOH": Key.FIRST},
        **{b"G": Key.LAST, b"\x1b[F": Key.LAST, b"\x1b[4~": Key.LAST, b"\x1bOF": Key.LAST},
        b"!": Key.ATTENTION,
    }
)


def keys_of(typed: bytes) -> list[Key]:
    """The keys in what a terminal has sent; unknown ones are left out."""
    found = []
    while typed:
        known = [one for one in _KEYS if typed.startswith(one)]
        found += [_KEYS[one] for one in known]
        typed = typed[len(known[0]) if known else 1 :]
    return found


class Keys:
    """Calls ``pressed`` for each key while the ``with`` block runs; does nothing where ``fd`` is no terminal.

    Args:
        fd: descriptor of standard input.
    """

    def __init__(self, fd: int, pressed: Callable[[Key], None]) -> None:
        self._fd = fd
        self._pressed = pressed
        self._settings: list[Any] | None = None

    def __enter__(self) -> Keys:
        if os.isatty(self._fd):
            self._settings = termios.tcgetattr(self._fd)
            # Keys come one by one and are not echoed; Ctrl-C stays a signal.
            tty.setcbreak(self._fd)
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        if self._settings is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._settings)
            self._settings = None

    def _read(self) -> None:
        try:
            typed = os.read(self._fd, _MOST_BYTES)
        except OSError:
            typed = b""
        for key in keys_of(typed) if typed else [Key.QUIT]:
            self._pressed(key)
