# SPDX-License-Identifier: Apache-2.0
"""Requests and blocks that a test makes up, in place of vLLM's, for the scheduler's half of the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import LogicalBlock
from kvcached_nixl.scheduler.context import EngineContext, StockScheduler
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.wire.headroom import BlockUsage
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Keeps, KVGroup, KVGroups, Manifest, digest_of
from kvcached_nixl.wire.params import RemotePrefill, prefill_params
from kvcached_nixl.wire.step import Report, Reports, WakeAddress

BLOCK_SIZE = 4
TOKENS = 10
LEASE = 30.0
TIMEOUT = 120.0
ALLOCATION = 60.0
PATIENCE = 2.0
MOST_BATCHED_TOKENS = 4 * TOKENS
OWN = RemotePrefill("own", "10.0.0.1", 5600, 2)
WAKE = WakeAddress("127.0.0.1", 5601, "key")
"""Not the address for peers."""
PREFILL = RemotePrefill("p", "10.0.0.2", 5601, 2)
OWN_START, PREFILL_START = "00000000000000aa", "00000000000000bb"
COORDINATES = {"remote_engine_id": "p", "remote_host": "10.0.0.2", "remote_port": 5601, "tp_size": 2}


def prompt(seed: int = 0, num_tokens: int = TOKENS) -> list[int]:
    return [seed * 1000 + place for place in range(num_tokens)]


@dataclass
class Asked:
    """Stands in for vLLM's request. ``digested`` counts computations of its digest, which are slow."""

    request_id: str
    params: dict[str, Any] | None
    tokens: list[int] = field(default_factory=prompt)
    digested: int = 0
    computes_prompt: bool = False
    adapter: int = 0
    num_media: int = 0
    lacks_media: bool = False
    is_session: bool = False
    awaits_grammar: bool = False
    is_stand_in: bool = False
    whole_because: str = ""
    ends_in_media: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    def tell_cached(self, num_tokens: int) -> None:
        """No client of it reads ``usage``."""

    def digest(self, num_tokens: int) -> str:
        self.digested += 1
        return digest_of(self.tokens, num_tokens)


class Reads:
    """Stands in for the reader of vLLM's requests: returns each request unchanged."""

    def __init__(self) -> None:
        self.adapters = SimpleNamespace(forget=lambda number: None)

    def __call__(self, request: Any) -> Any:
        return request

    def take_renamed(self) -> set[str]:
        return set()

    def adapter_arrives(self, lora_request: Any) -> None:
        """No adapter is known."""


class Pool:
    """Stands in for vLLM's block pool. A block is with a request, taken from it, or free.

    Args:
        windows: first token that is kept, per group.
    """

    has_reserve = is_paused = is_copied = False

    def __init__(self, *windows: int, are_shared: bool = False, is_producer: bool = False) -> None:
        self.are_shared, self.is_producer = are_shared, is_producer
        self.of: dict[str, list[Any]] = {}
        self.freed: list[Any] = []
        self.windows = windows or (0,)
        self.stalled: list[str] = []
        self.starved: tuple[str, int] | None = None
        self.blocks_over_limit = self.num_cached = self.num_running_blocks = 0
        self.wanted = 0, False
        self.asked_for: list[int] = []
        self.let_go_of: list[tuple[str, bool]] = []
        self.outdated: list[tuple[Callable[[int, str], bool], bool]] = []

    def others_have_blocks(self, request_ids: Collection[str]) -> bool:
        return any(blocks and one not in request_ids for one, blocks in self.of.items())

    def usage(self) -> BlockUsage:
        return BlockUsage(90, sum(map(len, self.of.values())), 1 << 20, 0)

    def apply_limit(self) -> None:
        """It has none."""

    def tell_neighbours(self, needs_others: Callable[[str], bool]) -> bool:
        return False

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        return self.wanted

    def neighbours_served(self) -> None:
        """They say again what they still want."""

    def trim(self) -> int:
        return 0

    def drop_cached(self, num_blocks: int) -> int:
        dropped = min(num_blocks, self.num_cached)
        self.num_cached -= dropped
        return dropped

    def take(self, request_id: str) -> list[Any]:
        return self.of.pop(request_id, [])

    def give_back(self, blocks: list[Any]) -> None:
        self.freed += blocks
        twice = [block for block, times in Counter(self.freed).items() if times > 1]
        assert not twice, f"given back twice: {twice}"

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        self.let_go_of.append((request_id, recomputes))
        return None if recomputes else 0

    def outdate(self, is_meant: Callable[[int, str], bool], *, even_waiting: bool = False) -> set[str]:
        self.outdated.append((is_meant, even_waiting))
        return set(self.of)

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        self.asked_for.append(num_tokens)
        return tuple(window // BLOCK_SIZE * BLOCK_SIZE for window in self.windows)


def grown(*blocks: Sequence[int]) -> tuple[BlockRange, ...]:
    """Per KV-cache group, a request's blocks from its first token on."""
    return tuple(BlockRange(0, tuple(map(LogicalBlock, group))) for group in blocks)


def kv_groups(*block_sizes: int, drops_blocks: bool = False) -> KVGroups:
    """Groups of attention layers; with ``drops_blocks`` all have a sliding window."""
    keeps = Keeps.WINDOW if drops_blocks else Keeps.EVERYTHING
    return KVGroups(tuple(KVGroup(size, keeps) for size in block_sizes))


def with_states(attention: int = BLOCK_SIZE, state: int = 2 * BLOCK_SIZE) -> KVGroups:
    """A group of attention layers, and one that keeps states; tokens in a block of each, as vLLM counts."""
    return KVGroups((KVGroup(attention), KVGroup(state, Keeps.STATE)))


def stock(
    *, block_sizes: tuple[int, ...] = (BLOCK_SIZE,), drops_blocks: bool = False, **changed: Any
) -> StockScheduler:
    fields: dict[str, Any] = {
        "engine_id": OWN.engine_id,
        "tp_size": OWN.tp_size,
        "pp_size": OWN.pp_size,
        "groups": kv_groups(*block_sizes, drops_blocks=drops_blocks),
        "window_kinds": [],
        "output_checks": [],
        "zeroes_blocks": False,
        "recomputes": False,
        "max_num_batched_tokens": MOST_BATCHED_TOKENS,
        "is_consumer": True,
        "is_producer": False,
        "reader": Reads(),
        "spans": None,
        "extra_config": {},
    }
    return StockScheduler(**fields | changed)


def context(
    pool: Pool | None,
    clock: Clock,
    *,
    mode: TransferMode = TransferMode.PULL,
    timeout_seconds: float = TIMEOUT,
    **changed: Any,
) -> EngineContext:
    """Of an engine of `stock`, whose blocks are those of the pool, if there is one."""
    settings = Settings(mode, LEASE, timeout_seconds, ALLOCATION, PATIENCE)
    made = EngineContext(stock(**changed), settings, OWN, OWN_START, WAKE, clock)
    if pool is not None:
        made.bind(pool)
    return made


def manifest_of(
    tokens: list[int], request_id: str = "cmpl-p-0-0123abcd", first_tokens: tuple[int, ...] = (0,), **changed: Any
) -> Manifest:
    """Returns the manifest that prefill makes for these tokens; its block ids begin at 50."""
    end = -(-len(tokens) // BLOCK_SIZE)
    groups = tuple(BlockRange(first, tuple(range(50 + first // BLOCK_SIZE, 50 + end))) for first in first_tokens)
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "incarnation": PREFILL_START,
        "request_id": request_id,
        "digest": digest_of(tokens, len(tokens)),
        "num_tokens": len(tokens),
        "block_sizes": (BLOCK_SIZE,) * len(groups),
        "context_parallel": (1, 1),
        "groups": groups,
        "lease_seconds": LEASE,
        "num_media": 0,
    }
    return Manifest(**fields | changed)


def answer_of(manifest: Manifest, transfer_id: str | None = None) -> dict[str, Any]:
    told = {"transfer_id": transfer_id, "transfer_mode": TransferMode.PULL}
    return prefill_params(PREFILL, manifest, **told, cached_tokens=0)


def of_decode(
    name: str = "d1", tokens: list[int] | None = None, manifest: Manifest | None = None, **more: Any
) -> Asked:
    """Returns decode's request, with the parameters that prefill returned for the same prompt."""
    tokens = prompt() if tokens is None else tokens
    return Asked(name, answer_of(manifest_of(tokens) if manifest is None else manifest) | more, tokens)


def at_once(name: str = "d1", tokens: list[int] | None = None, **more: Any) -> Asked:
    """Returns decode's request of a router that sends to prefill and decode at once."""
    params = {"do_remote_prefill": True, "transfer_id": "t", **COORDINATES, **more}
    return Asked(name, params, prompt() if tokens is None else tokens)


def of_prefill(name: str = "p1", tokens: list[int] | None = None, **more: Any) -> Asked:
    return Asked(name, {"do_remote_decode": True, "transfer_id": "t", **more}, prompt() if tokens is None else tokens)


def reports(*ended: int, **found: Any) -> Reports:
    """With attempts that all ranks have ended."""
    return Reports(**found, report=Report({(attempt, rank) for attempt in ended for rank in range(OWN.tp_size)}))
