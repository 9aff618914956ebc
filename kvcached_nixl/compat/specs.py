# SPDX-License-Identifier: Apache-2.0
"""Read vLLM's KV-cache specs of a layer. Classes are recognised by name, so that nothing is imported.

Source: ``v1/kv_cache_interface.py``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["keeps_all_tokens", "kind_of", "kv_heads_of", "odd_cells", "specs_of"]


def specs_of(kv_cache_spec: Any) -> list[Any]:
    """The specs of a KV-cache group's layers."""
    if type(kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs":
        return list(kv_cache_spec.kv_cache_specs.values())
    return [kv_cache_spec]


def keeps_all_tokens(spec: Any) -> bool:
    """Whether vLLM's manager for such layers keeps every block until the request ends."""
    return any(cls.__name__ == "FullAttentionSpec" for cls in type(spec).__mro__) and type(spec).__name__ != "RSWASpec"


def kind_of(kv_cache_spec: Any) -> str:
    """What determines which of a group's blocks matter, in vLLM's terms: the kinds of its layers, and their windows."""
    kinds = set()
    for spec in specs_of(kv_cache_spec):
        known = vars(spec)
        limits = [f" {name}={known[name]}" for name in ("sliding_window", "attention_chunk_size") if known.get(name)]
        kinds.add(f"{type(spec).__name__}{''.join(limits)}")
    return "+".join(sorted(kinds))


def kv_heads_of(*configs: Any) -> set[int]:
    """The numbers of KV heads that the layers of these models have.

    Args:
        configs: Hugging Face's text configurations. They name the numbers once, per kind of layer, or per layer.
    """
    found: set[int] = set()
    left = [config.to_dict() for config in configs]
    while left:
        for name, value in left.pop().items():
            if isinstance(value, dict):
                left.append(value)
            elif "key_value_heads" in str(name) or "kv_heads" in str(name):
                found.update(one for one in (value if isinstance(value, (list, tuple)) else [value]) if one)
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
