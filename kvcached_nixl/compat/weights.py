# SPDX-License-Identifier: Apache-2.0
"""Named access to a vLLM worker's weights: its models in memory, the files they come from, and their settings.

Sources: ``v1/worker/gpu_worker.py``, ``v1/worker/gpu_model_runner.py``, ``v1/worker/gpu/model_runner.py``,
``model_executor/model_loader/default_loader.py``, ``config/model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcached_nixl.compat.drafts import keeps_draft_kv
from kvcached_nixl.compat.private import optional, private
from kvcached_nixl.identity.checkpoint import Checkpoint
from kvcached_nixl.identity.configuration import checksum_of, code_checksum, processor_checksum
from kvcached_nixl.identity.memory import in_memory
from kvcached_nixl.wire.handshake import Weights

__all__ = ["model_facts", "note_files", "weights_of"]

_CHECKPOINT = "_kvcached_nixl_checkpoint"


def note_files(loader: Any, name: str, subfolder: str | None, folder: str, files: list[str]) -> None:
    """Called when vLLM loads weights from these files. They are kept with the loader's configuration.

    Args:
        subfolder: the model's subfolder, if its weights have several parts.
    """
    load_config = private(loader, "load_config")
    if _CHECKPOINT not in vars(load_config):
        setattr(load_config, _CHECKPOINT, Checkpoint())
    vars(load_config)[_CHECKPOINT].load(name, subfolder or "", Path(folder), [Path(file) for file in files])


def weights_of(worker: Any) -> Weights:
    """A worker's current weights, including draft models that compute KV. Reads memory, on the worker's own thread."""
    config = private(worker, "vllm_config")
    found = in_memory(_parameters(worker), place=_place(config))
    checkpoint = vars(config.load_config).get(_CHECKPOINT)
    if checkpoint is None:
        # Nothing is known of weights that are kept elsewhere.
        return Weights(found.layout, found.content if found.is_whole else "", "")
    draft = _draft_of(config)
    ignored = "" if draft is None or keeps_draft_kv(config.speculative_config) else str(draft.model)
    # The draft model may be the served model itself.
    present, origin = checkpoint.content(str(config.model_config.model), ignored, found.content)
    if found.is_whole:
        return Weights(found.layout, found.content, present, present)
    return Weights(found.layout, found.content if origin else "", present, origin)


def model_facts(config: Any) -> dict[str, object]:
    """The parts of a model's configuration that determine the bytes of its KV, by name."""
    model = private(config, "model_config")
    facts: dict[str, object] = {
        "configuration": checksum_of(model.hf_config.to_dict()),
        "dtype": model.dtype,
        "quantization": _quantization(model),
        "implementation": private(model, "model_impl"),
        "window": "off" if private(model, "disable_sliding_window") else "-",
        "rope": _long_rope(model),
        "code": _code(config) or "-",
    }
    if private(model, "is_multimodal_model"):
        media = model.multimodal_config
        names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")
        settings = checksum_of({name: optional(media, name) for name in names})
        facts["media"] = f"{settings} {_processor(config) or '-'}"
    speculative = config.speculative_config
    if keeps_draft_kv(speculative):
        draft = _draft_of(config)
        drafted = "-" if draft is None else f"{checksum_of(draft.hf_config.to_dict())} {draft.dtype}"
        facts["drafts"] = f"{speculative.method} {drafted}"
    return facts


def _parameters(worker: Any) -> Iterator[tuple[str, Any]]:
    runner, config = private(worker, "model_runner"), private(worker, "vllm_config")
    # Expert load balancing moves experts without notice, so their weights are not compared.
    moves = private(config.parallel_config, "enable_eplb")
    for prefix, model in _models(runner, config):
        for name, parameter in model.named_parameters():
            if not (moves and ".experts." in name):
                yield f"{prefix}{name}", parameter
        # Scales with which an 8-bit KV cache is read.
        for name, buffer in model.named_buffers():
            if name.endswith("_scale"):
                yield f"{prefix}{name}", buffer


def _models(runner: Any, config: Any) -> Iterator[tuple[str, Any]]:
    yield "", private(runner, "get_model")()
    if keeps_draft_kv(config.speculative_config):
        # The draft model's attribute in model runners V1 and V2.
        for name in ("drafter", "speculator"):
            model = optional(optional(runner, name), "model")
            if model is not None:
                yield "draft ", model


def _place(config: Any) -> str:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    ranks = f"{get_tensor_model_parallel_rank()} of {parallel.tensor_parallel_size}"
    if parallel.enable_expert_parallel:
        ranks += f", experts {parallel.data_parallel_rank} of {parallel.data_parallel_size}"
    return f"{ranks} on {current_platform.get_device_name()}"


def _draft_of(config: Any) -> Any:
    speculative = config.speculative_config
    return None if speculative is None else speculative.draft_model_config


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


def _code(config: Any) -> str:
    """Checksum of the model's own Python code, if vLLM may run it."""
    folder = _folder(config) if config.model_config.trust_remote_code else None
    try:
        return "" if folder is None else code_checksum(folder)
    except OSError:
        return ""


def _processor(config: Any) -> str:
    """Checksum of the model's own settings for processing images, sounds, ..."""
    folder = _folder(config)
    try:
        return "" if folder is None else processor_checksum(folder)
    except (OSError, ValueError):
        return ""


def _folder(config: Any) -> Path | None:
    checkpoint = vars(config.load_config).get(_CHECKPOINT)
    found: Path | None = None if checkpoint is None else checkpoint.folder(str(config.model_config.model))
    return found
