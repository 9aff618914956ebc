# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.specs`: which draft models have a KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter.specs import keeps_draft_kv


def drafting(method: str, model_type: str | None = None) -> Any:
    """vLLM's configuration; ``draft_model_config`` is None where there is no draft model."""
    draft = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)) if model_type else None
    return SimpleNamespace(method=method, draft_model_config=draft)


@pytest.mark.parametrize(
    ("method", "model_type", "expected"),
    [
        ("ngram", None, False),
        ("ngram_gpu", None, False),
        ("suffix", None, False),
        ("medusa", "medusa", False),
        ("mtp", "gemma4_mtp", False),
        ("mtp", "deepseek_mtp", True),
        ("eagle3", "eagle", True),
        ("dflash", "qwen3", True),
        ("draft_model", "llama", True),
        ("extract_hidden_states", "extract_hidden_states", True),
        ("custom_class", None, True),
        ("of a later vLLM", "llama", True),
    ],
)
def test_whose_drafts_leave_kv(method: str, model_type: str | None, expected: bool) -> None:
    """What is not known is taken for one that does: nothing of it is used too early, and it is compared."""
    assert keeps_draft_kv(drafting(method, model_type)) is expected


def test_nothing_is_drafted() -> None:
    assert not keeps_draft_kv(None)
