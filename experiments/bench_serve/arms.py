# SPDX-License-Identifier: Apache-2.0
"""The arms: one instance, or prefill and decode on the same cores; with kvcached, and stock."""

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
    """One arm.

    Attributes:
        mode: the transfer mode, or "" for one instance.
        is_behind: vllm-router asks prefill; else decode does.
        is_stock: vLLM's own connector on vLLM's own memory, without kvcached and this package.
    """

    name: str
    mode: str = ""
    is_behind: bool = False
    is_stock: bool = False

    @property
    def tag(self) -> str:
        """Its name for files."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)

    def specs(self, model: Path) -> list[ServerSpec]:
        """Return the configuration of one server, or of prefill and decode."""
        common = ServerSpec(
            name=self.tag,
            model=model,
            dtype="float32",
            max_model_len=2048,
            # As many threads as the two servers of another arm have together.
            environment={"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))},
            forks=True,
        )
        if not self.mode:
            return [common]
        extra = {"num_threads": 0} if self.is_stock else {"num_threads": 0, "transfer_mode": self.mode}
        connector = {
            "kv_connector": "NixlPushConnector" if self.is_stock and self.mode == "push" else "NixlConnector",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
        return [
            ServerSpec(
                name=f"{self.tag}-{side}",
                model=model,
                dtype=common.dtype,
                max_model_len=common.max_model_len,
                environment={} if self.is_stock else KVCACHED,
                kv_transfer={**connector, "kv_role": role(side)},
                forks=True,
            )
            for side in ("prefill", "decode")
        ]


ONE = Arm("one instance")
PULL = Arm("decode asks, pull", "pull")
BEHIND_PULL = Arm("vllm-router, pull", "pull", is_behind=True)
STOCK_PULL = Arm("vllm-router, stock pull", "pull", is_behind=True, is_stock=True)
PUSH = Arm("decode asks, push", "push")
BEHIND_PUSH = Arm("vllm-router, push", "push", is_behind=True)
STOCK_PUSH = Arm("vllm-router, stock push", "push", is_behind=True, is_stock=True)
GROUPS: Mapping[str, tuple[Arm, ...]] = {
    "pull": (ONE, PULL, BEHIND_PULL, STOCK_PULL),
    "push": (PUSH, BEHIND_PUSH, STOCK_PUSH),
}
"""Arms whose servers run at the same time and take turns, by transfer mode."""
PAIRS = ((PULL, STOCK_PULL), (PUSH, STOCK_PUSH))
"""What is compared with targets."""


def groups(modes: tuple[str, ...], *, has_stock_push: bool) -> dict[str, tuple[Arm, ...]]:
    """Return the groups of ``modes``; ``has_stock_push``: whether the vLLM has ``NixlPushConnector``."""
    return {
        mode: tuple(arm for arm in GROUPS[mode] if has_stock_push or not (arm.is_stock and arm.mode == "push"))
        for mode in modes
    }
