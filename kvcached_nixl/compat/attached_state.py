# SPDX-License-Identifier: Apache-2.0
"""What of ours rides on vLLM's objects, under names of its own: our side of a connector, and what a step carries.

It lives as long as what it is attached to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcached_nixl.compat.private import private

__all__ = ["attach", "attach_step", "begin_step", "sides", "side_of", "step_of"]

_SIDE = "_kvcached_nixl"
_STEP = "kvcached_nixl_step"


def attach(connector: Any, side: Any) -> None:
    """Keep our side of a hand-over on vLLM's NIXL connector: the engine's or a worker's, whichever it is."""
    setattr(connector, _SIDE, side)


def side_of(connector: Any) -> Any:
    """What was attached; None to another connector."""
    return None if connector is None else vars(connector).get(_SIDE)


def sides(connector: Any) -> Iterator[Any]:
    """Our side of each NIXL connector in a connector, which may hold others (``MultiConnector``)."""
    waiting = [connector]
    while waiting:
        one = waiting.pop()
        side = side_of(one)
        if side is not None:
            yield side
        waiting += vars(one).get("_connectors", ()) if one is not None else ()


def attach_step(metadata: Any, step: Any) -> Any:
    """Let our step ride on the metadata that vLLM hands to every worker."""
    setattr(metadata, _STEP, step)
    return metadata


def begin_step(connector: Any, metadata: Any) -> None:
    """Begin, on a worker, the step that rides on this metadata; of another connector nothing."""
    side = side_of(connector)
    if side is not None:
        side.begin_step(private(metadata, _STEP))


def step_of(connector: Any) -> Any:
    """The step that is bound to a worker's connector."""
    return private(private(connector, "_connector_metadata"), _STEP)
