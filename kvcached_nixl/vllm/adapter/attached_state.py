# SPDX-License-Identifier: Apache-2.0
"""State of this package that is attached to vLLM's objects: the facade of a connector, its side channel's address, our
`Step` of a step, and the engine core of a scheduler.

It lives as long as the object that it is attached to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcached_nixl.side_channel_address import SideChannelAddress
from kvcached_nixl.vllm.adapter.private import optional, private

__all__ = [
    "address_of",
    "attach",
    "attach_address",
    "attach_step",
    "begin_step",
    "connectors",
    "core_of",
    "remember",
    "sides",
    "side_of",
    "step_of",
]

_SIDE = "_kvcached_nixl"
_ADDRESS = "_kvcached_nixl_address"
_STEP = "kvcached_nixl_step"
_CORE = "_kvcached_nixl_core"


def attach(connector: Any, side: Any) -> None:
    """Attach our scheduler facade or worker facade to vLLM's NIXL connector."""
    setattr(connector, _SIDE, side)


def side_of(connector: Any) -> Any:
    """The facade that was attached; None for any other connector."""
    return None if connector is None else vars(connector).get(_SIDE)


def attach_address(connector: Any, address: SideChannelAddress) -> None:
    """Attach the address of an engine's side channel to vLLM's NIXL connector of its scheduler."""
    setattr(connector, _ADDRESS, address)


def address_of(connector: Any) -> SideChannelAddress:
    """The address that was attached."""
    found: SideChannelAddress = private(connector, _ADDRESS)
    return found


def sides(connector: Any) -> Iterator[Any]:
    """Our facade of each NIXL connector in ``connector``, which may contain others (``MultiConnector``)."""
    return (side for side in map(side_of, connectors(connector)) if side is not None)


def connectors(connector: Any) -> Iterator[Any]:
    """A connector and those inside it."""
    waiting = [connector]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += optional(one, "_connectors", ())


def attach_step(metadata: Any, step: Any) -> Any:
    """Attach our `Step` to the connector metadata that vLLM sends to every worker."""
    setattr(metadata, _STEP, step)
    return metadata


def begin_step(connector: Any, metadata: Any) -> None:
    """On a worker, begin the `Step` that is attached to this metadata. Does nothing for any other connector."""
    side = side_of(connector)
    if side is not None:
        side.begin_step(private(metadata, _STEP))


def step_of(connector: Any) -> Any:
    """The `Step` on the metadata that is bound to a worker's connector."""
    return private(private(connector, "_connector_metadata"), _STEP)


def remember(core: Any) -> None:
    """Attach vLLM's engine core to its scheduler, for `core_of`."""
    vars(core.scheduler)[_CORE] = core


def core_of(engine_scheduler: Any) -> Any:
    """The engine core around a scheduler; None if there is no core process (an engine in its client's own process)."""
    return vars(engine_scheduler).get(_CORE)
