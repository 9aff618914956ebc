# SPDX-License-Identifier: Apache-2.0
"""The small models of the experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.common import model
from experiments.common.model import ModelShape, make_model

pytest.importorskip("tokenizers", reason="comes with vLLM")
transformers = pytest.importorskip("transformers", reason="comes with vLLM")


SHAPES = {name: one for name, one in vars(model).items() if isinstance(one, ModelShape)}


@pytest.mark.parametrize("name", SHAPES)
def test_the_model_has_a_row_for_every_token_of_its_tokenizer(name: str, tmp_path: Path) -> None:
    """vLLM takes any id that the tokenizer has; one without a row ends the engine."""
    folder = make_model(SHAPES[name], cache=tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert sorted(tokenizer.get_vocab().values()) == list(range(SHAPES[name].vocabulary))
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<s>", "</s>"]
