# SPDX-License-Identifier: Apache-2.0
"""Named access to a vLLM worker's weights: its models in memory, the files they come from, and their settings.

Sources: ``v1/worker/gpu_worker.py``, ``v1/worker/gpu_model_runner.py``, ``v1/worker/gpu/model_runner.py``,
``model_executor/model_loader/base_loader.py``, ``default_loader.py``, ``config/model.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcached_nixl.identity.files import checksum_of, processor_checksum, processor_code, settings_of
from kvcached_nixl.identity.history import ModelReading, WeightsHistory, joined
from kvcached_nixl.identity.memory import Reading, read
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.computes import (
    chosen_by_environment,
    code_and_choices,
    held_by,
    prepares_media,
    read_by_kernel,
)
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


def note_files(loader: Any, files: Sequence[str]) -> None:
    """Called when vLLM loads weights from these files, once for each part if the model's weights have several."""
    load = vars(loader).setdefault(_LOAD, object())
    read_alone = [] if distrust(type(loader)) else [Path(file) for file in files]
    _history(loader).reads_files(read_alone, load)


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
    its weights cannot be read, as text. In that case, too, the calls are noted, and need not be named again.

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
        **settings_of(chosen_by_environment()),
    }
    # vLLM reads it from there only, whatever the checkpoint has.
    if isinstance(model.hf_overrides, dict) and (path := model.hf_overrides.get("quantization_config_file")):
        facts["quantization file"] = hashlib.blake2b(Path(path).read_bytes()).hexdigest()
    if (more := private(model, "quantization_config")) is not None:
        # vLLM has some besides those of the model.
        facts["quantization"] = f"{facts['quantization']} {checksum_of({'settings': more})}"
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
        history.computes = code_and_choices(model)
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
