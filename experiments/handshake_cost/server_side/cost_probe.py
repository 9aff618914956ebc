# SPDX-License-Identifier: Apache-2.0
"""A worker extension that tells what was registered, forgets its peers, and times this package's per-step wrappers."""

from __future__ import annotations

import inspect
import time
from typing import Any

from kv_probe import KvProbe


def _connector_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker


def _stock_function(bound: Any) -> Any:
    """The function below every wrapper of a bound method."""
    return inspect.unwrap(bound.__func__ if inspect.ismethod(bound) else bound)


class CostProbe(KvProbe):
    """Runs in the worker process, between two engine steps."""

    def kv_probe_registration(self) -> dict[str, Any]:
        """Regions, blocks per region and descriptors this worker registered."""
        worker = _connector_worker()
        return {
            "regions": worker.num_regions,
            "num_blocks": worker.num_blocks,
            "descriptors": len(worker.src_blocks_data),
        }

    def kv_probe_forget_peers(self) -> dict[str, Any]:
        """Let go of every remote agent, as the worker itself does when it shuts down: the next hand-over is cold."""
        worker = _connector_worker()
        peers = list(worker._remote_agents)
        for peer in peers:
            if hasattr(worker, "_cleanup_remote_engine"):  # vLLM >= 0.24
                worker._cleanup_remote_engine(peer, log_eviction=False)
                continue
            for handle in worker.dst_xfer_side_handles.pop(peer).values():
                worker.nixl_wrapper.release_dlist_handle(handle)
            for agent in worker._remote_agents.pop(peer).values():
                worker.nixl_wrapper.remove_remote_agent(agent)
            del worker.kv_caches_base_addr[peer], worker.dst_num_blocks[peer]
        return {"forgotten": len(peers)}

    def kv_probe_wrapper_seconds(self, calls: int) -> dict[str, Any]:
        """Seconds per call of the connector's idle per-step method, as it stands and below its wrappers.

        The two are timed in turns so that a busy machine slows both.
        """
        worker = _connector_worker()
        wrapped, stock = worker.get_finished, _stock_function(type(worker).get_finished)
        spent = {"wrapped": 0.0, "stock": 0.0}
        for _ in range(calls):
            begun = time.perf_counter()
            wrapped()
            between = time.perf_counter()
            stock(worker)
            spent["stock"] += time.perf_counter() - between
            spent["wrapped"] += between - begun
        return {name: seconds / calls for name, seconds in spent.items()}
