# SPDX-License-Identifier: Apache-2.0
"""Named access to a vLLM worker's weights: its models in memory, the files they come from, and their settings.

Sources: ``v1/worker/gpu_worker.py``, ``v1/worker/gpu_model_runner.py``, ``v1/worker/gpu/model_runner.py``,
``model_executor/model_loader/base_loader.py``, ``default_loader.py``, ``config/model.py``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcached_nixl.identity.files import checksum_of, processor_checksum, processor_code, settings_of
from kvcached_nixl.identity.history import ModelReading, WeightsHistory, joined
from kvcached_nixl.identity.memory import Reading, read
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.computes import choices, own_code, prepares_media
from kvcached_nixl.vllm.adapter.locate import LOADER_BASE
from kvcached_nixl.vllm.adapter.specs import keeps_draft_kv
from kvcached_nixl.wire.handshake import Weights

logger = logging.getLogger(SERVER_LOGGER)

_NOT_OF_MEDIA = frozenset(
    {
        *("language_model_only", "limit_per_prompt", "enable_mm_embeds", "skip_mm_profiling", "interleave_mm_strings"),
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc"),
        *("mm_ipc_gpu_memory_gb", "mm_encoder_only", "mm_encoder_tp_mode", "allow_missing_mm_embeddings"),
        *("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
    }
)
"""Options of vLLM's ``MultiModalConfig`` that change no embedding: limits, caches, and where encoders run. Files of
scales are compared by content."""
_HISTORY = "_kvcached_nixl_weights"
_LOAD = "_kvcached_nixl_load"


def note_files(loader: Any, name: str, subfolder: str | None, files: Sequence[str]) -> None:
    """Called when vLLM loads weights from these files, of a subfolder if the model's weights have several parts."""
    load = vars(loader).setdefault(_LOAD, object())
    read_alone = [] if distrust(type(loader)) else [Path(file) for file in files]
    _history(loader).reads_files(name, subfolder or "", read_alone, load)


def _empty_is_zero() -> Any:
    """A mode of torch until its ``is_over`` is set, in which memory that nobody has written is zero.

    Some parameters have rows that no checkpoint fills: K and V of a layer that shares those of another one (Gemma 4).
    They would hold what was in memory before, and equal weights would look different.
    """
    from torch.overrides import TorchFunctionMode

    allocates = {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
    }

    class EmptyIsZero(TorchFunctionMode):  # type: ignore[misc]
        is_over = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            is_new = func in allocates and "out" not in (kwargs or {}) and type(made) is torch.Tensor
            if self.is_over or not is_new or torch.compiler.is_compiling():
                return made
            if made.layout is torch.strided and not made.is_meta:
                # What traces functions has tensors without memory.
                with contextlib.suppress(NotImplementedError):
                    made.untyped_storage().fill_(0)
            return made

    return EmptyIsZero()


def watch_loading(loader: Any) -> None:
    """Note what a new loader of weights loads, before and after kernels rewrite it.

    Every loader has methods of its own, so they are wrapped on the loader itself. ``load_model`` calls
    ``load_weights``, and then has kernels rewrite what was loaded; ``reload_weights`` of a worker calls
    ``get_all_weights``, which only some loaders have.
    """
    load_weights, load_model = private(loader, "load_weights"), private(loader, "load_model")
    get_all_weights = optional(loader, "get_all_weights")
    loaded: Reading = {}
    building = _empty_is_zero()

    def loads_weights(model: Any, *rest: Any, **named: Any) -> Any:
        nonlocal loaded
        building.is_over = True
        _adopt(loader, model)
        before = read(_loaded_into(model))
        found = load_weights(model, *rest, **named)
        # What loading leaves as it was is not of the checkpoint, and may be memory that nobody has written.
        loaded = {name: one for name, one in read(_loaded_into(model)).items() if before.get(name) != one}
        return found

    def loads_model(*arguments: Any, **named: Any) -> Any:
        building.is_over = False
        with building:
            model = load_model(*arguments, **named)
        history = _adopt(loader, model)
        _computes_by(model)
        history.built(loaded, distrust(type(loader)))
        history.begins(_reading(model, moves=False).tensors)
        return model

    def gets_all_weights(model_config: Any, model: Any) -> Any:
        _adopt(loader, model)
        return get_all_weights(model_config, model)

    loader.load_weights, loader.load_model = loads_weights, loads_model
    if get_all_weights is not None:
        loader.get_all_weights = gets_all_weights


def distrust(cls: type) -> str:
    """Why loaders of a class may put other weights in place than they read, as text; "" if vLLM's own code loads."""
    order = next(one for one in cls.__mro__ if "load_model" in vars(one))
    is_vllms = cls.__module__.startswith("vllm.") and order.__module__ == LOADER_BASE.module
    return "" if is_vllms else f"{cls.__name__} may put other weights in place than it reads"


def look_again(worker: Any, names: Sequence[str]) -> Any:
    """In a worker, after these calls, which may have changed its weights. Returns its metadata of handshakes, or why
    its weights cannot be read, as text.

    Where one rank raises, vLLM's executor leaves the answers of the others, and takes them for those of later calls.
    """
    try:
        for model in _models(worker).values():
            _history(model).called(names)
        return worker.get_kv_connector_handshake_metadata()
    except Exception as error:
        logger.exception("The weights of this rank cannot be read")
        return f"{type(error).__name__}: {error}"


def weights_of(worker: Any) -> tuple[Weights, Mapping[str, Sequence[str]]]:
    """A worker's current weights, including draft models that compute KV. Reads memory, on the worker's own thread.

    Returns: the weights, and the names of their tensors as `Weights.misfit` takes them.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    config, models = private(worker, "vllm_config"), _models(worker)
    # Expert load balancing moves experts between ranks without notice.
    moves = private(config.parallel_config, "enable_eplb")
    found = {prefix: _history(model).now(_reading(model, moves)) for prefix, model in models.items()}
    parallel = config.parallel_config
    place = f"{get_tensor_model_parallel_rank()} of {parallel.tensor_parallel_size}"
    if parallel.enable_expert_parallel:
        placement = parallel.expert_placement_strategy, parallel.eplb_config
        place += f", experts {parallel.data_parallel_rank} of {parallel.data_parallel_size} {placement}"
    computes = sorted(frozenset().union(*map(_computes_by, models.values())))
    return joined(found, place, checksum_of({"computes": computes}) if computes else "")


def _history(owner: Any) -> WeightsHistory:
    """Of a model, or of what a loader loads."""
    if _HISTORY not in vars(owner):
        vars(owner)[_HISTORY] = WeightsHistory()
    found: WeightsHistory = vars(owner)[_HISTORY]
    return found


def _adopt(loader: Any, model: Any) -> WeightsHistory:
    """A loader loads this model: both have one history, the model's if it has one."""
    found = vars(loader)[_HISTORY] = vars(model).setdefault(_HISTORY, _history(loader))
    return found


def _loaded_into(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers that a checkpoint has. Others are derived from limits, too, or not written yet."""
    derived = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from model.named_parameters()
    yield from ((name, one) for name, one in model.named_buffers() if name not in derived)


def _reading(model: Any, moves: bool) -> ModelReading:
    held = held_by(model)
    tensors = read((name, one.tensor) for name, one in held.items())
    tensors |= read(read_by_kernel(model, _history(model).vanished(tensors)))
    parameters = {name for name, one in held.items() if one.is_parameter}
    moved = [name for name in tensors if ".experts." in f".{name}" or "expert_weights" in name] if moves else ()
    return ModelReading(tensors, parameters, moved)


def model_facts(config: Any) -> dict[str, object]:
    """The parts of a model's configuration that determine the bytes of its KV, by name."""
    model = private(config, "model_config")
    facts: dict[str, object] = {
        **{f"configuration.{name}": text for name, text in settings_of(model.hf_config.to_dict()).items()},
        "dtype": model.dtype,
        "quantization": model.quantization or "-",
        "implementation": private(model, "model_impl"),
        "window": "off" if private(model, "disable_sliding_window") else "-",
    }
    if (settings := private(model, "quantization_config")) is not None:
        # vLLM has some besides those of the model.
        facts["quantization"] = f"{facts['quantization']} {checksum_of({'settings': settings})}"
    if private(model, "is_multimodal_model"):
        media = model.multimodal_config
        chosen = {name: one for name, one in vars(media).items() if name not in _NOT_OF_MEDIA}
        if scales := optional(media, "mm_encoder_fp8_scale_path"):
            chosen["scales"] = hashlib.blake2b(Path(scales).read_bytes()).hexdigest()
        facts["media"] = f"{checksum_of(chosen)} {_processor(model) or '-'}"
        facts.update(prepares_media())
    speculative = config.speculative_config
    if keeps_draft_kv(speculative):
        draft = speculative.draft_model_config
        drafted = "-" if draft is None else f"{checksum_of(draft.hf_config.to_dict())} {draft.dtype}"
        facts["drafts"] = f"{speculative.method} {drafted}"
    return facts


def _models(worker: Any) -> dict[str, Any]:
    """The models that compute KV, by a prefix for their tensors' names."""
    runner = private(worker, "model_runner")
    found = {"": private(runner, "get_model")()}
    if keeps_draft_kv(private(worker, "vllm_config").speculative_config):
        # The draft model's attribute in model runners V1 and V2.
        for name in ("drafter", "speculator"):
            model = optional(optional(runner, name), "model")
            if model is not None:
                found["draft "] = model
    return found


def _computes_by(model: Any) -> frozenset[str]:
    """What the bytes of KV follow from besides vLLM's code and what `model_facts` has, as it was when the model was
    built: files may be replaced, and with ``--max-model-len auto`` vLLM lowers the maximum afterwards."""
    history = _history(model)
    if history.computes is None:
        kinds = {type(one) for one in (*model.modules(), *(one for _, one in _objects_of(model)))}
        history.computes = frozenset({*own_code(kinds), *choices(model)})
    return history.computes


def _processor(model: Any) -> str:
    """Checksum of the model's own settings and code for processing images, sounds, ...; "" if there are none.

    They are in the folder with its configuration, whatever loads its weights.
    """
    from huggingface_hub import try_to_load_from_cache

    if not (folder := Path(model.model)).is_dir():
        try:
            found = try_to_load_from_cache(str(model.model), "config.json", revision=model.revision)
        except ValueError:
            # Not a name in a hub.
            return ""
        if not isinstance(found, str):
            return ""
        folder = Path(found).parent
    try:
        code = processor_code(folder) if model.trust_remote_code else ""
        return f"{processor_checksum(folder)} {code}".strip()
    except (OSError, ValueError):
        return ""


# --------------------------------------------------------------------------------------------------- what a model holds


_LORA = "vllm.lora."
_OTHERS = (
    "torch.",
    "vllm.config",
    "vllm.distributed",
    "vllm.compilation",
    "vllm.v1.worker",
    "vllm.v1.core",
    "transformers.",
    "kvcached",
    "logging",
    "threading",
    _LORA,
)
"""Objects of these modules are no part of a model. Adapters are compared by their files."""
_CHOSEN = frozenset({"topk_indices_buffer", "_topk_indices_buffer", "candidate_block_buffer", "candidate_blocks"})
_NO_WEIGHTS = frozenset({"kv_cache", "cpu_linear"}) | _CHOSEN
"""Attributes that hold the KV cache, the address of what `read_by_kernel` reads, and which tokens sparse attention has
chosen (``layers/sparse_attn_indexer.py``), which a step without a request does not write unless graphs are captured.
"""
_ATOMS = frozenset({str, bytes, int, float, bool, type, types.ModuleType})
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
_ROWS = 256


class Held(NamedTuple):
    """A tensor. ``is_parameter``: only loading and updates write it; computing may write others (scratch memory)."""

    tensor: torch.Tensor
    is_parameter: bool


def held_by(model: torch.nn.Module) -> dict[str, Held]:
    """Every tensor that a model computes with: parameters, buffers, and what its modules and the objects that they hold
    (a quantization method, a kernel, a closure) keep as plain attributes. Each once, by the first path to it; of an
    adapted layer, by the path without the adapter.

    vLLM's kernels delete parameters and keep what they made of them where ``named_parameters`` does not look: experts
    of gpt-oss (``quantization/mxfp4.py``: tensors in a ``PrecisionConfig``), latents' projections (``W_UK_T``), ...
    """
    found = {_named(name): Held(one, True) for name, one in model.named_parameters()}
    found |= {_named(name): Held(one, False) for name, one in model.named_buffers()}
    known = {id(one.tensor) for one in found.values()}
    others = ((path, one) for path, one in _objects_of(model) if isinstance(one, torch.Tensor) and id(one) not in known)
    return found | {path: Held(one, False) for path, one in others}


def _objects_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What the modules of a model keep as plain attributes, and what that holds, each once, by the first path to it."""
    seen = {id(module) for module in model.modules()}
    # Paths with the objects that are there, the next one last.
    waiting = [
        (f"{_named(name)}.{key}".lstrip("."), value)
        for name, module in model.named_modules()
        if not type(module).__module__.startswith(_LORA)
        for key, value in vars(module).items()
        if key not in _OF_TORCH and key not in _NO_WEIGHTS
    ]
    waiting.reverse()
    while waiting:
        path, value = waiting.pop()
        if value is None or type(value) in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        try:
            if not isinstance(value, torch.Tensor):
                waiting += [(f"{path}.{key}", one) for key, one in _parts(value)]
        except ReferenceError:
            # A weak proxy of what has gone.
            continue
        yield path, value


def _named(name: str) -> str:
    return name.replace(".base_layer", "")


def _parts(value: Any) -> Iterator[tuple[object, Any]]:
    """What an object that is no tensor holds, by name."""
    if isinstance(value, Mapping):
        # Any other key shows an address, which differs between two processes.
        yield from ((key if isinstance(key, (str, int)) else at, one) for at, (key, one) in enumerate(value.items()))
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from enumerate(value)
    elif isinstance(value, functools.partial):
        yield from enumerate((value.func, *value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, types.FunctionType):
        if not (value.__module__ or "").startswith(_OTHERS):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((name, cell.cell_contents) for name, cell in cells if cell != types.CellType())
            yield from enumerate(value.__defaults__ or ())
    elif isinstance(value, torch.nn.Module) or not f"{type(value).__module__}.".startswith(_OTHERS):
        slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
        held = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
        yield from ((key, one) for key, one in held.items() if key not in _NO_WEIGHTS)


def read_by_kernel(model: torch.nn.Module, vanished: Reading) -> Iterator[tuple[str, torch.Tensor]]:
    """Linear weights that vLLM's CPU kernels keep in memory of their own (``dispatch_cpu_unquantized_gemm``), through
    these kernels: a matrix with ones on its diagonal times a weight is that weight, to the bit.

    Args:
        vanished: as loaded, of weights that are not in sight.
    """
    for path, module in model.named_modules():
        name, multiply = f"{_named(path)}.weight", vars(module).get("cpu_linear")
        if multiply is None or name not in vanished or len(vanished[name].shape) != 2:
            continue
        rows, columns = vanished[name].shape
        weight = torch.empty(columns, rows, dtype=vanished[name].dtype)
        for begin in range(0, columns, _ROWS):
            ones = torch.zeros(min(_ROWS, columns - begin), columns, dtype=weight.dtype)
            ones.diagonal(begin).fill_(1)
            weight[begin : begin + _ROWS] = multiply(ones, module.weight, None)
        yield name, weight
