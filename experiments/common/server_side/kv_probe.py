# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker extension that reads, records and corrupts KV blocks; loaded by the experiments' servers only.

Set ``PYTHONPATH`` to the folder of this file and ``--worker-extension-cls`` to ``kv_probe.KvProbe``; call the methods
through ``/collective_rpc`` (``VLLM_SERVER_DEV_MODE=1``). Runs in the worker process, on its main thread, between two
engine steps. It hooks the connector's *instance*, so patches of the classes by the package under test stay in place
and are measured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version

# The kernel ends (SIGILL) a process that uses AMX tiles without requesting them first. For vLLM's CPU attention,
# torch.compile happens to request them, but these servers run without it (see common/servers.py).
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

BlockIds = list[list[int]]
"""Block ids per KV-cache group, outer list in group order."""


class ProbeError(RuntimeError):
    """The probe found a KV cache or a connector that it does not support, or was not armed."""


def normalise_block_ids(block_ids: Any) -> BlockIds:
    """Return ids per group as lists; a flat list (one group) is accepted, as older connectors send it."""
    groups = list(block_ids)
    if groups and isinstance(groups[0], int):
        return [groups]
    return [list(group) for group in groups]


def block_view(cache: torch.Tensor, block_id: int) -> torch.Tensor:
    """Return block ``block_id`` of one layer as a writable view of shape (2, heads, tokens, head_dim), K first.

    ``cache`` is the tensor that attention itself uses, in whatever strides:
    (2, blocks, heads, tokens, head_dim) as the CPU backend had it up to vLLM 0.22,
    (blocks, 2, tokens, heads, head_dim) as several CUDA backends have it, or
    (blocks, heads, tokens, 2 * head_dim) as packed backends have it since 0.23. In the packed form the CPU kernel
    keeps all K of a head before all V of it, while the CUDA kernels put K and V of a token side by side.
    """
    if cache.dim() == 5 and cache.shape[0] == 2:
        return cache[:, block_id]
    if cache.dim() == 5 and cache.shape[1] == 2:
        return cache[block_id].transpose(1, 2)
    if cache.dim() == 4:
        heads, tokens, both = cache[block_id].shape
        if cache.device.type == "cpu":
            return cache[block_id].view(heads, 2, tokens, both // 2).transpose(0, 1)
        return cache[block_id].view(heads, tokens, 2, both // 2).permute(2, 0, 1, 3)
    raise ProbeError(
        f"found a KV tensor of shape {tuple(cache.shape)}; expected (2, N, H, T, D), (N, 2, T, H, D) or (N, H, T, 2D)."
        " No digest of it would mean anything. Teach experiments/common/server_side/kv_probe.py this layout."
    )


def block_bytes(cache: torch.Tensor, block_id: int) -> bytes:
    """Return one layer's block in canonical order: K then V, token, head, element."""
    canonical = block_view(cache, block_id).permute(0, 2, 1, 3).contiguous()
    content: bytes = canonical.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return content


def block_digest(caches: list[torch.Tensor], block_id: int) -> str:
    """Return the SHA-256 (hex) of one block over all ``caches`` of its group, in layer order."""
    digest = hashlib.sha256()
    for cache in caches:
        digest.update(block_bytes(cache, block_id))
    return digest.hexdigest()


def digests(groups: list[list[torch.Tensor]], block_ids: BlockIds) -> list[list[str]]:
    """Return the SHA-256 (hex) of each block, per KV-cache group."""
    found = zip(groups, block_ids, strict=False)
    return [[block_digest(caches, block) for block in blocks] for caches, blocks in found]


# ---------------------------------------------------------------------------------------------- planted corruptions
Damage = Callable[[list[torch.Tensor], list[int], int], None]


def _swap_two_blocks(caches: list[torch.Tensor], block_ids: list[int], index: int) -> None:
    first, second = block_ids[index], block_ids[index + 1]
    for cache in caches:
        kept = block_view(cache, first).clone()
        block_view(cache, first).copy_(block_view(cache, second))
        block_view(cache, second).copy_(kept)


def _shift_v_by_a_head(caches: list[torch.Tensor], block_ids: list[int], index: int) -> None:
    for cache in caches:
        for block_id in block_ids:
            v = block_view(cache, block_id)[1]
            v.copy_(torch.roll(v, shifts=1, dims=0).clone())


def _send_k_for_v(caches: list[torch.Tensor], block_ids: list[int], index: int) -> None:
    for cache in caches:
        for block_id in block_ids:
            k, v = block_view(cache, block_id)
            v.copy_(k)


def _zero_a_block(caches: list[torch.Tensor], block_ids: list[int], index: int) -> None:
    for cache in caches:
        block_view(cache, block_ids[index]).zero_()


DROP_TAIL_BLOCK = "drop_tail_block"
STEP, OVER = "kvcached_nixl_step", "kvcached-nixl:over:"
"""Names that kvcached_nixl uses: the attribute of the connector's metadata with the hand-overs for its workers, and
the prefix that its workers put before the number of a finished attempt."""
DAMAGES: dict[str, Damage] = {
    "swap_two_blocks": _swap_two_blocks,
    "shift_v_by_a_head": _shift_v_by_a_head,
    "send_k_for_v": _send_k_for_v,
    "zero_a_block": _zero_a_block,
}


def step_pushes(connector: Any) -> bool:
    """Whether prefill writes while it computes."""
    return bool(connector.kv_transfer_config.kv_connector_extra_config.get("transfer_mode") == "push")


def stages(connector: Any) -> bool:
    """Whether KV is copied out of this engine's blocks before the transfer, so that other requests soon reuse them."""
    side = vars(connector).get("_kvcached_nixl")
    return side is not None and side.thread._context.staging is not None


# -------------------------------------------------------------------------------------------------------- recording
@dataclass
class Pending:
    """A request whose blocks are being transferred, and the content of its tail block before the transfer.

    ``transfer`` pairs it with the sender's request: its request id on P when D reads, the transfer name that both sides
    use when P writes. ``remote`` are the sender's blocks; None when P writes, because D does not learn them.
    """

    transfer: str
    local: BlockIds
    remote: BlockIds | None
    tail_before: list[list[torch.Tensor]] = field(default_factory=list)


def step_methods(vllm: str | None = None) -> tuple[str, str]:
    """Return the names of the first and the last connector method that a step calls, of the installed vLLM or
    ``vllm``."""
    series = Version(vllm or importlib.metadata.version("vllm")).release[:2]
    first = "start_load_kv" if series < (0, 29) else "handle_preemptions"
    return first, "get_finished" if series < (0, 30) else "get_transfer_results"


@dataclass
class Recorder:
    """Digests the received blocks of a request when the connector reports it as received, and the blocks that prefill
    wrote or copied when the connector reports it as sent: at that time the blocks still belong to the request.

    The key of a request is its id; of one that kvcached_nixl receives, the number of its attempt. On the connector's
    instance, ``begin`` replaces the first method that a step calls, ``finish`` or ``finish_with_results`` the last one;
    ``transfer`` replaces its NIXL agent's ``transfer``.
    """

    groups: list[list[torch.Tensor]]
    connector: Any
    call_begin: Callable[..., Any]
    call_finish: Callable[..., Any]
    call_transfer: Callable[..., Any]
    posted: int = 0
    pending: dict[str, Pending] = field(default_factory=dict)
    offered: dict[str, tuple[str, BlockIds]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    plan: tuple[str, int] | None = None

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM passes the metadata to handle_preemptions before it binds the metadata to the connector.
        metadata = kwargs.get("kv_connector_metadata") or self.connector._connector_metadata or args[0]
        step = vars(metadata).get(STEP)
        if step is None:
            for request_id, meta in metadata.reqs_to_recv.items():
                remote = normalise_block_ids(meta.remote.block_ids)
                local = normalise_block_ids(meta.local_block_ids)
                self._await(request_id, Pending(meta.remote.request_id, local, remote))
        for wanted in step.fetches if step is not None else ():
            self._await(str(wanted.attempt), self._wanted(wanted))
        for one in step.offered if step is not None else ():
            if one.ready_tokens:
                name = one.name if step_pushes(self.connector) else one.request_id
                self.offered[one.request_id] = (name, normalise_block_ids(one.block_ids))
        return self.call_begin(*args, **kwargs)

    def _wanted(self, wanted: Any) -> Pending:
        local = [list(group.block_ids) for group in wanted.groups]
        if step_pushes(self.connector):
            return Pending(wanted.name, local, None)
        manifest = wanted.manifest
        return Pending(manifest.request_id, local, [list(group.block_ids) for group in manifest.groups])

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        finished_sending, finished_receiving = self.call_finish(*args, **kwargs)
        self._note_finished(finished_sending, finished_receiving)
        return finished_sending, finished_receiving

    def finish_with_results(self, *args: Any, **kwargs: Any) -> Any:
        results = self.call_finish(*args, **kwargs)
        self._note_finished(results.finished_sending, results.finished_recving)
        return results

    def _note_finished(self, finished_sending: set[str], finished_receiving: set[str]) -> None:
        for name in sorted(finished_receiving):
            pending = self.pending.pop(name.removeprefix(OVER), None)
            if pending is not None:
                self._record(name.removeprefix(OVER), pending)
        for name in sorted(finished_sending):
            transfer, block_ids = self.offered.pop(name, (None, []))
            if transfer is not None and (step_pushes(self.connector) or stages(self.connector)):
                self.sent.append(
                    {"transfer": transfer, "block_ids": block_ids, "digests": digests(self.groups, block_ids)}
                )

    def transfer(self, *args: Any, **kwargs: Any) -> Any:
        posted = self.call_transfer(*args, **kwargs)
        self.posted += 1
        return posted

    def _await(self, request_id: str, pending: Pending) -> None:
        if self.plan is not None and self.plan[0] == DROP_TAIL_BLOCK:
            for caches, block_ids in self._filled_groups(pending):
                pending.tail_before.append([block_view(cache, block_ids[-1]).clone() for cache in caches])
        self.pending[request_id] = pending

    def _filled_groups(self, pending: Pending) -> Iterator[tuple[list[torch.Tensor], list[int]]]:
        for caches, block_ids in zip(self.groups, pending.local, strict=False):
            if block_ids:
                yield caches, block_ids

    def _record(self, request_id: str, pending: Pending) -> None:
        planted = None
        if self.plan is not None and any(pending.local):
            planted, index = self.plan
            self.plan = None
            if planted == DROP_TAIL_BLOCK:
                self._restore_tail(pending)
            else:
                for caches, block_ids in self._filled_groups(pending):
                    DAMAGES[planted](caches, block_ids, index)
        self.records.append(
            {
                "request_id": request_id,
                "transfer": pending.transfer,
                "local_block_ids": pending.local,
                "remote_block_ids": pending.remote,
                "digests": digests(self.groups, pending.local),
                "planted": planted,
            }
        )

    def _restore_tail(self, pending: Pending) -> None:
        for (caches, block_ids), before in zip(self._filled_groups(pending), pending.tail_before, strict=True):
            for cache, kept in zip(caches, before, strict=True):
                block_view(cache, block_ids[-1]).copy_(kept)


class KvProbe:
    """Methods that vLLM mixes into its worker class; every name starts with ``kv_probe_`` to collide with nothing."""

    # Set by vLLM's worker.
    model_runner: Any
    vllm_config: Any

    def _kv_probe_groups(self) -> list[list[torch.Tensor]]:
        """Return the tensors attention uses, per KV-cache group and in layer order."""
        layers = self.vllm_config.compilation_config.static_forward_context
        groups = []
        for group in self.model_runner.kv_cache_config.kv_cache_groups:
            tensors = []
            for name in group.layer_names:
                cache = layers[name].kv_cache
                # Until vLLM 0.18 a list with one tensor per virtual engine; since then the tensor itself.
                tensors.append(cache[0] if isinstance(cache, list) else cache)
            groups.append(tensors)
        return groups

    def kv_probe_geometry(self) -> dict[str, Any]:
        """Return shapes, strides (elements) and dtypes of the KV tensors and the planned number of blocks."""
        config = self.model_runner.kv_cache_config
        return {
            "num_blocks": config.num_blocks,
            "groups": [
                {
                    "layers": list(group.layer_names),
                    "shape": list(tensors[0].shape),
                    "stride": list(tensors[0].stride()),
                    "dtype": str(tensors[0].dtype),
                    "block_bytes": sum(block_view(tensor, 0).nbytes for tensor in tensors),
                }
                for group, tensors in zip(config.kv_cache_groups, self._kv_probe_groups(), strict=True)
            ],
        }

    def kv_probe_digests(self, block_ids: list[Any]) -> dict[str, Any]:
        """Return the SHA-256 of each block: ``{"digests": [[hex, ...] per group]}``."""
        return {"digests": digests(self._kv_probe_groups(), normalise_block_ids(block_ids))}

    def kv_probe_arm(self) -> dict[str, Any]:
        """Start recording what this server receives and pushes. Idempotent."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        first, last = step_methods()
        if not isinstance(getattr(getattr(connector, last), "__self__", None), Recorder):
            agent = connector.connector_worker.nixl_wrapper
            recorder = Recorder(
                self._kv_probe_groups(),
                connector,
                getattr(connector, first),
                getattr(connector, last),
                agent.transfer,
            )
            setattr(connector, first, recorder.begin)
            setattr(connector, last, recorder.finish if last == "get_finished" else recorder.finish_with_results)
            agent.transfer = recorder.transfer
        return {"connector": type(connector).__qualname__}

    def _kv_probe_recorder(self) -> Recorder:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        recorder = getattr(getattr(get_kv_transfer_group(), step_methods()[1]), "__self__", None)
        if not isinstance(recorder, Recorder):
            raise ProbeError("the recorder is not armed; call kv_probe_arm first.")
        return recorder

    def kv_probe_take(self) -> dict[str, Any]:
        """Return and clear the records of what was received and pushed; and the transfers still under way."""
        recorder = self._kv_probe_recorder()
        taken, recorder.records = recorder.records, []
        sent, recorder.sent = recorder.sent, []
        return {"records": taken, "sent": sent, "pending": [one.transfer for one in recorder.pending.values()]}

    def kv_probe_pending(self) -> dict[str, Any]:
        """Return the transfers under way to this server, those it has begun to offer, and how many transfers it has
        posted to NIXL."""
        recorder = self._kv_probe_recorder()
        return {
            "posted": recorder.posted,
            "pending": [one.transfer for one in recorder.pending.values()],
            "offered": [transfer for transfer, _ in recorder.offered.values()],
        }

    def kv_probe_plant(self, kind: str, index: int) -> dict[str, Any]:
        """Damage the blocks of the next received request. ``index`` is a position in its list of received blocks."""
        if kind != DROP_TAIL_BLOCK and kind not in DAMAGES:
            raise ProbeError(f"found the corruption {kind!r}; expected one of {sorted([*DAMAGES, DROP_TAIL_BLOCK])}.")
        self._kv_probe_recorder().plan = (kind, int(index))
        return {"planted": kind, "index": int(index)}

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
                change = 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.copy_(first + change if int(seed) else first)
        return {}
