# SPDX-License-Identifier: Apache-2.0
"""The support matrix, as Markdown, from the capability table. ``python -m kvcached_nixl.compat.matrix`` prints it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from kvcached_nixl.compat.versions import KVCACHED_SUPPORTED, ROWS, Capability, Era, Row

__all__ = ["markdown"]

_BOTH = "both layouts"
_REFUSED = "refused"
_NOT_STREAMED = "both layouts; pushed when the prompt is computed"
_MULTIPLES = "one a multiple of the other"

# What the geometry serves, by era of the KV tensors; every "refused" is an error at start or at the handshake.
_GEOMETRY: Mapping[str, Mapping[Era, str]] = MappingProxyType(
    {
        "multi-head, grouped-query, multi-query attention": {Era.KV_FIRST: _BOTH, Era.PACKED: _BOTH},
        "multi-latent attention (MLA)": {Era.KV_FIRST: _BOTH, Era.PACKED: _BOTH},
        "odd number of layers": {Era.KV_FIRST: _BOTH, Era.PACKED: _BOTH},
        "sliding window, alone or beside full attention": {
            Era.KV_FIRST: _NOT_STREAMED,
            Era.PACKED: _NOT_STREAMED,
        },
        "kernel block smaller than block": {
            Era.KV_FIRST: "non-contiguous; contiguous is refused",
            Era.PACKED: "both layouts; contiguous MLA is refused",
        },
        "state-space or linear-attention layers": {Era.KV_FIRST: _REFUSED, Era.PACKED: _REFUSED},
        "peers with different tensor-parallel sizes": {Era.KV_FIRST: _MULTIPLES, Era.PACKED: _MULTIPLES},
        "peers with different block sizes": {Era.KV_FIRST: _MULTIPLES, Era.PACKED: _MULTIPLES},
        "peers with different layouts": {Era.KV_FIRST: _REFUSED, Era.PACKED: _REFUSED},
        "a peer that pulls and one that pushes": {Era.KV_FIRST: _REFUSED, Era.PACKED: _REFUSED},
        "peer without this package": {Era.KV_FIRST: _REFUSED, Era.PACKED: _REFUSED},
        "pipeline and context parallelism": {Era.KV_FIRST: _REFUSED, Era.PACKED: _REFUSED},
        "fp8 scales that an engine computes": {Era.KV_FIRST: _REFUSED, Era.PACKED: _REFUSED},
    }
)


def markdown() -> str:
    """Two tables, one column per supported series of vLLM; kvcached's version in the caption."""
    return "\n\n".join(
        [
            f"With kvcached {KVCACHED_SUPPORTED.removeprefix('==')}. Anything not in the tables is refused at start.",
            _table("capability", {c.value: {row.vllm: _provision(row, c) for row in ROWS} for c in Capability}),
            _table("geometry", {what: {row.vllm: cell[row.era] for row in ROWS} for what, cell in _GEOMETRY.items()}),
        ]
    )


def _provision(row: Row, capability: Capability) -> str:
    provision = row.provides[capability]
    return f"{provision.origin.value}: {provision.note}"


def _table(corner: str, lines: Mapping[str, Mapping[str, str]]) -> str:
    heads = [f"vLLM {row.vllm} (tested: {row.tested})" for row in ROWS]
    rows = [[corner, *heads], ["---"] * (1 + len(heads))]
    rows += [[what, *(cells[row.vllm] for row in ROWS)] for what, cells in lines.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
