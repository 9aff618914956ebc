# SPDX-License-Identifier: Apache-2.0
"""Read vLLM's KV-cache specs of a layer, where the parts of its state are, and which draft models have layers of their
own. Classes are recognised by name, so that nothing of vLLM is imported.

Tensor-parallel ranks share a layer's state. A convolution's state has channels of several projections side by side,
each of which is shared out by itself::

    Mamba2              x, B, C      heads of x; groups of B and C, or one group that every rank has
    gated delta net     q, k, v      heads
    Mamba1, short convolution        channels

The state behind it has heads (Mamba1: channels). Linear attention has no convolution.
Sources: ``v1/kv_cache_interface.py``, ``model_executor/layers/mamba/mamba_utils.py`` (shapes), ``mamba_mixer2.py``
(``mamba_v2_sharded_weight_loader``), ``v1/ssm_conv_transfer_utils.py`` (order of the projections);
``SpeculativeMethod`` in ``config/speculative.py``, and the drafter of each method: in model runner V1
``v1/worker/gpu_model_runner.py``, in V2 ``v1/worker/gpu/spec_decode/__init__.py`` (compared by
``tests/contract/test_shapes.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.vllm.adapter.attributes import optional
from kvcached_nixl.vllm.adapter.versions import (
    COUNTS_EXTERNAL_WEIGHTS,
    HASHES_AHEAD,
    HITS_DIVERGE,
    found_version,
    installed_has,
)
from kvcached_nixl.wire.manifest import Keeps
from kvcached_nixl.worker.geometry.planes import StatePart


def specs_of(kv_cache_spec: Any) -> list[Any]:
    if type(kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs":
        return list(kv_cache_spec.kv_cache_specs.values())
    return [kv_cache_spec]


def is_state(spec: Any) -> bool:
    """Whether such layers keep a state that each step overwrites (Mamba, linear attention, short convolutions)."""
    return any(cls.__name__ == "MambaSpec" for cls in type(spec).__mro__)


KEEPS = MappingProxyType(
    {
        "FullAttentionSpec": Keeps.EVERYTHING,
        "MLAAttentionSpec": Keeps.EVERYTHING,
        "HiddenStateCacheSpec": Keeps.EVERYTHING,
        "SinkFullAttentionSpec": Keeps.EVERYTHING,
        "RSWASpec": Keeps.WINDOW,
        "SlidingWindowSpec": Keeps.WINDOW,
        "SlidingWindowMLASpec": Keeps.WINDOW,
        "ChunkedLocalAttentionSpec": Keeps.WINDOW,
        "MambaSpec": Keeps.STATE,
    }
)
"""Which blocks of a request vLLM's manager keeps until the request ends, by the kind of a layer. Not by base classes: a
kind of its own may have a manager of its own."""


def keeps_of(kv_cache_spec: Any) -> Keeps:
    """Which blocks of a request vLLM's manager keeps for a KV-cache group until the request ends. Raises
    `LayoutRefused`: it is not known."""
    kinds = {type(spec).__name__ for spec in specs_of(kv_cache_spec)}
    if unknown := kinds - KEEPS.keys():
        raise LayoutRefused(
            found=f"a KV cache of the kind {', '.join(sorted(unknown))}",
            expected=f"one of {', '.join(KEEPS)}",
            consequence="it is not known which blocks a request keeps; the engine stops",
            remedy="choose another model or --kv-cache-dtype, or run without ENABLE_KVCACHED",
        )
    found = {KEEPS[kind] for kind in kinds}
    return found.pop() if len(found) == 1 else Keeps.WINDOW


def without_states(kv_cache_groups: Any) -> list[Any]:
    """The KV-cache groups without those of layers that keep a state."""
    return [one for one in kv_cache_groups if keeps_of(one.kv_cache_spec) is not Keeps.STATE]


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
        names = ("sliding_window", "attention_chunk_size", "num_speculative_blocks")
        limits = [f" {name}={known[name]}" for name in names if known.get(name)]
        if is_state(spec):
            # Not the shapes: they depend on the tensor-parallel size.
            limits = [f" {spec.mamba_type}", *(f" {dtype}" for _, dtype in tensors_of_state(spec)), *limits]
        kinds.add(f"{type(spec).__name__}{''.join(limits)}")
    return "+".join(sorted(kinds))


_KV_HEADS = ("key_value_heads", "kv_heads", "kv_n_heads", "n_head_kv", "num_attention_groups", "multi_query_group_num")


def kv_heads_of(*configs: Any) -> set[int]:
    """The numbers of KV heads that the layers of models have. Hugging Face's text configurations name them once, per
    kind of layer, or per layer."""
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


_IN_CELLS = frozenset({"NONE", "FP8_PER_TENSOR"})
"""Modes of quantization whose cells have all that belongs to them, besides those with scales per token and head."""


def odd_cells(spec: Any) -> str:
    """Why cells of such layers are not one token of one head each, in vLLM's terms; "" if they are."""
    known = vars(spec)
    if known.get("num_head_slots") is not None:
        return f"num_head_slots {known['num_head_slots']} for {spec.num_kv_heads} heads"
    if known.get("tokens_per_state", 1) != 1:
        return f"tokens_per_state {known['tokens_per_state']}"
    mode = known.get("kv_quant_mode")
    # Others may have scales behind all data of a block (NVFP4; TurboQuant with FlyDSL).
    is_known = mode is None or mode.name in _IN_CELLS or mode.name.endswith("_PER_TOKEN_HEAD")
    return "" if is_known else f"kv_quant_mode {mode.name}"


def unserved_states(specs: Iterable[Any], vllm_config: Any) -> list[tuple[str, str]]:
    """Settings with which decode would go on from another state than prefill's: (found, expected)."""
    specs = [spec for spec in specs if is_state(spec)]
    if not specs:
        return []
    refused = []
    if not installed_has(HITS_DIVERGE):
        # The engine ends where it loads beside cached states (vllm#43508), CUDA graphs may read another state
        # (vllm#42430), prefix hits may end where no state is, or zeroing a block of contiguous layers clears some of
        # the next one (vllm#50276).
        found = f"layers that keep a state, with vLLM {found_version('vllm')}"
        refused.append((found, "vLLM 0.28 or later, whose engine can load them"))
    if odd := sorted({spec.mamba_cache_mode for spec in specs} - {"none", "align"}):
        # Then a state is kept at every block boundary, and the last one is not always where the last token is.
        refused.append((f"--mamba-cache-mode {odd[0]}", "--mamba-cache-mode align, or none"))
    # With it, the block before a prompt's last one may have the state of an earlier token, for prefix hits.
    if not installed_has(COUNTS_EXTERNAL_WEIGHTS) and any(
        spec.mamba_cache_mode == "align" and optional(spec, "num_prefill_checkpoint_blocks") for spec in specs
    ):
        refused.append(("checkpoints of states while a prompt is computed", "vLLM 0.32, or --no-enable-prefix-caching"))
    if optional(vllm_config.cache_config, "use_replayssm"):
        refused.append(("--use-replayssm", "states that are kept as a whole"))
    drafts = vllm_config.speculative_config
    if optional(drafts, "num_speculative_tokens"):
        model = vllm_config.model_config.architectures[0]
        # Before, a step without drafts goes on from the state behind the last one's first token, whatever was accepted:
        # where ngram finds nothing, or a grammar allows none (vllm#56531). Others were not compared with stock.
        is_shown = drafts.method in _DRAFTING and model.startswith(_WITH_DRAFTS) and installed_has(HASHES_AHEAD)
        if not is_shown:
            found = f"--speculative-config with method {drafts.method} for {model}, which keeps states"
            served = "Qwen3-Next or Qwen3.5 with MTP, ngram, EAGLE or DFlash and vLLM 0.33"
            refused.append((found, f"{served}, or no speculative decoding"))
    return refused


_WITH_DRAFTS, _DRAFTING = ("Qwen3Next", "Qwen3_5"), ("mtp", "ngram", "eagle", "dflash")
"""Models with states, and methods, that were compared with stock."""
WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods that draft from tokens alone, or with heads on the last token's hidden states: no attention, so no KV."""

_SHARES_KV = "gemma4_mtp"
"""The draft model's type whose layers read the KV of the model itself and write none."""


def keeps_draft_kv(speculative_config: Any) -> bool:
    """Whether a draft model computes additional KV for the prompt, in layers of the KV cache.

    True for eagle, eagle3, every kind of mtp but Gemma 4's, dflash, dspark and draft_model; for extract_hidden_states,
    which has no weights and keeps the model's hidden states there; and for unknown methods: a user's class
    (custom_class), or a method of a later vLLM.
    """
    if speculative_config is None or speculative_config.method in WITHOUT_KV:
        return False
    draft = speculative_config.draft_model_config
    return optional(optional(draft, "hf_config"), "model_type") != _SHARES_KV


# -------------------------------------------------------------------------------------------------- parts of a state


class _Share(NamedTuple):
    """Channels of a projection on this rank, the model's index of the first of them, and which of several copies it
    is."""

    channels: int
    first: int
    copies: int = 1
    copy: int = 0


def parts_of_state(
    spec: Any, tp_rank: int, tp_size: int, groups: set[int], *, dim_first: bool
) -> tuple[StatePart, ...]:
    """The parts of a rank's state, in an order that does not depend on the tensor-parallel size; () if this is not
    known for such a layer.

    Args:
        spec: a layer's ``MambaSpec``.
        groups: numbers of groups that the model's configuration names (`groups_of_states`).
        dim_first: a convolution's channels come before its positions (``VLLM_SSM_CONV_STATE_LAYOUT=DS``).
    """
    tensors = tensors_of_state(spec)
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type)).upper()
    if tp_size > 1 and optional(spec, "tp_replicated"):
        # vLLM 0.30 has layers whose state is the same on all ranks.
        alone = parts_of_state(spec, 0, 1, groups, dim_first=dim_first)
        return tuple(part._replace(copies=tp_size, copy=tp_rank) for part in alone)
    shares = _shares(kind, [shape for shape, _ in tensors], tp_rank, tp_size, groups, dim_first)
    if not shares:
        return ()
    found: list[StatePart] = []
    offset = 0
    for (shape, dtype), of_tensor in zip(tensors, shares, strict=True):
        size = dtype.itemsize
        if of_tensor is None:
            heads, cell = shape[0], math.prod(shape[1:]) * size
            found.append(StatePart(offset, 1, 0, cell, heads, tp_rank * heads))
        else:
            found += _of_convolution(offset, shape, size, of_tensor, dim_first)
        offset += math.prod(shape) * size
    return tuple(found)


def _of_convolution(
    offset: int, shape: tuple[int, ...], size: int, shares: list[_Share], dim_first: bool
) -> Iterator[StatePart]:
    channels, positions = shape if dim_first else shape[::-1]
    before = 0
    for share in shares:
        if dim_first:
            yield StatePart(offset + before * positions * size, 1, 0, positions * size, *share)
        else:
            yield StatePart(offset + before * size, positions, channels * size, size, *share)
        before += share.channels


def _shares(
    kind: str, shapes: list[tuple[int, ...]], rank: int, ranks: int, groups: set[int], dim_first: bool
) -> list[list[_Share] | None]:
    """Per tensor: the projections in a convolution's channels; None for a tensor of heads. [] if it is not known."""
    dims = [len(shape) for shape in shapes]
    if kind == "LINEAR" and dims == [3]:
        return [None]
    if kind not in ("MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV") or dims[:1] != [2]:
        return []
    channels = shapes[0][0 if dim_first else 1]
    own = _Share(channels, rank * channels)
    if kind == "SHORT_CONV" and dims == [2]:
        return [[own]]
    if kind == "MAMBA1" and dims == [2, 2]:
        return [[own], None]
    if kind not in ("MAMBA2", "GDN_ATTN") or dims != [2, 3]:
        return []
    wide = shapes[1][0] * shapes[1][1]
    narrow, odd = divmod(channels - wide, 2)
    if odd or narrow <= 0:
        return []
    heads = _Share(wide, rank * wide)
    if kind == "GDN_ATTN":
        return [[_Share(narrow, rank * narrow)] * 2 + [heads], None]
    # One group may be this rank's own, or the only one.
    is_shared = ranks > 1 and narrow == shapes[1][2]
    if is_shared and groups not in ({1}, {ranks}):
        return []
    shared = _Share(narrow, 0, ranks, rank) if is_shared and groups == {1} else _Share(narrow, rank * narrow)
    return [[heads, shared, shared], None]


_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


def groups_of_states(config: Any) -> set[int]:
    """The numbers of groups of B and C that a Hugging Face text configuration names."""
    return {int(value) for name, value in config.to_dict().items() if name in _GROUPS and isinstance(value, int)}


def dims_first() -> bool:
    """Whether a convolution's channels come before its positions on this engine."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())
