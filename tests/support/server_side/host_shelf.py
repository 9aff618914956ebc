# SPDX-License-Identifier: Apache-2.0
"""A connector that keeps the blocks of prompts as files, and loads them for later requests; for tests of what is beside
NixlConnector in a ``MultiConnector``.

It keeps to what kvcached asks of such a connector: it holds a request's blocks until they are saved, follows the
strides of the tensors that it is given, and registers no memory. One KV-cache group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_blocks import block_view
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

Copies = list[tuple[str, int]]
"""Key and block id of each block."""


@dataclass
class ShelfMetadata(KVConnectorMetadata):
    """What the worker copies in a step, by request."""

    loads: dict[str, Copies] = field(default_factory=dict)
    saves: dict[str, Copies] = field(default_factory=dict)


class HostShelf(KVConnectorBase_V1, SupportsHMA):
    """Both connector roles. ``kv_connector_extra_config`` has the ``folder`` of the files."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["folder"])
        self._block_size = vllm_config.cache_config.block_size
        self._caches: dict[str, Any] = {}
        self._next = ShelfMetadata()
        self._first: dict[str, int] = {}
        self._received: set[str] = set()

    # ------------------------------------------------------------------------------------------------ in the engine
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = num_computed_tokens // self._block_size
        # The last token is computed, for its logits.
        keys = self._keys(request.prompt_token_ids[:-1])
        last = next((place for place in range(first, len(keys)) if not self._file(keys[place]).exists()), len(keys))
        self._first[request.request_id] = first
        return max(0, last - first) * self._block_size, last > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self._first.pop(request.request_id, 0)
        end = first + num_external_tokens // self._block_size
        if end > first:
            (block_ids,) = blocks.get_block_ids()
            copies = zip(self._keys(request.prompt_token_ids), block_ids, strict=False)
            self._next.loads[request.request_id] = list(copies)[first:end]

    def build_connector_meta(self, scheduler_output: Any) -> ShelfMetadata:
        told, self._next = self._next, ShelfMetadata()
        return told

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        keys = self._keys(request.prompt_token_ids[: request.num_computed_tokens])
        copies = [
            (key, block_id) for key, block_id in zip(keys, block_ids, strict=False) if not self._file(key).exists()
        ]
        if copies:
            self._next.saves[request.request_id] = copies
        return bool(copies), None

    def request_finished_all_groups(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        (of_group,) = block_ids
        return self.request_finished(request, of_group)

    # ------------------------------------------------------------------------------------------------ in the worker
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, copies in self._told().loads.items():
            for key, block_id in copies:
                for name, content in load_file(self._file(key)).items():
                    block_view(self._caches[name], block_id).copy_(content)
            self._received.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request waits until all is loaded."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """A prompt is saved when its request has finished."""

    def wait_for_save(self) -> None:
        """See ``get_finished``, which vLLM calls in steps without requests, too."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        saves = self._told().saves
        for copies in saves.values():
            for key, block_id in copies:
                content = {name: block_view(cache, block_id).contiguous() for name, cache in self._caches.items()}
                save_file(content, self._file(key))
        received, self._received = self._received, set()
        return set(saves) or None, received or None

    def _told(self) -> ShelfMetadata:
        told = self._get_connector_metadata()
        assert isinstance(told, ShelfMetadata)
        return told

    # ------------------------------------------------------------------------------------------------ in both
    def _keys(self, token_ids: Sequence[int]) -> list[str]:
        """A key for each whole block, which follows from all tokens up to its end."""
        digest, keys = hashlib.sha256(), []
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            digest.update(repr(list(token_ids[end - self._block_size : end])).encode())
            keys.append(digest.hexdigest())
        return keys

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.safetensors"
