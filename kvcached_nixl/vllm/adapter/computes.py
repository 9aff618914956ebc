# SPDX-License-Identifier: Apache-2.0
"""What the bytes of KV follow from besides weights, configuration and vLLM's version: choices that a model's modules
made when they were built, Python code that is not vLLM's, and what prepares images, sounds, ... for an encoder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.versions import found_version

_VLLMS = frozenset({"vllm", "torch", *sys.stdlib_module_names})
"""Packages whose code is the same where vLLM is."""
_BY_VERSION = frozenset({"transformers"})
_EXTENDED = ("vllm.", "torch.nn.")
_PREPARE = (
    *("transformers", "mistral_common", "torchvision", "torchaudio", "kaldi-native-fbank"),
    *("pillow", "opencv-python-headless", "opencv-python", "av", "torchcodec", "PyNvVideoCodec"),
)
"""Distributions. What they make of a file is not in vLLM's hash of media: that is of the file, or of a sound's samples.
Which of them transformers takes depends on what is installed."""


def choices(model: Any) -> Iterator[str]:
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


def own_code(kinds: Iterable[type]) -> Iterator[str]:
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


def prepares_media() -> Iterator[tuple[str, str]]:
    """What turns media into an encoder's input besides the model's own files and code: (name, version or choice)."""
    from vllm import envs

    yield "media.videos", private(envs, "VLLM_VIDEO_LOADER_BACKEND")
    for name in _PREPARE:
        # Not what a module states: whether it is imported already differs between two processes.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"media.{name}", importlib.metadata.version(name)
