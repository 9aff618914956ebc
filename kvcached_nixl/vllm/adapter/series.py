# SPDX-License-Identifier: Apache-2.0
"""Changes of vLLM per series, and how each series was tested. The rows of the support matrix are made from both.

The eight newest series are supported. To add one, add a line to ``TESTED`` and a `Change` for each difference,
and delete the oldest with everything that only it needs. `versions` checks installed versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


@dataclass(frozen=True)
class Change:
    """A change of vLLM, from one series on.

    Attributes:
        since: the first series with it, as in "0.28".
        what: one line of text for the support matrix.
    """

    since: str
    what: str

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
)
LOADS_BEHIND = Change(
    "0.29",
    "a connector's loads begin after the forward pass, and it is told of preemptions before it (handle_preemptions); "
    "one logical view of every cache; kvcached 0.1.6 accepts model runner V2 only",
)
ASKS_FOR_RESULTS = Change("0.30", "the runner asks its connector for the results of transfers (get_transfer_results)")
BEYOND_KVCACHED = Change(
    "0.31",
    "beyond kvcached 0.1.6's version windows, which this package opens if all of kvcached's patches fit; one queue of "
    "waiting requests, and one of those that hold KV (kv_holding_waiting); the worker saves in empty steps, too; a "
    "pause that fails tells its caller; decode's usage says what prefill had cached",
)
COUNTS_EXTERNAL_WEIGHTS = Change(
    "0.32",
    "a worker's memory is counted without weights that another process holds, and profiled with vLLM's current "
    "configuration; blocks that a connector is to load are not zeroed when they are allocated; kernel blocks by a "
    "layer's KV-cache spec; Mamba2 layers keep checkpoints of their states while a prompt is computed",
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
"""The changes after the first supported series, oldest first. Code depends on those that have a variable."""


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
    """

    series: str
    tested: str
    evidence: tuple[Evidence, ...]

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


ROWS = tuple(Row(tested.rpartition(".")[0], tested, evidence) for tested, evidence in TESTED.items())
SUPPORTED = f"{ROWS[0].vllm.partition(',')[0]},{ROWS[-1].vllm.partition(',')[2]}"
"""The version specifier of all rows; no series between the first and the last is left out."""
