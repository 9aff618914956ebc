# SPDX-License-Identifier: Apache-2.0
"""Attributes of vLLM's objects: private ones that this package reads, and those that it attaches; and what vLLM and
kvcached have chosen on this host.

A private name that is missing is a refusal, unless some supported vLLM lacks it. What is attached lives as long as its
object: the facade of a connector, its side channel's address, our `Step` and `Report` of a step, and the engine core of
a scheduler.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.side_channel_address import PORT, SideChannelAddress
from kvcached_nixl.vllm.adapter.locate import METADATA_MODULE
from kvcached_nixl.wire.step import Report


def private(owner: Any, name: str) -> Any:
    """Read a private attribute of vLLM or kvcached. Raises ContractChanged with its name if it is missing."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = type(owner)
        where = owner.__name__ if isinstance(owner, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
        raise ContractChanged(
            found=f"{where} without {name!r}",
            expected=f"the attribute {name!r} that this package reads",
            consequence="the state of vLLM or kvcached cannot be read; the engine stops before any transfer",
            remedy="use versions that `python -m kvcached_nixl` lists as supported",
        ) from error


def optional(owner: Any, name: str, default: Any = None) -> Any:
    """Read an attribute that some supported vLLM versions lack, or that an object lacks because it is None.

    ``tests/support/shapes/reads.py`` says which versions have it: a later one without it is found before it is
    supported.
    """
    return getattr(owner, name, default)


# ---------------------------------------------------------------------------------------------------- what is attached

_SIDE = "_kvcached_nixl"
ADDRESS = "_kvcached_nixl_address"
STEP = "kvcached_nixl_step"
"""Of the connector metadata that vLLM sends to every worker: our `Step`."""
_REPORT = "kvcached_nixl_report"
_TRANSFER = "_kvcached_nixl_transfer"
OWNER = "_kvcached_nixl_owner"
"""Of a scheduler: vLLM's engine core around it."""


def attach(connector: Any, side: Any, address: SideChannelAddress | None = None) -> None:
    """Attach our scheduler facade, with the address of its engine's side channel, or our worker facade to vLLM's NIXL
    connector."""
    setattr(connector, _SIDE, side)
    setattr(connector, ADDRESS, address)


def side_of(connector: Any) -> Any:
    """The facade that was attached; None for any other connector."""
    return None if connector is None else vars(connector).get(_SIDE)


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


def mark_outermost(vllm_config: Any) -> None:
    """Attach the ``kv_transfer_config`` of an engine's outermost connector: ``MultiConnector`` gives its connectors
    copies of ``vllm_config`` with another one."""
    vars(vllm_config)[_TRANSFER] = vllm_config.kv_transfer_config


def outermost(vllm_config: Any) -> Any:
    """What `mark_outermost` has attached: vLLM's scheduler and API server read the role and the policy there."""
    return vars(vllm_config).get(_TRANSFER, vllm_config.kv_transfer_config)


def carry(report: Report) -> Any:
    """vLLM's container for what a worker reports to its scheduler."""
    return _carrier()(report)


def metadata_in(worker_meta: Any) -> Iterator[Any]:
    """``KVConnectorOutput.kv_connector_worker_meta``; of a ``MultiConnector``, also that of each of its connectors."""
    waiting = [worker_meta]
    while waiting:
        one = waiting.pop()
        if one is not None:
            yield one
        several = optional(one, "metadata")
        waiting += several if isinstance(several, tuple) else ()


def reports_in(worker_meta: Any) -> Iterator[Report]:
    """The reports of our workers in that."""
    for one in metadata_in(worker_meta):
        if (found := optional(one, _REPORT)) is not None:
            yield found


@functools.cache
def _carrier() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

    class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
        def __init__(self, report: Report) -> None:
            setattr(self, _REPORT, report)

        def aggregate(self, other: Any) -> Any:
            getattr(self, _REPORT).add(getattr(other, _REPORT))
            return self

        def __reduce__(self) -> tuple[Any, ...]:
            # A worker sends it to its engine, where this class is a different object.
            return carry, (getattr(self, _REPORT),)

    return WorkerReport


def owner_of(engine_scheduler: Any) -> Any:
    """The engine core around a scheduler, in a process of its own or its client's; None before its first request."""
    return vars(engine_scheduler).get(OWNER)


def has_loop(core: Any) -> bool:
    """Whether an engine core has a process of its own, whose loop takes requests from a queue."""
    return "input_queue" in vars(core)


# ------------------------------------------------------------------------------------------------------------ this host


@dataclass(frozen=True)
class Platform:
    """What vLLM and kvcached have detected or chosen.

    Attributes:
        device: vLLM's name of the kind of device.
        memory_type: NIXL's memory type of the KV cache on that device.
        page_bytes: size of kvcached's pages of physical memory.
        is_contiguous: kvcached keeps all layers of a block side by side.
    """

    device: str
    memory_type: str
    page_bytes: int
    is_contiguous: bool


def platform() -> Platform:
    """Source of the memory type: ``v1/nixl/base_worker.py``."""
    from kvcached import utils

    # This import sets environment variables of UCX, on which a proof depends.
    importlib.import_module(METADATA_MODULE)
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    stock = current_platform.get_nixl_memory_type()
    return Platform(
        device=device,
        memory_type=stock or ("DRAM" if device == "cpu" else "VRAM"),
        page_bytes=int(utils.PAGE_SIZE),
        is_contiguous=bool(utils.CONTIGUOUS_LAYOUT),
    )


def side_channel_address(index: int = 0) -> SideChannelAddress:
    """The side channel of a data-parallel rank, as this process's environment configures it.

    Raises:
        SettingsError: it cannot be used.
    """
    from vllm import envs
    from vllm.utils.network_utils import get_ip

    host = str(private(envs, "VLLM_NIXL_SIDE_CHANNEL_HOST"))
    try:
        port: int | str = int(private(envs, "VLLM_NIXL_SIDE_CHANNEL_PORT"))
    except ValueError:
        # vLLM cannot read it as a number: `SideChannelAddress.of` refuses the text.
        port = os.environ[PORT]
    return SideChannelAddress.of(host, port, index, os.environ, get_ip)
