# SPDX-License-Identifier: Apache-2.0
"""Named access to vLLM's requests, and to everything that determines the KV of their prompts.

Sources: ``v1/request.py``, ``lora/request.py``, ``lora/utils.py``, ``multimodal/inputs.py``.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvcached_nixl.identity.adapters import Adapters
from kvcached_nixl.identity.files import checksum_of
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.asked_prompts import identifier_of, sent_prompt
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.wire.manifest import Embeddings, digest_of
from kvcached_nixl.wire.params import asks
from kvcached_nixl.wire.question import Question, plain_id

logger = logging.getLogger(SERVER_LOGGER)

_PLACEHOLDERS = tuple(
    f"{kind}_{name}"
    for kind in ("image", "video", "audio", "speech", "media", "vision", "multimodal")
    for name in ("token_id", "token_index", "pad_token_id", "placeholder_token_id", "soft_token_id")
)
"""Names in model configurations of the placeholder tokens of images, sounds, ..."""
_EMBEDDINGS = "_kvcached_nixl_embeddings"
WHOLE_BECAUSE = "_kvcached_nixl_whole_because"
"""Key in ``kv_transfer_params``: why the prompt was left whole; empty if its last token was taken away."""


class RequestReader:
    """Reads an engine's requests. One per engine, used on the engine's thread.

    Attributes:
        placeholders: ids of the placeholder tokens of images, sounds, ...; empty for a text-only model.
        adapters: the content of adapters, by vLLM's ``lora_int_id``.
        are_placeholders_unknown: the model is multimodal, and its configuration has none of the known names.
    """

    def __init__(self, config: Any) -> None:
        model = config.model_config
        self.placeholders: list[int] = []
        self.are_placeholders_unknown = False
        if private(model, "is_multimodal_model"):
            self.placeholders = sorted(_placeholders_in(model.hf_config.to_dict()))
            self.are_placeholders_unknown = not self.placeholders
        # Those of the engine that decide how adapters are applied.
        names = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
        settings = {name: optional(config.lora_config, name) for name in names}
        settings["target_modules"] = sorted(settings["target_modules"] or ())
        self._lora_settings = checksum_of({name: str(value) for name, value in settings.items()})
        told = "KV computed with a LoRA adapter is not handed over: %s."
        self.adapters = Adapters(_folder, functools.partial(logger.warning, told))
        self._contents: dict[str, str | None] = {}
        self._renamed: set[str] = set()

    def __call__(self, request: Any) -> RequestView:
        return RequestView(request, self)

    def adapter_arrives(self, lora_request: Any) -> None:
        """Identify the adapter of a request that has just arrived, or that is about to be loaded; None for none. Its
        content is read on the first call and remembered, so call it before the workers load the adapter."""
        if lora_request is not None:
            name, content = str(lora_request.lora_name), self._content(lora_request)
            if self._contents.setdefault(name, content) != content:
                self._renamed.add(name)
            self._contents[name] = content

    def adapter_of(self, lora_request: Any) -> str:
        """Identity of a request's adapter, for the digest: "" without an adapter, a unique value if it is unknown."""
        if lora_request is None:
            return ""
        content = self._content(lora_request)
        if content is None:
            return f"unknown {secrets.token_hex(8)}"
        # Whether the experts' weights are one 3D tensor.
        is_fused = bool(private(lora_request, "is_3d_lora_weight"))
        return f"{content} {self._lora_settings} {is_fused}"

    def is_loaded(self, lora_request: Any) -> bool:
        """Whether the workers have loaded what its files hold, so that its requests need not load it again."""
        return self.adapters.is_loaded(int(lora_request.lora_int_id), str(lora_request.lora_path))

    def take_renamed(self) -> set[str]:
        """Names that got another adapter since the last call. vLLM's prefix cache uses the names as keys."""
        found, self._renamed = self._renamed, set()
        return found

    def _content(self, lora_request: Any) -> str | None:
        return self.adapters.content(int(lora_request.lora_int_id), str(lora_request.lora_path))


def _placeholders_in(values: Mapping[str, Any]) -> set[int]:
    """Placeholder token ids in a configuration and in its parts (``thinker_config``, ``text_config``)."""
    found = {value for name, value in values.items() if name in _PLACEHOLDERS and isinstance(value, int)}
    for value in values.values():
        if isinstance(value, Mapping):
            found |= _placeholders_in(value)
    return found


def _folder(path: str, is_new: bool) -> str:
    from vllm import envs
    from vllm.lora.utils import get_adapter_absolute_path

    is_local = os.path.isabs(path) or path.startswith("~") or os.path.exists(path)
    if is_new or is_local or envs.VLLM_USE_MODELSCOPE:
        return str(get_adapter_absolute_path(path))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # A worker that reads the adapter again downloads the hub's newest version into this cache.
        return str(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise OSError(f"{path} is no longer in the hub's cache") from error


def hash_embeddings(request: Any) -> Embeddings | None:
    """Hash the embeddings of a request's prompt, for its digest, unless that was done. None if its prompt has none."""
    found: Embeddings | None = vars(request).get(_EMBEDDINGS)
    if found is None and request.prompt_embeds is not None:
        import torch

        embeds = request.prompt_embeds.detach().contiguous().cpu()
        # numpy has no bfloat16.
        data = embeds.view(torch.uint8).numpy()
        found = Embeddings(str(embeds.dtype), memoryview(data.reshape(-1)), data.shape[-1])
        setattr(request, _EMBEDDINGS, found)
    return found


def is_stand_in(request: Any) -> bool:
    """Whether ``request`` stands for one that vLLM rejected, so that connectors free what is held for that one.

    vLLM adds it and aborts it at once. Its only token is not the prompt's.
    """
    return bool(private(request, "abort_immediately"))


def ends_in_media(mm_features: Iterable[Any], num_tokens: int) -> bool:
    """Whether the last token of a prompt belongs to an image, a sound, ..."""
    ends = (int(one.mm_position.offset) + int(one.mm_position.length) for one in mm_features)
    return max(ends, default=0) >= num_tokens


def set_apart(request: Any) -> None:
    """Give a request's blocks hashes that no other request has, so that the prefix cache shares none of those that it
    computes from now on. Those that are cached already keep their hashes. Idempotent: it may outlive any number of
    changes."""
    hasher = private(request, "_block_hasher")
    if hasher is None or (isinstance(hasher, functools.partial) and hasher.func is _own_hashes):
        return
    salt = secrets.token_bytes(16)
    request.block_hashes[:] = _salted(salt, request.block_hashes)
    # It hashes blocks that have become full, each together with the hash of the block before.
    request._block_hasher = functools.partial(_own_hashes, hasher, salt)


def _own_hashes(hasher: Callable[[Any], list[bytes]], salt: bytes, request: Any) -> list[bytes]:
    return _salted(salt, hasher(request))


def _salted(salt: bytes, block_hashes: Iterable[bytes]) -> list[bytes]:
    return [hashlib.sha256(salt + one).digest() for one in block_hashes]


class RequestView:
    """One request in vLLM's scheduler.

    Attributes:
        params: its ``kv_transfer_params``, unchecked, as a client or router has sent them; None if it is not a mapping,
            which the API server refuses or passes on unchecked.
        whole_because: why prefill computes it to its last token, which no state can be taken back from; "" if it does
            not. Asked only of requests of prefill, where layers keep states.
        ends_in_media: its prompt's last token belongs to an image, a sound, ...
        is_session: more input may follow after what it has generated: its prompt is then not its whole input.
        awaits_grammar: vLLM begins it when the grammar of its structured output is compiled.
        is_stand_in: vLLM added it in place of a rejected request: its prompt is not known, and it is aborted at once.
        computes_prompt: it needs an output for each token of its prompt, so that must be computed here in full.
        adapter: the engine's number of the LoRA adapter that it is computed with; 0 for none.
        num_media: images, sounds, ... in its prompt.
        lacks_media: its prompt has placeholders for images, sounds, ... that did not come with the request.
        trace_headers: the W3C trace context as its client or router has sent it, unchecked. None without tracing.
        priority: less is started earlier, where the engine goes by priority.
        block_hashes: what its full blocks are cached under: each stands for all tokens up to its end, adapter, media
            and salt.
        question: what a prefill server would be asked. None for a prompt that has to be computed here, one whose
            images, sounds, ... are not here, and one that another server was named for already.
    """

    def __init__(self, request: Any, reader: RequestReader) -> None:
        self.request, self._reader = request, reader
        self.request_id = str(request.request_id)
        self.is_session = bool(private(request, "resumable"))
        self.is_stand_in = is_stand_in(request)
        # vLLM reads no prefix cache for prompt log-probabilities or pooling either.
        self.computes_prompt = bool(private(request, "skip_reading_prefix_cache"))
        self.adapter = 0 if request.lora_request is None else int(request.lora_request.lora_int_id)
        self.trace_headers: Any = private(request, "trace_headers")

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def params(self) -> Mapping[str, Any] | None:
        found = self.request.kv_transfer_params
        return found if isinstance(found, Mapping) else None

    @property
    def whole_because(self) -> str:
        return str((self.params or {}).get(WHOLE_BECAUSE, "it did not enter the engine as requests do"))

    @property
    def ends_in_media(self) -> bool:
        return ends_in_media(self.request.mm_features, self.num_prompt_tokens)

    @property
    def num_media(self) -> int:
        return len(self.request.mm_features)

    @property
    def lacks_media(self) -> bool:
        token_ids = self.request.prompt_token_ids
        if self._reader.are_placeholders_unknown:
            return not self.request.mm_features
        if not self._reader.placeholders or token_ids is None:
            return False
        found = np.isin(np.asarray(token_ids, np.int64), self._reader.placeholders)
        for one in self.request.mm_features:
            begin = int(one.mm_position.offset)
            found[begin : begin + int(one.mm_position.length)] = False
        return bool(found.any())

    @property
    def awaits_grammar(self) -> bool:
        structured = self.request.structured_output_request
        if structured is None:
            return False
        # Reading vLLM's ``grammar`` waits for it, below 0.33.
        grammar = private(structured, "_grammar")
        return grammar is None or (isinstance(grammar, Future) and not grammar.done())

    def refuse_prefill(self) -> None:
        """Forget the prefill server that a client names in its parameters."""
        if asks(self.params, "do_remote_prefill"):
            self.request.kv_transfer_params = None
            logger.warning(
                "Request %s comes with kv_transfer_params that name a prefill server; expected none, because this "
                "server asks for its KV itself (prefill). They are not used. If clients or a router may choose whom it "
                "connects to, set accept_kv_transfer_params.",
                self.request_id,
            )

    @property
    def priority(self) -> int:
        return int(self.request.priority)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return tuple(private(self.request, "block_hashes"))

    @property
    def question(self) -> Question | None:
        request = self.request
        if (
            self.computes_prompt
            or self.is_session
            or self.is_stand_in
            or private(request, "sampling_params") is None
            or asks(self.params, "do_remote_prefill")
            or asks(self.params, "do_remote_decode")
        ):
            return None
        adapter = "" if request.lora_request is None else str(request.lora_request.lora_name)
        found = None
        if request.mm_features or request.prompt_embeds is not None:
            found = sent_prompt(request, plain_id(self.request_id), adapter)
            if found is None:
                return None
        return Question(
            self.request_id,
            request.prompt_token_ids,
            adapter,
            salt=request.cache_salt or "",
            priority=self.priority,
            trace_headers=self.trace_headers,
            prompt=found,
        )

    def tell_cached(self, num_tokens: int) -> None:
        """Let its client's ``usage`` name these as the prompt's cached tokens, or those that were cached here, if more
        were: of what is handed over, prefill had these cached, and vLLM would count all. Until its first output.
        Source: ``v1/metrics/stats.py``."""
        stats = private(self.request, "prefill_stats")
        if stats is not None:
            stats.num_cached_tokens = max(stats.num_local_cached_tokens, min(num_tokens, stats.num_prompt_tokens))

    def digest(self, num_tokens: int) -> str:
        """Digest of its first ``num_tokens`` tokens (`wire.manifest`)."""
        request = self.request
        embeddings = hash_embeddings(request)
        return digest_of(
            request.prompt_token_ids,
            num_tokens,
            embeddings=b"" if embeddings is None else embeddings.hash_of(num_tokens),
            are_tokens=private(request, "prompt_is_token_ids"),
            features=[
                (identifier_of(one), int(one.mm_position.offset), int(one.mm_position.length))
                for one in request.mm_features
            ],
            lora=self._reader.adapter_of(request.lora_request),
            salt=request.cache_salt or "",
        )
