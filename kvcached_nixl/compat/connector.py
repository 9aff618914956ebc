# SPDX-License-Identifier: Apache-2.0
"""Named access to the private state of vLLM's NIXL connector.

Every name here is checked when it is used: a name that is gone is a refusal, not a default.
Sources: ``v1/nixl_connector.py`` (0.19), ``v1/nixl/base_worker.py`` (0.24 to 0.28).
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Mapping, MutableMapping, MutableSet
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from kvcached_nixl.errors import ContractChanged, LayoutRefused

_PROBED = MappingProxyType({"num_blocks": 1_000_003, "block_size": 4_800, "num_heads": 1_009})
"""Numbers that no other dimension of a cache has, so that their places in a shape tell what it counts."""


def private(owner: Any, name: str) -> Any:
    """Read a private attribute of vLLM's, or refuse by its name."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ContractChanged(
            found=f"{type(owner).__module__}.{type(owner).__qualname__} without {name!r}",
            expected=f"the attribute {name!r} that this package reads",
            consequence="its geometry cannot be known; the engine stops before any transfer",
            remedy="use a vLLM version that `python -m kvcached_nixl` lists as supported",
        ) from error


def num_kv_cache_groups(scheduler: Any) -> int:
    """KV-cache groups of vLLM's scheduler, or of its NIXL scheduler."""
    return len(private(scheduler, "kv_cache_config").kv_cache_groups)


@dataclasses.dataclass
class SchedulerView:
    """The stock NIXL scheduler as the push sees it."""

    scheduler: Any

    @property
    def engine_id(self) -> str:
        return str(private(self.scheduler, "engine_id"))

    @property
    def host(self) -> str:
        return str(private(self.scheduler, "side_channel_host"))

    @property
    def port(self) -> int:
        return int(private(self.scheduler, "side_channel_port"))

    @property
    def tp_size(self) -> int:
        return int(private(self.scheduler, "vllm_config").parallel_config.tensor_parallel_size)

    @property
    def block_size(self) -> int:
        """Tokens in a block of the scheduler."""
        return int(private(self.scheduler, "block_size"))

    @property
    def num_kv_cache_groups(self) -> int:
        return num_kv_cache_groups(self.scheduler)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """``kv_connector_extra_config``."""
        found: Mapping[str, Any] = private(self.scheduler, "vllm_config").kv_transfer_config.kv_connector_extra_config
        return found


@dataclasses.dataclass
class WorkerView:
    """The stock worker as the geometry sees it."""

    worker: Any

    @property
    def num_blocks(self) -> int:
        """Blocks vLLM planned, at the granularity of the attention kernel."""
        return int(private(self.worker, "num_blocks"))

    @property
    def num_pools(self) -> int:
        """Pools of layers that back the KV cache; layers of different groups may share one."""
        return len(private(self.worker, "kv_cache_config").kv_cache_tensors)

    @property
    def use_mla(self) -> bool:
        return bool(private(self.worker, "use_mla"))

    @property
    def block_size(self) -> int:
        """Tokens in a block of the attention kernel."""
        return int(private(self.worker, "block_size"))

    @property
    def kernel_blocks_per_block(self) -> int:
        """Blocks of the attention kernel in a block of the scheduler."""
        return int(private(self.worker, "_physical_blocks_per_logical_kv_block"))

    @property
    def engine_id(self) -> str:
        return str(private(self.worker, "engine_id"))

    @property
    def tp_size(self) -> int:
        return int(private(self.worker, "world_size"))

    @property
    def tp_rank(self) -> int:
        return int(private(self.worker, "tp_rank"))

    @property
    def total_kv_heads(self) -> int:
        """KV heads of the model, over all ranks."""
        return int(private(self.worker, "model_config").get_total_num_kv_heads())

    @property
    def agent(self) -> Any:
        """The NIXL agent."""
        return private(self.worker, "nixl_wrapper")

    @property
    def backends(self) -> list[str]:
        """In whose memory the agent registers."""
        return list(private(self.worker, "nixl_backends"))

    def use(self, agent: Any, kept: MutableSet[Any], leases: MutableMapping[Any, float]) -> None:
        """Replace the agent, the requests that decode may read, and when their leases end; nothing is in them yet."""
        for name, replacement in (("nixl_wrapper", agent), ("_reqs_to_process", kept), ("_reqs_to_send", leases)):
            private(self.worker, name)
            setattr(self.worker, name, replacement)

    def agents_of(self, engine_id: str) -> list[str]:
        """The agents of another engine's ranks; none before a handshake."""
        return list(private(self.worker, "_remote_agents").get(engine_id, {}).values())

    def is_connecting(self, engine_id: str) -> bool:
        return engine_id in private(self.worker, "_handshake_futures")

    def connect(self, engine_id: str, host: str, port: int, tp_size: int) -> None:
        """vLLM <= 0.21: begin a handshake as the stock worker does, but for no request."""
        lock, futures = private(self.worker, "_handshake_lock"), private(self.worker, "_handshake_futures")

        def connected(future: Future[Any]) -> None:
            with lock:
                del futures[engine_id]
                if future.exception() is None:
                    private(self.worker, "_remote_agents")[engine_id] = future.result()

        with lock:
            if engine_id not in futures and not self.agents_of(engine_id):
                handshake = private(self.worker, "_nixl_handshake")
                executor = private(self.worker, "_handshake_initiation_executor")
                futures[engine_id] = executor.submit(handshake, host, port, tp_size, engine_id)
                futures[engine_id].add_done_callback(connected)

    @property
    def is_receiving(self) -> bool:
        """Whether a transfer is in flight that this worker posted."""
        return bool(private(self.worker, "_recving_transfers"))

    @property
    def engines(self) -> list[str]:
        """Other engines with whom there was a handshake."""
        return list(private(self.worker, "_remote_agents"))

    def forget_engine(self, engine_id: str) -> None:
        """Let go of another engine as the stock worker does when it shuts down; what is read next needs a handshake."""
        clean_up = getattr(self.worker, "_cleanup_remote_engine", None)  # vLLM >= 0.24
        if clean_up is not None:
            clean_up(engine_id, log_eviction=False)
            return
        for handle in private(self.worker, "dst_xfer_side_handles").pop(engine_id).values():
            self.agent.release_dlist_handle(handle)
        for agent in private(self.worker, "_remote_agents").pop(engine_id).values():
            self.agent.remove_remote_agent(agent)
        for name in ("kv_caches_base_addr", "dst_num_blocks"):
            del private(self.worker, name)[engine_id]

    @property
    def memory_type(self) -> str:
        """NIXL's word for where the KV cache is."""
        return str(private(self.worker, "nixl_memory_type"))

    @property
    def device_id(self) -> int:
        return int(private(self.worker, "device_id"))

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """``kv_connector_extra_config``."""
        found: Mapping[str, Any] = private(self.worker, "kv_transfer_config").kv_connector_extra_config
        return found

    @property
    def memory_order(self) -> str:
        return str(private(self.worker, "kv_cache_layout"))

    @property
    def kv_cache_dtype(self) -> str:
        return str(private(self.worker, "vllm_config").cache_config.cache_dtype)

    @property
    def pipeline_parallel_size(self) -> int:
        return int(private(self.worker, "vllm_config").parallel_config.pipeline_parallel_size)

    def page_bytes(self) -> dict[str, int]:
        """Layer name -> bytes of one kernel block in that layer (K and V, or the latent)."""
        ratio = self.kernel_blocks_per_block
        pages: dict[str, int] = {}
        for layer, spec in private(self.worker, "_layer_specs").items():
            own = spec.kv_cache_specs[layer] if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
            if type(own).__name__ == "MambaSpec":
                raise LayoutRefused(
                    found=f"layer {layer!r} keeps a state (MambaSpec) beside attention layers",
                    expected="attention layers only; linear attention and state-space layers are not supported yet",
                    consequence="state and attention share pools in a way not described yet; the engine stops",
                    remedy="serve this model without ENABLE_KVCACHED, or without a KV connector",
                )
            pages[layer] = own.page_size_bytes // ratio
        return pages

    def probe_cache_shape(self) -> tuple[tuple[int, ...], Mapping[str, int]]:
        """The backend's KV cache shape for telling numbers of blocks, tokens and heads, and those numbers."""
        backend = private(self.worker, "attn_backends")[0]
        shape = backend.get_kv_cache_shape(
            num_blocks=_PROBED["num_blocks"],
            block_size=_PROBED["block_size"],
            num_kv_heads=_PROBED["num_heads"],
            head_size=1,
        )
        return tuple(shape), _PROBED

    def tell_kv_first(self) -> None:
        """Make this worker's connector register K and V apart although its backend keeps blocks first.

        Only this worker's list of backends changes; the attention layers keep the real class (vllm#42095).
        """
        stock = private(self.worker, "attn_backends")[0]

        def get_kv_cache_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
            num_blocks, halves, *inner = stock.get_kv_cache_shape(*args, **kwargs)
            return (halves, num_blocks, *inner)

        kv_first = type(f"KVFirst{stock.__name__}", (stock,), {"get_kv_cache_shape": staticmethod(get_kv_cache_shape)})
        self.worker.attn_backends = [kv_first, *private(self.worker, "attn_backends")[1:]]

    def set_device_kv_caches(self, device_views: dict[str, Any]) -> None:
        """Give back to the worker the views attention uses, for its host copies and post-processing."""
        private(self.worker, "device_kv_caches")
        self.worker.device_kv_caches = device_views

    def registered_regions(self) -> list[tuple[int, int]]:
        """What the stock worker made of the offered tensors: (address, block bytes) per region."""
        addresses = private(self.worker, "kv_caches_base_addr")[private(self.worker, "engine_id")]
        return list(
            zip(addresses[private(self.worker, "tp_rank")], private(self.worker, "block_len_per_layer"), strict=True)
        )

    def offer_handshake(self, metadata: bytes) -> None:
        """Replace what this worker tells peers that ask, behind the compatibility string."""
        self.worker.xfer_handshake_metadata = dataclasses.replace(
            private(self.worker, "xfer_handshake_metadata"), agent_metadata_bytes=metadata
        )

    def sign_compatibility(self, sign: Callable[[str], str]) -> str:
        """Replace the compatibility string this worker compares with and offers; returns the new one."""
        signed = sign(private(self.worker, "compat_hash"))
        self.worker.compat_hash = signed
        self.worker.xfer_handshake_metadata = dataclasses.replace(
            private(self.worker, "xfer_handshake_metadata"), compatibility_hash=signed
        )
        return signed

    @property
    def compatibility(self) -> str:
        """The string this worker compares with a peer's."""
        return str(private(self.worker, "compat_hash"))

    def receiving_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Local block ids, per group, of a request whose KV is being received; empty if there is none."""
        meta = private(self.worker, "_recving_metadata").get(request_id)
        return () if meta is None else tuple(meta.local_block_ids)

    def end_receive(self, request_id: str) -> None:
        """Forget what is known of a receive that posted no transfer."""
        private(self.worker, "_recving_metadata").pop(request_id, None)

    def report_invalid_blocks(self, block_ids: set[int]) -> None:
        """Add to the block ids the worker reports as not loaded.

        On vLLM <= 0.21 only on the engine's thread: they are a plain set there.
        """
        invalid = private(self.worker, "_invalid_block_ids")
        if isinstance(invalid, queue.Queue):
            invalid.put(block_ids)
        else:
            invalid.update(block_ids)

    def report_failed_receives(self, count: int, block_ids: set[int]) -> None:
        """Add to vLLM's metric of failed transfers, and to the block ids that are reported as not loaded."""
        if block_ids:
            self.report_invalid_blocks(block_ids)
        for _ in range(count):
            private(self.worker, "xfer_stats").record_failed_transfer()

    def count_expired(self, count: int) -> None:
        """Add to vLLM's metric of requests whose lease has ended."""
        for _ in range(count):
            private(self.worker, "xfer_stats").record_kv_expired_req()

    @property
    def failed_receives(self) -> set[str]:
        """vLLM <= 0.21: ids of receives that failed before a transfer was posted; any thread adds to it."""
        found: set[str] = private(self.worker, "_failed_recv_reqs")
        return found

    @failed_receives.setter
    def failed_receives(self, replacement: set[str]) -> None:
        self.worker._failed_recv_reqs = replacement
