# SPDX-License-Identifier: Apache-2.0
"""Makes small models with random weights and a byte-level tokenizer; nothing is downloaded.

The weights have a standard deviation of 0.08, wide enough that greedy output depends on every KV block; the
byte-equivalence harness checks that. ``python -m experiments.common.model`` makes one and prints its folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "models"
FORMAT = 3
"""Part of a model's folder name. Increase it when this module's output for a shape changes, or old files are used."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model, in elements. ``head_size`` 0 stands for ``hidden / heads``.

    ``sliding_window_tokens``: layers attend to that many tokens only, except one layer in ``full_attention_every``;
    vLLM then plans two KV-cache groups unless its hybrid manager is disabled. 0: full attention in all layers.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 0
    intermediate: int = 512
    vocabulary: int = 512
    max_positions: int = 4096
    sliding_window_tokens: int = 0
    full_attention_every: int = 2
    seed: int = 20260
    deviation: float = 0.08

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def family(self) -> str:
        """``qwen2``; ``llama`` where layers differ in their attention window, or ``head_size`` is set."""
        return "llama" if self.sliding_window_tokens or self.head_size else "qwen2"


GQA = ModelShape()
MHA = ModelShape(kv_heads=8)
MQA = ModelShape(kv_heads=1)
ODD_LAYERS = ModelShape(layers=3)
SLIDING_AND_FULL = ModelShape(sliding_window_tokens=128)
PADDED = ModelShape(vocabulary=510)
"""vLLM rounds the embedding up to 512 rows. It accepts a token id equal to the vocabulary's size (``max_token_id`` in
``vllm/tokenizers/hf.py``); without a row for that id, such a request ends the engine, also in stock vLLM."""


def make_model(shape: ModelShape = GQA, *, cache: Path = CACHE) -> Path:
    """Return the folder of the model of ``shape``; makes it (about a second) if it does not exist."""

    def write(folder: Path) -> None:
        _write_weights(shape, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))

    return made_once(cache, shape.family, [FORMAT, asdict(shape)], write, shape)


def made_once(cache: Path, name: str, key: list[Any], write: Callable[[Path], None], shape: ModelShape) -> Path:
    """Return the folder of a model, with a tokenizer, which ``write`` makes if it does not exist. Its content follows
    from ``key``."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache / f"{name}-{digest}"
    if (folder / "complete").is_file():
        return folder
    partial = cache / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    write_tokenizer(shape, partial)
    (partial / "complete").touch()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _config(shape: ModelShape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if shape.family == "llama" else "Qwen2ForCausalLM"],
        "model_type": shape.family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
    }
    if shape.head_size:
        config["head_dim"] = shape.head_size
    if shape.sliding_window_tokens:
        config["sliding_window"] = shape.sliding_window_tokens
        config["layer_types"] = [
            "sliding_attention" if layer % shape.full_attention_every else "full_attention"
            for layer in range(shape.layers)
        ]
    return config


def _write_weights(shape: ModelShape, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.seed)

    def drawn(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * shape.deviation).to(torch.bfloat16)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": drawn(shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            weights[f"{prefix}self_attn.{name}.weight"] = drawn(rows, shape.hidden)
            if shape.family == "qwen2":
                weights[f"{prefix}self_attn.{name}.bias"] = drawn(rows)
        weights[f"{prefix}self_attn.o_proj.weight"] = drawn(shape.hidden, queries)
        weights[f"{prefix}mlp.gate_proj.weight"] = drawn(shape.intermediate, shape.hidden)
        weights[f"{prefix}mlp.up_proj.weight"] = drawn(shape.intermediate, shape.hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = drawn(shape.hidden, shape.intermediate)
        weights[f"{prefix}input_layernorm.weight"] = ones.clone()
        weights[f"{prefix}post_attention_layernorm.weight"] = ones.clone()
    weights["model.norm.weight"] = ones.clone()
    weights["lm_head.weight"] = drawn(shape.vocabulary, shape.hidden)
    save_file(weights, path, metadata={"format": "pt"})


def write_tokenizer(shape: ModelShape, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped, unused-ignore]

    vocabulary = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    # Greedy output may contain any id below the vocabulary size, and each must decode to some text.
    while len(vocabulary) < shape.vocabulary:
        vocabulary[f"<spare-{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Servers that read only this file leave them out of texts, too.
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        # Without it, transformers adds a padding token: vLLM accepts its id, the model has no row for it, and the
        # engine ends.
        "pad_token": "</s>",
        "unk_token": "<s>",
        "model_max_length": shape.max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    print(make_model())
