# SPDX-License-Identifier: Apache-2.0
"""Blocks move byte for byte between two real connectors over kvcached's arrangements, on the installed vLLM.

Real: vLLM's NixlConnector with this package's patches, its side channel, NIXL and UCX. Made by the test: memory with
the layout of kvcached 0.1.6 (``test_kvcached_layouts.py`` compares that layout with the real one).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import attention_engines
from support.attention_engines import ERAS, GQA, EngineOver, backend_of, engine_of
from support.kvcached_memory import Geometry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.patching import Registry
from kvcached_nixl.vllm.adapter.versions import LOADS_BEHIND, installed_has
from kvcached_nixl.worker.geometry.planes import Axes

pytestmark = pytest.mark.usefixtures("parallel_state", "patched")
SAME = ((False, False), (True, True))
"""Whether prefill's memory is contiguous, and whether decode's is."""
CASES = [
    *[(era, contiguous, {}) for era in ERAS for contiguous in SAME],
    *[(era, contiguous, {}) for era in ERAS for contiguous in ((False, True), (True, False))],
    *[(ERAS[0], contiguous, {"num_kv_heads": heads}) for contiguous in SAME for heads in (8, 1)],
    *[(ERAS[0], contiguous, {"num_pools": 3}) for contiguous in SAME],
    *[(ERAS[0], contiguous, {"num_pools": 1}) for contiguous in SAME],
    *[(ERAS[0], contiguous, {"num_pools": 3, "groups": 2}) for contiguous in (*SAME, (True, False))],
]


@pytest.mark.parametrize(
    ("era", "contiguous", "overrides"),
    [pytest.param(*one, marks=[pytest.mark.long] if place >= 2 * len(ERAS) else []) for place, one in enumerate(CASES)],
    ids=str,
)
def test_blocks_arrive_byte_for_byte_and_nothing_else_changes(
    era: str, contiguous: tuple[bool, bool], overrides: dict[str, Any], engine_over: EngineOver
) -> None:
    """Multi-head, grouped, multi-query and latent caches, odd layers and several groups, each side in both
    arrangements.

    Prefill and decode plan and reserve different numbers of blocks; decode's other blocks keep their bytes.
    """
    theirs = dataclasses.replace(GQA, era=era, contiguous=contiguous[0], **overrides)
    geometry = dataclasses.replace(theirs, contiguous=contiguous[1], num_blocks=17, reserved_blocks=40)
    prefill, sent = engine_over(theirs)
    decode, received = engine_over(geometry)
    before = {layer: cache.clone() for layer, cache in received.items()}
    remote = [[7, 2, 10], [5]][: geometry.groups]
    local = [[3, 16, 1], [9]][: geometry.groups]

    assert decode.read("r1", local, remote, prefill)

    moved = dict(zip(sum(local, []), sum(remote, []), strict=True))
    for layer, cache in received.items():
        for block_id in range(17):
            source = (sent, moved[block_id]) if block_id in moved else (before, block_id)
            assert torch.equal(cache[block_id], source[0][layer][source[1]]), (layer, block_id)


def test_registration_costs_what_was_planned_not_what_was_reserved(engine_over: EngineOver, patched: Registry) -> None:
    """A region each, as long as the planned blocks; the worker's own block count is left alone."""
    geometry = dataclasses.replace(GQA, era=ERAS[0], reserved_blocks=500)
    engine, _ = engine_over(geometry)
    worker = engine.worker.connector_worker
    assert worker.num_blocks == geometry.num_blocks
    # The other registration is the table of ownership tokens.
    extents, _ = worker._registered_descs
    lengths = [extents[place][1] for place in range(extents.descCount())]
    assert len(lengths) == geometry.expected_regions()
    assert sum(lengths) == geometry.num_blocks * geometry.block_bytes_of_all_layers()


def test_memory_the_stock_worker_reads_otherwise_stops_the_engine(tmp_path: Path) -> None:
    """A tensor with holes between its blocks is refused at registration, before any transfer."""
    geometry = dataclasses.replace(GQA, era="packed")
    caches, _ = geometry.allocate()
    engine = engine_of(geometry, tmp_path)
    with pytest.raises(LayoutRefused, match="blocks of"):
        engine.register({layer: cache[::2] for layer, cache in caches.items()})


UNSERVED = {
    ("parallel_config", "decode_context_parallel_size", 2): "--decode-context-parallel-size 2",
    ("parallel_config", "prefill_context_parallel_size", 2): "--prefill-context-parallel-size 2",
    ("cache_config", "calculate_kv_scales", True): "--calculate-kv-scales",
    ("model_config", "runner_type", "pooling"): "--runner pooling",
}


@pytest.mark.parametrize("setting", list(UNSERVED), ids=str)
def test_what_no_peer_could_make_sense_of_stops_the_engine_in_words(
    setting: tuple[str, str, Any], tmp_path: Path
) -> None:
    """Finding A5: bytes would arrive, and mean something else there. Refused before any memory is registered."""
    geometry = dataclasses.replace(GQA, era=ERAS[0])
    engine = engine_of(geometry, tmp_path)
    owner, name, value = setting
    setattr(getattr(engine.config, owner), name, value)
    with pytest.raises(LayoutRefused) as raised:
        engine.register(geometry.allocate()[0])
    assert UNSERVED[setting] in raised.value.found
    assert "the engine stops" in raised.value.consequence and "without ENABLE_KVCACHED" in raised.value.remedy
    assert not engine.worker.connector_worker._registered_descs


no_shapes = pytest.mark.skipif(installed_has(LOADS_BEHIND), reason="vLLM 0.29 asks no backend for a shape")
NAMES = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_MLA", "FLASHMLA", "CPU_ATTN")
NUMBERS = {"num_blocks": 1_000_003, "block_size": 4_800, "num_heads": 1_009}


def backend(name: str) -> Any:
    try:
        return AttentionBackendEnum[name].get_class()
    except KeyError:
        pytest.skip("not in this vLLM")
    except (ImportError, AssertionError, AttributeError, RuntimeError, ValueError) as error:
        pytest.skip(f"not on this machine: {error}")


def shape_of(name: str) -> tuple[int, ...]:
    sizes = {"num_blocks": NUMBERS["num_blocks"], "block_size": NUMBERS["block_size"]}
    try:
        return tuple(backend(name).get_kv_cache_shape(**sizes, num_kv_heads=NUMBERS["num_heads"], head_size=1))
    except AssertionError as error:
        pytest.skip(f"takes no such shape: {error}")


@pytest.mark.parametrize("name", NAMES)
@no_shapes
def test_blocks_tokens_and_heads_are_found(name: str) -> None:
    """Latents have no heads; K and V of different head sizes (``DIFFKV``) are packed in one cell."""
    shape = shape_of(name)
    axes = Axes.from_probe(shape, **NUMBERS)
    assert (shape[0], shape[axes.token]) == (NUMBERS["num_blocks"], NUMBERS["block_size"])
    if "MLA" in name:
        assert axes.head is axes.kv is None
    else:
        assert axes.head is not None and shape[axes.head] == NUMBERS["num_heads"]
        assert axes.kv is None or shape[axes.kv] == 2


@pytest.mark.parametrize("name", ["FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"])
@no_shapes
def test_keys_and_values_of_different_sizes_are_one_cell(name: str) -> None:
    """MiMo-V2: 192 and 128 elements a head. They are moved together, and never cut between the two."""
    shape = shape_of(name)
    axes = Axes.from_probe(shape, **NUMBERS)
    assert axes.kv is None and shape[-1] > 2 and axes.ndim == 4


def test_processors_that_order_a_block_differently_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, engine_over: EngineOver
) -> None:
    """With AMX, vLLM's attention on a CPU orders keys and values otherwise than without, in tensors of one shape."""

    def named(geometry: Geometry) -> type:
        return type("Named", (backend_of(geometry),), {"get_name": staticmethod(lambda: "CPU_ATTN")})

    monkeypatch.setattr(attention_engines, "backend_of", named)
    found = set()
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", partial(bool, has_amx))
        engine, _ = engine_over(dataclasses.replace(GQA, era=ERAS[0], block_size=32))
        found.add(engine.worker.connector_worker.xfer_handshake_metadata.compatibility_hash)
    assert len(found) == 2
