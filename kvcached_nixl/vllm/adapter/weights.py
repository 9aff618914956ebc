# SPDX-License-Identifier: Apache-2.0
"""Named access to a vLLM worker's weights: its models in memory, the files they come from, and their settings.

Sources: ``v1/worker/gpu_worker.py``, ``v1/worker/gpu_model_runner.py``, ``v1/worker/gpu/model_runner.py``,
``model_executor/model_loader/base_loader.py``, ``default_loader.py``, ``config/model.py``.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcached_nixl.identity.configuration import checksum_of, processor_checksum, processor_code, settings_of
from kvcached_nixl.identity.history import ModelReading, WeightsHistory, joined
from kvcached_nixl.identity.memory import Reading, read
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.held_tensors import held_by, read_by_kernel
from kvcached_nixl.vllm.adapter.locate import LOADER_BASE
from kvcached_nixl.vllm.adapter.specs import keeps_draft_kv
from kvcached_nixl.wire.handshake import Weights

_HISTORY = "_kvcached_nixl_weights"
_LOAD = "_kvcached_nixl_load"
_OWN_CODE = "transformers_modules."


def note_files(loader: Any, name: str, subfolder: str | None, files: Sequence[str]) -> None:
    """Called when vLLM loads weights from these files.

    Args:
        subfolder: the model's subfolder, if its weights have several parts.
    """
    load = vars(loader).setdefault(_LOAD, object())
    read_alone = [] if distrust(type(loader)) else [Path(file) for file in files]
    _history(loader).reads_files(name, subfolder or "", read_alone, load)


def watch_loading(loader: Any) -> None:
    """Note what a new loader of weights loads, before and after kernels rewrite it.

    Every loader has methods of its own, so they are wrapped on the loader itself. ``load_model`` calls
    ``load_weights``, and then has kernels rewrite what was loaded; ``reload_weights`` of a worker calls
    ``get_all_weights``, which only some loaders have.
    """
    load_weights, load_model = private(loader, "load_weights"), private(loader, "load_model")
    get_all_weights = optional(loader, "get_all_weights")
    loaded: Reading = {}

    def loads_weights(model: Any, *rest: Any, **named: Any) -> Any:
        nonlocal loaded
        _adopt(loader, model)
        before = read(_loaded_into(model))
        found = load_weights(model, *rest, **named)
        # What loading leaves as it was is not of the checkpoint, and may be memory that nobody has written.
        loaded = {name: one for name, one in read(_loaded_into(model)).items() if before.get(name) != one}
        return found

    def loads_model(*arguments: Any, **named: Any) -> Any:
        model = load_model(*arguments, **named)
        history = _adopt(loader, model)
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


def note_calls(worker: Any, names: Sequence[str]) -> None:
    """Called in a worker after calls that may have changed its weights."""
    for model in _models(worker).values():
        _history(model).called(names)


def weights_of(worker: Any) -> tuple[Weights, Mapping[str, Sequence[str]]]:
    """A worker's current weights, including draft models that compute KV. Reads memory, on the worker's own thread.

    Returns: the weights, and the names of their tensors as `Weights.misfit` takes them.
    """
    config, models = private(worker, "vllm_config"), _models(worker)
    # Expert load balancing moves experts between ranks without notice.
    moves = private(config.parallel_config, "enable_eplb")
    found = {prefix: _history(model).now(_reading(model, moves)) for prefix, model in models.items()}
    return joined(found, _place(config), _own_code(models.values()))


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
        "quantization": _quantization(model),
        "implementation": private(model, "model_impl"),
        "window": "off" if private(model, "disable_sliding_window") else "-",
        "rope": _long_rope(model),
    }
    if private(model, "is_multimodal_model"):
        media = model.multimodal_config
        names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")
        settings = checksum_of({name: optional(media, name) for name in names})
        facts["media"] = f"{settings} {_processor(config) or '-'}"
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


def _place(config: Any) -> str:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    parallel = config.parallel_config
    ranks = f"{get_tensor_model_parallel_rank()} of {parallel.tensor_parallel_size}"
    if parallel.enable_expert_parallel:
        placement = parallel.expert_placement_strategy, parallel.eplb_config
        ranks += f", experts {parallel.data_parallel_rank} of {parallel.data_parallel_size} {placement}"
    return ranks


def _quantization(model: Any) -> str:
    """Name and settings of the quantization: vLLM has some besides those of the model."""
    settings = private(model, "quantization_config")
    name = model.quantization or "-"
    return name if settings is None else f"{name} {checksum_of({'settings': settings})}"


def _long_rope(model: Any) -> str:
    """Which rotary angles a longrope model uses: it has others if the engine allows prompts longer than the original
    maximum.
    """
    text = model.hf_text_config
    turns = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "longrope" not in str(turns) and "'su'" not in str(turns):
        return "-"
    made_for = getattr(text, "original_max_position_embeddings", None) or dict(turns).get(
        "original_max_position_embeddings", 0
    )
    return "long" if model.max_model_len > made_for else "short"


def _own_code(models: Iterable[Any]) -> str:
    """Checksum of the Python code that computes and that a model has brought along; "" if vLLM's computes."""
    waiting = {kind.__module__ for model in models for module in model.modules() for kind in type(module).__mro__}
    read: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if not name.startswith(_OWN_CODE) or name in read:
            continue
        module = sys.modules[name]
        read[name] = hashlib.blake2b(Path(str(module.__file__)).read_bytes()).hexdigest()
        for value in vars(module).values():
            used = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            waiting.add(used if isinstance(used, str) else "")
    return checksum_of({name.rpartition(".")[2]: code for name, code in read.items()}) if read else ""


def _processor(config: Any) -> str:
    """Checksum of the model's own settings and code for processing images, sounds, ..."""
    folder = _folder(config.model_config)
    try:
        if folder is None:
            return ""
        code = processor_code(folder) if config.model_config.trust_remote_code else ""
        return f"{processor_checksum(folder)} {code}".strip()
    except (OSError, ValueError):
        return ""


def _folder(model: Any) -> Path | None:
    """The folder with the model's configuration, whatever loads its weights; None if it is on no file system."""
    from huggingface_hub import try_to_load_from_cache

    if (folder := Path(model.model)).is_dir():
        return folder
    try:
        found = try_to_load_from_cache(str(model.model), "config.json", revision=model.revision)
    except ValueError:
        # Not a name in a hub.
        return None
    return Path(found).parent if isinstance(found, str) else None
