# SPDX-License-Identifier: Apache-2.0
"""The models, what their KV takes of a device that they share; and the arms: how they share it, on which servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from experiments.common.device import layout, nixl
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, ServerSpec, tag_of

MAX_MODEL_LEN = 1792
BLOCK_SIZE = 32
MODELS: Mapping[str, ModelShape] = {
    name: ModelShape(layers=2, heads=16, kv_heads=16, head_size=256, intermediate=256, seed=seed)
    for name, seed in (("a", 20260), ("b", 20261))
}
"""Much KV and little to compute: a page of kvcached, of keys or values of a layer, holds 128 tokens."""
KV_BYTES_PER_TOKEN = 2 * 2 * 16 * 256 * 4
"""K and V of two layers, in float32."""
SPLIT_BLOCKS: Mapping[str, int] = {"prefill": 64, "decode": 96}
"""Of each model's servers, where the device is split: more for decode, whose requests stay longer."""
DEVICE_BLOCKS = len(MODELS) * sum(SPLIT_BLOCKS.values())
DEVICE_BYTES = DEVICE_BLOCKS * BLOCK_SIZE * KV_BYTES_PER_TOKEN
DEVICE_GIB = DEVICE_BYTES / 2**30
LEASE_SECONDS = 30.0
NEVER_SECONDS = 86_400
"""``give_way_after``: its greatest value, so that no offer is taken back within a run."""
QUEUE_SECONDS = 3.0
"""``queue_timeout``: within the latency bound, so that who would wait longer is refused at once."""


@dataclass(frozen=True)
class Arm:
    """One way of sharing the device.

    Attributes:
        connector: ``stock`` (vLLM's own, vLLM's own memory), ``own patch`` (kvcached's, without this package),
            ``ours``, or "" for one server per model that computes prompts and answers.
        mode: transfer mode.
        staged: KV goes through a slab in host memory.
        gives_way: prefill takes back what nobody fetches where memory is short; else only leases end that. In push,
            decode gives up what it has registered, too.
        is_behind: vllm-router asks prefill whatever decode can take; else decode asks, where it can.
    """

    name: str
    connector: str
    mode: str = "pull"
    staged: bool = False
    gives_way: bool = True
    is_behind: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether its servers share the device's memory, as kvcached maps it."""
        return self.connector != "stock"

    @property
    def asks(self) -> bool:
        """Whether decode asks prefill; others that have both are behind vllm-router."""
        return self.connector == "ours" and not self.is_behind

    @property
    def sides(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.connector else ("alone",)

    def specs(self, model: str, device_name: str) -> list[ServerSpec]:
        elastic = {
            "ENABLE_KVCACHED": "true",
            **layout(),
            "KVCACHED_HOSTVMM_DEVICE": device_name,
            "KVCACHED_HOSTVMM_GIB": str(DEVICE_GIB),
            # kvcached's defaults, ten pages and 16,000 tokens an engine, are more than this device.
            **GIVES_BACK,
        }
        if self.connector == "own patch":
            elastic |= {"KVCACHED_CONTIGUOUS_LAYOUT": "false", "KVCACHED_NIXL": "0"}
        return [
            ServerSpec(
                name=f"{tag_of(self.name)}-{model}-{side}",
                model=make_model(MODELS[model]),
                dtype="float32",
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                kv_transfer=self._transfer(side) if self.connector else None,
                environment=elastic if self.is_elastic else {},
                arguments=("--num-gpu-blocks-override", str(DEVICE_BLOCKS if self.is_elastic else SPLIT_BLOCKS[side])),
                forks=True,
            )
            for side in self.sides
        ]

    def _transfer(self, side: str) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self.connector == "ours":
            extra |= {"transfer_mode": self.mode, "kv_lease_duration": LEASE_SECONDS}
            extra |= {"memory_path": "host"} if self.staged else {}
            extra |= {} if self.gives_way else {"give_way_after": NEVER_SECONDS}
            extra |= {"queue_timeout": QUEUE_SECONDS} if self.asks and side == "decode" else {}
        is_stock_push = self.connector == "stock" and self.mode == "push"
        connector = {"kv_connector": "NixlPushConnector"} if is_stock_push else {}
        return nixl(side, extra, kv_load_failure_policy="recompute", **connector)


STATIC, STATIC_PUSH = Arm("static split, stock P/D", "stock"), Arm("static split, stock push", "stock", "push")
ALONE = Arm("kvcached without P/D", "")
OWN_PATCH = Arm("kvcached's own Nixl patch", "own patch")
PULL, PUSH = Arm("this package, pull", "ours"), Arm("this package, push", "ours", "push")
STAGED = Arm("this package, staged pull", "ours", staged=True)
WITHOUT_REVOCATION = tuple(
    replace(arm, name=f"{arm.name}, without revocation", gives_way=False) for arm in (PULL, PUSH)
)
BEHIND = tuple(replace(arm, name=f"{arm.name}, behind vllm-router", is_behind=True) for arm in (PULL, PUSH))
ARMS = (STATIC, STATIC_PUSH, ALONE, OWN_PATCH, PULL, PUSH, STAGED, *WITHOUT_REVOCATION, *BEHIND)
"""In the order of the table."""
