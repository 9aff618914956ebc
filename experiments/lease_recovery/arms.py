# SPDX-License-Identifier: Apache-2.0
"""The arms: which pairs of servers are tested, and with which prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.common.device import PINNED, layout, nixl
from experiments.common.families import FAMILIES, make_family
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, ServerSpec, prefill_and_decode
from kvcached_nixl.wire.messages import INTERVAL

LEASE_SECONDS = 3.0
HEARTBEAT_SECONDS = INTERVAL * LEASE_SECONDS
BLOCK_SIZE = 32
NUM_BLOCKS = 96
TOKENS = 12
PROMPT_TOKENS = (200, 640)
# A page group of kvcached holds 16 blocks of this model, so the pool has six page groups.
MODEL = ModelShape(kv_heads=8, head_size=128)
KVCACHED: Mapping[str, str] = {"ENABLE_KVCACHED": "true", **layout(), "KVCACHED_HOSTVMM_GIB": "1", **GIVES_BACK}


@dataclass(frozen=True)
class Arm:
    """A prefill and a decode server.

    Attributes:
        extra: further extra config of the connector, besides mode and lease.
        family: a model with several KV-cache groups, of `families.FAMILIES`, in place of ``MODEL``.
        num_blocks: of the pool: a few of the longest requests fill it.
        is_short: memory comes and goes, too: limits are changed, and a neighbour takes memory of the device.
    """

    name: str
    mode: str
    kvcached: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    family: str = ""
    num_blocks: int = NUM_BLOCKS
    is_short: bool = False

    def specs(self, policy: str) -> list[ServerSpec]:
        """Return the configurations of P and D; ``policy`` is ``kv_load_failure_policy``."""
        extra: dict[str, object] = {"kv_lease_duration": int(LEASE_SECONDS)}
        if self.kvcached:
            extra |= {"transfer_mode": self.mode, **self.extra}
        family = FAMILIES[self.family] if self.family else None
        arguments = ("--num-gpu-blocks-override", str(self.num_blocks))
        if family:
            arguments = (*arguments, "--no-disable-hybrid-kv-cache-manager", *family.arguments)
        return prefill_and_decode(
            self.name,
            nixl("", extra, kv_load_failure_policy=policy),
            model=make_family(self.family) if family else make_model(MODEL),
            dtype="float32",
            environment={**(KVCACHED if self.kvcached else {}), **self.environment},
            block_size=family.block_size if family else BLOCK_SIZE,
            max_model_len=1024,
            arguments=arguments,
            forks=True,
        )


PULL, PUSH = Arm("pull", "pull"), Arm("push", "push")
# kvcached looks at its limit on the thread that allocates pages in advance.
_LOOKS = {"KVCACHED_PAGE_PREALLOC_ENABLED": "true"}
SHORT = (
    Arm("short of memory, pull", "pull", environment=_LOOKS, is_short=True),
    Arm("short of memory, push", "push", environment=_LOOKS, is_short=True),
    Arm("short of memory, staged", "push", extra={"memory_path": "device"}, environment=_LOOKS, is_short=True),
)
STOCK = Arm("stock pull", "pull", kvcached=False)
STAGED = (
    # These set no memory_path: the proof at start must find that registrations do not follow kvcached's pages.
    Arm("staged pull, pinned", "pull", environment=PINNED),
    Arm("staged push, pinned", "push", environment=PINNED),
    Arm("staged push", "push", extra={"memory_path": "device"}),
)
HYBRID = (
    # Blocks of 128 tokens, and one for each request's states.
    Arm("hybrid pull", "pull", family="nemotron-h", num_blocks=32),
    Arm("hybrid push", "push", family="nemotron-h", num_blocks=32),
    Arm("hybrid staged pull", "pull", extra={"memory_path": "device"}, family="nemotron-h", num_blocks=32),
)
ARMS = (PULL, PUSH, *STAGED, *HYBRID, *SHORT, STOCK)


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Return different prompts, each of some full blocks and a partly filled one."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(count)]
