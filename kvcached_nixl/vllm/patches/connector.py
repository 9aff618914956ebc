# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM's NIXL connector: behind its public methods, this package does the hand-over.

The stock connector is still constructed: it provides the NIXL agent, the side channel's address and vLLM's view of the
model. None of its own methods handles a request. Needed until vLLM's own hand-over describes what it moves, as the
manifest does, and checks it; where a patch says no other end.

Runs in: every process (configuration); the engine core (scheduler methods) or the worker (the others).
Sources: ``kv_connector/v1/base.py``, ``v1/nixl/base_worker.py`` (``is_conv_state_dim_first``),
``v1/core/kv_cache_manager.py`` (``get_computed_blocks_for_connector``), 0.33's ``config/vllm.py``
(``_verify_kv_transfer_compat``) and ``v1/worker/gpu_worker.py`` (``wake_up``); vllm#50558, vllm#48633, vllm#52234.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from typing import Any

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.proof.find import find_here
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath, Settings
from kvcached_nixl.transport.listener import Listener, start
from kvcached_nixl.transport.side_channel import HandshakeWatch, SideChannel
from kvcached_nixl.vllm.adapter import metrics
from kvcached_nixl.vllm.adapter.attributes import ADDRESS, STEP, attach, carry, private, side_channel_address, side_of
from kvcached_nixl.vllm.adapter.locate import CONNECTOR_BASE, FACADE, PULL_FACADE, WORKER
from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView
from kvcached_nixl.vllm.adapter.specs import without_states
from kvcached_nixl.vllm.adapter.versions import ASKS_FOR_RESULTS, HASHES_AHEAD, HITS_DIVERGE, LOADS_BEHIND
from kvcached_nixl.vllm.patches.step_output import is_whole, scheduled
from kvcached_nixl.wire.handshake import Answers
from kvcached_nixl.worker import memory_registration as registration
from kvcached_nixl.worker.facade import build_worker
from kvcached_nixl.worker.memory_registration import choose

logger = logging.getLogger(SERVER_LOGGER)


@Patch(
    PULL_FACADE,
    "supports_sleep_mode",
    "every",
    "cls kv_transfer_config",
    kind="classmethod",
    versions=HASHES_AHEAD.later,
)
def supports_sleep_mode(call: Call) -> bool:
    """Without it, vLLM would unpin KV memory before it sleeps, and publish another registration when it wakes up, of
    which this package's peers are not told. Until sleep and wake-up were run on a GPU with this vLLM."""
    return False


# ------------------------------------------------------------------------------------------------------- in the engine


@Patch(FACADE, "get_num_new_matched_tokens", "scheduler", "self request num_computed_tokens")
def get_num_new_matched_tokens(call: Call) -> Any:
    """Without it, the blocks to read would be taken unchecked from what a client sends."""
    side = side_of(call.instance)
    return side.matched(side.read(call.argument("request")), call.argument("num_computed_tokens"))


@Patch(FACADE, "update_state_after_alloc", "scheduler", "self request blocks num_external_tokens")
def update_state_after_alloc(call: Call) -> None:
    """Without it, decode's blocks would be matched with prefill's by their position in a list."""
    side, blocks, request = side_of(call.instance), call.argument("blocks").get_block_ids(), call.argument("request")
    side.allocated(side.read(request), blocks, call.argument("num_external_tokens"))
    # vLLM counts those of preempted requests elsewhere, and none where KV was computed before.
    is_counted = not (private(request, "num_preemptions") or request.num_computed_tokens)
    if private(request, "skip_reading_prefix_cache") and is_counted:
        side.num_miscounted_tokens += int(request.num_prompt_tokens)


@Patch(FACADE, "build_connector_meta", "scheduler", "self scheduler_output")
def build_connector_meta(call: Call) -> Any:
    """Without it, the workers would not be told of any hand-over."""
    side, scheduler_output = side_of(call.instance), call.argument("scheduler_output")
    step = side.take_step(scheduled(scheduler_output))
    # vLLM zeroes blocks where states and KV share them: the bytes of a state, read as KV behind a request's last token,
    # may be no numbers, and one that is no number spoils an attention layer although its weight is 0 (vllm#35219). From
    # 0.28 on it does not zero blocks that a connector is to load, but a hand-over fills the last one only in part. So
    # workers zero these at the beginning of the step that starts to load them.
    if block_ids := side.filled_in_part(step):
        wanted = dict.fromkeys([*(private(scheduler_output, "new_block_ids_to_zero") or ()), *block_ids])
        scheduler_output.new_block_ids_to_zero = list(wanted)
    metadata = call.proceed()
    setattr(metadata, STEP, step)
    return metadata


@Patch(FACADE, "request_finished", "scheduler", "self request block_ids")
def request_finished(call: Call) -> Any:
    """Without it, blocks would be reused while decode reads them."""
    return _finished(call, (call.argument("block_ids"),))


@Patch(FACADE, "request_finished_all_groups", "scheduler", "self request block_ids")
def request_finished_all_groups(call: Call) -> Any:
    """Without it, blocks would be reused while decode reads them."""
    return _finished(call, call.argument("block_ids"))


def _finished(call: Call, block_ids: Any) -> Any:
    side, request = side_of(call.instance), call.argument("request")
    return side.finished(side.read(request), is_whole(request), block_ids)


@Patch(FACADE, "on_new_request", "scheduler", "self request")
def on_new_request(call: Call) -> None:
    """Without it, vLLM's own worker would send heartbeats for leases that this package manages.

    Does nothing: `arrival.add_request` is called for new requests."""


@Patch(FACADE, "has_pending_push_work", "scheduler", "self")
def has_pending_push_work(call: Call) -> bool:
    """Without it, an engine with nothing to compute would sleep, and not free the blocks that its workers have
    released."""
    return bool(side_of(call.instance).pending)


@Patch(FACADE, "set_xfer_handshake_metadata_pp_aware", "scheduler", "self metadata")
def set_xfer_handshake_metadata_pp_aware(call: Call) -> None:
    """Without it, one request that cannot be answered would end vLLM's listener, and every later handshake would
    fail."""
    side, address = side_of(call.instance), private(call.instance, ADDRESS)

    def listener(answers: Answers) -> Listener:
        listen = functools.partial(
            Listener,
            address.listening,
            address.bound.port,
            answers,
            side.engine.woken,
            side.engine.wake_address.key,
            side.side_channel.headroom,
            side.side_channel.watch_memory,
        )
        return start(address, answers, listen, SideChannel())

    side.side_channel.introduce(call.argument("metadata"), listener)
    call.note(f"side channel {address}")


@Patch(
    FACADE, "supports_divergent_local_hybrid_hits", "scheduler", "self", kind="property", versions=HITS_DIVERGE.later
)
def supports_divergent_local_hybrid_hits(call: Call) -> bool:
    """Without it, vLLM would count tokens as computed that only full attention has in decode's prefix cache; sliding
    windows would see whatever is in their blocks. Until a hand-over begins at each KV-cache group's own prefix hit.

    Decode fetches the tokens behind one prefix, the same for all groups."""
    return False


# ------------------------------------------------------------------------------------------------------- in the worker


@Patch(WORKER, "__init__", "worker", "self vllm_config engine_id kv_cache_config")
def make_nixl_worker(call: Call) -> None:
    """Without it, vLLM's own worker would end the engine, because it moves states in parts, and only those of some
    layouts. Until vLLM's own worker leaves the layout of states to the methods that move them.

    It knows the KV-cache groups with attention only, and `nixl_worker.WorkerView` all of them.

    vLLM's own wants another layout of convolution states (``VLLM_SSM_CONV_STATE_LAYOUT=DS``), and does not know all
    kinds of states; but none of its own methods moves any.
    """
    kv_cache_config = call.argument("kv_cache_config")
    groups = without_states(private(kv_cache_config, "kv_cache_groups"))
    has_states = len(groups) < len(kv_cache_config.kv_cache_groups)
    # Not a copy: it would have what vLLM has already derived from all groups.
    narrowed = dataclasses.replace(kv_cache_config, kv_cache_groups=groups) if has_states else kv_cache_config
    call.proceed(kv_cache_config=narrowed)
    private(call.instance, "kv_cache_config")
    call.instance.kv_cache_config = kv_cache_config


@Patch(FACADE, "register_kv_caches", "worker", "self kv_caches")
def register_kv_caches(call: Call) -> None:
    """Without it, other blocks' bytes would be moved: kvcached reserves more blocks than vLLM planned, and keeps K, V
    or layers apart although the stock worker assumes that they are dense."""
    view = WorkerView(call.instance)
    settings = Settings.from_extra_config(view.extra_config)
    caches = call.argument("kv_caches")
    question = view.question(caches)
    is_needed = settings.memory_path is MemoryPath.DIRECT
    path = choose(settings.memory_path, lambda: find_here(question, is_needed=is_needed), question.staged)
    registered = registration.register(view, caches, path, settings)
    # vLLM takes its data with each step.
    private(view.worker, "xfer_stats")
    view.worker.xfer_stats = metrics.stats()
    attach(call.instance, build_worker(view, registered, settings, SideChannel(), Clock()))
    call.note(f"memory path {path.value}: {registered}")


@Patch(CONNECTOR_BASE, "handle_preemptions", "worker", "self kv_connector_metadata", versions=LOADS_BEHIND.later)
def handle_preemptions(call: Call) -> None:
    """Without it, the transfer thread would be told of a step only after it was computed.

    vLLM calls this before each step, whether a request was preempted or not."""
    side = side_of(call.instance)
    if side is not None:
        side.begin_step(private(call.argument("kv_connector_metadata"), STEP))
    call.proceed()


@Patch(PULL_FACADE, "start_load_kv", "worker", "self forward_context kwargs")
def start_load_kv(call: Call) -> None:
    """Without it, the transfer thread would not be told of any step."""
    side = side_of(call.instance)
    side.begin_step(private(private(call.instance, "_connector_metadata"), STEP))
    side.blocks_zeroed()


@Patch(FACADE, "wait_for_save", "worker", "self")
def wait_for_save(call: Call) -> None:
    """Without it, the KV that a step has computed would not be offered."""
    # vLLM calls this in a `finally`: the step may have raised.
    side_of(call.instance).end_step(has_failed=sys.exc_info()[0] is not None)


@Patch(FACADE, "get_finished", "worker", "self finished_req_ids", versions=ASKS_FOR_RESULTS.earlier)
def get_finished(call: Call) -> tuple[set[str], set[str]]:
    """Without it, the stock worker would take the transfer thread's notifications, and requests would wait forever."""
    return _sent(call), set()


@Patch(FACADE, "get_transfer_results", "worker", "self finished_req_ids", versions=ASKS_FOR_RESULTS.later)
def get_transfer_results(call: Call) -> Any:
    """Without it, the stock worker would take the transfer thread's notifications, and requests would wait forever."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_sending=_sent(call), finished_recving=set())


def _sent(call: Call) -> set[str]:
    side = side_of(call.instance)
    sent: set[str] = side.take_sent()
    metrics.record(private(private(call.instance, "connector_worker"), "xfer_stats"), side.take_counted())
    return sent


@Patch(CONNECTOR_BASE, "build_connector_worker_meta", "worker", "self")
def build_connector_worker_meta(call: Call) -> Any:
    """Without it, the scheduler would not be told which hand-overs have ended, or failed."""
    side = side_of(call.instance)
    if side is None:
        return call.proceed()
    report = side.take_report()
    return None if report is None else carry(report)


@Patch(FACADE, "get_block_ids_with_load_errors", "worker", "self")
def get_block_ids_with_load_errors(call: Call) -> set[int]:
    """Without it, vLLM's own worker would be asked, which moves no KV."""
    return set()


@Patch(PULL_FACADE, "unregister_kv_caches", "worker", "self", versions=HASHES_AHEAD.later)
def unregister_kv_caches(call: Call) -> None:
    """Without it, vLLM would take memory from NIXL that the transfer thread is using, and could not give it back.

    Does nothing: kvcached's pages stay where they are while vLLM sleeps, and so does the slab."""


restore_kv_caches = dataclasses.replace(unregister_kv_caches, attribute="restore_kv_caches")


@Patch(FACADE, "shutdown", "every", "self")
def shutdown(call: Call) -> None:
    """Without it, the transfer thread would use an agent that has been destroyed."""
    side = side_of(call.instance)
    if side is not None:
        side.close()
    call.proceed()


# ------------------------------------------------------------------------------------------------------------- metrics


@Patch(FACADE, "build_kv_connector_stats", "every", "cls data", kind="classmethod")
def build_kv_connector_stats(call: Call) -> Any:
    """Without it, vLLM's own statistics would not accept this package's figures."""
    return metrics.stats(call.argument("data"))


@Patch(
    FACADE,
    "build_prom_metrics",
    "every",
    "cls vllm_config metric_types labelnames per_engine_labelvalues",
    kind="classmethod",
)
def build_prom_metrics(call: Call) -> Any:
    """Without it, no metric would say why hand-overs bring no KV."""
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
    made.of_engines.counts_engines = private(parallel, "_api_process_rank") < 1
    tp_size, pp_size = int(private(parallel, "tensor_parallel_size")), int(private(parallel, "pipeline_parallel_size"))
    HandshakeWatch(SideChannel(), engines, tp_size, pp_size, made.of_engines)
    return made
