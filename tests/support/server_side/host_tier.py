# SPDX-License-Identifier: Apache-2.0
"""An ``OffloadingSpec`` that copies blocks between host memories, for tests of vLLM's OffloadingConnector beside
NixlConnector where there is no GPU. ``kv_connector_extra_config`` has ``host_blocks``, ``delay_seconds`` and a
``folder`` with a file for each direction, in which a byte stands for a block that was copied.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager


class HostTierSpec(OffloadingSpec):  # type: ignore[misc, unused-ignore]
    """As many blocks as ``host_blocks`` says, each copied ``delay_seconds`` after vLLM has ordered it."""

    def get_manager(self) -> OffloadingManager:
        return HostTierManager(int(self.extra_config["host_blocks"]))

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        tensors = [one.tensor for one in kv_caches.tensors]
        return HostTierWorker(tensors, self.extra_config)


class HostTierManager(CPUOffloadingManager):  # type: ignore[misc, unused-ignore]
    """vLLM's own, without the metrics that its own spec declares."""

    def get_stats(self) -> None:
        """None of them."""


class HostTierWorker(OffloadingWorker):  # type: ignore[misc, unused-ignore]
    """Copies late, and only when it is asked.

    Attributes:
        ordered: by the job's number, what is to be copied.
        is_stuck: nothing is copied, unless vLLM waits for it.
        spoils: what is loaded are other bytes.
    """

    def __init__(self, tensors: list[torch.Tensor], extra: Mapping[str, Any]) -> None:
        self._device = tensors
        self._host = [torch.zeros(int(extra["host_blocks"]), one.shape[1], dtype=one.dtype) for one in tensors]
        self._delay_seconds = float(extra.get("delay_seconds", 0))
        self._folder = extra.get("folder")
        self.ordered: dict[int, tuple[float, Any, Any, bool]] = {}
        self._ended: list[TransferResult] = []
        self.is_stuck = self.spoils = False

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._order(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._order(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        now = time.monotonic()
        due = [job_id for job_id, (at, *_) in self.ordered.items() if at <= now and not self.is_stuck]
        self.wait(set(due))
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self.ordered.keys()):
            _, blocks, kept, is_store = self.ordered.pop(job_id)
            for device, host in zip(self._device, self._host, strict=True):
                for block_id, place in zip(blocks, kept, strict=True):
                    source, target = (device[block_id], host[place]) if is_store else (host[place], device[block_id])
                    target.copy_(source if is_store or not self.spoils else source + 1)
            if self._folder is not None:
                with (Path(self._folder) / ("stored" if is_store else "loaded")).open("ab") as counted:
                    counted.write(bytes(len(blocks)))
            num_bytes = len(blocks) * sum(one.shape[1] for one in self._device)
            self._ended.append(TransferResult(job_id, True, num_bytes, 0.001))

    def _order(self, job_id: int, device: Any, host: Any, *, is_store: bool) -> bool:
        at = time.monotonic() + self._delay_seconds
        self.ordered[job_id] = (at, device.block_ids.tolist(), host.block_ids.tolist(), is_store)
        return True
