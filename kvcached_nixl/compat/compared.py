# SPDX-License-Identifier: Apache-2.0
"""What is compared between two engines before one uses KV of the other, as text for the report and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["COMPARED"]

COMPARED: Mapping[str, str] = MappingProxyType(
    {
        "weights of files, as loaded": (
            "names, types, shapes and bytes of the tensors in the files (beyond 256 MiB, 8,192 pieces of them), and "
            "the content of memory where both have the same layout; not file names, folders or the loader"
        ),
        "other weights (object stores, GGUF, dummy), or updated in place": (
            "the content of memory (beyond 256 MiB, 2,048 elements of each tensor), where both have the same layout: "
            "the same quantization, kind of device and tensor-parallel size. Otherwise, or if weights cannot be read "
            "(a CPU's linear layers), KV is refused"
        ),
        "configuration": (
            "the model's, with overrides (rope, windows), its dtype, quantization and its settings, implementation and "
            "own code, and how media are processed (options, and the model's own files)"
        ),
        "draft models": "as the model, where their KV is in the cache; drafts without a model (ngram) are not compared",
        "LoRA": (
            "the content of an adapter's files when the engine first saw them, and which modules it is applied to, not "
            "its name. If they are replaced without load_inplace, or it cannot be loaded, its KV is refused"
        ),
        "prompts": "token ids, cache salt, the content of media and their positions, embeddings",
    }
)
