# SPDX-License-Identifier: Apache-2.0
"""Writes what a server of every feature needs: a chat model, LoRA adapters, draft models and a model with images.

Random weights, and nothing is downloaded. Two folders that are written with the same arguments have the same content.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from experiments.common import model as models
from experiments.common.device import layout, nixl
from experiments.common.families import make_family
from experiments.common.servers import ServerSpec

SHAPE = models.GQA
CHAT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""As in Qwen3's tokenizer: tokens of their own, which stay in the text."""
THINK_END = SHAPE.vocabulary - len(CHAT_TOKENS) + CHAT_TOKENS.index("</think>")
SPACES = [2 + sorted(ByteLevel.alphabet()).index(letter) for letter in "ĠĊčĉ"]
"""Of a space, a line's end, a return and a tabulator; behind the two special ones, tokens are bytes."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)
MEDIA_TOKENS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
IMAGE_SIZE, PATCH_SIZE, MERGE_SIZE = 112, 14, 2
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE // MERGE_SIZE) ** 2
_TEXT: dict[str, Any] = {
    "hidden_size": SHAPE.hidden,
    "intermediate_size": SHAPE.intermediate,
    "num_hidden_layers": SHAPE.layers,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.kv_heads,
    "vocab_size": SHAPE.vocabulary,
    "max_position_embeddings": SHAPE.max_positions,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
LAYERS = "base_model.model.model.layers"


def chat_model(folder: Path) -> Path:
    """The experiments' model, with tokens for reasoning and for calls of tools."""
    shutil.copytree(models.make_model(SHAPE), folder)
    _name_tokens(folder, CHAT_TOKENS)
    return folder


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of what computes K and V, drawn from ``seed``."""
    rank = 8
    drawn = torch.Generator().manual_seed(seed)
    sizes = {"lora_A": (rank, SHAPE.hidden), "lora_B": (SHAPE.kv_heads * SHAPE.head_dim, rank)}
    weights = {
        f"{LAYERS}.{layer}.self_attn.{name}.{part}.weight": torch.randn(size, generator=drawn) * 0.3
        for layer in range(SHAPE.layers)
        for name in ("k_proj", "v_proj")
        for part, size in sizes.items()
    }
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["k_proj", "v_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def eagle(folder: Path, target: Path) -> Path:
    """An EAGLE draft of ``target``: one layer, which sees a token's embedding beside the model's hidden state."""
    stored = load_file(target / "model.safetensors")
    vocabulary, hidden = stored["model.embed_tokens.weight"].shape
    shape = models.ModelShape(layers=1, vocabulary=vocabulary, hidden=hidden, head_size=SHAPE.head_dim, seed=7)
    shutil.copytree(models.make_model(shape), folder)
    weights = load_file(folder / "model.safetensors")
    one = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers." in name}
    # vLLM's draft has no norm before its first layer.
    one = {name: tensor for name, tensor in one.items() if "input_layernorm" not in name}
    drawn = torch.Generator().manual_seed(shape.seed)
    # It must guess right now and then: where the model repeats a token, its hidden state says so.
    both = torch.eye(hidden).repeat(1, 2) + torch.randn(hidden, 2 * hidden, generator=drawn) * 0.02
    one["fc.weight"] = both.to(torch.bfloat16)
    for name, tensor in one.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.1
    # It shares the model's head.
    one["embed_tokens.weight"] = stored["model.embed_tokens.weight"]
    save_file(one, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, folder / name)
    return folder


def dflash(folder: Path, target: Path) -> Path:
    """A DFlash draft of a `drafting_hybrid` with circles of one token: it says what most of the prompt is.

    It guesses right only with its own values of the prompt: those of the tokens that it computes say nothing.
    """
    stored = load_file(target / "model.safetensors")
    values = json.loads((target / "config.json").read_text())
    hidden, head = values["hidden_size"], values["head_dim"]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    drawn = torch.Generator().manual_seed(9)
    turned, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=drawn))
    # Rows at right angles: what is seen through them is still nearest to itself.
    seen = torch.linalg.qr(torch.randn(hidden, kv_heads * head, generator=drawn))[0].T
    by_head = seen.view(kv_heads, head, hidden).repeat_interleave(heads // kv_heads, dim=0)
    attention = {
        "q_proj": torch.randn(heads * head, hidden, generator=drawn) * 0.1,
        "k_proj": torch.randn(kv_heads * head, hidden, generator=drawn) * 0.1,
        "v_proj": seen @ turned.T,
        "o_proj": 30 * by_head.reshape(heads * head, hidden).T,
        "q_norm": torch.full((head,), 0.3),
        "k_norm": torch.full((head,), 0.3),
    }
    wide = values["intermediate_size"]
    weights = {
        **{f"layers.0.self_attn.{name}.weight": one for name, one in attention.items()},
        "layers.0.mlp.gate_proj.weight": torch.zeros(wide, hidden),
        "layers.0.mlp.up_proj.weight": torch.zeros(wide, hidden),
        "layers.0.mlp.down_proj.weight": torch.zeros(hidden, wide),
        "fc.weight": turned,
        **{f"{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "norm")},
        **{f"layers.0.{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")},
    }
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [values["num_hidden_layers"] - 2]},
        **{name: values[name] for name in _OF_TARGET},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: one.to(stored["lm_head.weight"].dtype).contiguous() for name, one in weights.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


_OF_TARGET = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "max_position_embeddings"),
)


def vision_model(folder: Path) -> Path:
    """Qwen2-VL, with positions of three dimensions. Its images need no torchvision, only its import does."""
    import transformers

    token_ids = {f"{name}_token_id": SHAPE.vocabulary - 4 + place for place, name in enumerate(MEDIA_TOKENS)}
    values: dict[str, Any] = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **_TEXT,
        **token_ids,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "rope_theta": 10000.0,
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": SHAPE.hidden,
            "mlp_ratio": 2,
            "num_heads": 4,
            "in_chans": 3,
            "in_channels": 3,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
        },
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    model = transformers.Qwen2VLForConditionalGeneration(transformers.AutoConfig.from_pretrained(folder))
    drawn = torch.Generator().manual_seed(SHAPE.seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * models.DEVIATION)
    model.to(torch.bfloat16).save_pretrained(folder)
    # As real checkpoints have it; each transformers writes it in another form.
    (folder / "config.json").write_text(json.dumps(values))
    models.write_tokenizer(SHAPE.vocabulary, SHAPE.max_positions, folder)
    _name_tokens(folder, tuple(MEDIA_TOKENS.values()))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2VLProcessor",
                "do_resize": False,
                "min_pixels": IMAGE_SIZE**2,
                "max_pixels": IMAGE_SIZE**2,
                "patch_size": PATCH_SIZE,
                "temporal_patch_size": 2,
                "merge_size": MERGE_SIZE,
            }
        )
    )
    return folder


def _name_tokens(folder: Path, names: tuple[str, ...]) -> None:
    """Give the tokenizer's last tokens these names. Each is one token wherever it stands in a text."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for number, name in enumerate(names, len(vocabulary) - len(names)):
        del vocabulary[f"<spare-{number}>"]
        vocabulary[name] = number
        rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": number, "content": name, **rules})
    path.write_text(json.dumps(tokenizer))


def drafting_hybrid(folder: Path, circle: int = 6) -> Path:
    """Qwen3.5 with a draft layer (MTP). Most tokens follow from the one before: ``circle`` of them are a circle.

    So n-grams come again, and no rounding decides between two tokens. What the layers add is in the log-probabilities.
    """
    shutil.copytree(make_family("qwen3.5"), folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding *= 12
    tokens = torch.arange(len(embedding) // circle * circle)
    follows = tokens // circle * circle + (tokens + 1) % circle
    direction = torch.nn.functional.normalize(embedding[tokens].float())
    weights["lm_head.weight"][follows] += direction.to(embedding.dtype)
    weights |= _draft_layer(weights, embedding.shape[1])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    return folder


def _draft_layer(weights: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The model's last layer again; it gets a token's embedding, and some of the model's hidden state."""
    last = max(name.partition("self_attn.")[0] for name in weights if "self_attn." in name)
    found = {name.replace(last, "mtp.layers.0."): one.clone() for name, one in weights.items() if name.startswith(last)}
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        found[f"mtp.{name}.weight"] = weights["model.norm.weight"].clone()
    hidden = torch.randn(size, size, generator=torch.Generator().manual_seed(5)) * 0.2
    found["mtp.fc.weight"] = torch.cat([torch.eye(size), hidden], dim=1).to(torch.bfloat16)
    return found


KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **layout()}


def spec(name: str, model: Path, mode: str | None, *arguments: str, **environment: str) -> ServerSpec:
    """Return the configuration of a server; without ``mode``, of the stock instance. The name tells its role."""
    return ServerSpec(
        name=name,
        model=model,
        dtype="float32",
        # All that is asked at once, in one step: on a CPU vLLM ends where a prompt with a seed is computed in chunks.
        max_num_batched_tokens=2048,
        kv_transfer=nixl(name, {"transfer_mode": mode}, kv_load_failure_policy="fail") if mode else None,
        environment={**environment, **(KVCACHED if mode else {})},
        arguments=arguments,
        forks=True,
    )
