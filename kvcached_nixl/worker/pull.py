# SPDX-License-Identifier: Apache-2.0
"""Beside vLLM's worker of a connector that pulls: what it reads is verified, and its leases end in their order.

Once per worker, on the engine's thread. Up to vLLM 0.21 leases are renewed here too. And a peer to which the connection
was lost is met anew: else every READ of it would fail for as long as both engines live.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from kvcached_nixl.clock import Clock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER, Settings
from kvcached_nixl.transport.agent import peer_name
from kvcached_nixl.wire.lease import Beats, beats
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.worker.lease import Leases
from kvcached_nixl.worker.lease_table import KeptRequests
from kvcached_nixl.worker.verified_reads import VerifiedReads

__all__ = ["PullWorker", "start"]

logger = logging.getLogger(SERVER_LOGGER)


class StockWorker(Protocol):
    """What is asked of vLLM's NIXL worker; ``compat.connector.WorkerView`` answers."""

    @property
    def agent(self) -> Any: ...
    @property
    def backends(self) -> list[str]: ...
    def use(self, agent: VerifiedReads, kept: KeptRequests, leases: Leases) -> None: ...
    def agents_of(self, engine_id: str) -> list[str]: ...
    def is_connecting(self, engine_id: str) -> bool: ...
    def connect(self, engine_id: str, host: str, port: int, tp_size: int) -> None: ...
    @property
    def is_receiving(self) -> bool: ...
    @property
    def engines(self) -> list[str]: ...
    def forget_engine(self, engine_id: str) -> None: ...


def start(worker: StockWorker, settings: Settings, clock: Clock, *, renews: bool) -> PullWorker:
    """Give the stock worker its agent, its set of requests and its leases, before it registers memory.

    Args:
        renews: whether leases are granted and renewed here; else vLLM does it, in these leases.
    """
    leases = Leases(clock, lease_seconds=settings.kv_lease_duration_seconds)
    agent = VerifiedReads(worker.agent, worker.backends, renew=leases.renew if renews else None)
    worker.use(agent, KeptRequests(agent.table), leases)
    return PullWorker(leases if renews else None)


class PullWorker:
    """See the module.

    It does not hold that worker, which holds it: an agent in a cycle is gone before the worker has released its
    handles, and that aborts the process.

    Args:
        leases: None where vLLM grants and renews them.
    """

    def __init__(self, leases: Leases | None) -> None:
        self._leases = leases
        self._lost: set[str] = set()
        self._unsent: dict[RemotePrefill, dict[PrefillRequestId, None]] = {}

    def forget_lost_peers(self, worker: StockWorker) -> None:
        """Before the stock worker begins a step, so that what it reads next begins with a handshake."""
        self._lost |= worker.agent.take_lost()
        # What is in flight to others goes on; what was lost ends soon.
        if not self._lost or worker.is_receiving:
            return
        for engine_id in worker.engines:
            if not self._lost.isdisjoint(map(peer_name, worker.agents_of(engine_id))):
                logger.warning("A READ of engine %s has failed; there will be another handshake with it", engine_id)
                worker.forget_engine(engine_id)
        self._lost = set()

    def begin_step(self, worker: StockWorker, sent: Iterable[str], renewed: Beats) -> None:
        """After the stock worker has begun it.

        Args:
            worker: the stock one.
            sent: prefill's requests that have ended, to which it has given its own time.
            renewed: decode's leases.
        """
        for request_id in map(PrefillRequestId, sent if self._leases is not None else ()):
            # It keeps none for a request that decode has read already.
            if self._leases is not None and request_id in self._leases:
                self._leases.grant(request_id)
        for prefill, names in renewed:
            self._unsent.setdefault(prefill, {}).update(dict.fromkeys(names))
            if not worker.agents_of(prefill.engine_id):
                worker.connect(prefill.engine_id, prefill.host, prefill.port, prefill.tp_size)
        for prefill in list(self._unsent):
            # Where the handshake has failed, the next beat begins another.
            if not worker.is_connecting(prefill.engine_id):
                self._send(worker, worker.agents_of(prefill.engine_id), self._unsent.pop(prefill))

    @staticmethod
    def _send(worker: StockWorker, agents: Iterable[str], names: Iterable[PrefillRequestId]) -> None:
        for beat in beats(names):
            for agent in agents:
                try:
                    worker.agent.send_notif(agent, beat)
                except Exception as cause:  # noqa: BLE001 - NIXL's; prefill is gone, or the next beat makes up for it
                    logger.warning("A heartbeat did not reach prefill's %s: %s", agent, cause)
