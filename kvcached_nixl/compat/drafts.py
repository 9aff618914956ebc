# SPDX-License-Identifier: Apache-2.0
"""What vLLM's ways of drafting tokens leave in the KV cache. Imports nothing.

Sources: ``SpeculativeMethod`` in ``config/speculative.py``; who drafts for which method: in runner V1
``v1/worker/gpu_model_runner.py``, in V2 ``v1/worker/gpu/spec_decode/__init__.py``.
``tests/contract/test_drafts.py`` holds this to both.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WITHOUT_KV", "keeps_draft_kv"]

WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Drafts from tokens alone, or heads on the hidden states of the last token: no attention, so no KV."""

_SHARES_KV = "gemma4_mtp"
"""The draft model's type whose layers read the KV of the model itself and write none (vLLM 0.22 and later)."""


def keeps_draft_kv(speculative_config: Any) -> bool:
    """Whether drafts are made by a model that computes KV of its own for the prompt, in layers of the KV cache.

    True for eagle, eagle3, every kind of mtp but Gemma 4's, dflash, dspark and draft_model; for extract_hidden_states,
    which has no weights and keeps the model's hidden states there; and for what is not known: a class of the user's
    (custom_class), a method of a later vLLM.

    Args:
        speculative_config: vLLM's, or None.
    """
    if speculative_config is None or speculative_config.method in WITHOUT_KV:
        return False
    draft = speculative_config.draft_model_config
    return getattr(getattr(draft, "hf_config", None), "model_type", None) != _SHARES_KV
