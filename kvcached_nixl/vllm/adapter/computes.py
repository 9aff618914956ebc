# SPDX-License-Identifier: Apache-2.0
"""What a model computes with, besides configuration and vLLM's version: every tensor that it holds, wherever it is;
choices that its modules made when they were built; Python code of the model, and other that is not vLLM's;
and what prepares media (images, sounds, ...) for its encoder."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcached_nixl.identity.memory import Reading
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.versions import found_version

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


# ------------------------------------------------------------------------------------------------- its choices and code

_VLLMS = frozenset({"vllm", "torch", *sys.stdlib_module_names})
"""Packages whose code is the same where vLLM is."""
_BY_VERSION = frozenset({"transformers"})
_EXTENDED = ("vllm.", "torch.nn.")
_MODELS = ("vllm.model_executor.models.", "vllm.models.")
_PREPARE = (
    *("transformers", "mistral_common", "torchvision", "torchaudio", "kaldi_native_fbank"),
    *("PIL", "cv2", "av", "torchcodec", "PyNvVideoCodec"),
)
"""Modules. What they make of a file is not in vLLM's hash of media: that is of the file, or of a sound's samples.
Which of them transformers takes depends on what is installed."""
BY_ENVIRONMENT = frozenset(
    {
        # Weights or activations are quantized, or less so, whatever the model's own settings say.
        *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_MARLIN_INPUT_DTYPE"),
        *("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_CPU_INT4_W4A8", "VLLM_XPU_INC_WNA16_BACKEND"),
        *("VLLM_ROCM_USE_AITER_MOE_SITUV2", "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"),
        *("VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_FP8_MFMA_PAGE_ATTN"),
        *("VLLM_B12X_MOE_FP4_FORCE_A16", "VLLM_TEST_FORCE_FP8_MARLIN", "VLLM_USE_DEEP_GEMM_E8M0"),
        # Sums of products, of experts or of ranks are less precise.
        *("VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_HUMMING_USE_F16_ACCUM", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"),
        *("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE"),
        # Tokens go to experts at random.
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    }
)
"""Variables of ``vllm.envs``, each in some supported series, that change what is computed by more than a choice between
kernels of equal precision does."""


def code_and_choices(model: torch.nn.Module) -> frozenset[str]:
    kinds = {type(one) for one in (*model.modules(), *(one for _, one in _objects_of(model)))}
    return frozenset({*_own_code(kinds), *_model_code(model), *_choices(model)})


def _choices(model: Any) -> Iterator[str]:
    """What modules have chosen by the longest prompt that the engine allows: rotary angles (longrope, dynamic), and
    Llama 4's temperature tuning."""
    for module in model.modules():
        if (is_long := optional(module, "use_long_rope")) is not None:
            yield f"angles for long prompts: {is_long}"
        if (is_tuned := optional(module, "attn_temperature_tuning")) is not None:
            yield f"temperature tuning: {is_tuned}"
        trained = optional(module, "max_trained_positions")
        if trained and module.max_position_embeddings != trained:
            yield f"angles of {module.max_position_embeddings} positions, trained with {trained}"


def _model_code(model: torch.nn.Module) -> Iterator[str]:
    """Names of the model's class and of that of its language model, and checksums of vLLM's files with them: an image
    may have another file in a release's place. Of no other module: pipeline stages and servers without media lack some.
    """
    # A router may compute logits, too.
    inner = [one for one in model.modules() if hasattr(one, "compute_logits") and hasattr(one, "load_weights")]
    for kind in {type(one) for one in (model, *inner)}:
        yield kind.__qualname__
        for name in {base.__module__ for base in kind.__mro__ if base.__module__.startswith(_MODELS)}:
            yield hashlib.blake2b(Path(inspect.getfile(sys.modules[name])).read_bytes()).hexdigest()


def _own_code(kinds: Iterable[type]) -> Iterator[str]:
    """Checksums of the Python code that computes and is not vLLM's: a model's own, or a plugin's. ``kinds``: of what
    the model consists of. Those count that extend a module of torch, or a class of vLLM (a quantization method)."""
    waiting: set[str] = set()
    for kind in kinds:
        modules = {base.__module__ for base in kind.__mro__}
        if any(name.startswith(_EXTENDED) for name in modules):
            waiting |= modules
    packages = {name.partition(".")[0] for name in waiting} - _VLLMS
    yield from (f"{name} {found_version(name)}" for name in packages & _BY_VERSION)
    read: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name.partition(".")[0] not in packages - _BY_VERSION or name in read:
            continue
        read.add(name)
        try:
            code = Path(inspect.getfile(module := sys.modules[name])).read_bytes()
        except (KeyError, TypeError, OSError):
            # Of an interactive session, in an archive, or made while it ran.
            yield name
            continue
        yield hashlib.blake2b(code).hexdigest()
        for value in vars(module).values():
            used = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            waiting.add(used if isinstance(used, str) else "")


def chosen_by_environment() -> dict[str, object]:
    """`BY_ENVIRONMENT` as vLLM reads it: a variable may name a file with its value."""
    from vllm import envs

    return {name: getattr(envs, name, None) for name in BY_ENVIRONMENT}


def prepares_media() -> Iterator[tuple[str, str]]:
    """What turns media into an encoder's input besides the model's own files and code: (name, version or choice)."""
    from vllm import envs

    yield "media.videos", private(envs, "VLLM_VIDEO_LOADER_BACKEND")
    # Not what a module states: whether it is imported already differs between two processes. Several distributions may
    # have one module (Pillow and pillow-simd, OpenCV's four), and the last one that was installed has its files there.
    found = importlib.metadata.packages_distributions()
    for name in sorted({one for module in _PREPARE for one in found.get(module, ())}):
        yield f"media.{name}", importlib.metadata.version(name)
