# SPDX-License-Identifier: Apache-2.0
"""The KV probe's digests depend on bytes and not on layouts, and its corruptions do corrupt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.script_loading import load_script

torch: Any = pytest.importorskip("torch", reason="the KV probe runs inside vLLM's worker, next to torch")

HEADS, TOKENS, DIM, BLOCKS = 2, 4, 3, 6
SOURCE = Path(__file__).parents[3] / "experiments" / "common" / "server_side" / "kv_probe.py"


@pytest.fixture(scope="module")
def probe() -> Iterator[ModuleType]:
    """The module, loaded as the servers load it: on its own."""
    sys.path.insert(0, str(SOURCE.parent))
    try:
        module = load_script("kv_probe_under_test", SOURCE)
        yield module
    finally:
        sys.path.remove(str(SOURCE.parent))
        sys.modules.pop("kv_probe_under_test")
        sys.modules.pop("kv_blocks", None)


def blocks() -> ModuleType:
    """The module that the probe reads blocks with."""
    return sys.modules["kv_blocks"]


@pytest.fixture
def logical() -> Any:
    """KV in logical order: (block, K or V, head, token, element)."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BLOCKS, 2, HEADS, TOKENS, DIM, generator=generator).to(torch.bfloat16)


def layouts(logical: Any) -> dict[str, Any]:
    """Return the same KV in every layout the probe reads on a CPU."""
    apart = torch.empty(2, BLOCKS, TOKENS, HEADS, DIM, dtype=logical.dtype).transpose(0, 1)
    block_major = torch.empty(BLOCKS, 5, 2, TOKENS, HEADS, DIM, dtype=logical.dtype)[:, 3]
    for cache in (apart, block_major):
        cache.copy_(logical.transpose(2, 3))
    return {
        "K and V apart": apart,
        "a layer among others in a block": block_major,
        "K and V in the block": logical.transpose(2, 3).contiguous(),
        "packed": logical.transpose(1, 2).contiguous().view(BLOCKS, HEADS, TOKENS, 2 * DIM),
    }


def test_the_digest_does_not_depend_on_the_layout(probe: ModuleType, logical: Any) -> None:
    """One block, one digest, however it lies in memory."""
    for block in range(BLOCKS):
        digests = {name: blocks().block_digest([cache], block) for name, cache in layouts(logical).items()}
        assert len(set(digests.values())) == 1, digests


def test_every_byte_of_a_block_changes_its_digest_and_no_other(probe: ModuleType, logical: Any) -> None:
    """One element moves the digest of its block alone."""
    for name, cache in layouts(logical).items():
        before = [blocks().block_digest([cache], block) for block in range(BLOCKS)]
        blocks().block_view(cache, 2)[1, HEADS - 1, TOKENS - 1, DIM - 1] += 1
        after = [blocks().block_digest([cache], block) for block in range(BLOCKS)]
        assert [ours != theirs for ours, theirs in zip(before, after, strict=True)] == [
            block == 2 for block in range(BLOCKS)
        ], name


class FakeConnector:
    """A connector that 'transfers' by copying from ``source`` when the request finishes."""

    def __init__(self, cache: Any, source: Any, mode: str = "pull") -> None:
        self.cache, self.source, self.moved = cache, source, {}
        self.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"transfer_mode": mode})
        self.finished_sending: set[str] = set()
        self._connector_metadata: Any = None

    def start_load_kv(self, forward_context: None) -> None:
        self.moved.update(self._connector_metadata.reqs_to_recv)

    def get_finished(self) -> tuple[set[str], set[str]]:
        for meta in filter(None, self.moved.values()):
            for ours, theirs in zip(meta.local_block_ids[0], meta.remote.block_ids[0], strict=True):
                self.cache[ours] = self.source[theirs]
        finished, self.moved = set(self.moved), {}
        return self.finished_sending, finished

    def transfer(self, handle: object) -> str:
        return "PROC"


def recorder_of(probe: ModuleType, connector: FakeConnector) -> Any:
    call = (connector.start_load_kv, connector.get_finished, connector.transfer)
    return probe.Recorder([[connector.cache]], connector, *call)


def begin(recorder: Any, reqs_to_recv: dict[str, Any], **more: Any) -> None:
    """Start a step with this metadata."""
    recorder.connector._connector_metadata = SimpleNamespace(reqs_to_recv=reqs_to_recv, **more)
    recorder.begin(None)


def received(probe: ModuleType, logical: Any, plan: tuple[str, int] | None) -> tuple[dict[str, Any], list[str]]:
    """Receive three blocks under ``plan``; return the record and the digests the sender has."""
    source = logical.transpose(2, 3).contiguous()
    cache = torch.ones_like(source)
    recorder = recorder_of(probe, FakeConnector(cache, source))
    recorder.plan = plan and (*plan, probe.ALL_GROUPS)
    meta = SimpleNamespace(
        local_block_ids=([4, 1, 2],), remote=SimpleNamespace(block_ids=[[0, 3, 5]], request_id="on p")
    )
    begin(recorder, {"on d": meta})
    assert recorder.finish() == (set(), {"on d"})
    (record,) = recorder.records
    return record, [blocks().block_digest([source], block) for block in (0, 3, 5)]


def test_what_arrives_is_recorded_as_it_was_sent(probe: ModuleType, logical: Any) -> None:
    """Without a corruption the received digests are the sender's, under the ids of both sides."""
    record, sent = received(probe, logical, None)
    assert record["digests"] == [sent]
    assert record["local_block_ids"] == [[4, 1, 2]]
    assert record["remote_block_ids"] == [[0, 3, 5]]
    assert record["transfer"] == "on p"
    assert record["planted"] is None


@pytest.mark.parametrize(
    ("plan", "changed"),
    [
        (("swap_two_blocks", 1), [False, True, True]),
        (("shift_v_by_a_head", 0), [True, True, True]),
        (("send_k_for_v", 0), [True, True, True]),
        (("zero_a_block", 1), [False, True, False]),
        (("drop_tail_block", 0), [False, False, True]),
    ],
)
def test_each_corruption_changes_the_blocks_it_names(
    probe: ModuleType, logical: Any, plan: tuple[str, int], changed: list[bool]
) -> None:
    """A corruption that left a block as it was could not be caught; one that hit others would prove too little."""
    record, sent = received(probe, logical, plan)
    assert record["planted"] == plan[0]
    assert [ours != theirs for ours, theirs in zip(record["digests"][0], sent, strict=True)] == changed
