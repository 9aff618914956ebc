# SPDX-License-Identifier: Apache-2.0
"""Kinds of models through real prefill and decode servers on real kvcached memory.

The reference is the prefill server answering alone. What the quick byte-equivalence run covers (grouped-query
attention against a stock instance) is not repeated here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from experiments.common import model as models
from experiments.common.client import Answer, Client, HandOver, Pair, http_client
from experiments.common.servers import ServerSpec, running

# Lengths around one block of 32 tokens, beyond the sliding window of 128, and beyond one chunk of 256.
LENGTHS = (1, 33, 100, 300, 700)
TOKENS = 24
BLOCK_SIZE = 32

GROUPS = ("--no-disable-hybrid-kv-cache-manager",)
CASES = {
    "multi-head, contiguous": (models.MHA, True, (), {}),
    "multi-query, non-contiguous": (models.MQA, False, (), {}),
    "odd number of layers, contiguous": (models.ODD_LAYERS, True, (), {}),
    "sliding window and full attention, contiguous": (models.SLIDING_AND_FULL, True, GROUPS, {}),
    "sliding window and full attention, non-contiguous": (models.SLIDING_AND_FULL, False, GROUPS, {}),
    "sliding window and full attention, contiguous, pushed and verified": (
        models.SLIDING_AND_FULL,
        True,
        GROUPS,
        {"transfer_mode": "push", "verify_fraction": 1.0},
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_handed_over_request_ends_like_a_local_one(case: str, tmp_path: Path) -> None:
    """Tokens are those of one instance alone, and every received block has the bytes that were sent."""
    shape, contiguous, arguments, extra = CASES[case]
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_threads": 0, **extra},
    }
    environment = {
        "ENABLE_KVCACHED": "true",
        "KVCACHED_CONTIGUOUS_LAYOUT": str(contiguous).lower(),
        "KVCACHED_HOSTVMM_GIB": "2",
    }
    specs = [
        ServerSpec(
            name=side,
            model=models.make_model(shape),
            dtype="float32",
            max_num_batched_tokens=256,
            kv_transfer=connector,
            environment=environment,
            arguments=arguments,
            forks=True,
        )
        for side in ("prefill", "decode")
    ]
    with running(specs, tmp_path) as (prefill, decode):
        alone, handed_over, records = asyncio.run(_both_ways(prefill.base_url, decode.base_url))
    assert [answer.token_ids for answer in alone] == [hand_over.answer.token_ids for hand_over in handed_over]
    for length, hand_over in zip(LENGTHS, handed_over, strict=True):
        # A model with a window computes its last token again, and takes one token less.
        end = -(-(length - bool(shape.sliding_window_tokens)) // BLOCK_SIZE)
        if not end:
            assert hand_over.transfer not in records
            continue
        record = records[hand_over.transfer]
        # Of a push decode does not hear prefill's block ids.
        assert record["remote_block_ids"] in (None, hand_over.sent_block_ids)
        for group, received in zip(hand_over.sent_digests, record["digests"], strict=True):
            # Decode needs no more than the window of a sliding group, so it may take the tail of what was sent.
            sent = group[: len(group) - (-(-length // BLOCK_SIZE) - end)]
            assert sent[len(sent) - len(received) :] == received
        assert any(record["digests"])


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_blocks_of_other_sizes_are_computed_again(mode: str, tmp_path: Path) -> None:
    """The CPU's kernel keeps a block in an order of its own, in which no half of it is half of the tokens."""
    specs = [
        ServerSpec(
            name=side,
            model=models.make_model(models.GQA),
            dtype="float32",
            max_num_batched_tokens=256,
            block_size=block_size,
            kv_transfer={
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"num_threads": 0, "transfer_mode": mode},
            },
            environment={"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2"},
            forks=True,
        )
        for side, block_size in (("prefill", 32), ("decode", 64))
    ]
    with running(specs, tmp_path) as (prefill, decode):
        alone, handed_over, _ = asyncio.run(_both_ways(prefill.base_url, decode.base_url))
        said = decode.log.read_text()
    assert [answer.token_ids for answer in alone] == [hand_over.answer.token_ids for hand_over in handed_over]
    assert "whole blocks of 32 tokens" in said and "whole blocks of 64 tokens" in said


async def _both_ways(
    prefill_url: str, decode_url: str
) -> tuple[list[Answer], list[HandOver], dict[str, dict[str, object]]]:
    async with http_client(1) as http:
        pair = Pair(Client(prefill_url, http), Client(decode_url, http))
        await pair.decode.probe("arm")
        alone, handed_over = [], []
        for length in LENGTHS:
            prompt = [3 + (place * 37 + length) % 500 for place in range(length)]
            name = f"length-{length}"
            alone.append(
                await pair.prefill.answer(prompt, max_tokens=TOKENS, salt=f"alone-{name}", request_id=f"alone-{name}")
            )
            handed_over.append(await pair.hand_over(prompt, max_tokens=TOKENS, salt=name, request_id=name))
        taken = await pair.decode.probe("take")
    return alone, handed_over, {record["transfer"]: record for record in taken["records"]}
