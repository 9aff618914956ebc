# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers belong to several KV-cache groups in the same pools, and a model that computes their bytes.

Attention's bytes follow from each token and its position; a state's from all tokens so far and from the state before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvcached_nixl.vllm.patches import arrival
from support.nodes import DECODE_ID, Node, core_request, kv, prompt

STATE_BYTES = 752
"""Of `attention_engines.STATE_SHAPES`."""


def state_behind(token_ids: list[int], layer: int) -> torch.Tensor:
    """Returns the bytes of a layer's state behind these tokens."""
    seed = hashlib.blake2b(repr((token_ids, layer)).encode(), digest_size=47).digest()
    return torch.frombuffer(bytearray(seed * 16), dtype=torch.uint8) % 241


class GroupsNode(Node):
    """Its layers belong to groups with blocks of their own, in the same pools."""

    def of_groups(self, request_id: str) -> list[list[int]]:
        return [list(group) for group in self.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def places(self, token_ids: list[int], first: int, blocks: list[list[int]], group: int) -> Iterator[Any]:
        """Where a group has each token from ``first`` on, and what must be there; None where it has let go of it."""
        layers = list(self.caches.values())[group * self.geometry.num_pools :][: self.geometry.num_pools]
        size = self.geometry.of_group(group).block_size
        kernel_blocks = self.kernel_blocks(blocks[group])
        for position in range(first, len(token_ids)):
            # Block 0 is vLLM's null block.
            block_id = kernel_blocks[position // size] if kernel_blocks[position // size] >= self.geometry.split else 0
            for layer, cache in enumerate(layers):
                number = group * self.geometry.num_pools + layer
                block = cache[block_id].view(torch.uint8).movedim(1, 0)
                cell = block[position % size]
                expected = kv([token_ids[position]], position, number, cell.numel()).view(cell.shape)
                yield position, (cell if block_id else None), expected

    def run(self, output: Any) -> ModelRunnerOutput:
        # Model runner V1 zeroes blocks before the connector begins to load, V2 in between.
        if self.runner is None:
            self.zero(output.new_block_ids_to_zero or ())
        return super().run(output)

    def compute(self, output: Any) -> None:
        if self.runner is not None:
            self.zero(output.new_block_ids_to_zero or ())
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            self.compute_tokens(request, self.of_groups(request_id), request.num_computed_tokens - count, count)

    def zero(self, block_ids: Sequence[int]) -> None:
        """What the model runner does with new blocks before it computes."""
        self.fill(list(block_ids), 0)

    def compute_tokens(self, request: Request, blocks: list[list[int]], begin: int, count: int) -> None:
        """Computes some tokens of a request, whose blocks the device was told when the step was scheduled."""
        token_ids = list(request.all_token_ids[: begin + count])
        # Behind them drafts, as which any tokens do. No state before those is kept.
        token_ids += [0] * (begin + count - len(token_ids))
        self.keep_checkpoints(token_ids, begin, blocks)
        self.advance_states(token_ids, begin, blocks)
        for group in self.with_kv:
            for _, cell, expected in self.places(token_ids, begin, blocks, group):
                assert cell is not None, "what is computed is in a block"
                cell.copy_(expected)

    def sees(self, request_id: str, num_tokens: int, at: int) -> bool:
        """Attention, computing the token ``at``, sees what it must of the prompt in the layers of each group, and
        layers with a state have the one behind all tokens before."""
        blocks, token_ids = self.of_groups(request_id), prompt(0, num_tokens)[:at]
        for group in self.with_kv:
            window = self.windows[group]
            first = 0 if window is None else max(0, at - int(window) + 1)
            for _, cell, expected in self.places(token_ids, first, blocks, group):
                if cell is None or not torch.equal(cell, expected):
                    return False
            if self.with_states and any(cell.any() for cell in self.behind(at, blocks, group)):
                return False
        computed = list(self.scheduler.requests[request_id].all_token_ids[:at])
        return all(self.has_state(group, blocks, computed) for group in self.with_states)

    def behind(self, num_tokens: int, blocks: list[list[int]], group: int) -> Iterator[torch.Tensor]:
        """Yields the rest of the block that the last of these tokens is in; a kernel may read it."""
        size = self.geometry.of_group(group).block_size * self.geometry.split
        if num_tokens % size:
            end = [0] * (num_tokens + size - num_tokens % size)
            yield from (cell for _, cell, _ in self.places(end, num_tokens, blocks, group))

    # ------------------------------------------------------------------------------------------------------ states

    @property
    def with_kv(self) -> list[int]:
        return [group for group, window in enumerate(self.windows) if not isinstance(window, str)]

    @property
    def with_states(self) -> list[int]:
        return [group for group, window in enumerate(self.windows) if isinstance(window, str)]

    def states(self, group: int, blocks: list[list[int]], num_tokens: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields, per layer of a group, the bytes where vLLM keeps the state behind so many tokens, and the layer."""
        size = self.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        block_id = blocks[group][(num_tokens - 1) // size]
        assert block_id, "the null block holds no state"
        pools = self.geometry.num_pools
        for layer, cache in list(enumerate(self.caches.values()))[group * pools : (group + 1) * pools]:
            yield cache[block_id].view(-1).view(torch.uint8)[:STATE_BYTES], layer

    def has_state(self, group: int, blocks: list[list[int]], token_ids: list[int]) -> bool:
        """Whether a group's layers have the state behind these tokens, where vLLM looks for it."""
        found = self.states(group, blocks, len(token_ids)) if token_ids else ()
        return all(torch.equal(state, state_behind(token_ids, layer)) for state, layer in found)

    def advance_states(self, token_ids: list[int], begin: int, blocks: list[list[int]]) -> None:
        """Computes the states behind ``token_ids`` from those behind the first ``begin`` of them."""
        for group in self.with_states:
            is_right = self.has_state(group, blocks, token_ids[:begin])
            for state, layer in self.states(group, blocks, len(token_ids)):
                # A wrong state stays wrong.
                state.copy_(state_behind(token_ids, layer) if is_right else torch.zeros(STATE_BYTES))

    def keep_checkpoints(self, token_ids: list[int], begin: int, blocks: list[list[int]]) -> None:
        """Keeps the state behind an earlier token of the step where vLLM has reserved a block for it."""
        for group in self.with_states:
            manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
            if not getattr(manager, "has_prefill_checkpoint_blocks", False):
                continue
            from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

            offsets, columns = compute_mamba_prefill_checkpoints(
                [len(token_ids)],
                [len(token_ids) - begin],
                hash_block_size=self.scheduler.hash_block_size,
                mamba_block_size=manager.block_size,
                checkpoint_alignment=manager.kv_cache_spec.prefill_checkpoint_alignment,
                drop_eagle_block=False,
                cache_hit_alignment_tokens=manager.cache_hit_alignment_tokens,
            )
            if not offsets[0] or not blocks[group][columns[0]]:
                continue
            is_right = self.has_state(group, blocks, token_ids[:begin])
            found = token_ids[: begin + offsets[0]]
            for state, layer in self.states(group, blocks, columns[0] * manager.block_size + 1):
                state.copy_(state_behind(found, layer) if is_right else torch.zeros(STATE_BYTES))

    def fill(self, block_ids: list[int], filling: int) -> None:
        """Overwrites the blocks with a byte. A block has the same bytes in every group."""
        for cache in list(self.caches.values())[: self.geometry.num_pools]:
            is_paged = 0 in self.with_states
            for block_id in block_ids if is_paged else self.kernel_blocks(block_ids):
                cache[block_id].view(torch.uint8).fill_(filling)

    def add(
        self,
        request_id: str,
        params: Any,
        max_tokens: int = 4,
        first_token: int = 0,
        num_tokens: int = 96,
        priority: int = 0,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        if not self.with_states:
            super().add(request_id, params, max_tokens, first_token, num_tokens, priority)
            return
        sampling = SamplingParams(
            extra_args={"kv_transfer_params": params},
            ignore_eos=True,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        )
        asked = core_request(request_id, prompt_token_ids=prompt(first_token, num_tokens), sampling_params=sampling)
        # As `EngineCore.preprocess_add_request` does.
        arrival.align_chunks(self.scheduler)
        arrival.draft_behind_prompts(self.scheduler)
        arrival.stop_before_last(asked)
        hasher = get_request_block_hasher(self.geometry.block_size * self.geometry.split, sha256)
        self.scheduler.add_request(Request.from_engine_core_request(asked, hasher))


def runs_rightly(prefill: Node, decode: GroupsNode, num_tokens: int) -> None:
    """Whether it was handed over or not: whenever decode computes a token, it sees what it must."""
    request = decode.scheduler.requests[DECODE_ID]
    compute, wrong = decode.compute, list[int]()

    def checked(output: Any) -> None:
        count = output.num_scheduled_tokens.get(DECODE_ID)
        if count is not None:
            first = request.num_computed_tokens - count
            if not decode.sees(DECODE_ID, num_tokens, first):
                wrong.append(first)
        compute(output)

    decode.compute = checked  # type: ignore[method-assign]
    try:
        decode.step_until(lambda: DECODE_ID in decode.ended, prefill)
    finally:
        del decode.compute
    assert decode.ended.pop(DECODE_ID) == "length"
    assert wrong == []
