# SPDX-License-Identifier: Apache-2.0
"""Makes small models with random weights and a byte-level tokenizer; nothing is downloaded.

The weights have a standard deviation of 0.08, wide enough that greedy output depends on every KV block; the
byte-equivalence harness checks that. ``python -m experiments.common.model`` makes one and prints its folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "models"
FORMAT = 4
"""Part of a model's folder name. Increase it when this module's output for a shape changes, or old files are used."""

SEED, DEVIATION = 20260, 0.08
"""Of weights."""


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
    seed: int = SEED

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def is_llama(self) -> bool:
        """Else Qwen2, which has no windows of its own for each layer, and no ``head_size``."""
        return bool(self.sliding_window_tokens or self.head_size)

    @property
    def values(self) -> dict[str, Any]:
        """Of transformers' configuration; the rest is its default."""
        values: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if self.is_llama:
            values["head_dim"] = self.head_dim
        if self.sliding_window_tokens:
            every = self.full_attention_every
            kinds = ("sliding_attention" if layer % every else "full_attention" for layer in range(self.layers))
            values |= {"sliding_window": self.sliding_window_tokens, "layer_types": list(kinds)}
        return values


GQA = ModelShape()
MHA = ModelShape(kv_heads=8)
MQA = ModelShape(kv_heads=1)
ODD_LAYERS = ModelShape(layers=3)
SLIDING_AND_FULL = ModelShape(sliding_window_tokens=128)
PADDED = ModelShape(vocabulary=510)
"""vLLM rounds the embedding up to 512 rows. It accepts a token id equal to the vocabulary's size (``max_token_id`` in
``vllm/tokenizers/hf.py``); without a row for that id, such a request ends the engine, also in stock vLLM."""


def make_model(shape: ModelShape = GQA, *, cache: Path = CACHE) -> Path:
    """Return the folder of the model of ``shape``; makes it (in seconds) if it does not exist."""
    name = "Llama" if shape.is_llama else "Qwen2"
    return make(name.lower(), f"{name}ForCausalLM", f"{name}Config", shape.values, shape.seed, cache)


def make(
    name: str, architecture: str, config_class: str, values: Mapping[str, Any], seed: int = SEED, cache: Path = CACHE
) -> Path:
    """Return the folder of a model and its tokenizer; makes it if it does not exist.

    Args:
        name: of the folder, together with a digest of the other arguments.
        architecture: as vLLM's registry names it.
        config_class: transformers' class of its configuration, which has ``values``, else its defaults.
        seed: of the weights.
    """
    key = [FORMAT, config_class, architecture, dict(values), seed]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache / f"{name}-{digest}"
    if (folder / "complete").is_file():
        return folder
    partial = cache / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write(architecture, config_class, values, seed, partial)
    write_tokenizer(values["vocab_size"], values["max_position_embeddings"], partial)
    (partial / "complete").touch()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _write(architecture: str, config_class: str, values: Mapping[str, Any], seed: int, folder: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    config = getattr(transformers, config_class)(**values)
    config.architectures = [architecture]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * DEVIATION)
    weights = {name: parameter.detach() for name, parameter in model.state_dict().items()}
    shared = values.get("num_kv_shared_layers", 0)
    for layer in range(config.num_hidden_layers - shared, config.num_hidden_layers):
        # In the files of Gemma 4, and wanted by vLLM; transformers' model does not have it where KV is shared.
        size = values["global_head_dim" if config.layer_types[layer] == "full_attention" else "head_dim"]
        weights[f"model.layers.{layer}.self_attn.k_norm.weight"] = torch.ones(size, dtype=torch.bfloat16)
    metadata = {"format": "pt"}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", metadata)
    config.save_pretrained(folder)


def write_tokenizer(size: int, max_positions: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped, unused-ignore]

    vocabulary = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    # Greedy output may contain any id below the vocabulary size, and each must decode to some text.
    while len(vocabulary) < size:
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
        "model_max_length": max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    print(make_model())
