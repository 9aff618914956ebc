# SPDX-License-Identifier: Apache-2.0
"""`nixl_worker` and `specs` with stand-ins for vLLM's NIXL connector: values are found by name, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.vllm.adapter import nixl_worker
from kvcached_nixl.vllm.adapter import specs as kv_cache_specs
from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView
from kvcached_nixl.vllm.adapter.specs import parts_of_state
from kvcached_nixl.vllm.adapter.versions import (
    COUNTS_EXTERNAL_WEIGHTS,
    HASHES_AHEAD,
    HITS_DIVERGE,
    LOADS_BEHIND,
    Change,
)
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.manifest import Keeps
from kvcached_nixl.worker.geometry.layout import Page
from kvcached_nixl.worker.geometry.planes import Axes

_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"


@pytest.fixture(autouse=True)
def envs(make_module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that knows nothing of ROCm."""
    found = make_module("vllm.envs", "VLLM_VIDEO_LOADER_BACKEND = 'opencv'")
    make_module("vllm").envs = found  # type: ignore[attr-defined]
    monkeypatch.setattr(nixl_worker, "_is_rocm", lambda: False)
    monkeypatch.setattr(nixl_worker, "dims_first", lambda: False)


Install = Callable[..., None]


@pytest.fixture(autouse=True)
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(*changes): a vLLM that has these; at first one that has none."""

    def has(*changes: Change) -> None:
        for one in (nixl_worker, kv_cache_specs):
            monkeypatch.setattr(one, "installed_has", changes.__contains__)

    has()
    return has


def backend(name: str) -> SimpleNamespace:
    return SimpleNamespace(get_name=lambda: name)


class FullAttentionSpec:
    page_size_bytes = 64
    block_size = 16
    num_kv_heads = 4

    def __init__(self, non_causal: bool = False) -> None:
        self.non_causal = non_causal


class MLAAttentionSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    page_size_bytes = 64
    block_size = 16
    num_kv_heads = 4


class ChunkedLocalAttentionSpec:
    pass


class MambaSpec:
    page_size_bytes = 64
    block_size = 4096
    shapes = ((3, 4),)
    dtypes = (SimpleNamespace(itemsize=2),)
    mamba_type = "short_conv"
    mamba_cache_mode = "none"


class UniformTypeKVCacheSpecs:
    block_size = 16

    def __init__(self, **specs: Any) -> None:
        self.kv_cache_specs = specs


@pytest.fixture
def attention_backends(make_module: Callable[..., ModuleType]) -> list[list[str]]:
    """Has vLLM say which backends some layers have; the names of the layers that it was asked about."""
    asked: list[list[str]] = []
    found = make_module(_UTILS)

    def get_current_attn_backends(config: object, layers: list[str]) -> list[SimpleNamespace]:
        asked.append(layers)
        return [backend("FLASH")]

    found.get_current_attn_backends = get_current_attn_backends  # type: ignore[attr-defined]
    return asked


def groups(*specs: Any) -> list[SimpleNamespace]:
    """KV-cache groups with one layer each: "a", "b", ..."""
    return [
        SimpleNamespace(kv_cache_spec=spec, layer_names=list(vars(spec).get("kv_cache_specs", "abc"[index])))
        for index, spec in enumerate(specs)
    ]


def with_blocks_of(num_tokens: int) -> FullAttentionSpec:
    spec = FullAttentionSpec()
    spec.block_size, vars(spec)["head_size"] = num_tokens, 64
    return spec


@dataclass
class KVCacheConfig:
    """vLLM's."""

    kv_cache_groups: list[Any]
    kv_cache_tensors: list[Any]
    needs_kv_cache_zeroing: bool = False


def cache_of(*specs: Any, pools: int = 1) -> KVCacheConfig:
    return KVCacheConfig(groups(*specs), [1] * pools)


@pytest.mark.parametrize(
    ("spec", "keeps"),
    [
        (FullAttentionSpec(), Keeps.EVERYTHING),
        (MLAAttentionSpec(), Keeps.EVERYTHING),
        (SlidingWindowSpec(), Keeps.WINDOW),
        (ChunkedLocalAttentionSpec(), Keeps.WINDOW),
        (RSWASpec(), Keeps.WINDOW),
        (MambaSpec(), Keeps.STATE),
        (UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=FullAttentionSpec()), Keeps.EVERYTHING),
        (UniformTypeKVCacheSpecs(a=SlidingWindowSpec(), b=SlidingWindowSpec()), Keeps.WINDOW),
        (UniformTypeKVCacheSpecs(a=SlidingWindowSpec(), b=FullAttentionSpec()), Keeps.WINDOW),
    ],
    ids=["full", "latent", "window", "chunks", "unknown to its base", "state", "uniform", "windows", "mixed"],
)
def test_who_drops_blocks_is_told_by_the_kind_of_its_layers(spec: Any, keeps: Keeps) -> None:
    """Not by the number of groups."""
    assert kv_cache_specs.keeps_of(spec) is keeps


class CircularBufferSpec:
    pass


class OfSomebodys(FullAttentionSpec):
    pass


@pytest.mark.parametrize("spec", [CircularBufferSpec(), OfSomebodys()], ids=lambda spec: type(spec).__name__)
def test_a_kind_of_cache_that_is_not_known_is_refused(spec: Any) -> None:
    """Its manager may keep one block of a request (vLLM 0.33), or any."""
    for one in (spec, UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=spec)):
        with pytest.raises(LayoutRefused, match=type(spec).__name__):
            kv_cache_specs.keeps_of(one)


def config_of(**values: Any) -> SimpleNamespace:
    """A model's configuration, as transformers has it."""
    return SimpleNamespace(to_dict=lambda: values, **values)


def worker(**changed: Any) -> WorkerView:
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
    )
    cache = SimpleNamespace(cache_dtype="auto", block_size=16, use_replayssm=False)
    model = SimpleNamespace(
        model="m", revision=None, dtype="bf16", quantization=None, quantization_config=None,
        hf_config=config_of(), hf_text_config=config_of(), hf_overrides={},
        is_multimodal_model=False, multimodal_config=None, trust_remote_code=False, max_model_len=4096,
        get_total_num_kv_heads=lambda: 8, get_head_size=lambda: 64, get_total_num_hidden_layers=lambda: 2,
        model_impl="auto", runner_type="generate", disable_sliding_window=False, architectures=["Qwen3NextForCausalLM"],
        try_get_generation_config=dict, override_generation_config={},
    )  # fmt: skip
    for owner in (parallel, cache, model):
        optional = {id(cache): "calculate_kv_scales", id(model): "uses_mrope"}.get(id(owner))
        for name in [name for name in changed if name in {*vars(owner), optional}]:
            setattr(owner, name, changed.pop(name))
    half = SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=parallel,
            cache_config=cache,
            speculative_config=changed.pop("speculative", None),
            model_config=model,
            load_config=SimpleNamespace(),
            diffusion_config=changed.pop("diffusion", None),
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"a": 1}),
        model_config=model,
        engine_id="e",
        world_size=2,
        tp_rank=1,
        attn_backends=[backend("FLASH")],
        kv_cache_config=cache_of(
            FullAttentionSpec(), UniformTypeKVCacheSpecs(b=SlidingWindowSpec(), c=SlidingWindowSpec()), pools=3
        ),
        num_blocks=7,
        use_mla=False,
        device_id=0,
        nixl_memory_type="DRAM",
        nixl_backends=("UCX",),
        nixl_wrapper=None,
        _physical_blocks_per_logical_kv_block=2,
        _registered_descs=[],
        xfer_stats="stock",
        xfer_handshake_metadata=None,
    )
    vars(half).update(changed)
    return WorkerView(SimpleNamespace(connector_worker=half))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"prefill_context_parallel_size": 4}, "--prefill-context-parallel-size 4"),
        ({"calculate_kv_scales": True}, "--calculate-kv-scales"),
        ({"diffusion": SimpleNamespace(canvas_length=256)}, "a diffusion model"),
        (
            {"multimodal_config": SimpleNamespace(video_pruning_rate=0.5), "uses_mrope": True},
            "--video-pruning-rate 0.5 of a model with spatial token positions",
        ),
        (
            {"attn_backends": [backend("FLASH_ATTN"), backend("ROCM_ATTN")]},
            "the attention backend ROCM_ATTN, which interleaves the tokens of a block",
        ),
        (
            {"kv_cache_config": cache_of(UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=FullAttentionSpec(True)))},
            "a Prefix LM (non-causal attention)",
        ),
    ],
)
def test_what_no_peer_could_make_sense_of_is_named(changed: dict[str, Any], found: str) -> None:
    """Not by a peer, and not by this engine."""
    assert [one for one, _ in worker(**changed).unserved] == [found]
    assert worker(calculate_kv_scales=False).unserved == []
    pruning = SimpleNamespace(video_pruning_rate=0.5)
    assert worker(multimodal_config=pruning, uses_mrope=False).unserved == []


def test_a_shuffled_cache_is_named(make_module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of a block in tiles; elsewhere nobody reads that variable."""
    make_module("vllm").envs = make_module("vllm.envs", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT = True")  # type: ignore[attr-defined]
    assert worker().unserved == []
    monkeypatch.setattr(nixl_worker, "_is_rocm", lambda: True)
    assert [found for found, _ in worker().unserved] == [
        "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1, which interleaves the tokens of a block"
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_head_slots": 2}, "num_head_slots 2 for 4 heads"),
        ({"num_head_slots": 4}, "num_head_slots 4 for 4 heads"),
        ({"tokens_per_state": 4}, "tokens_per_state 4"),
        *(
            ({"kv_quant_mode": SimpleNamespace(name=name)}, f"kv_quant_mode {name}")
            for name in ("NVFP4", "NVFP4_DS_MLA", "TURBOQUANT_4BIT_NC", "ULTRAQUANT_4BIT", "OCTAVE_K3V4", "CUSTOM")
        ),
    ],
)
def test_cells_that_are_no_token_of_one_head_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    """Their shape may look as if they were: K and V as two heads, of a rank that has two."""
    spec = FullAttentionSpec()
    vars(spec).update(fields)
    with pytest.raises(LayoutRefused, match=words):
        worker(kv_cache_config=cache_of(spec)).groups()
    with pytest.raises(LayoutRefused, match="turboquant_k8v4"):
        worker(kv_cache_config=cache_of(FullAttentionSpec()), cache_dtype="turboquant_k8v4").groups()
    for name in ("NONE", "FP8_PER_TENSOR", "INT4_PER_TOKEN_HEAD"):
        spec = FullAttentionSpec()
        vars(spec).update(num_head_slots=None, tokens_per_state=1, kv_quant_mode=SimpleNamespace(name=name))
        assert worker(kv_cache_config=cache_of(spec)).groups()


@pytest.mark.parametrize(
    ("backends", "sizes", "ratio", "shown"),
    [
        (["CPU_ATTN"], (16,), 1, "CPU_ATTN, whole blocks of 16 tokens, for vec16"),
        (["CPU_ATTN"], (32, 32), 1, "CPU_ATTN, whole blocks of 32 tokens, for amx"),
        (["CPU_ATTN"], (48, 32), 1, "CPU_ATTN, whole blocks of 48+32 tokens, for amx+vec16"),
        (["FLASH_ATTN"], (64, 32), 1, "FLASH_ATTN"),
        (["SPARSE", "V32_INDEXER"], (64,), 1, "SPARSE+V32_INDEXER, whole blocks of 64 tokens"),
        (["SPARSE", "V32_INDEXER"], (64,), 2, "SPARSE+V32_INDEXER, whole blocks of 64 tokens in 2"),
    ],
)
def test_what_shares_whole_blocks_only_has_a_tag_of_its_own(
    backends: list[str], sizes: tuple[int, ...], ratio: int, shown: str, make_module: Callable[..., ModuleType]
) -> None:
    """The CPU's kernel, whose order is the processor's; and an indexer, whose scales are behind the keys of all tokens
    of a block (DeepSeek V3.2)."""
    cpu = make_module("vllm.v1.attention.backends.cpu_attn")
    cpu._get_attn_isa = lambda _, size, __: "vec16" if size % 32 else "amx"  # type: ignore[attr-defined]
    view = worker(
        attn_backends=[*map(backend, backends)],
        kv_cache_config=cache_of(*map(with_blocks_of, sizes)),
        _physical_blocks_per_logical_kv_block=ratio,
    )
    assert dict(view.facts)["attention"] == shown


class Decided(SimpleNamespace):
    """vLLM's configuration: it says itself which runner it has."""

    is_v2: bool

    @property
    def use_v2_model_runner(self) -> bool:
        return self.is_v2


@pytest.mark.parametrize(
    ("is_v2", "method", "unpadded", "expected"),
    [
        (True, "eagle3", False, True),
        (True, "mtp", False, True),
        (True, "ngram", False, False),
        (True, None, False, False),
        (False, "eagle3", False, False),
        (False, "draft_model", False, False),
        (False, "eagle3", True, True),
        (False, "ngram", True, False),
    ],
)
def test_who_answers_before_a_draft_model_has_run(
    is_v2: bool, method: str | None, unpadded: bool, expected: bool
) -> None:
    """Nobody else waits for the device."""
    speculative = None
    if method is not None:
        speculative = SimpleNamespace(
            method=method, model="s", draft_model_config=None, disable_padded_drafter_batch=unpadded
        )
    asked = worker(speculative=speculative)
    asked.vllm_config = Decided(**vars(asked.vllm_config), is_v2=is_v2)
    assert asked.answers_before_drafts is expected


@pytest.fixture
def kernel_tokens(make_module: Callable[..., ModuleType]) -> Callable[[int], None]:
    """Sets how many tokens of a block vLLM's kernels take at most."""

    def at_most(num_tokens: int) -> None:
        source = f"def select_common_block_size(size, backends): return min(size, {num_tokens})"
        make_module("vllm.v1.worker.utils", source)

    return at_most


@pytest.mark.parametrize(("at_most", "is_served"), [(64, True), (16, False)])
def test_groups_may_have_blocks_of_other_sizes(
    kernel_tokens: Callable[[int], None], at_most: int, is_served: bool
) -> None:
    """Gemma 4: 64 tokens in a sliding window's blocks, 32 in the others. Not if the kernel splits those of one group
    only: a slot of a slab, and a block that is registered, has the same bytes in every group."""
    kernel_tokens(at_most)
    view = worker(
        kv_cache_config=cache_of(FullAttentionSpec(), with_blocks_of(32)), _physical_blocks_per_logical_kv_block=1
    )
    refused = [("KV-cache groups with 1, 2 kernel blocks in a block", "the same in every group")]
    assert view.unserved == ([] if is_served else refused)
    assert view.groups() == [{"a": Page(64, 16, 4)}, {"b": Page(64, 32, 4)}]


@pytest.mark.parametrize(("tokens_of_wide", "is_served"), [(16, True), (8, False)])
def test_a_kernel_may_split_blocks_of_one_size_by_their_spec(
    tokens_of_wide: int, is_served: bool, install: Install, make_module: Callable[..., ModuleType]
) -> None:
    """vLLM 0.33: FlashAttention 4 takes blocks of another size where heads are wide."""
    source = "def select_common_block_size(size, backends, specs): return specs[0].kernel_tokens"
    make_module("vllm.v1.worker.utils", source)
    source = "def get_current_attn_backends_and_specs(config, cache, fallback): return fallback, cache.kv_cache_groups"
    make_module(_UTILS, source)
    install(COUNTS_EXTERNAL_WEIGHTS)
    found = groups(FullAttentionSpec(), FullAttentionSpec())
    found[0].kernel_tokens, found[1].kernel_tokens = 16, tokens_of_wide
    view = worker(kv_cache_config=KVCacheConfig(found, [1]), _physical_blocks_per_logical_kv_block=1)
    refused = [("KV-cache groups with 1, 2 kernel blocks in a block", "the same in every group")]
    assert view.unserved == ([] if is_served else refused)


def test_layers_of_one_group_with_blocks_of_several_sizes_are_named() -> None:
    """A position would be in another block than the manifest says."""
    config = cache_of(UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=with_blocks_of(32)))
    ((found, expected),) = worker(kv_cache_config=config).unserved
    assert found == "a KV-cache group with blocks of 16, 32 tokens"
    assert expected == "blocks of one size in each group"


UNKNOWN = (8 * 2**20 + 1, 1, 0)


@pytest.mark.parametrize(
    ("tp_size", "num_heads", "config", "share"),
    [
        (1, 8, {}, (0, 1, 0)),
        (2, 4, {}, (4, 1, 0)),
        (8, 1, {}, (1, 1, 0)),
        (16, 1, {}, (0, 2, 1)),
        (2, 2, {"num_key_value_heads": 8, "num_global_key_value_heads": 4}, (2, 1, 0)),
        (2, 1, {"num_key_value_heads": 8, "num_global_key_value_heads": 2}, (1, 1, 0)),
        (8, 1, {"num_attention_groups": 8, "other_setting": {"num_attention_groups": 2}}, UNKNOWN),
        (8, 1, {"num_attention_heads": 16, "block_configs": [{"attention": {"n_heads_in_group": 8}}]}, UNKNOWN),
        (8, 1, {"num_key_value_heads": 8, "num_global_key_value_heads": 4}, UNKNOWN),
        (8, 1, {"num_kv_heads": [8, 4]}, UNKNOWN),
        (8, 1, {"num_key_value_heads": 8, "per_layer_config": {"1": {"num_key_value_heads": 1}}}, UNKNOWN),
        (16, 1, {"num_key_value_heads": 8, "num_global_key_value_heads": 4}, (0, 2, 1)),
        (20, 1, {}, (20 * 2**20 + 1, 1, 0)),
    ],
)
def test_the_heads_of_a_rank_are_found_or_are_no_heads_of_others(
    tp_size: int, num_heads: int, config: dict[str, Any], share: tuple[int, int, int]
) -> None:
    """A rank's only head may be a copy of another rank's, in layers with fewer heads than the other layers have."""
    rank = min(1, tp_size - 1)
    view = worker(world_size=tp_size, tp_rank=rank, hf_text_config=config_of(**config))
    assert view.share_of(num_heads) == share
    latent = worker(world_size=tp_size, tp_rank=rank, use_mla=True)
    assert latent.share_of(1) == (0, tp_size, rank)
    assert latent.share_of(4).first_head == 4 * rank, "heads of a draft model"


FACTS: list[dict[str, Any]] = [
    {"dtype": "fp16"},
    {"cache_dtype": "fp8"},
    {"quantization": "awq"},
    {"hf_config": config_of(rope_theta=1)},
    {"model_impl": "transformers"},
    {"disable_sliding_window": True},
    {"get_total_num_kv_heads": lambda: 4},
    {"get_head_size": lambda: 128},
    {"get_total_num_hidden_layers": lambda: 3},
    {"attn_backends": [backend("TRITON")]},
    {"kv_cache_config": cache_of(FullAttentionSpec())},
]


@pytest.mark.parametrize("changed", FACTS, ids=lambda changed: next(iter(changed)))
def test_whatever_bytes_follow_from_is_a_fact(changed: dict[str, Any], make_module: Callable[..., ModuleType]) -> None:
    platforms = make_module("vllm.platforms")
    platforms.current_platform = SimpleNamespace(fp8_dtype=lambda: "e4m3fn")  # type: ignore[attr-defined]
    plain, other = dict(worker().facts), dict(worker(**changed).facts)
    assert "vLLM" in plain
    assert len(dict(plain.items() ^ other.items())) == 1


def test_quantization_behind_loading_is_a_fact(tmp_path: Path, make_module: Callable[..., ModuleType]) -> None:
    """By its settings, in whatever file they are, and whether a variable or an option names it."""

    def facts(text: str) -> dict[str, str]:
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.json"
        path.write_text(text)
        names = {"quantization_config_file": str(path)}
        return dict(worker(hf_config=config_of(**names), hf_overrides=names).facts)

    unread = config_of(quantization_config_file="a checkpoint's, which vLLM does not read")
    assert "quantization file" not in dict(worker(hf_config=unread).facts)
    one, other = facts("int8"), facts("fp8")
    assert one == facts("int8") and {name for name, _ in one.items() ^ other.items()} == {"quantization file"}
    envs = make_module("vllm.envs")
    make_module("vllm").envs = envs  # type: ignore[attr-defined]
    plain = dict(worker().facts)
    for name, value in (("VLLM_MARLIN_INPUT_DTYPE", "fp8"), ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", {"dtype": "int4"})):
        setattr(envs, name, value)
        changed = {key for key, _ in plain.items() ^ dict(worker().facts).items()}
        assert [*worker().facts] == sorted(worker().facts), "they are compared as text"
        assert changed and all(key.startswith(name) for key in changed)
        delattr(envs, name)


@pytest.mark.parametrize(
    ("option", "is_fact"),
    [("mm_device_do_normalize", True), ("of_a_later_vllm", True), ("mm_processor_cache_gb", False)],
)
def test_every_option_of_media_is_a_fact_but_limits_and_caches(option: str, is_fact: bool) -> None:
    """Decode's processor makes what prefill's encoder takes."""
    one, other = (
        dict(worker(is_multimodal_model=True, multimodal_config=SimpleNamespace(**{option: value})).facts)["media"]
        for value in (True, False)
    )
    assert (one != other) is is_fact


@pytest.mark.parametrize(
    ("library", "module"),
    [
        *(("transformers",) * 2, ("torchvision",) * 2, ("torchcodec",) * 2),
        *(("pillow", "PIL"), ("pillow-simd", "PIL"), ("opencv-contrib-python-headless", "cv2")),
    ],
)
def test_what_turns_a_file_into_pixels_is_a_fact(library: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's hash of an image is that of its file, and transformers prepares it with torchvision if that is there. The
    files of a module are those of the distribution that was installed last."""
    installed = {"transformers": "5.5.3", "pillow": "13.0", "opencv-python": "5.0", "numpy": "2.0"}
    modules = {"transformers": ["transformers"], "PIL": ["pillow"], "cv2": ["opencv-python"], "numpy": ["numpy"]}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError
        return installed[name]

    def media() -> set[tuple[str, str]]:
        return set(worker(is_multimodal_model=True, multimodal_config=SimpleNamespace()).facts)

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: modules)
    plain, text = media(), worker().facts
    installed[library] = "99"
    modules[module] = [*{*modules.get(module, ()), library}]
    assert {name for name, _ in media() ^ plain} == {f"media.{library}"}
    assert worker().facts == text, "only where there are media"


def test_what_decodes_videos_is_a_fact(make_module: Callable[..., ModuleType]) -> None:
    def media() -> dict[str, str]:
        return dict(worker(is_multimodal_model=True, multimodal_config=SimpleNamespace()).facts)

    plain = media()
    found = make_module("vllm.envs", "VLLM_VIDEO_LOADER_BACKEND = 'torchcodec'")
    make_module("vllm").envs = found  # type: ignore[attr-defined]
    assert dict(media().items() - plain.items()) == {"media.videos": "torchcodec"}


def test_drafts_that_compute_kv_are_a_fact() -> None:
    def drafting(**values: Any) -> dict[str, str]:
        draft = SimpleNamespace(hf_config=config_of(**values), dtype="bf16", model="d")
        return dict(worker(speculative=SimpleNamespace(method="eagle", draft_model_config=draft)).facts)

    assert drafting(layers=1)["drafts"] != drafting(layers=2)["drafts"] and "drafts" not in dict(worker().facts)


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("dtypes", (SimpleNamespace(itemsize=4),), "groups"),
        ("mamba_type", "gdn", "groups"),
        (None, True, "states of convolutions"),
    ],
)
def test_a_state_of_another_kind_is_another_fact(
    name: str | None, value: object, fact: str, attention_backends: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of another tensor-parallel size: ranks have other shares of it then."""
    config = cache_of(FullAttentionSpec(), MambaSpec())
    before = dict(worker(kv_cache_config=config).facts)
    if name:
        monkeypatch.setattr(MambaSpec, name, value)
    else:
        monkeypatch.setattr(nixl_worker, "dims_first", lambda: value)
    after = dict(worker(kv_cache_config=config).facts)
    assert [one for one in before if before[one] != after[one]] == [fact]
    monkeypatch.setattr(MambaSpec, "shapes", ((3, 8),))
    assert dict(worker(kv_cache_config=config).facts) == after


def drafting(method: str, num_tokens: int = 2, model: str = "Qwen3NextForCausalLM") -> dict[str, Any]:
    speculative = SimpleNamespace(method=method, num_speculative_tokens=num_tokens, model="s", draft_model_config=None)
    return {"speculative": speculative, "architectures": [model]}


SERVED, KEPT = [HITS_DIVERGE], {"num_prefill_checkpoint_blocks": 1}
IN_BLOCKS = {"mamba_cache_mode": "align"}


@pytest.mark.usefixtures("attention_backends")
@pytest.mark.parametrize(
    ("has", "fields", "changed", "found"),
    [
        ([], {}, {}, "layers that keep a state, with vLLM"),
        (SERVED, {}, {}, ""),
        (SERVED, {"mamba_cache_mode": "all"}, {}, "--mamba-cache-mode all"),
        (SERVED, {}, {"use_replayssm": True}, "--use-replayssm"),
        # Drafts, where they were compared with stock.
        (SERVED, IN_BLOCKS, drafting("ngram", 0), ""),
        (SERVED, IN_BLOCKS, drafting("ngram"), "--speculative-config with method ngram for Qwen3NextForCausalLM"),
        (SERVED, {}, drafting("mtp", model="Qwen3_5ForCausalLM"), "--speculative-config"),
        ([*SERVED, HASHES_AHEAD], {}, drafting("mtp"), ""),
        ([*SERVED, HASHES_AHEAD], {}, drafting("mtp", model="Qwen3_5MoeForConditionalGeneration"), ""),
        ([*SERVED, HASHES_AHEAD], {}, drafting("mtp", model="KimiLinearForCausalLM"), "--speculative-config"),
        ([*SERVED, HASHES_AHEAD], {}, drafting("ngram"), ""),
        ([*SERVED, HASHES_AHEAD], {}, drafting("eagle"), ""),
        ([*SERVED, HASHES_AHEAD], {}, drafting("dflash"), ""),
        ([*SERVED, HASHES_AHEAD], {}, drafting("dspark"), "--speculative-config"),
        # From 0.32 on every layer of Mamba2 says that it keeps a checkpoint; without a prefix cache it keeps none.
        (SERVED, KEPT, {}, ""),
        (SERVED, {**IN_BLOCKS, **KEPT}, {}, "checkpoints of states while a prompt is computed"),
        ([*SERVED, COUNTS_EXTERNAL_WEIGHTS], KEPT, {}, ""),
        ([*SERVED, COUNTS_EXTERNAL_WEIGHTS], {**IN_BLOCKS, **KEPT}, {}, ""),
    ],
)
def test_what_would_make_a_state_the_wrong_one_is_refused(
    has: list[Change],
    fields: dict[str, Any],
    changed: dict[str, Any],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state at every block boundary, or in pieces; kernels that were not run with drafts; an engine that cannot load
    it."""
    monkeypatch.setattr(kv_cache_specs, "installed_has", has.__contains__)
    spec = MambaSpec()
    vars(spec).update(fields)
    view = worker(kv_cache_config=cache_of(FullAttentionSpec(), spec), **changed)
    assert [one[: len(found)] for one, _ in view.unserved] == ([found] if found else [])
    assert worker(**changed).unserved == [], "only where there are states"


def test_states_of_drafts_are_of_another_kind() -> None:
    plain, with_drafts = MambaSpec(), MambaSpec()
    vars(with_drafts)["num_speculative_blocks"] = 2
    assert kv_cache_specs.kind_of(with_drafts) == f"{kv_cache_specs.kind_of(plain)} num_speculative_blocks=2"


@pytest.mark.parametrize(
    ("heads_here", "tp_size", "named", "expected"),
    [
        ([4], 2, {}, 8),
        ([1], 8, {"num_key_value_heads": 2}, 8),
        ([1], 2, {"num_key_value_heads": 2}, 2),
        ([1], 1, {}, 1),
        ([8, 2], 1, {}, 8),
        ([2, 8], 1, {}, 8),
    ],
)
def test_as_many_ranks_have_kv_of_their_own_as_there_are_heads(
    heads_here: list[int], tp_size: int, named: dict[str, int], expected: int
) -> None:
    """A rank's only head may be one of as many as the model has: more heads than there are mean fewer copies. The
    layer with the most decides: its heads would not all arrive otherwise."""
    specs = [FullAttentionSpec() for _ in heads_here]
    for spec, heads in zip(specs, heads_here, strict=True):
        spec.num_kv_heads = heads
    found = worker(kv_cache_config=cache_of(*specs), world_size=tp_size, hf_text_config=config_of(**named))
    assert found.kv_shares == expected


def test_latents_beside_states_are_not_all_that_a_rank_needs() -> None:
    """Kimi-Linear: decode asks one rank of prefill for a latent, and every rank for the states."""
    latent, drafter = MLAAttentionSpec(), FullAttentionSpec()
    latent.num_kv_heads, drafter.num_kv_heads = 1, 4
    assert worker(use_mla=True, kv_cache_config=cache_of(latent)).kv_shares == 1
    found = worker(use_mla=True, world_size=2, kv_cache_config=cache_of(latent, drafter)).kv_shares
    assert found == 8, "as many as a draft model has heads"
    assert worker(use_mla=True, kv_cache_config=cache_of(MLAAttentionSpec(), MambaSpec())).kv_shares == MAX_TP_SIZE


@pytest.mark.parametrize(("use_mla", "heads"), [(False, 1_009), (True, 1)], ids=["heads", "latent"])
def test_where_all_views_are_alike_no_backend_is_asked(install: Install, use_mla: bool, heads: int) -> None:
    """vLLM 0.29: (blocks, heads, tokens, cell), and one head for a latent."""
    install(LOADS_BEHIND)
    asked, numbers = worker(use_mla=use_mla).probe_cache_shape()
    assert asked == (numbers["num_blocks"], heads, numbers["block_size"], 1)
    assert Axes.from_probe(asked, **numbers) == Axes(2, None if use_mla else 1, None, 4)


def test_pools_are_counted_by_where_layers_lie(install: Install) -> None:
    """vLLM 0.29: groups that share pools have a tensor each, with layers at the same bytes."""

    def tensor(*layers: str, offset: int = 0, layer_stride: int = 64) -> SimpleNamespace:
        return SimpleNamespace(layers=layers, offset=offset, layer_stride=layer_stride)

    def pools(*tensors: SimpleNamespace) -> int:
        return worker(kv_cache_config=KVCacheConfig(groups(FullAttentionSpec()), list(tensors))).num_pools

    install(LOADS_BEHIND)
    assert pools(tensor("a", "b", "c")) == 3
    assert pools(tensor("a", "b"), tensor("c", "d")) == 2
    assert pools(tensor("a", "b"), tensor("c")) == 2
    assert pools(tensor("a"), tensor("b", offset=64), tensor("c", offset=128)) == 3


# ------------------------------------------------------------------------------------------------------ parts of states


CONV, SSM = SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4)


def spec(kind: Any, *shapes: tuple[int, ...]) -> SimpleNamespace:
    dtypes = [CONV if len(shape) == 2 else SSM for shape in shapes]
    return SimpleNamespace(mamba_type=kind, shapes=shapes, dtypes=dtypes)


def test_a_state_that_all_ranks_have_is_not_shared_out() -> None:
    """vLLM 0.30: ``tp_replicated``."""
    one = spec("SHORT_CONV", (3, 8))
    one.tp_replicated = True
    assert parts_of_state(one, 3, 4, set(), dim_first=False) == ((0, 3, 16, 2, 8, 0, 4, 3),)


@pytest.mark.parametrize(
    ("kind", "shapes", "groups"),
    [
        ("MAMBA2", ((3, 22), (4, 3, 5)), {4}),
        ("MAMBA2", ((3, 22), (4, 3, 5)), {1, 2}),
        ("MAMBA2", ((3, 12), (4, 3, 5)), {2}),
        ("MAMBA2", ((3, 21), (4, 3, 5)), {2}),
        ("MAMBA2", ((3, 22), (4, 3, 5), (4, 8, 3)), {2}),
        ("MAMBA1", ((3, 22), (4, 3, 5)), set()),
        ("LINEAR", ((3, 22),), set()),
        ("new", ((3, 22), (4, 3, 5)), {2}),
    ],
    ids=str,
)
def test_what_is_not_known_is_not_cut(kind: str, shapes: tuple[tuple[int, ...], ...], groups: set[int]) -> None:
    assert parts_of_state(spec(kind, *shapes), 0, 2, groups, dim_first=False) == ()
