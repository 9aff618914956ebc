# SPDX-License-Identifier: Apache-2.0
"""Changes of vLLM per series, and how each series was tested. The rows of the support matrix are made from both.

The eight newest series are supported. To add one, add a line to ``TESTED`` and a `Change` for each difference,
and delete the oldest with everything that only it needs. `versions` checks installed versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


@dataclass(frozen=True)
class Shape:
    """Differences between series that the code asks for.

    Attributes:
        serves_states: layers with a state are handed over (`adapter.specs`). Before, the engine ends where it loads
            beside cached states (vllm#43508), CUDA graphs may read another state (vllm#42430), prefix hits may end
            where no state is, or zeroing a block of contiguous layers clears some of the next one (vllm#50276).
        runners: vLLM's model runners that kvcached has an adapter for.
        held_kv_runs_while_pausing: a pause that waits for running requests runs those that wait and hold KV, too.
        keeps_checkpoints: the block before a prompt's last one may have the state of an earlier token, for prefix hits
            (align mode).
        kernel_blocks_by_spec: how many kernel blocks a block has depends on its layers' KV-cache spec, too.
        logical_views: every layer's view is (N, H, bs, D) with any backend, with one head for a latent; vLLM states its
            byte offset.
        pause_errors_reach_callers: a pause that fails tells its caller so, and the engine goes on.
    """

    serves_states: bool = False
    runners: tuple[str, ...] = ("V1",)
    held_kv_runs_while_pausing: bool = False
    keeps_checkpoints: bool = False
    kernel_blocks_by_spec: bool = False
    logical_views: bool = False
    pause_errors_reach_callers: bool = False


@dataclass(frozen=True)
class Change:
    """A change of vLLM, from one series on.

    Attributes:
        since: the first series with it, as in "0.28".
        what: one line of text for the support matrix.
        sets: fields of `Shape` -> their values from that series on.
    """

    since: str
    what: str
    sets: Mapping[str, object] = field(default_factory=dict)

    @property
    def later(self) -> str:
        """The version specifier of the series with this change."""
        return f">={self.since}"

    @property
    def earlier(self) -> str:
        """The version specifier of the series before it."""
        return f"<{self.since}"


HITS_DIVERGE = Change(
    "0.28",
    "kvcached 0.1.6 accepts model runner V2; blocks are zeroed by their own size and stride (vllm#50276); local prefix "
    "hits of a model with states may differ by KV-cache group (supports_divergent_local_hybrid_hits)",
    {"serves_states": True, "runners": ("V1", "V2")},
)
LOADS_BEHIND = Change(
    "0.29",
    "a connector's loads begin after the forward pass, and it is told of preemptions before it (handle_preemptions); "
    "one logical view of every cache; kvcached 0.1.6 accepts model runner V2 only",
    {"logical_views": True, "runners": ("V2",)},
)
ASKS_FOR_RESULTS = Change("0.30", "the runner asks its connector for the results of transfers (get_transfer_results)")
BEYOND_KVCACHED = Change(
    "0.31",
    "beyond kvcached 0.1.6's version windows, which this package opens if all of kvcached's patches fit; one queue of "
    "waiting requests, and one of those that hold KV (kv_holding_waiting); the worker saves in empty steps, too; a "
    "pause that fails tells its caller; decode's usage says what prefill had cached",
    {"pause_errors_reach_callers": True},
)
COUNTS_EXTERNAL_WEIGHTS = Change(
    "0.32",
    "a worker's memory is counted without weights that another process holds, and profiled with vLLM's current "
    "configuration; blocks that a connector is to load are not zeroed when they are allocated; kernel blocks by a "
    "layer's KV-cache spec; Mamba2 layers keep checkpoints of their states while a prompt is computed",
    {"kernel_blocks_by_spec": True, "keeps_checkpoints": True, "held_kv_runs_while_pausing": True},
)
HASHES_AHEAD = Change(
    "0.33",
    "hashes of blocks may cover tokens behind them (num_hash_lookahead_tokens); with a draft model the worker saves "
    "after it was asked for results; a connector is asked whether it can follow sleep mode, and answers no; NIXL 1.5",
)
CHANGES = (
    Change("0.27", "torch 2.13"),
    HITS_DIVERGE,
    LOADS_BEHIND,
    ASKS_FOR_RESULTS,
    BEYOND_KVCACHED,
    COUNTS_EXTERNAL_WEIGHTS,
    HASHES_AHEAD,
)
"""The changes after the first supported series, oldest first. Patches depend on those that have a variable."""


class Evidence(Enum):
    """How a release was tested, the strongest first."""

    GPU = "GPU"
    E2E = "e2e on CPU"
    EQUIVALENCE = "byte equivalence on CPU"
    CONTRACT = "contract"


@dataclass(frozen=True)
class Row:
    """One series of vLLM releases.

    Attributes:
        series: as in "0.28".
        tested: the release that the tests run against.
        evidence: how it was tested.
        shape: the differences between series.
    """

    series: str
    tested: str
    evidence: tuple[Evidence, ...]
    shape: Shape

    @property
    def vllm(self) -> str:
        """The version specifier of the series."""
        major, minor = self.series.split(".")
        return f">={self.series},<{major}.{int(minor) + 1}"


_COMPARED = (Evidence.EQUIVALENCE, Evidence.CONTRACT)
_SERVED = (Evidence.E2E, *_COMPARED)
TESTED: Mapping[str, tuple[Evidence, ...]] = MappingProxyType(
    {
        "0.26.0": _SERVED,
        "0.27.1": _COMPARED,
        "0.28.0": _SERVED,
        "0.29.0": _COMPARED,
        "0.30.0": _COMPARED,
        "0.31.0": _COMPARED,
        "0.32.0": _COMPARED,
        "0.33.0": _COMPARED,
    }
)
"""One release of each series, the oldest first, and the kinds of tests that were run with it."""


def _row(tested: str, evidence: tuple[Evidence, ...]) -> Row:
    series = tested.rpartition(".")[0]
    values: dict[str, object] = {}
    for change in CHANGES:
        if _number(change.since) <= _number(series):
            values |= change.sets
    return Row(series, tested, evidence, Shape(**values))  # type: ignore[arg-type]


def _number(series: str) -> tuple[int, ...]:
    return tuple(int(part) for part in series.split("."))


ROWS = tuple(_row(tested, evidence) for tested, evidence in TESTED.items())
SUPPORTED = f"{ROWS[0].vllm.partition(',')[0]},{ROWS[-1].vllm.partition(',')[2]}"
"""The version specifier of all rows; no series between the first and the last is left out."""
