# SPDX-License-Identifier: Apache-2.0
"""The arms: each pair once on the direct path and once staged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.common.servers import GIVES_BACK, SERVER_SIDE, ServerSpec
from experiments.common.transfer_config import role
from experiments.push_vs_pull import arms as push_vs_pull
from experiments.push_vs_pull.arms import BLOCK_SIZE, KV_BYTES_PER_TOKEN, MAX_MODEL_LEN, PULL, PUSH_STREAMED, Arm, Load

HERE = Path(__file__).resolve().parent
PAGE_GROUP_BYTES = 2 * push_vs_pull.MODEL.layers * (2 << 20)
"""The least that kvcached maps at a time: a page of K and one of V in every layer."""
BLOCK_BYTES = BLOCK_SIZE * KV_BYTES_PER_TOKEN
CHUNK_TOKENS = 512
RESERVED_GIB = (1, 8, 60)
SLAB_GIB = 0.25
POOL_GIB = 2


def staged(arm: Arm, gib: float | None = None) -> Arm:
    """Return ``arm`` staged through a slab in host memory, of the default size or of ``gib``."""
    size = {} if gib is None else {"staging_gib": gib}
    return dataclasses.replace(arm, name=f"{arm.name}, staged", extra={**arm.extra, "memory_path": "host", **size})


DIRECT = (PULL, PUSH_STREAMED)
PAIRS = tuple((arm, staged(arm)) for arm in DIRECT)
ARMS = tuple(arm for pair in PAIRS for arm in pair)
VERIFIED = dataclasses.replace(PULL, name="pull, verified", extra={"verify_fraction": 1.0})
"""Every hand-over is verified; the cost is reported without a target."""
FIRST_TOKEN = Load(lengths=(512, 2048, 8192), at_a_time=(1, 4), most_rounds=5, tokens=16_384)
FIRST_TOKEN_QUICK = Load(lengths=(512, 4096), at_a_time=(1,), most_rounds=5)


@dataclass(frozen=True)
class Pool:
    """The memory that kvcached reserves, and the number of blocks that vLLM plans in it."""

    gib: float
    blocks: int
    environment: Mapping[str, str] = field(default_factory=dict)


def planned(gib: float) -> Pool:
    """Return a pool whose blocks fill ``gib``, which may exceed the machine's memory: only little is ever mapped."""
    # kvcached leaves 5 % of a device free.
    return Pool(gib, int(0.95 * gib * 2**30 // BLOCK_BYTES), {"KVCACHED_HOSTVMM_OVERCOMMIT": "1"})


GIVING_BACK = Pool(POOL_GIB, push_vs_pull.NUM_BLOCKS, GIVES_BACK)


def specs(arm: Arm, pool: Pool, model: Path) -> list[ServerSpec]:
    """Return the configurations of P and D of an arm over a pool."""
    tag = "".join(letter if letter.isalnum() else "-" for letter in f"{arm.name}-{pool.gib}")
    return [
        ServerSpec(
            name=f"{tag}-{side}",
            model=model,
            dtype="float32",
            kv_transfer={
                "kv_connector": "NixlConnector",
                "kv_role": role(side),
                "kv_connector_extra_config": {"num_threads": 0, **arm.extra},
            },
            environment={
                "PYTHONPATH": ":".join(
                    map(str, (SERVER_SIDE, push_vs_pull.HERE / "server_side", HERE / "server_side"))
                ),
                "ENABLE_KVCACHED": "true",
                "KVCACHED_CONTIGUOUS_LAYOUT": "true",
                "KVCACHED_HOSTVMM_GIB": str(pool.gib),
                **pool.environment,
            },
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=CHUNK_TOKENS,
            forks=True,
            arguments=(
                *("--worker-extension-cls", "staging_probe.StagingProbe"),
                *("--disable-hybrid-kv-cache-manager", "--num-gpu-blocks-override", str(pool.blocks)),
            ),
        )
        for side in ("prefill", "decode")
    ]
