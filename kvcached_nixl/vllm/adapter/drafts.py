# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's speculative methods keep KV of a draft model in the KV cache. Imports nothing of vLLM.

Sources: ``SpeculativeMethod`` in ``config/speculative.py``; the drafter of each method: in model runner V1
``v1/worker/gpu_model_runner.py``, in V2 ``v1/worker/gpu/spec_decode/__init__.py``.
``tests/contract/test_drafts.py`` checks this module against both.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.vllm.adapter.private import optional

__all__ = ["WITHOUT_KV", "keeps_draft_kv"]

WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods that draft from tokens alone, or with heads on the last token's hidden states: no attention, so no KV."""

_SHARES_KV = "gemma4_mtp"
"""The draft model's type whose layers read the KV of the model itself and write none."""


def keeps_draft_kv(speculative_config: Any) -> bool:
    """Whether a draft model computes additional KV for the prompt, in layers of the KV cache.

    True for eagle, eagle3, every kind of mtp but Gemma 4's, dflash, dspark and draft_model; for extract_hidden_states,
    which has no weights and keeps the model's hidden states there; and for unknown methods: a user's class
    (custom_class), or a method of a later vLLM.

    Args:
        speculative_config: vLLM's, or None.
    """
    if speculative_config is None or speculative_config.method in WITHOUT_KV:
        return False
    draft = speculative_config.draft_model_config
    return optional(optional(draft, "hf_config"), "model_type") != _SHARES_KV
