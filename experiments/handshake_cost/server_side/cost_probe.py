# SPDX-License-Identifier: Apache-2.0
"""A worker extension that reports registrations, forgets its peers, and times the connector's share of a step."""

from __future__ import annotations

import time
from typing import Any

from kv_probe import KvProbe


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _side() -> Any:
    """Return this package's worker facade; None where another connector serves."""
    return vars(_connector()).get("_kvcached_nixl")


class CostProbe(KvProbe):
    """Runs in the worker process, between two engine steps."""

    def kv_probe_registration(self) -> dict[str, Any]:
        """Return the number of blocks, of descriptors per block, and of descriptors made before the first request."""
        worker = _connector().connector_worker
        if _side() is not None:
            extents = sum(found.descCount() for found in worker._registered_descs) - 1
            return {"num_blocks": worker.num_blocks, "a_block": extents, "descriptors": 0}
        made = len(worker.src_blocks_data)
        return {"num_blocks": worker.num_blocks, "a_block": made // worker.num_blocks, "descriptors": made}

    def kv_probe_forget_peers(self) -> dict[str, Any]:
        """Drop every remote agent, as if its engine had ended, so that the next hand-over is cold."""
        side, worker = _side(), _connector().connector_worker
        if side is not None:
            peers = side.thread._context.peers
            links = list(peers._links.values())
            for link in links:
                peers._let_go(link)
                peers._drop(link)
            return {"forgotten": len(links)}
        engines = list(worker._remote_agents)
        for engine in engines:
            if hasattr(worker, "_cleanup_remote_engine"):  # not in vLLM 0.33
                worker._cleanup_remote_engine(engine, log_eviction=False)
                continue
            for handle in worker.dst_xfer_side_handles.pop(engine).values():
                worker.nixl_wrapper.release_dlist_handle(handle)
            for agent in worker._remote_agents.pop(engine).values():
                worker.nixl_wrapper.remove_remote_agent(agent)
            del worker.kv_caches_base_addr[engine], worker.dst_num_blocks[engine]
        return {"forgotten": len(engines)}

    def kv_probe_idle_seconds(self, calls: int) -> dict[str, Any]:
        """Return the seconds per ``get_finished`` call, which every step makes, while no hand-over changes."""
        get_finished = _connector().get_finished
        begun = time.perf_counter()
        for _ in range(calls):
            get_finished(set())
        return {"idle": (time.perf_counter() - begun) / calls}
