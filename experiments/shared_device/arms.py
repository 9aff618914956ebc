# SPDX-License-Identifier: Apache-2.0
"""The models, what their KV takes of a device that they share; and the arms: how they share it, on which servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.common.device import layout, nixl
from experiments.common.families import FAMILIES, Family, make_family
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, ServerSpec

MAX_MODEL_LEN = 1792
_ELEMENT_BYTES = 4
"""Of float32."""


@dataclass(frozen=True)
class Served:
    """A model, and its part of a device that is split.

    Attributes:
        model: its dimensions, or the name of its family, which has attention and Mamba2 layers.
        block_size: tokens in a block.
        split_blocks: of its prefill and its decode server, where the device is split. A request needs one more for its
            states, if it has any.
        kv_bytes_per_token: of keys and values, in all layers.
        state_bytes: of a request's states, in all layers.
    """

    model: ModelShape | str
    block_size: int
    split_blocks: Mapping[str, int]
    kv_bytes_per_token: int
    state_bytes: int = 0

    def make(self) -> Path:
        """Return the model's folder; makes it if it does not exist."""
        return make_family(self.model) if isinstance(self.model, str) else make_model(self.model)

    @property
    def family(self) -> Family | None:
        return FAMILIES[self.model] if isinstance(self.model, str) else None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in all layers that use it: attention's, or those of the states, of which there are as many.

        A state that is smaller than a block is padded.
        """
        return self.block_size * self.kv_bytes_per_token

    @property
    def split_bytes(self) -> int:
        return sum(self.split_blocks.values()) * self.block_bytes

    def arguments(self) -> tuple[str, ...]:
        """Return more arguments of ``vllm serve``."""
        if self.family is None:
            return ()
        caches = () if self.family.caches_prefixes else ("--no-enable-prefix-caching",)
        return ("--no-disable-hybrid-kv-cache-manager", *self.family.arguments, *caches)

    def stock_environment(self) -> Mapping[str, str]:
        """Return what vLLM's own connector needs: it hands over a convolution's states in this layout only."""
        return {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"} if self.state_bytes else {}


@dataclass(frozen=True)
class Device:
    """A device, as large as its split servers need together."""

    models: Mapping[str, Served]

    @property
    def num_bytes(self) -> int:
        return sum(one.split_bytes for one in self.models.values())

    @property
    def gib(self) -> float:
        return self.num_bytes / 2**30

    def make_models(self) -> dict[str, Path]:
        """Return the folder of each model; makes those that do not exist."""
        return {name: one.make() for name, one in self.models.items()}


def _full_attention(seed: int) -> Served:
    """Much KV and little to compute: a page of kvcached, of keys or values of a layer, holds 128 tokens."""
    shape = ModelShape(layers=2, heads=16, kv_heads=16, head_size=256, intermediate=256, seed=seed)
    # 2,048 and 3,072 tokens: more for decode, whose requests stay longer.
    return Served(shape, 32, {"prefill": 64, "decode": 96}, 2 * 2 * 16 * 256 * _ELEMENT_BYTES)


FULL_ATTENTION = Device({"a": _full_attention(20260), "b": _full_attention(20261)})
WITH_HYBRID = Device(
    {
        # As many tokens as the other model, and four blocks for states.
        "a": Served(
            "nemotron-h, much KV",
            128,
            {"prefill": 20, "decode": 28},
            # Two layers of attention.
            kv_bytes_per_token=2 * 2 * 16 * 128 * _ELEMENT_BYTES,
            # Two of Mamba2: its state, and three positions of each channel of its convolution.
            state_bytes=2 * (2048 * 128 + 3 * (2048 + 2 * 2 * 128)) * _ELEMENT_BYTES,
        ),
        "b": FULL_ATTENTION.models["b"],
    }
)


# ----------------------------------------------------------------------------------------------------------------- arms


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
    def tag(self) -> str:
        """Its name for files."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)

    def sides(self) -> tuple[str, ...]:
        """Return the servers of each model."""
        return ("prefill", "decode") if self.connector else ("alone",)

    def specs(self, device: Device, model: str, folder: Path, device_name: str) -> list[ServerSpec]:
        """Return the configuration of a model's servers.

        Args:
            folder: of the model.
            device_name: of the emulated device that they share with others.
        """
        return [self._spec(device, model, side, folder, device_name) for side in self.sides()]

    def _spec(self, device: Device, model: str, side: str, folder: Path, device_name: str) -> ServerSpec:
        served = device.models[model]
        blocks = device.num_bytes // served.block_bytes if self.is_elastic else served.split_blocks[side]
        return ServerSpec(
            name=f"{self.tag}-{model}-{side}",
            model=folder,
            dtype="float32",
            block_size=served.block_size,
            max_model_len=MAX_MODEL_LEN,
            kv_transfer=self._transfer(side) if self.connector else None,
            environment=self._elastic(device, device_name) if self.is_elastic else served.stock_environment(),
            arguments=("--num-gpu-blocks-override", str(blocks), *served.arguments()),
            forks=True,
        )

    def _elastic(self, device: Device, device_name: str) -> dict[str, str]:
        own_patch = {"KVCACHED_CONTIGUOUS_LAYOUT": "false", "KVCACHED_NIXL": "0"}
        return {
            "ENABLE_KVCACHED": "true",
            **layout(),
            "KVCACHED_HOSTVMM_DEVICE": device_name,
            "KVCACHED_HOSTVMM_GIB": str(device.gib),
            # kvcached's defaults, ten pages and 16,000 tokens an engine, are more than this device.
            **GIVES_BACK,
            **(own_patch if self.connector == "own patch" else {}),
        }

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
    dataclasses.replace(arm, name=f"{arm.name}, without revocation", gives_way=False) for arm in (PULL, PUSH)
)
BEHIND = tuple(dataclasses.replace(arm, name=f"{arm.name}, behind vllm-router", is_behind=True) for arm in (PULL, PUSH))
ARMS = (STATIC, STATIC_PUSH, ALONE, OWN_PATCH, PULL, PUSH, STAGED, *WITHOUT_REVOCATION, *BEHIND)
"""In the order of the table."""
HYBRID_ARMS = (STATIC, ALONE, PULL)
"""Where a model has states. kvcached's own patch refuses those."""
