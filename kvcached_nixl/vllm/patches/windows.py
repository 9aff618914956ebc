# SPDX-License-Identifier: Apache-2.0
"""Opens kvcached's version windows for the vLLM series beyond its own that this package was tested with.

kvcached 0.1.6 states the versions that it was made for as windows, which end below 0.31. They stay open only if
everything that kvcached touches is as it was read, and each of its patches reports success. Otherwise kvcached refuses
the engine, as without this package.

What it touches was found by comparing vLLM's modules before and after kvcached's patches;
``tests/contract/test_windows.py`` does so again with the installed versions. Where all of it is as listed, what
kvcached does there is what it does with 0.30. Needed until kvcached accepts these versions itself.

Runs in: every process, while vLLM is being imported, before kvcached patches it.
Sources: kvcached 0.1.6, ``integration/version_utils.py``, ``integration/patch_base.py``,
``integration/vllm/{patches,autopatch,model_runner_v2}.py``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvcached_nixl.errors import UnsupportedVersion
from kvcached_nixl.patching import Call, Patch, parameter_lists
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.locate import KVCACHED_PATCH_MANAGER, KVCACHED_VERSION_RANGE
from kvcached_nixl.vllm.adapter.versions import BEYOND_KVCACHED, KVCACHED, found_version

logger = logging.getLogger(SERVER_LOGGER)

_SPECIFIERS = frozenset({">=0.26.0,<0.31.0", ">=0.28.0,<0.31.0", ">=0.29.0,<0.31.0"})
"""kvcached's windows that end below 0.31. Its other ranges have no end, or end earlier."""


@Patch(KVCACHED_VERSION_RANGE, "contains", "every", "self ver", versions=BEYOND_KVCACHED.later)
def contains(call: Call) -> bool:
    """Without it, kvcached refuses vLLM from 0.31 on by its number, though its patches fit."""
    return bool(call.proceed()) or WINDOWS.contains(call.instance, call.argument("ver"))


@Patch(KVCACHED_PATCH_MANAGER, "apply_all_patches", "every", "self", versions=BEYOND_KVCACHED.later)
def apply_all_patches(call: Call) -> dict[str, bool]:
    """Without it, kvcached only warns when one of its patches fails, and its windows would stay open."""
    found = WINDOWS.while_patched(call.instance.library_name, call.proceed)
    call.note("kvcached's version windows are open" if WINDOWS.is_open else "kvcached's version windows stay shut")
    return found


class Windows:
    def __init__(self) -> None:
        self.is_open = False
        self.refusal: UnsupportedVersion | None = None

    def contains(self, window: Any, version: str) -> bool:
        """Whether one of kvcached's windows (``VersionRange``) that does not contain ``version`` does so while they are
        open."""
        if not self.is_open or window.range_spec not in _SPECIFIERS:
            return False
        beginning = type(window)(window.range_spec.partition(",")[0])
        return bool(beginning.contains(version))

    def while_patched(self, library: str, apply: Callable[[], dict[str, bool]]) -> dict[str, bool]:
        """Have kvcached patch vLLM with its windows open, and shut them if anything is not as it must be.

        Args:
            library: what is patched; kvcached also patches SGLang.
            apply: applies all of kvcached's patches; returns its name for each -> whether it was applied.
        """
        if library != "vllm":
            return apply()
        kvcached = found_version("kvcached")
        found = differences() if kvcached == KVCACHED else [f"kvcached {kvcached}; expected {KVCACHED}"]
        results: dict[str, bool] = {}
        self.is_open = not found
        try:
            results = apply()
        finally:
            # Without results, too: what has raised has proved nothing.
            found = found or [
                f"kvcached's patch {name!r} was not applied" for name in PATCH_NAMES if not results.get(name)
            ]
            self.is_open = not found
        if found:
            self.refusal = UnsupportedVersion(
                found=f"vLLM {found_version('vllm')}, in which {'; '.join(found):.1000}",
                expected=f"everything that kvcached {KVCACHED} touches as in the release that was tested",
                consequence="kvcached has no adapter for this vLLM, and ends the engine at its start.",
                remedy="Install a release that `python -m kvcached_nixl` names as tested, or unset ENABLE_KVCACHED.",
            )
            logger.error("kvcached's version windows stay shut:%s", self.refusal)
        return results


WINDOWS = Windows()
"""Of this process: kvcached's patches are applied once."""


# ----------------------------------------------------------------------------------------------- what kvcached touches

PATCH_NAMES = (
    *("nixl_connector_compat", "elastic_block_pool", "engine_core", "mp_client"),
    *("core_engine_proc_manager", "model_runner_v2", "kv_layout_v2", "gpu_worker"),
    *("hybrid_block_size_align", "kv_cache_coordinator", "allocate_slots", "mamba_partial_tail"),
)
"""The patches that kvcached applies to these versions, as it names them."""


class Contact(NamedTuple):
    """A function or method of vLLM. ``accepted``: names of parameters; several lists where versions differ."""

    module: str
    qualname: str
    accepted: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


_TOUCHED = """
vllm.platforms.interface
  Platform._align_hybrid_block_size: cls vllm_config backend_cls
vllm.v1.core.kv_cache_coordinator
  KVCacheCoordinator.__init__: self kv_cache_config max_model_len max_in_flight_tokens use_eagle enable_caching
    enable_kv_cache_events dcp_world_size pcp_world_size scheduler_block_size hash_block_size metrics_collector
    num_prefill_lookahead num_hash_lookahead_tokens?
vllm.v1.core.kv_cache_manager
  KVCacheManager.allocate_slots: self request num_new_tokens num_new_computed_tokens new_computed_blocks
    num_lookahead_tokens num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit
    reserved_blocks has_scheduled_reqs skip_zeroing_group_ids?
vllm.v1.core.single_type_kv_cache_manager
  MambaManager._cache_partial_tail_block: self request num_tokens retention_interval
vllm.v1.engine.core
  EngineCore.__init__: self vllm_config executor_class log_stats executor_fail_callback include_finished_set
  EngineCore.reset_prefix_cache: self reset_running_requests reset_connector
  EngineCore.shutdown: self
  EngineCore.step_with_batch_queue: self
vllm.v1.engine.core_client
  MPClient.__init__: self asyncio_mode vllm_config executor_class log_stats client_addresses renderer
  MPClient.shutdown: self timeout
vllm.v1.engine.utils
  CoreEngineProcManager.__init__: self local_engine_count start_index local_start_index vllm_config local_client
    handshake_address executor_class log_stats client_handshake_address tensor_queue
  CoreEngineProcManager.monitor_engine_liveness: self
  CoreEngineProcManager.shutdown: self timeout
  wait_for_engine_startup: handshake_socket core_engines parallel_config coordinated_dp cache_config launch
vllm.v1.worker.gpu.attn_utils
  allocate_kv_cache: kv_cache_config device layout kernel_block_sizes
vllm.v1.worker.gpu.model_runner
  GPUModelRunner.__init__: self vllm_config device
  GPUModelRunner.initialize_kv_cache: self kv_cache_config is_profiling kv_cache_allocation_context
  init_attn_backend: kv_cache_config vllm_config device active_layer_names draft_layer_names
vllm.v1.worker.gpu_worker
  Worker.determine_available_memory: self
  Worker.shutdown: self
  request_memory: init_snapshot cache_config external_weight_memory?
"""
"""By module: functions and methods with their parameters. One with a question mark is there in some supported versions
only."""


def _contacts() -> Iterator[Contact]:
    module = ""
    for line in re.sub(r"\n {4}", " ", _TOUCHED).strip().splitlines():
        if not line.startswith(" "):
            module = line
            continue
        qualname, _, words = line.strip().partition(": ")
        yield Contact(module, qualname, parameter_lists(words))


CONTACTS = tuple(_contacts())


def differences() -> list[str]:
    """What differs in the installed vLLM, before kvcached has changed it; imports the modules, as kvcached does."""
    differences = []
    for contact in CONTACTS:
        try:
            found: Any = importlib.import_module(contact.module)
            for part in contact.qualname.split("."):
                found = inspect.getattr_static(found, part)
            function = found.__func__ if isinstance(found, classmethod) else found
            parameters = tuple(inspect.signature(function).parameters)
        except Exception as error:  # noqa: BLE001 - recorded; raised here, it would keep kvcached from patching
            differences.append(f"{contact}: {type(error).__name__}: {error}")
            continue
        if parameters not in contact.accepted:
            expected = ", ".join(contact.accepted[0])
            differences.append(f"{contact}: parameters ({', '.join(parameters)}); expected ({expected})")
    return differences
