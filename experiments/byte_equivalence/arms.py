# SPDX-License-Identifier: Apache-2.0
"""The table of arms: which configurations of servers are compared. To compare another transfer mode, add a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from experiments.common import device
from experiments.common.device import FOLLOWS, PINNED, RUNNERS, accepted, role, runner_of, with_extra
from experiments.common.servers import ServerSpec, tag_of

SINGLE = "single"
Order = Literal["asked", "P first", "D first"]
Size = Literal["full", "quick", "brief"]
SIZES: tuple[Size, ...] = ("full", "quick", "brief")


@dataclass(frozen=True)
class Arm:
    """One configuration of servers. ``mode`` is ``single`` or the transfer mode; ``environment`` is set on its servers.

    ``orders``: D is asked, and asks P. Or the client asks both, and brings their parameters: P first, then all blocks
    are transferred at once; or D first, then blocks are transferred while P computes. ``is_staged``: KV is copied out
    of P's blocks before it is transferred. ``prefill``: extra config of P only. ``decode``: environment variables of D
    only. ``has_both_roles``: every server's ``kv_role`` is kv_both, not that of its side. ``servers``: number of P, and
    of D, each with ``ranks`` tensor-parallel ranks. ``in_runs``: the smallest run that includes this arm.
    """

    name: str
    mode: str
    connector: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    orders: tuple[Order, ...] = ("asked",)
    is_staged: bool = False
    prefill: Mapping[str, object] = field(default_factory=dict)
    decode: Mapping[str, str] = field(default_factory=dict)
    has_both_roles: bool = False
    servers: int = 1
    ranks: int = 1
    in_runs: Size = "quick"

    @property
    def has_own_runner(self) -> bool:
        """Whether this arm sets its model runner. The other arms all use the default one of the vLLM under test."""
        return device.SWITCH in self.environment

    @property
    def computes_as_stock(self) -> bool:
        """Whether its P computes the same chunks in the same way as stock P, so that their KV must be bit-identical."""
        return self.servers == self.ranks == 1 and not self.has_own_runner

    @property
    def writes(self) -> bool:
        """Whether P writes, and frees its blocks without another step."""
        return self.mode == "push" or self.is_staged

    @property
    def asks(self) -> bool:
        return "asked" in self.orders

    @property
    def kvcached(self) -> bool:
        return "ENABLE_KVCACHED" in self.environment


def _connector(**extra: object) -> dict[str, object]:
    # NIXL's default of four threads per agent makes servers on few cores mostly wait for each other.
    return with_extra({"kv_connector": "NixlConnector"}, {"num_threads": 0, **extra})


FLAT: Mapping[str, str] = {"ENABLE_KVCACHED": "true", device.LAYOUT: "false", **FOLLOWS}
"""kvcached's non-contiguous layout."""
CONTIGUOUS: Mapping[str, str] = {**FLAT, device.LAYOUT: "true"}
FLAT_PINNED, CONTIGUOUS_PINNED = {**FLAT, **PINNED}, {**CONTIGUOUS, **PINNED}
SMALL_SLAB: Mapping[str, object] = {"staging_gib": 0.005}
"""40 slots of 32 tokens in float32: requests queue for slots, and long ones are transferred one range at a time."""
VERIFIED: Mapping[str, object] = {"verify_fraction": 1.0}
"""In these arms D also compares every hand-over with the checksums that P sends."""
NOTHING: Mapping[str, object] = MappingProxyType({})
P_FIRST: tuple[Order, ...] = ("asked", "P first")
D_FIRST: tuple[Order, ...] = ("asked", "D first")
REFERENCE = Arm("single instance, stock", SINGLE, orders=())
STOCK_PULL = Arm("stock P/D, pull", "pull", _connector(), orders=("P first",))


def _pull(words: str, environment: Mapping[str, str], extra: Mapping[str, object] = NOTHING, **more: Any) -> Arm:
    return Arm(f"kvcached {words}, pull", "pull", _connector(**extra), environment, **more)


def _push(words: str, environment: Mapping[str, str], extra: Mapping[str, object] = NOTHING, **more: Any) -> Arm:
    more = {"orders": D_FIRST, **more}
    return Arm(f"kvcached {words}, push", "push", _connector(transfer_mode="push", **extra), environment, **more)


QUICK_ARMS = (
    REFERENCE,
    STOCK_PULL,
    _pull("P/D, non-contiguous", FLAT, orders=P_FIRST),
    _pull("P/D, contiguous", CONTIGUOUS, VERIFIED, in_runs="brief"),
    _push("P/D, non-contiguous", FLAT, in_runs="brief"),
    _push("P/D, contiguous", CONTIGUOUS, orders=("asked", "P first", "D first")),
    # These two set no memory_path: the proof at start must find that registrations do not follow kvcached's pages.
    _pull("P/D, staged", FLAT_PINNED, is_staged=True),
    _push("P/D, staged", CONTIGUOUS_PINNED, {**SMALL_SLAB, **VERIFIED}, is_staged=True),
)
FULL_ARMS = (
    _pull("P/D, staged, contiguous", CONTIGUOUS_PINNED, SMALL_SLAB, is_staged=True),
    _push("P/D, staged, non-contiguous", FLAT_PINNED, is_staged=True),
    _pull("P/D, device slab, contiguous", CONTIGUOUS, {"memory_path": "device", **SMALL_SLAB}, is_staged=True),
    _pull("P/D, direct to staged", FLAT, decode=PINNED),
    _push("P/D, direct to staged", FLAT, decode=PINNED),
    # P is staged by its config, not by pinned registrations: on host memory, a server with pinned registrations takes
    # its peer's for pinned, too.
    _pull("P/D, staged to direct", FLAT, is_staged=True, prefill={"memory_path": "host"}),
    _push("P/D, device slab", FLAT, {"memory_path": "device"}, is_staged=True),
    _pull("P/D, tensor parallel 2", FLAT, ranks=2),
    _push("P/D, tensor parallel 2", FLAT, ranks=2),
    _push("P/D, tensor parallel 2, staged", FLAT_PINNED, orders=("asked",), is_staged=True, ranks=2),
    _pull("P/D, runner V2", {**FLAT, **RUNNERS["V2"]}),
    _push("P/D, runner V2, contiguous", {**CONTIGUOUS, **RUNNERS["V2"]}),
    _pull("2P/2D", FLAT, has_both_roles=True, servers=2),
    _push("2P/2D", FLAT, has_both_roles=True, servers=2),
    _push("2P/2D, staged", FLAT_PINNED, orders=("asked",), is_staged=True, servers=2),
)
ARMS: tuple[Arm, ...] = (*QUICK_ARMS, *(replace(one, in_runs="full") for one in FULL_ARMS))


def of_size(size: Size, vllm: str) -> list[Arm]:
    """Return the arms of a run of ``size`` that ``vllm`` can serve on this machine."""
    return [arm for arm in ARMS if SIZES.index(arm.in_runs) >= SIZES.index(size) and _can_serve(arm, vllm)]


def _can_serve(arm: Arm, vllm: str) -> bool:
    """Whether kvcached accepts the arm's model runner, it differs from the default, and attention supports the layout.

    Several servers can share one GPU; the ranks of one server cannot, so each needs its own.
    """
    if 0 < device.num_gpus() < arm.ranks:
        return False
    usual, own = runner_of({}, vllm), runner_of(arm.environment, vllm)
    is_contiguous = arm.environment.get(device.LAYOUT) == "true"
    has_layout = device.serves_contiguous(vllm) or not is_contiguous
    return (not arm.has_own_runner or own != usual) and own in accepted(vllm) and has_layout


def _kv_transfer(arm: Arm, name: str) -> dict[str, object]:
    # What the client brings in the other orders.
    accepts = {"accept_kv_transfer_params": True} if len(arm.orders) > 1 else {}
    config = with_extra(arm.connector, accepts if name.startswith("decode") else arm.prefill)
    return {"kv_role": role("" if arm.has_both_roles else name), **config}


def specs(
    arm: Arm,
    model: Path,
    dtype: str,
    pool: Mapping[str, str],
    block_size: int | None = 32,
    *,
    forks: bool = False,
    arguments: tuple[str, ...] = (),
) -> list[ServerSpec]:
    """Return the servers of ``arm``: one, or all P and then all D."""
    names = [f"{side}{number or ''}" for side in ("prefill", "decode") for number in range(arm.servers)]
    executor = {"executor": "mp", "tensor_parallel_size": arm.ranks} if arm.ranks > 1 else {}
    return [
        ServerSpec(
            name=f"{tag_of(arm.name)}-{dtype}-{name}",
            model=model,
            dtype=dtype,
            kv_transfer=_kv_transfer(arm, name) if arm.connector else None,
            environment={
                **arm.environment,
                **(pool if arm.kvcached else {}),
                **(arm.decode if name.startswith("decode") else {}),
            },
            block_size=block_size,
            forks=forks,
            arguments=arguments,
            **executor,
        )
        for name in (["single"] if arm.mode == SINGLE else names)
    ]
