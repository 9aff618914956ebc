# SPDX-License-Identifier: Apache-2.0
"""The gate: vLLM can construct a NIXL connector only if every patch is in place; it then gets its `SchedulerFacade`.

Runs in: the engine core and every worker process. There are two ways to construct a connector, and both are patched:
``KVConnectorFactory.create_connector``, and the constructor of the NIXL connector itself, because ``MultiConnector``
constructs its children without the factory. If one of the two cannot be patched, the other one raises that refusal.
Needed until this package no longer patches anything.

Other connectors are not affected, unless they are beside NIXL's in a ``MultiConnector`` and could not use kvcached's
memory: `adapter.neighbours`. vLLM's own push connector is served as a mode of ``NixlConnector``: in every process that
constructs a ``KVTransferConfig``, its name is replaced before any connector is chosen by it.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.errors import ContractChanged, SettingsError, StartRefused
from kvcached_nixl.patching import ANY_PARAMETERS, Call, Patch, Registry
from kvcached_nixl.processes import has_ancestor
from kvcached_nixl.scheduler.context import StockScheduler
from kvcached_nixl.scheduler.facade import build_scheduler
from kvcached_nixl.settings import SERVER_LOGGER, Settings, TransferMode, misplaced, staged_on_host, unheeded
from kvcached_nixl.vllm import NIXL_PREFIX
from kvcached_nixl.vllm.adapter.attributes import (
    attach,
    connectors,
    mark_outermost,
    optional,
    outermost,
    private,
    side_channel_address,
)
from kvcached_nixl.vllm.adapter.locate import (
    CONNECTOR_BASE,
    ENGINE_SCHEDULER,
    FACADE,
    FACADE_CLASS_NAMES,
    FACTORY,
    PULL_FACADE,
    PUSH_CLASS_NAMES,
    TRANSFER_CONFIG,
    WORKER_BASE,
    WORKER_PROCESS,
)
from kvcached_nixl.vllm.adapter.neighbours import (
    connector_classes,
    extras_of,
    is_tier,
    require_no_replacement,
    require_servable,
)
from kvcached_nixl.vllm.adapter.requests import RequestReader
from kvcached_nixl.vllm.adapter.specs import keeps_of, specs_of
from kvcached_nixl.vllm.adapter.tracing import spans_of
from kvcached_nixl.vllm.patches.tier import serve
from kvcached_nixl.wire.manifest import Keeps, KVGroup, KVGroups

logger = logging.getLogger(SERVER_LOGGER)


@Patch(
    FACTORY, "create_connector", "every", "cls config role kv_cache_config", kind="classmethod", when_unsupported=True
)
def create_connector(call: Call) -> Any:
    """Without it, the connector would start although a patch is missing, and return wrong tokens with HTTP 200."""
    vllm_config = call.argument("config")
    config = vllm_config.kv_transfer_config
    if config is None:
        return call.proceed()
    require_no_replacement(vllm_config)
    classes = list(connector_classes(call.instance, config))
    if any(map(is_nixl, classes)):
        require_complete(call.registry, str(config.kv_connector))
        require_servable(classes, vllm_config)
        require_reached(call, classes, vllm_config)
    mark_outermost(vllm_config)
    connector = call.proceed()
    # A class of another package may have made connectors that the configuration does not name.
    made = [type(one) for one in connectors(connector)]
    if any(map(is_nixl, made)):
        require_servable(made, vllm_config)
        require_reached(call, made, vllm_config)
        if call.argument("role").name == "SCHEDULER":
            _name_misplaced(config)
    for one in connectors(connector):
        if is_tier(type(one)) and (nixl := next((two for two in connectors(connector) if is_nixl(type(two))), None)):
            serve(one, nixl, call.argument("role").name, call.argument("kv_cache_config"))
    return connector


def _name_misplaced(config: Any) -> None:
    for extra in extras_of(config):
        for error in misplaced(extra) if "connectors" in extra else ():
            logger.warning("%s", error.line)


# Any parameters: a changed signature would refuse this patch, and so leave the gate open.
@Patch(FACADE, "__init__", "every", ANY_PARAMETERS, when_unsupported=True)
def construct(call: Call) -> None:
    """Without it, the connector would start although a patch is missing, and return wrong tokens with HTTP 200."""
    cls = type(call.instance)
    require_complete(call.registry, cls.__name__)
    config = _config_of(call)
    _require_startable(cls)
    vllm_config = call.argument("vllm_config")
    require_reached(call, [cls], vllm_config)
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    if config.kv_buffer_device == "cpu" != device:
        # For the CPU of an accelerator vLLM would allocate a copy of the whole pool: KV is staged there instead.
        config.kv_connector_extra_config = staged_on_host(config.kv_connector_extra_config, device)
        config.kv_buffer_device = device
    Settings.from_extra_config(config.kv_connector_extra_config)
    if call.argument("role").name != "SCHEDULER":
        call.proceed()
        return
    for error in unheeded(config.kv_connector_extra_config):
        logger.warning("%s", error.line)
    # Before vLLM's own constructor, which reads the same settings and says less of what is wrong with them. Each
    # data-parallel engine has ports of its own.
    address = side_channel_address(int(private(vllm_config.parallel_config, "data_parallel_index")))
    call.proceed()
    stock = stock_scheduler(vllm_config, call.argument("kv_cache_config"))
    attach(call.instance, build_scheduler(stock, address, Clock()), address)


def stock_scheduler(config: Any, kv_cache_config: Any) -> StockScheduler:
    """Source: ``v1/nixl/base_scheduler.py``."""
    transfer, engine = config.kv_transfer_config, outermost(config)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    windows = [spec for of_group in specs for spec in specs_of(of_group) if keeps_of(spec) is Keeps.WINDOW]
    return StockScheduler(
        engine_id=str(transfer.engine_id),
        tp_size=int(config.parallel_config.tensor_parallel_size),
        pp_size=int(config.parallel_config.pipeline_parallel_size),
        groups=KVGroups(tuple(KVGroup(int(spec.block_size), keeps_of(spec)) for spec in specs)),
        window_kinds=[type(spec).__name__ for spec in windows],
        output_checks=_output_checks(config),
        zeroes_blocks=bool(private(kv_cache_config, "needs_kv_cache_zeroing")),
        recomputes=engine.kv_load_failure_policy == "recompute",
        max_num_batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
        is_consumer=bool(engine.is_kv_consumer),
        is_producer=bool(engine.is_kv_producer),
        reader=RequestReader(config),
        spans=spans_of(config),
        extra_config=transfer.kv_connector_extra_config,
    )


def _output_checks(config: Any) -> list[str]:
    """Settings with which vLLM looks for a dead expert-parallel peer, or for NaN, when it reads a step's output: after
    ``wait_for_save``.

    Source: ``get_output`` in ``v1/worker/gpu_model_runner.py``, and the backends' ``support_fault_tolerance``."""
    from vllm import envs

    checks = {
        "--all2all-backend nixl_ep": private(config.parallel_config, "all2all_backend") == "nixl_ep",
        "VLLM_RAISE_ON_LOGIT_NANS": optional(envs, "VLLM_RAISE_ON_LOGIT_NANS", False),
    }
    return [name for name, is_on in checks.items() if is_on]


def require_complete(registry: Registry, connector: str) -> None:
    """Decides every patch. Raises StartRefused, which lists everything that was refused in this process."""
    registry.complete()
    causes = registry.refusals()
    if causes:
        raise StartRefused.of(connector, causes)


def require_reached(call: Call, classes: Iterable[type], vllm_config: Any) -> None:
    """Returns only if the classes of this process reach what was patched. An operator may put others in their place:

        --scheduler-cls                a subclass of vLLM's scheduler
        --worker-cls                   a subclass of vLLM's worker; a worker extension only adds to it
        kv_connector_module_path       a subclass of the NIXL connector

    An executor (``--distributed-executor-backend``) that skips vLLM's constructor has no name for kvcached, and its
    workers refuse to start (`naming`). Of a model loader of another package, memory alone is compared
    (`adapter.weights`).

    Args:
        call: of a constructor or the factory.
        classes: of its connectors. vLLM's own push connector is refused elsewhere, in other words.

    Raises:
        StartRefused: lists the patches that would not run.
    """
    bypassed = call.registry.bypassed
    causes = [
        cause
        for cls in classes
        if is_nixl(cls) and not _is_push(cls)
        for cause in bypassed(cls, CONNECTOR_BASE, FACADE, PULL_FACADE)
    ]
    if call.argument("role").name == "SCHEDULER":
        causes += bypassed(private(vllm_config, "scheduler_config").get_scheduler_cls(), ENGINE_SCHEDULER)
    else:
        module, _, name = private(vllm_config, "parallel_config").worker_cls.rpartition(".")
        if module:
            causes += bypassed(getattr(importlib.import_module(module), name), WORKER_BASE, WORKER_PROCESS)
    if causes:
        raise StartRefused.of("The NIXL connector", causes)


def is_nixl(cls: type) -> bool:
    """Whether a connector class is vLLM's NIXL connector or derived from it."""
    return any(c.__name__ in FACADE_CLASS_NAMES and c.__module__.startswith(NIXL_PREFIX) for c in cls.__mro__)


def _is_push(cls: type) -> bool:
    return any(c.__name__ in PUSH_CLASS_NAMES for c in cls.__mro__)


def _config_of(call: Call) -> Any:
    try:
        return call.argument("vllm_config").kv_transfer_config
    except TypeError as error:
        raise ContractChanged(
            found=f"{type(call.instance).__name__}.__init__: {error}",
            expected="a parameter vllm_config",
            consequence="The settings of the connector cannot be read, so it is not constructed.",
            remedy="Use a supported vLLM (python -m kvcached_nixl lists them).",
        ) from error


def _require_startable(cls: type) -> None:
    """Raises SettingsError if a server may not start with what its connector does not read of its configuration."""
    from vllm import envs

    if _is_push(cls):
        raise SettingsError(
            found=f"kv_connector {cls.__name__}",
            expected='NixlConnector with "transfer_mode": "push"',
            consequence="vLLM's own push classes leave requests waiting for ever when prefill fails, and end "
            "prefill's worker when a WRITE fails.",
            remedy='Set "kv_connector": "NixlConnector" and "kv_connector_extra_config": {"transfer_mode": "push"} '
            "on both sides.",
        )
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        raise SettingsError(
            found="VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1",
            expected="request ids that vLLM makes unique, as it does by default",
            consequence="A request with a reused id would be taken for the earlier request, and decode would use "
            "blocks that belong to another request by then.",
            remedy="Unset VLLM_DISABLE_REQUEST_ID_RANDOMIZATION.",
        )
    # Read as vLLM does, which ends for what is no number.
    switch = os.environ.get("VLLM_USE_RUST_FRONTEND", "")
    frontend = f"VLLM_USE_RUST_FRONTEND={switch}" if switch not in ("", "0") else ""
    if frontend or has_ancestor("vllm-rs"):
        raise SettingsError(
            found=frontend or "an engine of vllm-rs",
            expected="vLLM's API server in Python",
            consequence="No patch of this package reaches vLLM's Rust frontend: at some endpoints it answers a "
            "failed hand-over with HTTP 200 and no token, and it identifies images, sounds, ... otherwise.",
            remedy="Start vllm serve without VLLM_USE_RUST_FRONTEND, and do not use vllm-rs.",
        )


# ------------------------------------------------------------------------------------------ vLLM's own push connector

_NAME, _MODULE, _EXTRA = "kv_connector", "kv_connector_module_path", "kv_connector_extra_config"


@Patch(TRANSFER_CONFIG, "__post_init__", "every", "self")
def post_init(call: Call) -> None:
    """Without it, a manifest that names vLLM's push connector would be refused: vLLM's own leaves requests waiting for
    ever. Until vLLM's own push connector survives failed WRITEs and ended leases, and serves kvcached.

    Replace ``NixlPushConnector``, also among the children of a ``MultiConnector``.

    So vLLM's checks that look for the name ``NixlConnector`` apply, and all processes know a connector's metrics by one
    name.

    Raises:
        SettingsError: the configuration also has another ``transfer_mode``.
    """
    config = call.instance
    given = {name: getattr(config, name) for name in (_NAME, _MODULE, _EXTRA)}
    found = _in_push_mode(given)
    if found != given:
        logger.info('kv_connector NixlPushConnector is NixlConnector with "transfer_mode": "push" in kvcached_nixl')
        config.kv_connector, config.kv_connector_extra_config = found[_NAME], found[_EXTRA]
        call.note('NixlPushConnector is served as NixlConnector with "transfer_mode": "push"')
    call.proceed()


def _in_push_mode(config: Mapping[str, Any]) -> dict[str, Any]:
    found, extra = dict(config), config.get(_EXTRA)
    if isinstance(extra, Mapping) and isinstance(children := extra.get("connectors"), list):
        of_children = [_in_push_mode(one) if isinstance(one, Mapping) else one for one in children]
        found[_EXTRA] = {**extra, "connectors": of_children}
    name = config.get(_NAME)
    # Somebody's own class may have the same name, and somebody's own connector anything below this key.
    if isinstance(name, str) and name in PUSH_CLASS_NAMES and config.get(_MODULE) is None:
        asked = (extra or {}).get("transfer_mode", TransferMode.PUSH.value)
        if asked != TransferMode.PUSH.value:
            raise SettingsError(
                found=f"kv_connector {name} with transfer_mode={asked!r}",
                expected='"push", or no transfer_mode',
                consequence="It is not known which side starts transfers.",
                remedy='Remove "transfer_mode" from kv_connector_extra_config, or set "kv_connector": "NixlConnector".',
            )
        found[_NAME] = "NixlConnector"
        found[_EXTRA] = {**(extra or {}), "transfer_mode": asked}
    return found
