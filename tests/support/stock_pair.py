# SPDX-License-Identifier: Apache-2.0
"""Two real NixlConnectors in one process, with real NIXL agents, over the memory a test gives them.

There is no model, no scheduler loop and no HTTP. The connector is used as a server uses it: handshakes go over the real
side channel, and blocks move by real NIXL reads.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from experiments.common.servers import free_ports
from kvcached_nixl.vllm.adapter.attributes import side_of, sides
from kvcached_nixl.vllm.adapter.versions import LOADS_BEHIND, installed_has
from kvcached_nixl.wire.handshake import Tensors, Weights
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import FetchSpec, Finish, OfferUpdate, Report, Step, WakeAddress
from support.engine_fakes import grown

TRANSFER_TIMEOUT_SECONDS = 20.0
LISTENS_AT = "127.0.0.1"
"""Where the side channels of all engines listen; a test may replace it."""


class Layer(AttentionLayerBase):
    """Stands in for an attention layer; the connector only asks it for its backend."""

    def __init__(self, backend: type) -> None:
        self.backend = backend

    def get_attn_backend(self) -> type:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


@dataclass
class Engine:
    """One side: a scheduler-role and a worker-role connector of the same engine."""

    config: VllmConfig
    kv_cache_config: KVCacheConfig
    scheduler: Any
    worker: Any
    port: int
    weights: Weights = Weights(Tensors("1" * 32, "2" * 32), files="3" * 32)

    @property
    def engine_id(self) -> str:
        return str(self.config.kv_transfer_config.engine_id)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Registers memory and publishes the handshake metadata, as the model runner and the executor do at start."""
        self.worker.register_kv_caches(dict(kv_caches))
        side = side_of(self.scheduler)
        if side is not None:
            side.engine.incarnation = "0" * 16
        self.listen()

    def listen(self) -> None:
        """Starts to answer handshakes."""
        for side in sides(self.worker):
            # A worker identifies the weights of its model, and there is no model here.
            side.identify(self.weights)
        metadata = self.worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    def shutdown(self) -> None:
        """Stops its threads. Its agent is freed together with the engine."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    @property
    def block_size(self) -> int:
        return int(self.config.cache_config.block_size)

    def read(
        self, request_id: str, local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]], peer: Engine
    ) -> bool:
        """Reads ``remote`` blocks of ``peer`` into ``local`` ones, per group. A shorter group has only the last tokens.

        The peer keeps the blocks, as for a request of prefill that decode will read. Returns whether the read worked.
        """
        end = max(map(len, remote)) * peer.block_size

        def ranges(groups: Sequence[Sequence[int]], size: int) -> tuple[BlockRange, ...]:
            return tuple(BlockRange(end - len(group) * size, tuple(group)) for group in groups)

        kept = f"{request_id}-prefill"
        start, digest = "0" * 16, "0" * 32
        manifest = Manifest(
            PROTOCOL,
            start,
            kept,
            digest,
            end,
            (peer.block_size,) * len(remote),
            (1, 1),
            ranges(remote, peer.block_size),
            30.0,
            0,
        )
        offered = OfferUpdate(kept, "name", digest, end, grown(*remote), end, manifest)
        theirs = side_of(peer.worker)
        if theirs is not None:
            theirs.begin_step(
                Step(
                    "127.0.0.1",
                    peer.port,
                    WakeAddress("127.0.0.1", peer.port, "key"),
                    start,
                    commands=[offered, Finish(kept)],
                )
            )
            theirs.end_step()
        prefill = RemotePrefill(peer.engine_id, "127.0.0.1", peer.port, 1)
        groups = ranges(local, self.block_size)
        first = min(one.first_token for one in groups)
        wanted = FetchSpec(1, request_id, prefill, manifest, "name", digest, end, first, end, groups)
        side = side_of(self.worker)
        side.begin_step(
            Step("127.0.0.1", self.port, WakeAddress("127.0.0.1", self.port, "key"), start, commands=[wanted])
        )
        report = Report()
        deadline = time.monotonic() + TRANSFER_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            side.take_sent()
            report.add(side.take_report() or Report())
            if report.ended:
                return not report.failed
            time.sleep(0.001)
        raise TimeoutError(f"{request_id} was neither received nor failed in {TRANSFER_TIMEOUT_SECONDS} s")


def write_model(folder: Path, architecture: str = "Qwen2ForCausalLM", **overrides: Any) -> Path:
    """Writes a model configuration without weights, which is all that ModelConfig reads."""
    config = {
        "architectures": [architecture],
        "model_type": "qwen2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
        **overrides,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MAX_TOKENS = 1024
"""Of a request."""


def build_engine(
    model: Path,
    groups: Sequence[tuple[Sequence[str], Any]],
    pools: Sequence[Sequence[str]],
    num_blocks: int,
    block_size: int,
    backend: type,
    extra_config: Mapping[str, Any] | None = None,
    *,
    kv_role: str = "kv_both",
) -> Engine:
    """Builds an engine with these KV-cache groups (layer names, spec). ``pools``: layers that share each pool."""
    import os

    (port,) = free_ports(1)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = LISTENS_AT
    model_config = ModelConfig(
        model=str(model), tokenizer=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_TOKENS
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=block_size),
        scheduler_config=SchedulerConfig(max_model_len=MAX_TOKENS, is_encoder_decoder=False),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role=kv_role,
            kv_buffer_device="cpu",
            engine_id=str(uuid.uuid4()),
            kv_connector_extra_config={"num_threads": 0, **(extra_config or {})},
        ),
    )
    # The CPU platform would choose another backend for latent attention.
    config.cache_config.block_size = block_size
    if installed_has(LOADS_BEHIND):
        # The engine core resolves this before the workers allocate memory.
        config.cache_config.kv_cache_layout = "LBNHC"
    names = [name for layer_names, _ in groups for name in layer_names]
    config.compilation_config.static_forward_context.update({name: Layer(backend) for name in names})
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=_tensors(groups, pools, num_blocks),
        kv_cache_groups=[KVCacheGroupSpec(list(layer_names), spec) for layer_names, spec in groups],
    )
    scheduler, worker = (
        KVConnectorFactory.create_connector(config, role, kv_cache_config)
        for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    )
    return Engine(config, kv_cache_config, scheduler, worker, port)


def _tensors(
    groups: Sequence[tuple[Sequence[str], Any]], pools: Sequence[Sequence[str]], num_blocks: int
) -> list[KVCacheTensor]:
    """Returns which layers share which memory: by layer name, since vLLM 0.29 by offsets in one range for all."""
    page_bytes = groups[0][1].page_size_bytes
    pool_bytes = num_blocks * page_bytes
    if not installed_has(LOADS_BEHIND):
        return [KVCacheTensor(size=pool_bytes, shared_by=list(pool)) for pool in pools]
    return [
        KVCacheTensor(
            size=len(pools) * pool_bytes, layers=list(names), layer_stride=pool_bytes, block_stride=page_bytes
        )
        for names, _ in groups
    ]


@contextmanager
def single_process_group() -> Iterator[None]:
    """Sets up the parallel state of one rank, which the connector's constructor needs."""
    from vllm.config import VllmConfig as Config
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(Config(device_config=DeviceConfig("cpu"))):
        (port,) = free_ports(1)
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
