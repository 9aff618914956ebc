# SPDX-License-Identifier: Apache-2.0
"""The arms: one instance with all cores, or prefill, decode and the router on the same cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.common.model import ModelShape
from experiments.common.servers import ServerSpec
from experiments.common.transfer_config import role

MODEL = ModelShape(layers=8, kv_heads=8, max_positions=4096)
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 64
KVCACHED: Mapping[str, str] = {
    "ENABLE_KVCACHED": "true",
    "KVCACHED_CONTIGUOUS_LAYOUT": "true",
    "KVCACHED_HOSTVMM_GIB": "2",
}


@dataclass(frozen=True)
class Arm:
    """One arm. ``mode`` is the transfer mode, or "" for one instance that gets its requests directly."""

    name: str
    mode: str = ""

    def specs(self, model: Path) -> list[ServerSpec]:
        """Return the configuration of one server, or of prefill and decode."""
        common = ServerSpec(
            name="one-instance",
            model=model,
            dtype="float32",
            max_model_len=2048,
            # As many threads as the two servers of another arm have together.
            environment={"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))},
            forks=True,
        )
        if not self.mode:
            return [common]
        connector = {
            "kv_connector": "NixlConnector",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"num_threads": 0, "transfer_mode": self.mode},
        }
        return [
            ServerSpec(
                name=f"{self.mode}-{side}",
                model=model,
                dtype=common.dtype,
                max_model_len=common.max_model_len,
                environment=KVCACHED,
                kv_transfer={**connector, "kv_role": role(side)},
                forks=True,
            )
            for side in ("prefill", "decode")
        ]


ONE, PULL, PUSH = Arm("one instance"), Arm("router, pull", "pull"), Arm("router, push", "push")
ARMS = (ONE, PULL, PUSH)
