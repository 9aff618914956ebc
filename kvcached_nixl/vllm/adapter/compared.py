# SPDX-License-Identifier: Apache-2.0
"""What is compared between two engines before one uses KV of the other, as text for the report and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["COMPARED"]

COMPARED: Mapping[str, str] = MappingProxyType(
    {
        "weights": (
            "what is in memory, every byte of each tensor that a model holds, where both lie alike; else what was "
            "loaded, before kernels rewrote it; else the files, where those differ in place (tensor-parallel size, "
            "quantizing kernels): names, types, shapes and bytes of their tensors (beyond 256 MiB, 8,192 pieces of "
            "them); not file names, folders or the loader"
        ),
        "weights that have changed since they were loaded": (
            "what is in memory alone. If part of it is out of sight of PyTorch, KV is refused"
        ),
        "configuration": (
            "the model's, setting by setting, with overrides (rope, windows), its dtype, quantization, implementation, "
            "own code that computes, and how media are processed (options, and the model's own files and code for it)"
        ),
        "draft models": "as the model, where their KV is in the cache; drafts without a model (ngram) are not compared",
        "LoRA": (
            "the content of an adapter's files when the engine first saw them, and which modules it is applied to, not "
            "its name. If they are replaced without load_inplace, or it cannot be loaded, its KV is refused"
        ),
        "prompts": "token ids, cache salt, the content of media and their positions, embeddings",
    }
)
