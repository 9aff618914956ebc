# SPDX-License-Identifier: Apache-2.0
"""Puts the hooks in place, once, and only where kvcached runs on host memory."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import wrapt

from kvcached_nixl.errors import ContractChanged, Refused

from . import hooks, pinning
from .device import clear_abandoned
from .recognition import is_hostvmm_build

# With this prefix wrapt keeps the attribute on the wrapper, and finds it through wrappers put around ours.
_MARK = "_self_kvcached_nixl_hostvmm"


@dataclass(frozen=True)
class Hook:
    """One name that needs a host answer."""

    module: str
    attribute: str
    """Dotted path inside the module."""
    replace: Callable[[Any], Any]
    """The present value to its replacement."""
    why: str
    versions: str


def _wrapped_by(wrapper: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda present: wrapt.FunctionWrapper(present, wrapper)


_INTERFACES = "kvcached.integration.vllm.interfaces"

HOOKS: tuple[Hook, ...] = (
    Hook(
        _INTERFACES,
        "torch",
        hooks.TorchWithHostCuda,
        "asks torch.cuda for availability, device and its size",
        "kvcached 0.1.6",
    ),
    Hook(
        _INTERFACES,
        "init_kvcached",
        _wrapped_by(hooks.init_kvcached),
        "the CPU worker's device is `cpu`; checks the host's memory",
        "kvcached 0.1.6",
    ),
    Hook(
        _INTERFACES,
        "start_worker_listener_thread",
        _wrapped_by(hooks.start_worker_listener_thread),
        "the listener thread selects a CUDA device and dies without one",
        "kvcached 0.1.6",
    ),
    Hook(
        _INTERFACES,
        "alloc_kv_cache",
        _wrapped_by(hooks.alloc_kv_cache),
        "refuses the shape (2, blocks, heads, tokens, width)",
        "vLLM up to 0.22; passes later shapes on",
    ),
    Hook(
        _INTERFACES,
        "build_kv_views",
        _wrapped_by(hooks.build_kv_views),
        "the same, for models with several KV-cache groups",
        "vLLM up to 0.22; passes later shapes on",
    ),
    Hook(
        "kvcached.integration.vllm.model_runner_v2",
        "allocate_kv_cache",
        _wrapped_by(hooks.allocate_kv_cache),
        "asks torch.cuda for the device's size",
        "kvcached 0.1.6; called with vLLM 0.29 and 0.30",
    ),
    Hook(
        _INTERFACES,
        "get_kv_cache_manager",
        _wrapped_by(hooks.get_kv_cache_manager),
        "a pool below one page group waits for ever",
        "kvcached 0.1.6",
    ),
    Hook(
        "kvcached.integration.vllm.patches",
        "_worker_physical_release_barrier",
        lambda present: hooks.worker_release_barrier,
        "synchronizes a CUDA device before pages are retired",
        "kvcached 0.1.6; called by vLLM with asynchronous scheduling",
    ),
    Hook(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.determine_available_memory",
        _wrapped_by(hooks.determine_available_memory),
        "plans the KV cache without regard to the device's size",
        "vLLM 0.19 to 0.30",
    ),
)

PINNING_HOOKS = tuple(
    Hook(
        module,
        f"nixl_agent.{name}",
        _wrapped_by(wrapper),
        "registers what is mapped at that moment, as a network card does",
        "NIXL 0.10 to 1.5",
    )
    # `nixl` loads one of the two: that of the CUDA which torch was built for; with none, either.
    for module in ("nixl_cu12._api", "nixl_cu13._api")
    for name, wrapper in (("get_reg_descs", pinning.get_reg_descs), ("get_xfer_descs", pinning.get_xfer_descs))
)
"""Where KVCACHED_HOSTVMM_REGISTRATION is set; an unusable value of it is refused when something is registered."""


@dataclass
class Activation:
    """What became of each hook in this process; grows as modules are imported."""

    reason: str
    """Why the hooks are active, or why not."""
    active: bool
    applied: list[Hook] = field(default_factory=list)
    refused: list[tuple[Hook, str]] = field(default_factory=list)

    def refusals(self) -> tuple[tuple[str, Refused], ...]:
        """Every hook that found another name than it was written for, as (name, refusal)."""
        return tuple(
            (
                f"hostvmm: {hook.attribute}",
                ContractChanged(
                    found=found,
                    expected=f"{hook.module}.{hook.attribute} ({hook.versions})",
                    consequence=f"kvcached on host memory would not work: it {hook.why}.",
                    remedy="Install kvcached and vLLM in supported versions; python -m kvcached_nixl lists them.",
                ),
            )
            for hook, found in self.refused
        )


def activate(environment: Mapping[str, str] = os.environ) -> Activation:
    """Prepares this process for kvcached on host memory.

    Call it before vLLM is imported, in every process, any number of times. Does nothing, and imports nothing, unless
    ENABLE_KVCACHED is on and the installed kvcached is the build on host memory. Hooks on modules imported later are
    recorded in the result when they are.
    """
    if environment.get("ENABLE_KVCACHED", "").lower() not in ("1", "true"):
        return Activation("ENABLE_KVCACHED is off", active=False)
    if not is_hostvmm_build():
        return Activation("the installed kvcached is not the build on host memory", active=False)
    activation = Activation("kvcached on host memory", active=True)
    # vLLM's engines leave by os._exit, so nobody else takes away the account of the last one that this process started.
    atexit.register(clear_abandoned)
    pins = pinning.REGISTRATION_VARIABLE in environment
    for hook in (*HOOKS, *(PINNING_HOOKS if pins else ())):
        wrapt.when_imported(hook.module)(partial(_apply, activation, hook))
    return activation


def _apply(activation: Activation, hook: Hook, module: ModuleType) -> None:
    """Never raises: an exception here would make the import hooks of others be skipped."""
    *path, name = hook.attribute.split(".")
    owner: Any = module
    try:
        for part in path:
            owner = getattr(owner, part)
        present = vars(owner)[name]
    except (AttributeError, KeyError):
        activation.refused.append((hook, f"{hook.module} has no {hook.attribute}"))
        return
    if getattr(present, _MARK, False):
        return
    replacement = hook.replace(present)
    setattr(replacement, _MARK, True)
    setattr(owner, name, replacement)
    activation.applied.append(hook)
