# SPDX-License-Identifier: Apache-2.0
"""The models that share a device, what their KV takes of it, and how large the device is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.common.families import FAMILIES, Family, make_family
from experiments.common.model import ModelShape, make_model

__all__ = ["FULL_ATTENTION", "MAX_MODEL_LEN", "WITH_HYBRID", "Device", "Served"]

MAX_MODEL_LEN = 1792
_ELEMENT_BYTES = 4
"""Of float32."""
_CONVOLUTION_POSITIONS = 3
"""Of each channel, in the state of a convolution over four."""


@dataclass(frozen=True)
class Served:
    """A model, and its part of a device that is split.

    Attributes:
        model: its dimensions, or the name of its family, which has attention and Mamba2 layers.
        block_size: tokens in a block.
        split_blocks: of its prefill and its decode server, where the device is split. A request needs one more for its
            states, if it has any.
    """

    model: ModelShape | str
    block_size: int
    split_blocks: Mapping[str, int]

    def make(self) -> Path:
        """Return the model's folder; makes it if it does not exist."""
        return make_family(self.model) if isinstance(self.model, str) else make_model(self.model)

    @property
    def family(self) -> Family | None:
        return FAMILIES[self.model] if isinstance(self.model, str) else None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of a token, in all layers."""
        if isinstance(self.model, ModelShape):
            heads, size, layers = self.model.kv_heads, self.model.head_dim, self.model.layers
        else:
            values = FAMILIES[self.model].values
            heads, size, layers = values["num_key_value_heads"], values["head_dim"], self._layers("full_attention")
        return 2 * layers * heads * size * _ELEMENT_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states, in all layers; 0 if it has none."""
        if isinstance(self.model, ModelShape):
            return 0
        values = FAMILIES[self.model].values
        inner, size = values["mamba_num_heads"] * values["mamba_head_dim"], values["ssm_state_size"]
        channels = inner + 2 * values["n_groups"] * size
        elements = inner * size + _CONVOLUTION_POSITIONS * channels
        return int(self._layers("linear_attention") * elements * _ELEMENT_BYTES)

    def _layers(self, kind: str) -> int:
        assert isinstance(self.model, str)
        return sum(each == kind for each in FAMILIES[self.model].values["layers_block_type"])

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
    return Served(shape, 32, {"prefill": 64, "decode": 96})


FULL_ATTENTION = Device({"a": _full_attention(20260), "b": _full_attention(20261)})
WITH_HYBRID = Device(
    {
        # As many tokens as the other model, and four blocks for states.
        "a": Served("nemotron-h, much KV", 128, {"prefill": 20, "decode": 28}),
        "b": FULL_ATTENTION.models["b"],
    }
)
