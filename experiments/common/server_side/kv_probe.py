# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker extension that reads, records and corrupts KV blocks; loaded by the experiments' servers only.

Set ``PYTHONPATH`` to the folder of this file and ``--worker-extension-cls`` to ``kv_probe.KvProbe``; call the methods
through ``/collective_rpc`` (``VLLM_SERVER_DEV_MODE=1``). Runs in the worker process, on its main thread, between two
engine steps. It hooks the connector's *instance*, so patches of the classes by the package under test stay in place
and are measured.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from kv_blocks import (
    DAMAGES,
    BlockIds,
    Cache,
    ProbeError,
    block_bytes,
    digests,
    parts,
    swap_groups,
)
from kv_times import KvTimes
from packaging.version import Version

# The kernel ends (SIGILL) a process that uses AMX tiles without requesting them first. For vLLM's CPU attention,
# torch.compile happens to request them, but these servers run without it (see common/servers.py).
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

DROP_TAIL_BLOCK, SWAP_GROUPS = "drop_tail_block", "swap_two_groups"
KEEP_STATE, KEPT_STATE = "keep_state", "state_of_another_token"
"""The first damages nothing: it keeps the state that a request received, for a later request to get."""
Saved = list[list[list[torch.Tensor]]]
"""Of each group and layer, the tensors of one block."""
ALL_GROUPS = -1
STEP, SIDE = "kvcached_nixl_step", "_kvcached_nixl"
"""Attributes that kvcached_nixl sets: of the connector's metadata, the hand-overs for its workers; of the connector,
the worker's half, which reports what has ended."""


def step_pushes(connector: Any) -> bool:
    return bool(connector.kv_transfer_config.kv_connector_extra_config.get("transfer_mode") == "push")


# -------------------------------------------------------------------------------------------------------- recording
@dataclass
class Pending:
    """A request whose blocks are being transferred, and the content of its tail block before the transfer.

    ``transfer`` pairs it with the sender's request: its request id on P when D reads, the transfer name that both sides
    use when P writes. ``request_id`` is D's. ``remote`` are the sender's blocks; None when P writes, because D does not
    learn them.
    """

    request_id: str
    transfer: str
    local: BlockIds
    remote: BlockIds | None
    tail_before: Saved = field(default_factory=list)


@dataclass
class Recorder:
    """Digests the received blocks of a request when the connector reports it as received, and prefill's blocks when the
    connector reports it as sent: at that time the blocks still belong to the request.

    The key of a request is its id; of one that kvcached_nixl receives, the number of its attempt. On the connector's
    instance, ``begin`` replaces the first method that a step calls, ``finish`` the last one; ``transfer`` replaces its
    NIXL agent's ``transfer``. ``plan``: a corruption, the block, and the KV-cache group or ALL_GROUPS.
    """

    groups: list[list[Cache]]
    connector: Any
    call_begin: Callable[..., Any]
    call_finish: Callable[..., Any]
    call_transfer: Callable[..., Any]
    posted: int = 0
    pending: dict[str, Pending] = field(default_factory=dict)
    offered: dict[str, tuple[str, BlockIds]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    plan: tuple[str, int, int] | None = None
    kept_state: Saved = field(default_factory=list)

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM passes the metadata to handle_preemptions before it binds the metadata to the connector.
        metadata = kwargs.get("kv_connector_metadata") or self.connector._connector_metadata or args[0]
        step = vars(metadata).get(STEP)
        if step is None:
            for request_id, meta in metadata.reqs_to_recv.items():
                local, remote = ([*map(list, ids)] for ids in (meta.local_block_ids, meta.remote.block_ids))
                self._await(request_id, Pending(request_id, meta.remote.request_id, local, remote))
        for one in () if step is None else step.commands:
            # By their names: stock servers are probed without the package.
            if type(one).__name__ == "FetchSpec":
                name, manifest = one.name, one.manifest
                sent = (name, None) if step_pushes(self.connector) else (manifest.request_id, _ids(manifest.groups))
                self._await(str(one.attempt), Pending(one.request_id, sent[0], _ids(one.groups), sent[1]))
            elif type(one).__name__ == "OfferUpdate" and one.ready_tokens:
                name = one.name if step_pushes(self.connector) else one.request_id
                self.offered[one.request_id] = (name, _ids(one.groups))
        return self.call_begin(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        found = self.call_finish(*args, **kwargs)
        # From vLLM 0.30 on, an object of results.
        has_names = hasattr(found, "finished_sending")
        finished_sending, finished_receiving = (found.finished_sending, found.finished_recving) if has_names else found
        side = vars(self.connector).get(SIDE)
        # vLLM asks for the report next.
        ended = () if side is None else (str(attempt) for attempt, _ in side._report.ended)
        for name in sorted({*finished_receiving, *ended}):
            if pending := self.pending.pop(name, None):
                self._record(pending)
        for name in sorted(finished_sending):
            if name in self.offered:
                transfer, block_ids = self.offered.pop(name)
                digest = digests(self.groups, block_ids)
                self.sent.append({"transfer": transfer, "block_ids": block_ids, "digests": digest})
        return found

    def transfer(self, *args: Any, **kwargs: Any) -> Any:
        posted = self.call_transfer(*args, **kwargs)
        self.posted += 1
        return posted

    def _await(self, request_id: str, pending: Pending) -> None:
        if self.plan is not None and self.plan[0] == DROP_TAIL_BLOCK:
            pending.tail_before = self._last_blocks(pending)
        self.pending[request_id] = pending

    def _last_blocks(self, pending: Pending) -> Saved:
        return [
            [[view.clone() for view in parts(cache, block_ids[-1])] for cache in caches]
            for caches, block_ids in self._filled_groups(pending)
        ]

    def _filled_groups(self, pending: Pending) -> Iterator[tuple[list[Cache], list[int]]]:
        wanted = ALL_GROUPS if self.plan is None else self.plan[2]
        for group, (caches, block_ids) in enumerate(zip(self.groups, pending.local, strict=False)):
            if block_ids and wanted in (group, ALL_GROUPS):
                yield caches, block_ids

    def _record(self, pending: Pending) -> None:
        planted = None
        if self.plan is not None and any(pending.local):
            planted = self.plan[0]
            self._damage(pending)
            self.plan = None
        self.records.append(
            {
                "request_id": pending.request_id,
                "transfer": pending.transfer,
                "local_block_ids": pending.local,
                "remote_block_ids": pending.remote,
                "digests": digests(self.groups, pending.local),
                "planted": planted,
            }
        )

    def _damage(self, pending: Pending) -> None:
        assert self.plan is not None
        kind, index, group = self.plan
        if kind == DROP_TAIL_BLOCK:
            self._restore(pending, pending.tail_before)
        elif kind == KEEP_STATE:
            self.kept_state = self._last_blocks(pending)
        elif kind == KEPT_STATE:
            self._restore(pending, self.kept_state)
        elif kind == SWAP_GROUPS:
            other = (group + 1) % len(self.groups)
            ids = pending.local
            swap_groups(self.groups[group], ids[group][-1], self.groups[other], ids[other][-1])
        else:
            for caches, block_ids in self._filled_groups(pending):
                DAMAGES[kind](caches, block_ids, index)

    def _restore(self, pending: Pending, saved: Saved) -> None:
        for (caches, block_ids), before in zip(self._filled_groups(pending), saved, strict=True):
            for cache, kept in zip(caches, before, strict=True):
                for view, before_it in zip(parts(cache, block_ids[-1]), kept, strict=True):
                    view.copy_(before_it)


def _ids(groups: Any) -> BlockIds:
    return [list(group.block_ids) for group in groups]


class KvProbe(KvTimes):
    """Methods that vLLM mixes into its worker class; every name starts with ``kv_probe_`` to collide with nothing."""

    # Set by vLLM's worker.
    model_runner: Any
    vllm_config: Any

    @property
    def _kv_probe_connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def _kv_probe_side(self) -> Any:
        """This package's worker facade; None where another connector serves."""
        return vars(self._kv_probe_connector).get(SIDE)

    def _kv_probe_groups(self) -> list[list[Cache]]:
        """Return the tensors attention uses, per KV-cache group and in layer order."""
        layers = self.vllm_config.compilation_config.static_forward_context
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        caches = [[layers[name].kv_cache for name in group.layer_names] for group in groups]
        # Of a state several tensors: a tuple, or a list below vLLM 0.27.
        return [[tuple(one) if isinstance(one, list) else one for one in of_group] for of_group in caches]

    def kv_probe_geometry(self) -> dict[str, Any]:
        """Return shapes, strides (elements) and dtypes of the KV tensors and the planned number of blocks."""
        config = self.model_runner.kv_cache_config
        groups = []
        for group, tensors in zip(config.kv_cache_groups, self._kv_probe_groups(), strict=True):
            views = tensors[0] if isinstance(tensors[0], tuple) else (tensors[0],)
            groups.append(
                {
                    "layers": list(group.layer_names),
                    "block_size": group.kv_cache_spec.block_size,
                    "window": vars(group.kv_cache_spec).get("sliding_window"),
                    "is_state": isinstance(tensors[0], tuple),
                    "shape": [list(view.shape) for view in views],
                    "stride": [list(view.stride()) for view in views],
                    "dtype": [str(view.dtype) for view in views],
                    "block_bytes": sum(len(block_bytes(tensor, 0)) for tensor in tensors),
                }
            )
        return {"num_blocks": config.num_blocks, "groups": groups}

    def kv_probe_digests(self, block_ids: BlockIds) -> dict[str, Any]:
        """Return the SHA-256 of each block: ``{"digests": [[hex, ...] per group]}``."""
        return {"digests": digests(self._kv_probe_groups(), block_ids)}

    def kv_probe_arm(self) -> dict[str, Any]:
        """Start recording what this server receives and pushes. Idempotent."""
        connector = self._kv_probe_connector
        if not hasattr(self, "_kv_probe_armed"):
            # The first and the last connector method that a step calls.
            series = Version(importlib.metadata.version("vllm")).release[:2]
            first = "start_load_kv" if series < (0, 29) else "handle_preemptions"
            last = "get_finished" if series < (0, 30) else "get_transfer_results"
            agent = connector.connector_worker.nixl_wrapper
            calls = getattr(connector, first), getattr(connector, last), agent.transfer
            self._kv_probe_armed = recorder = Recorder(self._kv_probe_groups(), connector, *calls)
            setattr(connector, first, recorder.begin)
            setattr(connector, last, recorder.finish)
            agent.transfer = recorder.transfer
        return {"connector": type(connector).__qualname__}

    def _kv_probe_recorder(self) -> Recorder:
        if not hasattr(self, "_kv_probe_armed"):
            raise ProbeError("the recorder is not armed; call kv_probe_arm first.")
        return self._kv_probe_armed

    def kv_probe_take(self) -> dict[str, Any]:
        """Return and clear the records of what was received and pushed; and the transfers still under way."""
        recorder = self._kv_probe_recorder()
        taken = {"records": recorder.records, "sent": recorder.sent}
        recorder.records, recorder.sent = [], []
        return {**taken, "pending": [one.transfer for one in recorder.pending.values()]}

    def kv_probe_pending(self) -> dict[str, Any]:
        """Return the transfers under way to this server, those it has begun to offer, and how many transfers it has
        posted to NIXL."""
        recorder = self._kv_probe_recorder()
        return {
            "posted": recorder.posted,
            "pending": [one.transfer for one in recorder.pending.values()],
            "offered": [transfer for transfer, _ in recorder.offered.values()],
        }

    def kv_probe_plant(self, kind: str, index: int, group: int = ALL_GROUPS) -> dict[str, Any]:
        """Damage the blocks of the next received request. ``index`` is a position in its list of received blocks."""
        known = sorted([*DAMAGES, DROP_TAIL_BLOCK, SWAP_GROUPS, KEEP_STATE, KEPT_STATE])
        if kind not in known:
            raise ProbeError(f"found the corruption {kind!r}; expected one of {known}.")
        self._kv_probe_recorder().plan = (kind, int(index), int(group))
        return {"planted": kind, "index": int(index), "group": int(group)}

    def kv_probe_other_weights(self, seed: str) -> dict[str, Any]:
        """Change the weights in place, as a trainer that sends new weights does; equal on all servers for one seed.

        Seed 0 restores the weights of the start.
        """
        generator = torch.Generator().manual_seed(int(seed))
        parameters = sorted(self.model_runner.get_model().named_parameters())
        if not hasattr(self, "_kv_probe_weights"):
            self._kv_probe_weights = [parameter.detach().clone() for _, parameter in parameters]
        with torch.no_grad():
            for (_, parameter), first in zip(parameters, self._kv_probe_weights, strict=True):
                change = 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.copy_(first + change if int(seed) else first)
        return {}

    def kv_probe_plain_norms(self, change: float) -> dict[str, Any]:
        """Keep the first norm's weight as a plain attribute, which no list of parameters has, and add to it."""
        modules = self.model_runner.get_model().named_modules()
        name, norm = next(one for one in modules if one[0].endswith("input_layernorm"))
        weight = norm.weight.data
        if "weight" in norm._parameters:
            del norm.weight
            norm.weight = weight
        weight += float(change)
        return {"changed": name}
