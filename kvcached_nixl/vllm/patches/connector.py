# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM's NIXL connector: behind its public methods, this package does the hand-over.

The stock connector is still constructed: it provides the NIXL agent, the side channel's address and vLLM's view of the
model. None of its own methods handles a request.

Runs in: every process (configuration); the engine core (scheduler methods) or the worker (the others).
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.patching import Call, Patch, Seam, Target
from kvcached_nixl.patching.record import Kind, Process
from kvcached_nixl.proof.find import find_here
from kvcached_nixl.scheduler.side_channel import Answers, HandshakeListener, start
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath, Settings
from kvcached_nixl.transport.handshake_watch import HandshakeWatch
from kvcached_nixl.transport.side_channel import Listener, SideChannel
from kvcached_nixl.vllm.adapter import metrics
from kvcached_nixl.vllm.adapter.attributes import address_of, attach, attach_step, private, side_of, step_on
from kvcached_nixl.vllm.adapter.locate import CONNECTOR_BASE, FACADE, PULL_FACADE, WORKER
from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView
from kvcached_nixl.vllm.adapter.platform import side_channel_address
from kvcached_nixl.vllm.adapter.series import ASKS_FOR_RESULTS, HASHES_AHEAD, HITS_DIVERGE, LOADS_BEHIND
from kvcached_nixl.vllm.adapter.specs import without_states
from kvcached_nixl.vllm.patches.step_output import is_whole, scheduled
from kvcached_nixl.worker import memory_registration as registration
from kvcached_nixl.worker.facade import build_worker
from kvcached_nixl.worker.memory_registration import choose

logger = logging.getLogger(SERVER_LOGGER)


@Patch(
    target=PULL_FACADE,
    attribute="supports_sleep_mode",
    kind="classmethod",
    process="every",
    parameters=("cls", "kv_transfer_config"),
    versions=HASHES_AHEAD.later,
    why="vLLM would unpin KV memory before it sleeps, and publish another registration when it wakes up, of which this "
    "package's peers are not told.",
    upstream="vLLM 0.33, vllm/config/vllm.py: _verify_kv_transfer_compat; vllm/v1/worker/gpu_worker.py: wake_up",
    remove_when="sleep and wake-up were run on a GPU with this vLLM",
).around
def supports_sleep_mode(call: Call) -> bool:
    return False


def _of_connector(
    process: Process,
    parameters: tuple[str, ...],
    why: str,
    *,
    target: Target = FACADE,
    versions: str = "",
    kind: Kind = "method",
) -> Callable[[Callable[[Call], Any]], Seam]:
    """Decorator: the function runs in place of the connector's method of the same name."""

    def bind(wrapper: Callable[[Call], Any]) -> Seam:
        patch = Patch(
            target=target,
            attribute=wrapper.__name__,
            kind=kind,
            process=process,
            parameters=("cls" if kind == "classmethod" else "self", *parameters),
            versions=versions,
            why=why,
            upstream="vllm/distributed/kv_transfer/kv_connector/v1/base.py; vllm#50558, vllm#48633, vllm#52234",
            remove_when="vLLM's own hand-over describes what it moves (as the manifest does), and checks it",
        )
        return patch.around(wrapper)

    return bind


# ------------------------------------------------------------------------------------------------------- in the engine


@_of_connector(
    "scheduler",
    ("request", "num_computed_tokens"),
    "the blocks to read would be taken unchecked from what a client sends.",
)
def get_num_new_matched_tokens(call: Call) -> Any:
    side = side_of(call.instance)
    return side.matched(side.read(call.argument("request")), call.argument("num_computed_tokens"))


@_of_connector(
    "scheduler",
    ("request", "blocks", "num_external_tokens"),
    "decode's blocks would be matched with prefill's by their position in a list.",
)
def update_state_after_alloc(call: Call) -> None:
    side, blocks = side_of(call.instance), call.argument("blocks").get_block_ids()
    side.allocated(side.read(call.argument("request")), blocks, call.argument("num_external_tokens"))


@_of_connector("scheduler", ("scheduler_output",), "the workers would not be told of any hand-over.")
def build_connector_meta(call: Call) -> Any:
    side, scheduler_output = side_of(call.instance), call.argument("scheduler_output")
    step = side.take_step(scheduled(scheduler_output))
    zero_first(scheduler_output, side.filled_in_part(step))
    return attach_step(call.proceed(), step)


def zero_first(scheduler_output: Any, block_ids: Sequence[int]) -> None:
    """Have workers zero these blocks on the device at the beginning of the step that starts to load them.

    vLLM does so where states and KV share blocks: the bytes of a state, read as KV behind a request's last token, may
    be no numbers, and one that is no number spoils an attention layer although its weight is 0 (vllm#35219). From 0.28
    on vLLM does not zero blocks that a connector is to load, but a hand-over fills the last one of a request only in
    part.
    """
    if block_ids:
        wanted = dict.fromkeys([*(private(scheduler_output, "new_block_ids_to_zero") or ()), *block_ids])
        scheduler_output.new_block_ids_to_zero = list(wanted)


_REUSED = "blocks would be reused while decode reads them."


@_of_connector("scheduler", ("request", "block_ids"), _REUSED)
def request_finished(call: Call) -> Any:
    return _finished(call, (call.argument("block_ids"),))


@_of_connector("scheduler", ("request", "block_ids"), _REUSED)
def request_finished_all_groups(call: Call) -> Any:
    return _finished(call, call.argument("block_ids"))


def _finished(call: Call, block_ids: Any) -> Any:
    side, request = side_of(call.instance), call.argument("request")
    return side.finished(side.read(request), is_whole(request), block_ids)


@_of_connector(
    "scheduler", ("request",), "vLLM's own worker would send heartbeats for leases that this package manages."
)
def on_new_request(call: Call) -> None:
    """Does nothing: `arrival.add_request` is called for new requests."""


@_of_connector(
    "scheduler",
    (),
    "an engine with nothing to compute would sleep, and not free the blocks that its workers have released.",
)
def has_pending_push_work(call: Call) -> bool:
    return bool(side_of(call.instance).pending)


@_of_connector(
    "scheduler",
    ("metadata",),
    "one request that cannot be answered would end vLLM's listener, and every later handshake would fail.",
)
def set_xfer_handshake_metadata_pp_aware(call: Call) -> None:
    side, address = side_of(call.instance), address_of(call.instance)

    def listener(answers: Answers) -> HandshakeListener:
        def listen() -> Listener:
            return Listener(
                address.listening,
                address.bound.port,
                answers,
                side.side_channel.woken,
                side.wake_address.key,
                side.side_channel.headroom,
                side.side_channel.watch_memory,
            )

        return start(address, answers, listen, SideChannel())

    side.side_channel.introduce(call.argument("metadata"), listener)
    call.note(f"side channel {address}")


@Patch(
    target=FACADE,
    attribute="supports_divergent_local_hybrid_hits",
    kind="property",
    process="scheduler",
    parameters=("self",),
    versions=HITS_DIVERGE.later,
    why="vLLM would count tokens as computed that only full attention has in decode's prefix cache; sliding windows "
    "would see whatever is in their blocks.",
    upstream="vllm/v1/core/kv_cache_manager.py: get_computed_blocks_for_connector",
    remove_when="a hand-over begins at each KV-cache group's own prefix hit",
).around
def supports_divergent_local_hybrid_hits(call: Call) -> bool:
    """Decode fetches the tokens behind one prefix, the same for all groups."""
    return False


# ------------------------------------------------------------------------------------------------------- in the worker


@Patch(
    target=WORKER,
    attribute="__init__",
    process="worker",
    parameters=("self", "vllm_config", "engine_id", "kv_cache_config"),
    why="vLLM's own worker would end the engine, because it moves states in parts, and only those of some layouts.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py: is_conv_state_dim_first",
    remove_when="vLLM's own worker leaves the layout of states to the methods that move them",
).around
def make_nixl_worker(call: Call) -> None:
    """It knows the KV-cache groups with attention only. `nixl_worker.WorkerView` knows all of them."""
    kv_cache_config = call.argument("kv_cache_config")
    call.proceed(kv_cache_config=config_without_states(kv_cache_config))
    private(call.instance, "kv_cache_config")
    call.instance.kv_cache_config = kv_cache_config


def config_without_states(kv_cache_config: Any) -> Any:
    """The KV-cache groups with attention only, for the constructor of vLLM's own NIXL worker.

    It wants another layout of convolution states (``VLLM_SSM_CONV_STATE_LAYOUT=DS``), and does not know all kinds of
    states; but none of its own methods moves any.
    """
    groups = without_states(private(kv_cache_config, "kv_cache_groups"))
    if len(groups) == len(kv_cache_config.kv_cache_groups):
        return kv_cache_config
    # Not a copy: it would have what vLLM has already derived from all groups.
    return dataclasses.replace(kv_cache_config, kv_cache_groups=groups)


@_of_connector(
    "worker",
    ("kv_caches",),
    "kvcached reserves more blocks than vLLM planned, and keeps K, V or layers apart although the stock worker assumes "
    "that they are dense; it would move other blocks' bytes.",
)
def register_kv_caches(call: Call) -> None:
    view = WorkerView(call.instance)
    settings = Settings.from_extra_config(view.extra_config)
    caches = call.argument("kv_caches")
    question = view.question(caches)
    is_needed = settings.memory_path is MemoryPath.DIRECT
    path = choose(settings.memory_path, lambda: find_here(question, is_needed=is_needed), question.staged)
    registered = registration.register(view, caches, path, settings)
    view.use_stats(metrics.stats())
    attach(call.instance, build_worker(view, registered, settings, SideChannel(), Clock()))
    call.note(f"memory path {path.value}: {registered}")


@_of_connector(
    "worker",
    ("kv_connector_metadata",),
    "the transfer thread would be told of a step only after it was computed.",
    target=CONNECTOR_BASE,
    versions=LOADS_BEHIND.later,
)
def handle_preemptions(call: Call) -> None:
    """vLLM calls this before each step, whether a request was preempted or not."""
    side = side_of(call.instance)
    if side is not None:
        side.begin_step(step_on(call.argument("kv_connector_metadata")))
    call.proceed()


@_of_connector(
    "worker",
    ("forward_context", "kwargs"),
    "the transfer thread would not be told of any step.",
    target=PULL_FACADE,
)
def start_load_kv(call: Call) -> None:
    side = side_of(call.instance)
    side.begin_step(step_on(private(call.instance, "_connector_metadata")))
    side.blocks_zeroed()


@_of_connector("worker", (), "the KV that a step has computed would not be offered.")
def wait_for_save(call: Call) -> None:
    # vLLM calls this in a `finally`: the step may have raised.
    side_of(call.instance).end_step(has_failed=sys.exc_info()[0] is not None)


_FINISHED_IN_VAIN = "the stock worker would take the transfer thread's notifications, and requests would wait forever."


@_of_connector("worker", ("finished_req_ids",), _FINISHED_IN_VAIN, versions=ASKS_FOR_RESULTS.earlier)
def get_finished(call: Call) -> tuple[set[str], set[str]]:
    return _ended(call)


@_of_connector("worker", ("finished_req_ids",), _FINISHED_IN_VAIN, versions=ASKS_FOR_RESULTS.later)
def get_transfer_results(call: Call) -> Any:
    """A failed receive is reported as invalid blocks, as before."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    sent, received = _ended(call)
    return KVConnectorTransferResults(finished_sending=sent, finished_recving=received)


def _ended(call: Call) -> tuple[set[str], set[str]]:
    side = side_of(call.instance)
    ended = side.take_ended()
    metrics.record(WorkerView(call.instance).stats, side.take_counted())
    return ended.sent, ended.received


@_of_connector("worker", (), "a hand-over that has failed would be taken for one that has succeeded.")
def get_block_ids_with_load_errors(call: Call) -> set[int]:
    marks: set[int] = side_of(call.instance).take_marks()
    return marks


_REGISTERED_AGAIN = "vLLM would take memory from NIXL that the transfer thread is using, and could not give it back."


@_of_connector("worker", (), _REGISTERED_AGAIN, target=PULL_FACADE, versions=HASHES_AHEAD.later)
def unregister_kv_caches(call: Call) -> None:
    """Does nothing: kvcached's pages stay where they are while vLLM sleeps, and so does the slab."""


@_of_connector("worker", (), _REGISTERED_AGAIN, target=PULL_FACADE, versions=HASHES_AHEAD.later)
def restore_kv_caches(call: Call) -> None:
    """Does nothing, as `unregister_kv_caches`."""


@_of_connector("every", (), "the transfer thread would use an agent that has been destroyed.")
def shutdown(call: Call) -> None:
    side = side_of(call.instance)
    if side is not None:
        side.close()
    call.proceed()


# ------------------------------------------------------------------------------------------------------------- metrics


@_of_connector(
    "every",
    ("data",),
    "vLLM's own statistics would not accept this package's figures.",
    kind="classmethod",
)
def build_kv_connector_stats(call: Call) -> Any:
    return metrics.stats(call.argument("data"))


@_of_connector(
    "every",
    ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "no metric would say why hand-overs bring no KV.",
    kind="classmethod",
)
def build_prom_metrics(call: Call) -> Any:
    names = ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")
    made = metrics.prom_metrics(*map(call.argument, names))
    try:
        engines = {index: side_channel_address(index).local for index in call.argument("per_engine_labelvalues")}
    except SettingsError as error:
        # The engine refuses to start where it is wrong. Here it may be a name that cannot be looked up now.
        logger.warning("No metric says what this server's handshake compares: %s", error.line)
        return made
    parallel = call.argument("vllm_config").parallel_config
    # The engine's own totals are the same for each of several API servers, whose counters are added up.
    made.counts_engines = private(parallel, "_api_process_rank") < 1
    HandshakeWatch(SideChannel(), engines, int(private(parallel, "tensor_parallel_size")), made)
    return made
