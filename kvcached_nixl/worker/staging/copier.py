# SPDX-License-Identifier: Apache-2.0
"""Copies KV between blocks and slots, on its own thread. One per worker that stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvcached_nixl.worker.background import Background, Work
from kvcached_nixl.worker.staging.slab import Slab

__all__ = ["Copier", "Copy"]


@dataclass(frozen=True, eq=False)
class Copy:
    """Attributes:
    is_gather: copy blocks of the cache into blocks of the slab; else back.
    blocks, staged: kernel blocks of the cache, and of the slab.
    ended: called once by `Copier.turn`, with the error text, or "".
    """

    is_gather: bool
    blocks: Sequence[int]
    staged: Sequence[int]
    ended: Callable[[str], None]


class Copier:
    """See the module.

    Args:
        device: where the KV cache is.
        wake: called on the copier's thread when a copy has ended; does not block.
    """

    def __init__(self, slab: Slab, device: torch.device, wake: Callable[[], None]) -> None:
        self._slab = slab
        self._background = Background("kvcached-nixl-copies", device, wake)

    def __len__(self) -> int:
        """Submitted copies whose ``ended`` was not called yet."""
        return len(self._background)

    def submit(self, copy: Copy) -> None:
        """Queue a copy behind those submitted before. Called on the transfer thread, as `turn` is."""
        what = f"a copy of {len(copy.blocks)} blocks"
        self._background.submit(Work(what, partial(self._do, copy), lambda _, failed: copy.ended(failed)))

    def turn(self) -> None:
        """Call ``ended`` of copies that have ended; raises as `Background.turn`."""
        self._background.turn()

    def close(self) -> None:
        """Stop the thread after all submitted copies."""
        self._background.close()

    def _do(self, copy: Copy) -> None:
        if copy.is_gather:
            self._slab.gather(copy.blocks, copy.staged)
        else:
            self._slab.scatter(copy.staged, copy.blocks)
