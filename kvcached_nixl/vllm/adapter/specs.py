# SPDX-License-Identifier: Apache-2.0
"""Read vLLM's KV-cache specs of a layer. Classes are recognised by name, so that nothing is imported.

Source: ``v1/kv_cache_interface.py``.
"""

from __future__ import annotations

import math
from typing import Any

from kvcached_nixl.wire.kv_groups import Keeps

__all__ = ["is_state", "keeps_of", "kind_of", "kv_heads_of", "odd_cells", "specs_of", "state_bytes", "tensors_of_state"]


def specs_of(kv_cache_spec: Any) -> list[Any]:
    """The specs of a KV-cache group's layers."""
    if type(kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs":
        return list(kv_cache_spec.kv_cache_specs.values())
    return [kv_cache_spec]


def is_state(spec: Any) -> bool:
    """Whether such layers keep a state that each step overwrites (Mamba, linear attention, short convolutions)."""
    return any(cls.__name__ == "MambaSpec" for cls in type(spec).__mro__)


def keeps_of(kv_cache_spec: Any) -> Keeps:
    """Which blocks of a request vLLM's manager keeps for a KV-cache group until the request ends."""
    found = {_keeps(spec) for spec in specs_of(kv_cache_spec)}
    return found.pop() if len(found) == 1 else Keeps.WINDOW


def _keeps(spec: Any) -> Keeps:
    if is_state(spec):
        return Keeps.STATE
    is_full = any(cls.__name__ == "FullAttentionSpec" for cls in type(spec).__mro__)
    return Keeps.EVERYTHING if is_full and type(spec).__name__ != "RSWASpec" else Keeps.WINDOW


def state_bytes(spec: Any) -> int:
    """Bytes of a layer's state, without the padding behind it."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors_of_state(spec))


def tensors_of_state(spec: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and data type of each tensor of a layer's state, on one rank."""
    return [(tuple(shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]


def kind_of(kv_cache_spec: Any) -> str:
    """What determines which of a group's blocks matter, in vLLM's terms: the kinds of its layers, and their windows."""
    kinds = set()
    for spec in specs_of(kv_cache_spec):
        known = vars(spec)
        limits = [f" {name}={known[name]}" for name in ("sliding_window", "attention_chunk_size") if known.get(name)]
        if is_state(spec):
            # Not the shapes: they depend on the tensor-parallel size.
            limits = [f" {spec.mamba_type}", *(f" {dtype}" for _, dtype in tensors_of_state(spec))]
        kinds.add(f"{type(spec).__name__}{''.join(limits)}")
    return "+".join(sorted(kinds))


_KV_HEADS = ("key_value_heads", "kv_heads", "kv_n_heads", "n_head_kv", "num_attention_groups", "multi_query_group_num")


def kv_heads_of(*configs: Any) -> set[int]:
    """The numbers of KV heads that the layers of these models have.

    Args:
        configs: Hugging Face's text configurations. They name the numbers once, per kind of layer, or per layer.
    """
    found: set[int] = set()
    left = [("", config.to_dict(), config.to_dict().get("num_attention_heads")) for config in configs]
    while left:
        name, value, num_heads = left.pop()
        if isinstance(value, dict):
            left += [(str(key), one, num_heads) for key, one in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(name, one, num_heads) for one in value]
        elif isinstance(value, int) and not isinstance(value, bool) and value:
            if any(part in name for part in _KV_HEADS):
                found.add(value)
            elif name == "n_heads_in_group" and isinstance(num_heads, int):
                found.add(num_heads // value)
    return found


def odd_cells(spec: Any) -> str:
    """Why cells of such layers are not one token of one head each, in vLLM's terms; "" if they are."""
    known = vars(spec)
    if known.get("num_head_slots") is not None:
        return f"num_head_slots {known['num_head_slots']} for {spec.num_kv_heads} heads"
    if known.get("tokens_per_state", 1) != 1:
        return f"tokens_per_state {known['tokens_per_state']}"
    mode = known.get("kv_quant_mode")
    return f"kv_quant_mode {mode.name}" if mode is not None and "NVFP4" in mode.name else ""
