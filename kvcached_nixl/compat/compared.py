# SPDX-License-Identifier: Apache-2.0
"""What of two engines is compared before KV of one is used by the other, for people."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["COMPARED"]

COMPARED: Mapping[str, str] = MappingProxyType(
    {
        "weights of files, as loaded": (
            "names, types, shapes and bytes of the tensors in the files (beyond 256 MiB, 8,192 pieces of them), and "
            "what lies in memory where both lie alike; not names, folders or who loads them"
        ),
        "other weights (object stores, GGUF, dummy), or updated in place": (
            "what lies in memory, beyond 256 MiB 2,048 elements of each tensor, where both lie alike: the same "
            "quantization, kind of device and tensor-parallel size. Where they do not, or cannot be read (a CPU's "
            "linear layers), KV is refused"
        ),
        "configuration": (
            "the model's, with overrides (rope, windows), its dtype, quantization and its settings, implementation and "
            "own code, and how media are processed (options, and the model's own files)"
        ),
        "draft models": "as the model, where their KV is in the cache; drafts without a model (ngram) are not compared",
        "LoRA": (
            "what an adapter's files held when the engine first saw them, and which modules it is applied to, not its "
            "name. If they are replaced without load_inplace, or it cannot be loaded, its KV is refused"
        ),
        "prompts": "token ids, cache salt, the content of media and which positions are theirs, embeddings",
    }
)
