# SPDX-License-Identifier: Apache-2.0
"""The support matrix as Markdown, made from the table of series and from what the report says is compared.

``python tests/support/matrix.py`` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from kvcached_nixl.cli.report import COMPARED
from kvcached_nixl.vllm.adapter.versions import CHANGES, KVCACHED_SUPPORTED, ROWS, Row

__all__ = ["markdown"]

_BOTH = "both layouts"
_REFUSED = "refused"
_NOT_STREAMED = "both layouts; pushed when the prompt is computed"
_MULTIPLES = "one a multiple of the other"

# Supported geometry. Each "refused" is an error at start or at the handshake.
_GEOMETRY: Mapping[str, str] = MappingProxyType(
    {
        "multi-head, grouped-query, multi-query attention": _BOTH,
        "multi-latent attention (MLA)": _BOTH,
        "odd number of layers": _BOTH,
        "sliding window, alone or beside full attention": _NOT_STREAMED,
        "KV-cache groups with blocks of different sizes (Gemma 4)": f"{_NOT_STREAMED}; served with 0.28",
        "kernel block smaller than block": "both layouts; contiguous MLA is refused, and from 0.29 on every contiguous "
        "layout",
        "cells that are not one token of one head (NVFP4, B12X, ROCM_ATTN, shuffled ROCm caches)": _REFUSED,
        "layers with a state (Mamba2, gated delta net) beside attention": "refused below 0.28; both layouts, from 0.29 "
        "on non-contiguous; served with 0.28 and 0.30",
        "states and speculative decoding": "MTP, ngram, EAGLE and DFlash with Qwen3-Next and Qwen3.5 and 0.33; others "
        "refused",
        "a state kept at every block boundary (--mamba-cache-mode all)": _REFUSED,
        "peers with states and different tensor-parallel sizes": f"{_MULTIPLES}; a Mamba2 model whose configuration "
        "does not tell its groups is refused",
        "peers with different tensor-parallel sizes": _MULTIPLES,
        "peers with different block sizes": f"{_MULTIPLES}; with a sliding window, prefill's not the smaller ones; "
        "refused on a CPU",
        "peers with different layouts": "served; a descriptor per layer and block, or two",
        "a peer that pulls and one that pushes": _REFUSED,
        "peer without this package": _REFUSED,
        "another connector of vLLM's beside it (MultiConnector)": "ExampleConnector, without MLA; since 0.28 "
        "OffloadingConnector, with one KV-cache group of full attention, and a spec that the operator vouches for; "
        "every other one is refused",
        "pipeline stages of prefill": "served with 0.26, 0.28 and 0.33; refused with several KV-cache groups or a "
        "draft model",
        "pipeline stages of decode, and context parallelism": _REFUSED,
        "fp8 KV with the scales of the model's files, or 1.0": "served with 0.26 and 0.28",
        "fp8 scales that an engine computes": _REFUSED,
        "pruned videos with spatial token positions (M-RoPE)": _REFUSED,
    }
)


def markdown() -> str:
    """Tables: tests run with each series, geometry, what is compared, and changes of vLLM."""
    return "\n\n".join(
        [
            f"With kvcached {KVCACHED_SUPPORTED.removeprefix('==')}. Anything else is refused at start.",
            _table(["vLLM", "tested by", "with"], [_band(list(rows)) for _, rows in groupby(ROWS, _tested)]),
            _table(["geometry", "with every supported vLLM, unless a series is named"], _GEOMETRY.items()),
            _table(["of two engines", "what is compared; if it differs, the hand-over fails"], COMPARED.items()),
            _table(["since vLLM", "what this package has to know"], [[one.since, one.what] for one in CHANGES]),
        ]
    )


def _band(rows: Sequence[Row]) -> Sequence[str]:
    """One row for consecutive series with the same evidence."""
    return _span(rows), _tested(rows[0]), ", ".join(row.tested for row in rows)


def _tested(row: Row) -> str:
    return ", ".join(evidence.value for evidence in row.evidence)


def _span(rows: Iterable[Row]) -> str:
    series = [row.series for row in rows]
    return series[0] if len(series) == 1 else f"{series[0]} to {series[-1]}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
