# SPDX-License-Identifier: Apache-2.0
"""Kinds of models through real prefill and decode servers on real kvcached memory.

The reference is the prefill server answering alone. What the quick byte-equivalence run covers (grouped-query
attention against a stock instance) is not repeated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import pytest

from experiments.common import device
from experiments.common import model as models
from experiments.common.client import Answer, Client, HandOver, Pair, http_client
from experiments.common.counted import count
from experiments.common.families import FAMILIES, make_family
from experiments.common.servers import UNIPROC, ServerSpec, running

# Lengths around one block of 32 tokens, beyond the sliding window of 128, and beyond one chunk of 256.
LENGTHS = (1, 33, 100, 300, 700)
TOKENS = 24
BLOCK_SIZE = 32

GROUPS = ("--no-disable-hybrid-kv-cache-manager",)
PUSHED: Mapping[str, object] = {"transfer_mode": "push", "verify_fraction": 1.0}


@dataclass(frozen=True)
class Case:
    """A model, and how it is served.

    Attributes:
        family: a name of `families.FAMILIES`, in place of ``shape``.
        block_sizes: per KV-cache group, tokens in a block; 1 where it keeps a state, as peers count.
        arguments: more of ``vllm serve``.
        rounds: decode computes the last token in another way than an instance alone, and this model's kernels round, so
            tokens may differ. Blocks are compared all the same.
    """

    shape: models.ModelShape = models.GQA
    contiguous: bool = True
    family: str = ""
    block_sizes: tuple[int, ...] = (32,)
    extra: Mapping[str, object] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    rounds: bool = False

    @property
    def recomputes_last(self) -> bool:
        """Decode computes the prompt's last token again: the model has windows or states."""
        return bool(self.family or self.shape.sliding_window_tokens)

    @property
    def has_states(self) -> bool:
        """Prefill leaves the prompt's last token out."""
        return 1 in self.block_sizes

    def side(self, name: str, tp: int = 1, stages: int = 1) -> ServerSpec:
        family = FAMILIES[self.family] if self.family else None
        return ServerSpec(
            name=name,
            model=make_family(self.family) if family else models.make_model(self.shape),
            dtype="bfloat16" if self.rounds else "float32",
            max_num_batched_tokens=256,
            tensor_parallel_size=tp,
            executor="mp" if tp * stages > 1 else UNIPROC,
            kv_transfer=device.nixl(name, self.extra),
            environment={
                "ENABLE_KVCACHED": "true",
                "KVCACHED_CONTIGUOUS_LAYOUT": str(self.contiguous).lower(),
                "KVCACHED_HOSTVMM_GIB": "2",
                **(family.environment if family else {}),
                **({"EXPERIMENT_STAGES": "1"} if stages > 1 else {}),
            },
            block_size=family.block_size if family else BLOCK_SIZE,
            arguments=(
                *(GROUPS if len(self.block_sizes) > 1 else ()),
                *(family.arguments if family else ()),
                *("--pipeline-parallel-size", str(stages)),
                *self.arguments,
            ),
            forks=True,
        )


CASES = {
    "multi-head, contiguous": Case(models.MHA),
    "multi-query, non-contiguous": Case(models.MQA, contiguous=False),
    "odd number of layers, contiguous": Case(models.ODD_LAYERS),
    "sliding window and full attention, contiguous": Case(models.SLIDING_AND_FULL, block_sizes=(32, 32)),
    "sliding window and full attention, non-contiguous": Case(
        models.SLIDING_AND_FULL, contiguous=False, block_sizes=(32, 32)
    ),
    "sliding window and full attention, contiguous, pushed and verified": Case(
        models.SLIDING_AND_FULL, block_sizes=(32, 32), extra=PUSHED
    ),
    "Gemma 4, contiguous": Case(family="gemma4", block_sizes=(64, 32)),
    "Gemma 4, five windows to one, non-contiguous, pushed and verified": Case(
        family="gemma4 5:1", contiguous=False, block_sizes=(64, 64, 64, 64, 64, 32), extra=PUSHED
    ),
    "Gemma 4, K and V equal, contiguous, staged and verified": Case(
        family="gemma4 K=V", block_sizes=(32, 64), extra={"memory_path": "host", "verify_fraction": 1.0}
    ),
    "Gemma 4, shared layers, non-contiguous": Case(family="gemma4 shared", contiguous=False, block_sizes=(64, 32)),
    "Nemotron-H, contiguous": Case(family="nemotron-h", block_sizes=(1, 128)),
    "Nemotron-H, non-contiguous, without prefix caching": Case(
        family="nemotron-h", contiguous=False, block_sizes=(1, 128), arguments=("--no-enable-prefix-caching",)
    ),
    "Granite 4-H, contiguous, staged and verified": Case(
        family="granite4-h", block_sizes=(1, 1, 1, 256), extra={"memory_path": "host", "verify_fraction": 1.0}
    ),
    "Falcon-H1, non-contiguous, pushed and verified": Case(
        family="falcon-h1", contiguous=False, block_sizes=(128, 1), extra=PUSHED
    ),
    "Zamba2, non-contiguous, staged and verified": Case(
        family="zamba2",
        contiguous=False,
        block_sizes=(1, 1, 256),
        extra={"memory_path": "host", "verify_fraction": 1.0},
    ),
    "Qwen3.5, non-contiguous": Case(family="qwen3.5", contiguous=False, block_sizes=(1, 1, 1, 160), rounds=True),
    "Qwen3-Next, contiguous, pushed, staged and verified": Case(
        family="qwen3-next",
        block_sizes=(1, 1, 1, 256),
        extra={**PUSHED, "memory_path": "host"},
        rounds=True,
    ),
}


def skip_if_not_served(case: Case) -> None:
    if case.contiguous and not device.serves_contiguous(version("vllm")):
        pytest.skip("the CPU's attention of this vLLM supports no layout with all layers in a block")
    if case.family:
        caches_prefixes = "--no-enable-prefix-caching" not in case.arguments
        if reason := FAMILIES[case.family].reason_to_skip(caches_prefixes):
            pytest.skip(reason)


@pytest.mark.parametrize("case", list(CASES))
def test_a_handed_over_request_ends_like_a_local_one(case: str, tmp_path: Path) -> None:
    """Tokens are those of one instance alone, and every received block has the bytes that were sent."""
    served = CASES[case]
    skip_if_not_served(served)
    # Shorter prompts are not handed over.
    lengths = (3, *LENGTHS[1:]) if served.has_states else LENGTHS
    specs = [served.side(side) for side in ("prefill", "decode")]
    with running(specs, tmp_path) as (prefill, decode):
        alone, handed_over, records = asyncio.run(_both_ways(prefill.base_url, decode.base_url, lengths=lengths))
    if not served.rounds:
        assert [answer.token_ids for answer in alone] == [hand_over.answer.token_ids for hand_over in handed_over]
    for length, hand_over in zip(lengths, handed_over, strict=True):
        end = length - served.recomputes_last
        if not end:
            assert hand_over.transfer not in records
            continue
        record = records[hand_over.transfer]
        # Of a push decode does not hear prefill's block ids.
        assert record["remote_block_ids"] in (None, hand_over.sent_block_ids)
        groups = zip(hand_over.sent_digests, record["digests"], served.block_sizes, strict=True)
        for group, received, size in groups:
            # Decode needs no more than the window of a sliding group, so it may take the tail of what was sent.
            more = 0 if served.has_states else -(-length // size) - -(-end // size)
            sent = group[: len(group) - more]
            assert sent[len(sent) - len(received) :] == received
        assert any(record["digests"])


UNEQUAL = {
    "heads": (1, 1, 2, Case()),
    "heads, pushed": (2, 1, 1, Case(contiguous=False, extra=PUSHED)),
    "a group of states on each rank": (
        1, 1, 2, Case(family="nemotron-h", block_sizes=(1, 128), extra={"verify_fraction": 1.0})
    ),
    "one group of states, pushed": (
        2, 1, 1, Case(family="granite4-h", contiguous=False, block_sizes=(1, 1, 1, 256), extra=PUSHED)
    ),
    "copies, Gemma 3": (1, 1, 2, Case(family="gemma3 one head", block_sizes=(32, 32), extra={"verify_fraction": 1.0})),
    "copies, Gemma 3, pushed": (
        2, 1, 1, Case(family="gemma3 one head", contiguous=False, block_sizes=(32, 32), extra=PUSHED)
    ),
    "copies, Gemma 4": (2, 1, 1, Case(family="gemma4 one head", block_sizes=(64, 32), extra={"verify_fraction": 1.0})),
    "copies, Gemma 4, pushed": (
        1, 1, 2, Case(family="gemma4 one head", contiguous=False, block_sizes=(64, 32), extra=PUSHED)
    ),
    "stages": (1, 2, 1, Case(extra={"verify_fraction": 0.5})),
    "stages of an odd number of layers, pushed": (1, 2, 2, Case(models.ODD_LAYERS, contiguous=False, extra=PUSHED)),
    "stages of two ranks, staged": (2, 2, 1, Case(extra={"memory_path": "host", "verify_fraction": 0.5})),
    "stages of two ranks, pushed": (2, 2, 2, Case(contiguous=False, extra=PUSHED)),
}  # fmt: skip
"""Prefill's tensor-parallel size and pipeline stages, and decode's tensor-parallel size."""


@pytest.mark.parametrize("case", list(UNEQUAL))
def test_ranks_of_unequal_sizes_get_their_share(case: str, tmp_path: Path) -> None:
    """Heads; a convolution's state, which has channels of several projections, each shared out; with more ranks than KV
    heads, a copy that vLLM has each rank compute; or the layers of all pipeline stages. Answers are those of a stock
    instance, if that has no states.
    """
    prefill_tp, stages, decode_tp, served = UNEQUAL[case]
    skip_if_not_served(served)
    specs = [served.side("prefill", prefill_tp, stages), served.side("decode", decode_tp)]
    if not served.has_states:
        specs.append(replace(served.side("stock"), kv_transfer=None, environment={}))
    with running(specs, tmp_path) as servers:
        urls = [one.base_url for one in servers]
        lengths = (3, *LENGTHS[2:]) if served.has_states else LENGTHS[1:]
        said, handed_over, records = asyncio.run(_both_ways(*urls, lengths=lengths))
        assert not count(servers[:2], "kvcached_nixl:handover_failures_total")
    assert [answer.token_ids for answer in said] == [hand_over.answer.token_ids for hand_over in handed_over]
    assert {hand_over.transfer for hand_over in handed_over} <= set(records)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_blocks_of_other_sizes_are_computed_again(mode: str, tmp_path: Path) -> None:
    """The CPU's kernel keeps a block in an order of its own, in which no half of it is half of the tokens."""
    case = Case(contiguous=device.serves_contiguous(version("vllm")), extra={"transfer_mode": mode})
    specs = []
    for side, block_size in ((case.side("prefill"), 32), (case.side("decode"), 64)):
        transfer = {**(side.kv_transfer or {}), "kv_load_failure_policy": "recompute"}
        specs.append(replace(side, block_size=block_size, kv_transfer=transfer))
    with running(specs, tmp_path) as (prefill, decode):
        alone, handed_over, _ = asyncio.run(_both_ways(prefill.base_url, decode.base_url))
        said = decode.log.read_text()
    assert [answer.token_ids for answer in alone] == [hand_over.answer.token_ids for hand_over in handed_over]
    assert "whole blocks of 32 tokens" in said and "whole blocks of 64 tokens" in said


async def _both_ways(
    prefill_url: str, decode_url: str, alone_url: str = "", *, lengths: Sequence[int] = LENGTHS
) -> tuple[list[Answer], list[HandOver], dict[str, dict[str, object]]]:
    async with http_client(1) as http:
        pair = Pair(Client(prefill_url, http), Client(decode_url, http))
        reference = Client(alone_url or prefill_url, http)
        await pair.decode.probe("arm")
        alone, handed_over = [], []
        for length in lengths:
            prompt = [3 + (place * 37 + length) % 500 for place in range(length)]
            name = f"length-{length}"
            alone.append(
                await reference.answer(prompt, max_tokens=TOKENS, salt=f"alone-{name}", request_id=f"alone-{name}")
            )
            handed_over.append(await pair.hand_over(prompt, max_tokens=TOKENS, salt=name, request_id=name))
        taken = await pair.decode.probe("take")
    return alone, handed_over, {record["transfer"]: record for record in taken["records"]}
