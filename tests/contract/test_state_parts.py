# SPDX-License-Identifier: Apache-2.0
"""States of ranks with another tensor-parallel size, as vLLM cuts them: by its own shapes and its own weight loader."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.worker_fakes import Local
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.vllm.adapter import specs
from kvcached_nixl.vllm.adapter.specs import parts_of_state, state_bytes
from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, installed_has
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.planes import GroupMemory
from kvcached_nixl.worker.geometry.planes import StatePart, part_planes, state_planes
from kvcached_nixl.worker.transfer.checksums import Content
from kvcached_nixl.worker.transfer.topology import contributors, ranges, routes

pytestmark = pytest.mark.skipif(not installed_has(HITS_DIVERGE), reason="this vLLM cannot load states")

KERNEL = 4
PAGE_BYTES = 4096
LAYERS = 2
NUM_BLOCKS = 3


@dataclass(frozen=True)
class Model:
    """Layers with a state: of a convolution, of something behind it, or of both.

    Attributes:
        projections: channels of each projection in the convolution, and whether every rank has all of them.
        behind: shape of the state behind the convolution, of the whole model.
        groups: of B and C, as a configuration has them.
        shape: vLLM's function of them, and its arguments but the tensor-parallel size.
    """

    kind: Kind
    projections: tuple[tuple[int, bool], ...]
    behind: tuple[int, ...] | None
    shape: Any
    arguments: dict[str, int]
    groups: frozenset[int] = frozenset()


def mamba2(groups: int) -> Model:
    heads, size, state = 8, 6, 10
    wide, narrow = heads * size, groups * state
    projections = ((wide, False), (narrow, groups == 1), (narrow, groups == 1))
    given = {"intermediate_size": wide, "n_groups": groups, "num_heads": heads, "head_dim": size, "state_size": state}
    given["conv_kernel"] = KERNEL
    return Model(Kind.MAMBA2, projections, (heads, size, state), Shapes.mamba2_state_shape, given, frozenset({groups}))


def gated_delta_net(keys: int, values: int) -> Model:
    q, v = keys * 6, values * 10
    given = {"num_k_heads": keys, "num_v_heads": values, "head_k_dim": 6, "head_v_dim": 10, "conv_kernel_size": KERNEL}
    shape = Shapes.gated_delta_net_state_shape
    return Model(Kind.GDN_ATTN, ((q, False), (q, False), (v, False)), (values, 10, 6), shape, given)


MODELS = {
    "Mamba2, groups on each rank": mamba2(8),
    "Mamba2, one group": mamba2(1),
    "gated delta net": gated_delta_net(4, 8),
    "short convolution": Model(
        Kind.SHORT_CONV,
        ((48, False),),
        None,
        Shapes.short_conv_state_shape,
        {"intermediate_size": 48, "conv_kernel": KERNEL},
    ),
    "linear attention": Model(
        Kind.LINEAR, (), (8, 6, 6), Shapes.linear_attention_state_shape, {"num_heads": 8, "head_dim": 6}
    ),
}


@pytest.fixture(params=["channels last", "channels first"])
def dim_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    found: bool = request.param == "channels first"
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS" if found else "SD")
    mamba_utils.get_conv_state_layout.cache_clear()
    assert specs.dims_first() is found
    yield found
    mamba_utils.get_conv_state_layout.cache_clear()


@pytest.fixture
def channels_last(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    mamba_utils.get_conv_state_layout.cache_clear()
    yield
    mamba_utils.get_conv_state_layout.cache_clear()


class Rank:
    """A rank's pages, with its share of the model's states in block ``block`` and noise around."""

    def __init__(self, model: Model, whole: list[list[torch.Tensor]], rank: int, size: int, dim_first: bool) -> None:
        shapes = model.shape(tp_size=size, **model.arguments) if model.kind is Kind.LINEAR else None
        shapes = shapes or model.shape(tp_world_size=size, **model.arguments)
        dtypes = (torch.bfloat16, torch.float32)[-len(shapes) :] if model.projections else (torch.float32,)
        dtypes = (torch.bfloat16,) if model.behind is None else dtypes
        self.spec = MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, mamba_type=model.kind)
        self.bytes = state_bytes(self.spec)
        self.block = 1 + rank % 2
        self.memory = torch.randint(0, 256, (NUM_BLOCKS, LAYERS, PAGE_BYTES), dtype=torch.uint8)
        self.share = [_share(model, of_layer, shapes, rank, size, dim_first) for of_layer in whole]
        found = parts_of_state(self.spec, rank, size, set(model.groups), dim_first=dim_first)
        parts = tuple(StatePart(*one) for one in found)
        pages = {f"l{layer}": self.memory[:, layer] for layer in range(LAYERS)}
        planes = state_planes(pages, dict.fromkeys(pages, self.bytes), 1000 * size + rank)
        self.group = GroupMemory(planes, parts=part_planes(pages, dict.fromkeys(pages, parts)))
        self.local = dataclasses.replace(
            Local().side.local, groups=(self.group,), tp_size=size, tp_rank=rank, kv_shares=MAX_TP_SIZE
        )
        self.content = Content((self.group,), [(self.memory.data_ptr(), self.memory.view(NUM_BLOCKS, -1))])

    def fill(self) -> None:
        for layer, share in enumerate(self.share):
            self.memory[self.block, layer, : self.bytes] = share

    @property
    def blocks(self) -> KernelBlockRange:
        return KernelBlockRange(9, (KernelBlock(self.block),))

    def digest(self, other: Rank, *, is_prefill: bool) -> str:
        return self.content.digest([(self.blocks, 9)], 10, (other.group,), is_prefill=is_prefill)


def _share(model: Model, whole: list[torch.Tensor], shapes: Any, rank: int, size: int, dim_first: bool) -> torch.Tensor:
    """The bytes of a rank's state."""
    found = []
    for tensor, shape in zip(whole, shapes, strict=True):
        if tensor.dim() == 2 and tensor is whole[0] and model.projections:
            channels, positions = shape if dim_first else shape[::-1]
            own = torch.zeros(channels, positions, dtype=tensor.dtype)
            spec = []
            for num_channels, copied in model.projections:
                # As MambaMixer2 counts them: with what every further rank has of its own.
                extra = (size - 1) * num_channels if copied else 0
                spec.append((num_channels + extra, extra, copied))
            mamba_v2_sharded_weight_loader(spec, size, rank)(torch.nn.Parameter(own, requires_grad=False), tensor)
            own = own if dim_first else own.T
        else:
            own = tensor.chunk(size)[rank]
        assert tuple(own.shape) == tuple(shape)
        found.append(own.contiguous().view(torch.uint8).reshape(-1))
    return torch.cat(found)


def whole_states(model: Model) -> list[list[torch.Tensor]]:
    """Per layer: what a convolution has of all channels, and all heads behind it."""
    generator = torch.Generator().manual_seed(7)
    channels = sum(one for one, _ in model.projections)
    shapes = [(channels, KERNEL - 1)] if channels else []
    dtypes = [torch.bfloat16] if channels else []
    if model.behind:
        shapes.append(model.behind)
        dtypes.append(torch.float32)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for _ in range(LAYERS)
    ]


def _as_copied(model: Model, whole: list[list[torch.Tensor]], rank: int) -> list[list[torch.Tensor]]:
    """The states as a rank of prefill has them: what several ranks have differs in its last bits."""
    found = [[tensor.clone() for tensor in of_layer] for of_layer in whole]
    for of_layer in found:
        first = 0
        for channels, copied in model.projections:
            if copied:
                of_layer[0][first : first + channels].view(torch.int16).bitwise_xor_(rank)
            first += channels
    return found


def moved(prefill: list[Rank], decode: list[Rank]) -> None:
    """Decode pulls from the ranks that it asks, as descriptors say."""
    for rank in decode:
        needed, _ = contributors(len(prefill), rank.local.tp_rank, len(decode), MAX_TP_SIZE)
        for one in needed:
            other = prefill[one]
            between = routes(rank.local.groups, (other.group,), is_prefill=False)
            found = ranges(between, [(rank.blocks, other.blocks, 9)], 10)
            here, there = rank.memory.view(-1), other.memory.view(-1)
            for (to, size), (at, _) in zip(found.local.tolist(), found.remote.tolist(), strict=True):
                to, at = to - here.data_ptr(), at - there.data_ptr()
                here[to : to + size] = there[at : at + size]


SIZES = [
    pytest.param(one, id=str(one), marks=[] if one in ((2, 1), (1, 4)) else [pytest.mark.long])
    for one in itertools.permutations((1, 2, 4), 2)
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", list(MODELS))
def test_a_rank_gets_its_share_of_the_states(name: str, sizes: tuple[int, int], dim_first: bool) -> None:
    """Every byte of it, and nothing else; and both sides have the same checksum of what they share."""
    model = MODELS[name]
    whole = whole_states(model)
    prefill = [Rank(model, _as_copied(model, whole, rank), rank, sizes[0], dim_first) for rank in range(sizes[0])]
    # Decode has what the first of its ranks of prefill has of what several have.
    firsts = [rank * sizes[0] // sizes[1] for rank in range(sizes[1])]
    decode = [
        Rank(model, _as_copied(model, whole, firsts[rank]), rank, sizes[1], dim_first) for rank in range(sizes[1])
    ]
    for one in prefill:
        one.fill()
    expected = []
    for one in decode:
        memory = one.memory.clone()
        for layer, share in enumerate(one.share):
            memory[one.block, layer, : one.bytes] = share
        expected.append(memory)
    moved(prefill, decode)
    for one, memory in zip(decode, expected, strict=True):
        assert torch.equal(one.memory, memory)
    times = max(sizes) // min(sizes)
    for one, other in itertools.product(prefill, decode):
        smaller, larger = sorted((one, other), key=lambda rank: rank.local.tp_size)
        if larger.local.tp_rank // times == smaller.local.tp_rank:
            assert one.digest(other, is_prefill=True) == other.digest(one, is_prefill=False)
            other.memory[other.block, 1, other.bytes - 1] ^= 1
            # The last head: of the last of several ranks.
            differs = one.digest(other, is_prefill=True) != other.digest(one, is_prefill=False)
            assert differs or (one.local.tp_rank + 1) % times
            other.memory[other.block, 1, other.bytes - 1] ^= 1


@pytest.mark.usefixtures("channels_last")
@pytest.mark.parametrize("groups", [{2, 4}, {8}, set()], ids=str)
def test_where_a_group_may_be_a_copy_nothing_is_told(groups: set[int]) -> None:
    """One group on each of four ranks, and a configuration that names neither one group nor four."""
    model = dataclasses.replace(mamba2(4), groups=frozenset(groups))
    rank = Rank(model, whole_states(model), 1, 4, False)
    assert rank.group.parts == ()
    alone = Rank(model, whole_states(model), 0, 1, False)
    with pytest.raises(ValueError, match="cells of"):
        routes(rank.local.groups, (alone.group,), is_prefill=False)


def test_another_kind_of_state_is_not_cut() -> None:
    spec = MambaSpec(block_size=64, shapes=((3, 8), (3, 8), (4, 6, 6)), dtypes=(torch.float32,) * 3)
    assert parts_of_state(spec, 0, 2, set(), dim_first=False) == ()
