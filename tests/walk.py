# SPDX-License-Identifier: Apache-2.0
"""Which functions a block id passes in one hand-over: ``python tests/walk.py pull`` or ``push`` prints them.

Runs a hand-over in one process, as the tests of ``flow`` do. Counts the functions of the package that get block ids as
an argument (numbers, arrays, ranges), and after them those that get any other object which holds some, such as an offer
that is to be removed. Needs Python 3.11.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.flow_pair import Pair, kind

from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.messages import KernelBlockRange

PACKAGE = str(Path(__file__).resolve().parents[1] / "kvcached_nixl") + "/"
IDS = range(3000, 3100)
"""No other number of a hand-over is among them."""
DEEPEST = 6


def holds(found: Any, *, any_object: bool, depth: int = 0) -> bool:
    """Whether there is a block id in it: among numbers and ranges, or, if ``any_object``, in fields of objects."""
    if depth > DEEPEST or isinstance(found, (str, bytes, bool, float, type(None))):
        return False
    if isinstance(found, (int, np.integer)):
        return int(found) in IDS
    if isinstance(found, np.ndarray):
        return bool(found.dtype.kind in "iu" and np.isin(found, IDS).any())
    parts: list[Any] = []
    if isinstance(found, (list, tuple, set, frozenset)):
        parts = list(found)
    elif isinstance(found, dict):
        parts = list(found.values())
    elif any_object or isinstance(found, (BlockRange, KernelBlockRange)):
        fields = getattr(found, "__struct_fields__", ())
        if dataclasses.is_dataclass(found):
            fields = tuple(field.name for field in dataclasses.fields(found))
        parts = [getattr(found, name, None) for name in fields]
    return any(holds(part, any_object=any_object, depth=depth + 1) for part in parts)


class Walk:
    """Functions in the order in which they were first called with block ids. ``direct``: with the ids themselves."""

    def __init__(self) -> None:
        self.direct: dict[tuple[str, str], str] = {}
        self.indirect: dict[tuple[str, str], str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        function = code.co_filename.removeprefix(PACKAGE), code.co_qualname
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
        arguments = {name: frame.f_locals.get(name) for name in names if name not in ("self", "cls")}
        for walk, any_object in ((self.direct, False), (self.indirect, True)):
            if function not in self.direct and function not in walk:
                found = next((name for name in arguments if holds(arguments[name], any_object=any_object)), None)
                if found is not None:
                    walk[function] = found


def hand_over(mode: TransferMode, watched: Callable[[FrameType, str, Any], None]) -> None:
    pair = Pair(mode, kind(num_blocks=IDS.stop), kind(num_blocks=IDS.stop))
    for engine in (pair.prefill, pair.decode):
        engine.pool.free = dict.fromkeys(IDS)
    pair.acquaint()
    sys.setprofile(watched)
    if mode.is_push:
        pair.ask_decode(pair.meet(transfer_id="one"))
        pair.ask_prefill(transfer_id="one")
        pair.settle()
    else:
        pair.hand_over()
    sys.setprofile(None)


def main() -> None:
    mode, walk = TransferMode(sys.argv[1]), Walk()
    hand_over(mode, walk)
    for title, found in (("block ids", walk.direct), ("another object that holds block ids", walk.indirect)):
        print(f"{len(found)} functions in {len({file for file, _ in found})} files get {title}:")
        for (file, name), argument in found.items():
            print(f"    {file}: {name}({argument})")


if __name__ == "__main__":
    main()
