# SPDX-License-Identifier: Apache-2.0
"""Slots are granted for tokens that are ready on every rank of prefill, and for no others."""

from __future__ import annotations

from support.worker_fakes import HeldCopies

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.worker.decode.staging_window import StagingWindow
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.staging.slots import Slots
from kvcached_nixl.worker.staging.staging import Held, Staging


def window(staging: Staging) -> tuple[StagingWindow, list[Held]]:
    """A window of 16 tokens in blocks of 4, that one rank of prefill writes."""
    blocks = KernelBlocks(tuple(map(KernelBlock, (9, 8, 7, 6))))
    made, granted = StagingWindow(staging, [blocks], 16, 4, 1, "remote"), list[Held]()
    made.join(0, granted.append, lambda failed: None)
    return made, granted


def test_a_request_for_slots_that_begins_elsewhere_is_ignored() -> None:
    made, granted = window(Staging(Slots(64, 8), HeldCopies(), (4,)))
    made.ready(0, 4, 8)
    assert granted == []
    made.ready(0, 0, 8)
    made.ready(0, 0, 12)
    assert [(held.first_token, held.end_token) for held in granted] == [(0, 8)]
    made.ready(0, 8, 16)
    assert [(held.first_token, held.end_token) for held in granted] == [(0, 8), (8, 16)]


def test_nothing_is_granted_after_the_end() -> None:
    made, granted = window(Staging(Slots(64, 8), HeldCopies(), (4,)))
    made.stop()
    made.ready(0, 0, 8)
    assert granted == []
