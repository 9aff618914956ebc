# SPDX-License-Identifier: Apache-2.0
"""Make an engine's unique name from the requested one."""

from __future__ import annotations

import re

__all__ = ["LONGEST", "is_name", "own_name"]

LONGEST = 64
"""Most characters in a name: kvcached's own limit. The path of a socket is limited to 108 (``unix(7)``)."""

_OTHERS = re.compile(r"[^A-Za-z0-9_-]")
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{LONGEST}}}")


def own_name(wish: str, rank: int | None, drawn: str) -> str:
    """``WISH-DRAWN``, or ``WISH-dpRANK-DRAWN`` for a data-parallel rank. A long ``wish`` is cut at its end."""
    suffix = f"-{drawn}" if rank is None else f"-dp{rank}-{drawn}"
    return f"{_OTHERS.sub('-', wish)[: LONGEST - len(suffix)]}{suffix}"


def is_name(text: str) -> bool:
    """Whether ``text`` is a valid name: none of its characters can lead to another folder."""
    return _NAME.fullmatch(text) is not None
