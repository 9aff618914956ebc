# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, sounds, ..., or of embeddings: from decode's engine to the wire, and from there to vLLM's.

Sources: ``multimodal/inputs.py``, ``multimodal/cache.py``, ``inputs/engine.py``.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.wire.question import MOST_SENT_BYTES, Element, Feature, Prompt, Tensor

_ASKED = "kvcached_nixl:"
_DIGITS = 32
_END = 2**31
"""Of the ids that vLLM can copy."""
_SHARED_MEMORY = frozenset({"address", "monotonic_id"})
"""What stands for an image whose data the workers have, with ``--mm-processor-cache-type shm``."""


def identifier_of(feature: Any) -> str:
    """What identifies the content of an image, a sound, ... in the engine of decode as in that of prefill."""
    # The identifier may be prefixed with an adapter's name.
    found = str(feature.mm_hash or feature.identifier)
    return found[len(_ASKED) + _DIGITS + 1 :] if found.startswith(_ASKED) else found


def sent_prompt(request: Any, request_id: str, adapter: str) -> Prompt | None:
    """What prefill is asked to compute; it shares the memory of the request's tensors. None if the data of its images,
    sounds, ... and embeddings are not here, or too much."""
    are_tokens = private(request, "prompt_is_token_ids")
    sizes: list[int] = []
    try:
        found = Prompt(
            request_id,
            np.asarray(request.prompt_token_ids or (), "<u4").tobytes(),
            [_feature(one, sizes) for one in request.mm_features],
            None if request.prompt_embeds is None else _sent(request.prompt_embeds, sizes),
            None if are_tokens is None else bytes(map(bool, are_tokens)),
            adapter,
            request.cache_salt or "",
            int(request.priority),
        )
    except ValueError:
        return None
    return found if sum(sizes) <= MOST_SENT_BYTES else None


def _feature(one: Any, sizes: list[int]) -> Feature:
    if one.data is None or set(one.data) >= _SHARED_MEMORY:
        raise ValueError("its data are elsewhere")
    place = one.mm_position
    mask = None if place.is_embed is None else bytes(map(bool, place.is_embed.tolist()))
    item: Any = {name: _element(elem, sizes) for name, elem in one.data.items()}
    return Feature(one.modality, identifier_of(one), int(place.offset), int(place.length), item, mask)


def _element(elem: Any, sizes: list[int]) -> Element:
    kinds: Any = {"MultiModalBatchedField": "batched", "MultiModalFlatField": "flat", "MultiModalSharedField": "shared"}
    kind = kinds.get(type(elem.field).__name__)
    if kind is None:
        raise ValueError("joined in a way that is not known")
    number = optional(elem.field, "dim", optional(elem.field, "batch_size", 0))
    return Element(_sent(elem.data, sizes), kind, number, elem.field.keep_on_cpu)


def _sent(data: Any, sizes: list[int]) -> Any:
    import torch

    if isinstance(data, (list, tuple)):
        return [_sent(one, sizes) for one in data]
    if isinstance(data, (bool, int, float)):
        return data
    if not isinstance(data, torch.Tensor) or not data.is_cpu or data.is_sparse:
        raise ValueError("its data are elsewhere")
    sizes.append(data.nbytes)
    flat = data.detach().contiguous().reshape(-1).view(torch.uint8)
    return Tensor(str(data.dtype).removeprefix("torch."), tuple(data.shape), memoryview(flat.numpy()))


# --------------------------------------------------------------------------------------------------------- on prefill


def engine_prompt(prompt: Prompt, renderer: Any, model_config: Any) -> Any:
    """vLLM's prompt; called on the thread where vLLM prepares images, sounds, ... Raises ValueError if the model takes
    no such prompt."""
    from vllm.inputs import embeds_input, mm_input

    token_ids = np.frombuffer(prompt.token_ids, "<u4").tolist()
    salt = prompt.salt or None
    if prompt.embeddings is not None:
        expected = model_config.get_hidden_size(), str(model_config.dtype).removeprefix("torch.")
        found = prompt.embeddings.shape[1], prompt.embeddings.dtype
        if not model_config.enable_prompt_embeds or found != expected:
            raise ValueError(f"Embeddings {found}; expected {expected}, and a server with --enable-prompt-embeds.")
        are_tokens = None if prompt.are_tokens is None else list(map(bool, prompt.are_tokens))
        # vLLM looks at the ids of other prompts only. The engine would end at one that the model does not have, but for
        # what stands for an embedding: vLLM's placeholder is a token behind those of the tokenizer.
        ends = [model_config.get_vocab_size() if is_token else _END for is_token in are_tokens or ()]
        if any(one >= end for one, end in zip(token_ids, ends, strict=True)):
            raise ValueError(f"Token ids up to {max(token_ids)}; the model has {model_config.get_vocab_size()}.")
        return embeds_input(
            _received(prompt.embeddings), cache_salt=salt, prompt_token_ids=token_ids or None, is_token_ids=are_tokens
        )
    if not prompt.features:
        raise ValueError("A prompt of tokens only; expected images, sounds, ..., or embeddings.")
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    for modality, count in Counter(one.modality for one in prompt.features).items():
        renderer.get_mm_processor().info.validate_num_items(modality, count)
    items, hashes, places = defaultdict(list), defaultdict(list), defaultdict(list)
    for one, elements in zip(prompt.features, prompt.elements(), strict=True):
        # By its bytes: nobody gets the KV of another image that a client gives the same identifier. Nor do clients of
        # this server find an entry of ours, which lacks what vLLM's processor knows of it.
        digits = hashlib.blake2b(one.item, digest_size=_DIGITS // 2).hexdigest()
        hashes[one.modality].append(f"{_ASKED}{digits}:{one.identifier}")
        items[one.modality].append(_item(one.modality, elements))
        mask = None if one.is_embed is None else _received(Tensor("bool", (one.length,), memoryview(one.is_embed)))
        places[one.modality].append(PlaceholderRange(offset=one.offset, length=one.length, is_embed=mask))
    for modality, some in items.items():
        for key, item in zip(hashes[modality], some, strict=True):
            _mirror(key, item, renderer, model_config)
    return mm_input(token_ids, MultiModalKwargsItems(items), hashes, places, cache_salt=salt)


def _item(modality: str, elements: Mapping[str, Element]) -> Any:
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalFieldElem, MultiModalKwargsItem

    found = {}
    for name, one in elements.items():
        make = {
            "batched": MultiModalFieldConfig.batched,
            # Only what splits a batch asks for slices.
            "flat": partial(MultiModalFieldConfig.flat, slices=[], dim=one.number),
            "shared": partial(MultiModalFieldConfig.shared, batch_size=one.number),
        }[one.field]
        field = make(modality, keep_on_cpu=one.keep_on_cpu).field
        found[name] = MultiModalFieldElem(data=_received(one.data), field=field)
    return MultiModalKwargsItem(found)


def _received(data: Any) -> Any:
    if isinstance(data, list):
        return [_received(one) for one in data]
    if not isinstance(data, Tensor):
        return data
    import torch

    # The copy is aligned, and does not keep the whole body.
    flat = torch.frombuffer(bytearray(data.data), dtype=torch.uint8) if data.data else torch.empty(0, dtype=torch.uint8)
    return (flat.bool() if data.dtype == "bool" else flat.view(getattr(torch, data.dtype))).view(data.shape)


def _mirror(key: str, item: Any, renderer: Any, model_config: Any) -> None:
    """Tell the API server's cache what the engine's will have: it must drop the same entries at the same time."""
    from vllm.multimodal.cache import MultiModalProcessorOnlyCache

    cache = renderer.mm_processor_cache
    of_engine = cache is not None and not isinstance(cache, MultiModalProcessorOnlyCache)
    if of_engine and model_config.multimodal_config.mm_processor_cache_type == "lru":
        cache.get_and_update_item((item, []), key)
