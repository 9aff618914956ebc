# SPDX-License-Identifier: Apache-2.0
"""Other connectors beside NixlConnector (``MultiConnector``), and why vLLM's OffloadingConnector is refused there.

When a test here fails with a new vLLM, read that connector again: it may have become safe, or there is a new one.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node
from support.engine_node import PREFILL_ID, USABLE, Node, nodes
from support.handover_node import RESERVED
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.vllm.adapter.neighbours import JUDGED

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
}
SHELF = {"kv_connector": "Shelf", "kv_connector_module_path": "support.shelf_connector", "kv_role": "kv_both"}


def test_every_connector_of_vllm_was_judged() -> None:
    """A new one is refused until it was read."""
    assert set(vars(KVConnectorFactory)["_registry"]) <= JUDGED


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("children", [[NIXL, OFFLOADING], [OFFLOADING, SHELF, NIXL]], ids=["after", "before"])
def test_the_offloading_connector_beside_nixl_s_is_refused(
    children: list[dict[str, Any]], role: KVConnectorRole
) -> None:
    """In each process, in both orders, before either is constructed."""
    with pytest.raises(SettingsError) as refusal:
        KVConnectorFactory.create_connector(_config(children), role, None)
    assert "after vLLM has freed it" in refusal.value.consequence


RENAMED = {"kv_connector": "Renamed", "kv_connector_module_path": "support.odd_connectors", "kv_role": "kv_both"}


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_beside_nixl_s_under_another_name_too(role: KVConnectorRole) -> None:
    with pytest.raises(SettingsError, match="after vLLM has freed it"):
        KVConnectorFactory.create_connector(_config([RENAMED, OFFLOADING]), role, None)


def test_also_if_the_configuration_does_not_name_it() -> None:
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="Both",
            kv_role="kv_both",
            kv_connector_module_path="support.odd_connectors",
        ),
        cache_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )
    with pytest.raises(SettingsError, match="after vLLM has freed it"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, None)


@dataclasses.dataclass(eq=False)
class Recorder:
    """In place of the copies between a GPU and the host, which vLLM's CPU build does not have. None of them ends.

    Attributes:
        begun: the blocks of each store that was begun.
    """

    begun: list[list[int]] = dataclasses.field(default_factory=list)

    def submit_store(self, job_id: int, source: Any, destination: Any) -> bool:
        self.begun.append([int(block_id) for block_id in source.block_ids])
        return True

    def get_finished(self) -> list[Any]:
        return []

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Nothing was begun."""


class OffloadingNode(Node):
    """Its connector is OffloadingConnector alone, as without this package."""

    connector: ClassVar[str] = "OffloadingConnector"

    @property
    def connector_scheduler(self) -> Any:
        # It has no side channel that the fixture could stop.
        return SimpleNamespace(_stop_event=threading.Event())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(CPUOffloadingSpec, "get_worker", lambda spec, caches: made)
    return made


@pytest.fixture
def offloading(tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., OffloadingNode]]:
    with nodes(OffloadingNode, tmp_path, log) as make:
        # Memory as vLLM itself allocates it.
        own = dataclasses.replace(RESERVED, reserved_blocks=RESERVED.num_blocks)
        yield lambda: make(0, own, listening=False, **OFFLOADING["kv_connector_extra_config"])


def test_it_begins_to_copy_blocks_of_a_request_that_was_preempted(
    recorder: Recorder, offloading: Callable[..., OffloadingNode]
) -> None:
    """The worker hears of it with the next step. kvcached unmaps the pages at once."""
    node = offloading()
    node.add(PREFILL_ID, None)
    node.step()
    blocks = node.blocks(PREFILL_ID)
    node.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert node.free_blocks == USABLE and not recorder.begun
    node.step()
    assert recorder.begun and set(recorder.begun[0]) <= set(blocks)


def test_it_begins_to_copy_blocks_of_a_request_that_has_finished(
    recorder: Recorder, offloading: Callable[..., OffloadingNode]
) -> None:
    """They are free: vLLM waits for the copy only when it allocates them again."""
    node = offloading()
    node.add(PREFILL_ID, None, max_tokens=1)
    node.step()
    assert node.ended[PREFILL_ID] == "length"
    assert node.free_blocks == USABLE and not recorder.begun
    node.step()
    node.step()
    assert recorder.begun and node.free_blocks == USABLE


def _config(children: list[dict[str, Any]]) -> Any:
    extra = {"connectors": children}
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    )
