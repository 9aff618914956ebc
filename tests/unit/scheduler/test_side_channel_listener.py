# SPDX-License-Identifier: Apache-2.0
"""side_channel_listener.py: each rank's handshake with its engine's incarnation, as vLLM collects them."""

from __future__ import annotations

from types import SimpleNamespace

from kvcached_nixl.scheduler.side_channel import answers_of
from kvcached_nixl.wire.handshake import Answer, read_answer

START = "0123456789abcdef"


def test_each_rank_is_answered_for_with_the_engines_start() -> None:
    offered = {
        (0, rank): SimpleNamespace(compatibility_hash=f"tag {rank}", agent_metadata_bytes=b"rank %d" % rank)
        for rank in range(3)
    }
    found = answers_of(offered, START)
    assert sorted(found) == [0, 1, 2]
    for rank, (compatibility, metadata) in found.items():
        assert compatibility == f"tag {rank}"
        assert read_answer(metadata) == Answer(START, b"rank %d" % rank)


def test_an_engine_without_ranks_answers_for_none() -> None:
    assert answers_of({}, START) == {}
