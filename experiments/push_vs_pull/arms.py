# SPDX-License-Identifier: Apache-2.0
"""The arms: who moves the bytes, over which transports, and the load: prompts and requests at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.common.model import ModelShape
from experiments.common.servers import SERVER_SIDE, ServerSpec
from experiments.common.transfer_config import role

HERE = Path(__file__).resolve().parent

MODEL = ModelShape(
    layers=8,
    hidden=256,
    heads=8,
    kv_heads=8,
    head_size=32,
    intermediate=256,
    max_positions=16384,
    sliding_window_tokens=32,
    full_attention_every=8,
)
"""A model with KV_BYTES_PER_TOKEN in float32. All layers keep the KV of all tokens, in one KV-cache group, because
vLLM's hybrid manager is disabled. All layers but one have windowed attention: long prompts compute quickly."""
KV_BYTES_PER_TOKEN = 16 * 1024
CHUNK_TOKENS = 128
"""So the shortest prompt with a target for streaming has eight chunks."""
BLOCK_SIZE = 32
MAX_MODEL_LEN = 8704
NUM_BLOCKS = 2304
"""A little more than eight of the longest prompts; 1.1 GiB."""
KV_GIB = 2


@dataclass(frozen=True)
class Transport:
    """A transport. ``of_prefill``: its rate as a multiple of the rate at which prefill computes KV of one prompt;
    None for no limit."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    of_prefill: float | None = None

    @property
    def is_tcp(self) -> bool:
        return self.environment.get("UCX_TLS") == "tcp"


SHARED_MEMORY = Transport("shared memory")
TCP = Transport("TCP", {"UCX_TLS": "tcp"})
TCP_LINK = Transport("TCP, a link", {"UCX_TLS": "tcp"}, 1.2)
"""A little faster than prefill computes KV at the machine's current speed. Comparable: a device that computes 20,000
tokens a second with 128 KiB of KV each, on a link of 25 Gbit/s."""
TRANSPORTS = (SHARED_MEMORY, TCP, TCP_LINK)


@dataclass(frozen=True)
class Arm:
    """One way of handing over.

    ``streamed``: both servers get their requests at once, and blocks are transferred while prefill computes. Otherwise
    decode gets the parameters of prefill's answer. ``only``: the vLLM series that supports it, None for all.
    """

    name: str
    connector: str = "NixlConnector"
    extra: Mapping[str, object] = field(default_factory=dict)
    kvcached: bool = True
    streamed: bool = False
    only: str = ""

    @property
    def servers(self) -> str:
        """A key for the configuration of its servers; arms with the same key share servers."""
        return f"{self.connector}{dict(self.extra)}{self.kvcached}"


STOCK_PULL = Arm("stock pull", kvcached=False)
STOCK_PUSH = Arm("stock push", "NixlPushConnector", kvcached=False, only="0.28")
PULL = Arm("pull")
PUSH_WHOLE = Arm("push, whole request", extra={"transfer_mode": "push"})
PUSH_STREAMED = Arm("push, streamed", extra={"transfer_mode": "push"}, streamed=True)
ARMS = (STOCK_PULL, STOCK_PUSH, PULL, PUSH_WHOLE, PUSH_STREAMED)


@dataclass(frozen=True)
class Load:
    """Prompt lengths (tokens), numbers of requests at a time, and the most rounds of each.

    ``tokens``: approximate number of tokens that each cell computes, so longer prompts get fewer rounds, down to a
    minimum.
    """

    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192)
    at_a_time: tuple[int, ...] = (1, 2, 4, 8)
    most_rounds: int = 6
    tokens: int = 24_576

    def rounds(self, length: int, at_a_time: int) -> int:
        """Return how often a cell sends ``at_a_time`` prompts of ``length`` tokens at once."""
        least = {1: 3, 2: 2}
        return max(least.get(at_a_time, 1), min(self.most_rounds, self.tokens // (length * at_a_time)))


FULL = Load()
QUICK = Load(lengths=(128, 1024, 4096), at_a_time=(1, 4), most_rounds=5)


def specs(arm: Arm, transport: Transport, model: Path) -> list[ServerSpec]:
    """Return the configurations of P and D of an arm over a transport."""
    environment: dict[str, str] = {
        **transport.environment,
        "PYTHONPATH": f"{SERVER_SIDE}:{HERE / 'server_side'}",
    }
    if arm.kvcached:
        environment |= {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_CONTIGUOUS_LAYOUT": "true",
            "KVCACHED_HOSTVMM_GIB": str(2 * KV_GIB),
            # Keep mapped pages mapped, as stock memory is. The kernel clears pages of the emulation when they are first
            # touched, which takes longer than the transfer; a device does not do that. A minimum above 0 would map
            # further, untouched pages.
            "KVCACHED_MIN_RESERVED_PAGES": "0",
            "KVCACHED_MAX_RESERVED_PAGES": str(NUM_BLOCKS),
        }
    tag = "".join(letter if letter.isalnum() else "-" for letter in f"{arm.name.split(',')[0]}-{transport.name}")
    return [
        ServerSpec(
            name=f"{tag}-{side}",
            model=model,
            dtype="float32",
            kv_transfer={
                "kv_connector": arm.connector,
                "kv_role": role(side),
                "kv_connector_extra_config": {"num_threads": 0, **arm.extra},
            },
            environment=environment,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=CHUNK_TOKENS,
            kv_space_gib=KV_GIB,
            forks=True,
            arguments=(
                *("--worker-extension-cls", "transfer_probe.TransferProbe"),
                *("--disable-hybrid-kv-cache-manager", "--num-gpu-blocks-override", str(NUM_BLOCKS)),
            ),
        )
        for side in ("prefill", "decode")
    ]
