# SPDX-License-Identifier: Apache-2.0
"""READs that are done only if prefill still kept the request when they were (rule R3).

A NIXL agent for vLLM's worker, which uses it as its own. What it posts as a READ of a request's blocks is followed by
a READ of the request's word (`wire.lease_word`), and only then is it done, and only then is prefill told so. If there
is no word, the transfer has failed, and vLLM fails the request or computes it anew, as kv_load_failure_policy says.

Nothing is registered, and no descriptor is prepared, per request: a peer's buckets are, when it is added.

Threads: as vLLM's worker uses an agent, the engine's for transfers, another for adding peers.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import wrapt

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.agent import descriptors, peer_name, state_of
from kvcached_nixl.transport.base import State
from kvcached_nixl.wire.lease import beats, is_beat, read_beat
from kvcached_nixl.wire.lease_word import BUCKET_BYTES, BUCKETS, WORDS_PER_BUCKET, LeasedAgent, place_of
from kvcached_nixl.worker.lease_table import Words

__all__ = ["LEASE_ENDED", "VerifiedReads"]

logger = logging.getLogger(SERVER_LOGGER)

LEASE_ENDED = "LEASE ENDED"
"""A transfer's state, where NIXL has DONE, PROC and ERR; vLLM takes any other than the first two for a failure."""
LANDINGS = 1024
"""Words that are looked at at the same time; further READs wait."""
LOOK_SECONDS = 0.0005
"""How long the engine's thread waits for a word, which takes less; else the next step sees it."""
_READ = re.compile(r".+:[1-9][0-9]{0,4}", re.DOTALL)
"""What a READ notifies: the request, and how many ranks of decode read it."""
_OWN = frozenset(("", "NIXL_INIT_AGENT"))


@dataclass(eq=False)
class _Read:
    """A READ of blocks, and then of its request's word."""

    blocks: Any
    peer: str
    request_id: PrefillRequestId
    notification: bytes
    word: Any = None
    landing: int | None = None


class VerifiedReads(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """See the module. Both peers need one.

    Args:
        agent: ``nixl_agent``, with host memory among what its backend can register.
        backends: in whose memory the table is registered.
        renew: takes heartbeats in, where vLLM's worker does not.
    """

    def __init__(
        self,
        agent: Any,
        backends: Sequence[str],
        renew: Callable[[list[PrefillRequestId]], None] | None = None,
    ) -> None:
        super().__init__(agent)
        self._self_memory: Words = np.zeros((BUCKETS + LANDINGS, WORDS_PER_BUCKET), dtype=np.uint64)
        self._self_registered = agent.register_memory(
            agent.get_reg_descs([(self._self_memory.ctypes.data, self._self_memory.nbytes, 0, "")], "DRAM"),
            backends=list(backends),
        )
        self._self_landings = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._rows(self._self_memory[BUCKETS:].ctypes.data, LANDINGS)
        )
        self._self_free = list(range(LANDINGS))
        self._self_tables: dict[str, Any] = {}
        self._self_peers: dict[Any, str] = {}
        self._self_ended = 0
        self._self_malformed = 0
        self._self_renew = renew
        self._self_lost: set[str] = set()

    @property
    def table(self) -> Words:
        """This side's own words, for `lease_table.KeptRequests`."""
        return self._self_memory[:BUCKETS]

    @property
    def leases_ended(self) -> int:
        """READs that found no word."""
        return self._self_ended

    @property
    def malformed(self) -> int:
        """Notifications that were dropped, because vLLM's worker would not survive them."""
        return self._self_malformed

    def take_lost(self) -> set[str]:
        """Peers of whom a READ has failed since the last call; NIXL does not connect to them again by itself."""
        lost, self._self_lost = self._self_lost, set()
        return lost

    def send_notif(self, agent_name: Any, notif_msg: bytes, *args: Any, **kwargs: Any) -> None:
        """As NIXL's; vLLM names all requests of a prefill in one heartbeat, however many there are."""
        for part in beats(read_beat(notif_msg)) if is_beat(notif_msg) else (notif_msg,):
            self.__wrapped__.send_notif(agent_name, part, *args, **kwargs)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """As NIXL's, but for what vLLM's worker cannot read."""
        heard: dict[str, list[bytes]] = self.__wrapped__.get_new_notifs()
        return {peer: [one for one in some if self._is_for_vllm(peer, one)] for peer, some in heard.items()}

    def get_agent_metadata(self) -> bytes:
        address = int(self._self_memory.ctypes.data)
        return msgspec.msgpack.encode(LeasedAgent(bytes(self.__wrapped__.get_agent_metadata()), address))

    def add_remote_agent(self, metadata: bytes) -> Any:
        """Raises ``msgspec.DecodeError`` for a peer whose READs cannot be verified."""
        found = msgspec.msgpack.decode(metadata, type=LeasedAgent)
        name = self.__wrapped__.add_remote_agent(found.agent_metadata)
        if peer_name(name) not in self._self_tables:
            rows = self._rows(found.table_address, BUCKETS)
            self._self_tables[peer_name(name)] = self.__wrapped__.prep_xfer_dlist(name, rows)
        return name

    def remove_remote_agent(self, name: Any) -> None:
        table = self._self_tables.pop(peer_name(name), None)
        if table is not None:
            self.__wrapped__.release_dlist_handle(table)
        self.__wrapped__.remove_remote_agent(name)

    def prep_xfer_dlist(self, agent_name: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self.__wrapped__.prep_xfer_dlist(agent_name, *args, **kwargs)
        if peer_name(agent_name) not in _OWN:
            self._self_peers[handle] = peer_name(agent_name)
        return handle

    def release_dlist_handle(self, handle: Any) -> None:
        self._self_peers.pop(handle, None)
        self.__wrapped__.release_dlist_handle(handle)

    def make_prepped_xfer(
        self, operation: str, local: Any, local_ids: Any, remote: Any, remote_ids: Any, notif_msg: bytes = b""
    ) -> Any:
        """A READ is named by its notification, ``request:ranks``, which is kept back."""
        if operation != "READ":
            return self.__wrapped__.make_prepped_xfer(operation, local, local_ids, remote, remote_ids, notif_msg)
        said = notif_msg.decode()
        if not _READ.fullmatch(said):
            raise ValueError(f"found a READ that notifies {notif_msg!r}; expected its request's id and a number")
        peer, request_id = self._self_peers[remote], PrefillRequestId(said.rpartition(":")[0])
        with self._loses(peer):
            blocks = self.__wrapped__.make_prepped_xfer(operation, local, local_ids, remote, remote_ids)
        return _Read(blocks, peer, request_id, notif_msg)

    def transfer(self, handle: Any) -> Any:
        if not isinstance(handle, _Read):
            return self.__wrapped__.transfer(handle)
        with self._loses(handle.peer):
            return self.__wrapped__.transfer(handle.blocks)

    def check_xfer_state(self, handle: Any) -> Any:
        """As NIXL's, but for a READ: DONE, once, when the word was found; LEASE_ENDED when it was not."""
        if not isinstance(handle, _Read):
            return self.__wrapped__.check_xfer_state(handle)
        with self._loses(handle.peer):
            state = self._state_of(handle)
        if state not in ("DONE", "PROC", LEASE_ENDED):
            self._self_lost.add(handle.peer)
        return state

    def _state_of(self, handle: _Read) -> Any:
        if handle.word is None:
            state = self.__wrapped__.check_xfer_state(handle.blocks)
            if state != "DONE":
                return state
            if not self._self_free:
                return "PROC"
            self._look(handle)
        until = time.perf_counter() + LOOK_SECONDS
        while (state := self.__wrapped__.check_xfer_state(handle.word)) == "PROC":
            if time.perf_counter() > until:
                return state
        return self._decide(handle) if state == "DONE" else state

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return self.__wrapped__.get_xfer_telemetry(handle.blocks if isinstance(handle, _Read) else handle)

    def release_xfer_handle(self, handle: Any) -> None:
        if not isinstance(handle, _Read):
            self.__wrapped__.release_xfer_handle(handle)
            return
        if handle.word is not None:
            # Where a word may still arrive, it would be taken for another request's.
            if handle.landing is not None and state_of(self.__wrapped__, handle.word) is not State.IN_FLIGHT:
                self._self_free.append(handle.landing)
            self.__wrapped__.release_xfer_handle(handle.word)
        self.__wrapped__.release_xfer_handle(handle.blocks)

    def _is_for_vllm(self, peer: str, notification: bytes) -> bool:
        try:
            if is_beat(notification):
                names = read_beat(notification)
                if self._self_renew is not None:
                    self._self_renew(names)
                return self._self_renew is None
            if _READ.fullmatch(notification.decode()):
                return True
        except ValueError:
            pass
        if not self._self_malformed:
            logger.warning("Dropped what %s says, and whatever like it follows: %.80r", peer, notification)
        self._self_malformed += 1
        return False

    @contextlib.contextmanager
    def _loses(self, peer: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._self_lost.add(peer)
            raise

    def _look(self, read: _Read) -> None:
        bucket, _ = place_of(read.request_id)
        landing, table = self._self_free[-1], self._self_tables[read.peer]
        read.word = self.__wrapped__.make_prepped_xfer("READ", self._self_landings, [landing], table, [bucket])
        read.landing = self._self_free.pop()
        self.__wrapped__.transfer(read.word)

    def _decide(self, read: _Read) -> str:
        assert read.landing is not None
        _, word = place_of(read.request_id)
        is_kept = bool((self._self_memory[BUCKETS + read.landing] == np.uint64(word)).any())
        self.__wrapped__.release_xfer_handle(read.word)
        self._self_free.append(read.landing)
        read.word = read.landing = None
        if is_kept:
            self.__wrapped__.send_notif(read.peer, notif_msg=read.notification)
            return "DONE"
        self._self_ended += 1
        logger.warning("Prefill does not keep request %s any more; what was read of it is not used", read.request_id)
        return LEASE_ENDED

    def _rows(self, address: int, count: int) -> Any:
        ranges = np.full((count, 2), BUCKET_BYTES, dtype=np.int64)
        ranges[:, 0] = address + BUCKET_BYTES * np.arange(count)
        return descriptors(self.__wrapped__, ranges, "DRAM")
