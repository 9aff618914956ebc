# SPDX-License-Identifier: Apache-2.0
"""How tensor-parallel ranks share a layer's state: which channels and heads of the model are where in a rank's state.

A convolution's state has channels of several projections side by side, each of which is shared out by itself::

    Mamba2              x, B, C      heads of x; groups of B and C, or one group that every rank has
    gated delta net     q, k, v      heads
    Mamba1, short convolution        channels

The state behind it has heads (Mamba1: channels). Linear attention has no convolution.
Sources: ``model_executor/layers/mamba/mamba_utils.py`` (shapes), ``mamba_mixer2.py``
(``mamba_v2_sharded_weight_loader``), ``v1/ssm_conv_transfer_utils.py`` (order of the projections).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from kvcached_nixl.vllm.adapter.private import optional
from kvcached_nixl.vllm.adapter.specs import tensors_of_state

__all__ = ["Part", "dims_first", "groups_of_states", "parts_of_state"]

Part: TypeAlias = tuple[int, int, int, int, int, int, int, int]
"""As `worker.geometry.states.StatePart`."""


class _Share(NamedTuple):
    """Channels of a projection on this rank, the model's index of the first of them, and which of several copies it
    is."""

    channels: int
    first: int
    copies: int = 1
    copy: int = 0


def parts_of_state(spec: Any, tp_rank: int, tp_size: int, groups: set[int], *, dim_first: bool) -> tuple[Part, ...]:
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
        return tuple((*part[:-2], tp_size, tp_rank) for part in alone)
    shares = _shares(kind, [shape for shape, _ in tensors], tp_rank, tp_size, groups, dim_first)
    if not shares:
        return ()
    found: list[Part] = []
    offset = 0
    for (shape, dtype), of_tensor in zip(tensors, shares, strict=True):
        size = dtype.itemsize
        if of_tensor is None:
            heads, cell = shape[0], math.prod(shape[1:]) * size
            found.append((offset, 1, 0, cell, heads, tp_rank * heads, 1, 0))
        else:
            found += _of_convolution(offset, shape, size, of_tensor, dim_first)
        offset += math.prod(shape) * size
    return tuple(found)


def _of_convolution(
    offset: int, shape: tuple[int, ...], size: int, shares: list[_Share], dim_first: bool
) -> Iterator[Part]:
    channels, positions = shape if dim_first else shape[::-1]
    before = 0
    for share in shares:
        if dim_first:
            yield offset + before * positions * size, 1, 0, positions * size, *share
        else:
            yield offset + before * size, positions, channels * size, size, *share
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
