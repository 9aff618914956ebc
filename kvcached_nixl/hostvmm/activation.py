# SPDX-License-Identifier: Apache-2.0
"""Installs the hooks, once per process, and only if kvcached is the build on host memory."""

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

# wrapt stores attributes with the prefix _self_ on the wrapper itself. Other wrappers around ours still find it.
_MARK = "_self_kvcached_nixl_hostvmm"


@dataclass(frozen=True)
class Hook:
    """One attribute of kvcached, vLLM or NIXL that is replaced."""

    module: str
    attribute: str
    """Dotted path inside the module."""
    replace: Callable[[Any], Any]
    """Takes the present value, returns its replacement."""
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
        "gets the device `cpu` from the CPU worker, for which it has no memory calls",
        "kvcached 0.1.6",
    ),
    Hook(
        _INTERFACES,
        "start_worker_listener_thread",
        _wrapped_by(hooks.start_worker_listener_thread),
        "starts a listener thread that selects a CUDA device and ends without one",
        "kvcached 0.1.6",
    ),
    Hook(
        _INTERFACES,
        "alloc_kv_cache",
        _wrapped_by(hooks.alloc_kv_cache),
        "maps addresses without asking how many mappings the kernel allows",
        "kvcached 0.1.6; called up to vLLM 0.28",
    ),
    Hook(
        "kvcached.integration.vllm.model_runner_v2",
        "allocate_kv_cache",
        _wrapped_by(hooks.allocate_kv_cache),
        "asks torch.cuda for the device's size",
        "kvcached 0.1.6; called from vLLM 0.29 on",
    ),
    Hook(
        _INTERFACES,
        "get_kv_cache_manager",
        _wrapped_by(hooks.get_kv_cache_manager),
        "waits for ever with a pool of less than one page group",
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
        "vLLM 0.26 to 0.33",
    ),
)

PINNING_HOOKS = tuple(
    Hook(
        module,
        f"nixl_agent.{name}",
        _wrapped_by(wrapper),
        "would follow later mappings; a network card registers what is mapped at that moment",
        "NIXL 1.3 to 1.5",
    )
    # `nixl` loads one of the two: the one for torch's CUDA version, or either if torch has no CUDA.
    for module in ("nixl_cu12._api", "nixl_cu13._api")
    for name, wrapper in (("get_reg_descs", pinning.get_reg_descs), ("get_xfer_descs", pinning.get_xfer_descs))
)
"""Installed if KVCACHED_HOSTVMM_REGISTRATION is set. An unusable value is refused when memory is registered."""


@dataclass
class Activation:
    """The result of each hook in this process. Hooks are added as their modules are imported."""

    reason: str
    """Why the hooks are active or not."""
    active: bool
    applied: list[Hook] = field(default_factory=list)
    refused: list[tuple[Hook, str]] = field(default_factory=list)

    def refusals(self) -> tuple[tuple[str, Refused], ...]:
        """Returns (name, refusal) for every hook whose attribute does not exist."""
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
    """Prepares this process for kvcached on host memory. Idempotent.

    Call it in every process, before vLLM is imported. Does nothing, and imports nothing, unless ENABLE_KVCACHED is on
    and the installed kvcached is the build on host memory. Hooks for modules that are imported later are added to the
    result at that time.
    """
    if environment.get("ENABLE_KVCACHED", "").lower() not in ("1", "true"):
        return Activation("ENABLE_KVCACHED is off", active=False)
    if not is_hostvmm_build():
        return Activation("the installed kvcached is not the build on host memory", active=False)
    activation = Activation("kvcached on host memory", active=True)
    # vLLM's engines end with os._exit, without cleanup. So this process removes the device files that they left.
    atexit.register(clear_abandoned)
    pins = pinning.REGISTRATION_VARIABLE in environment
    for hook in (*HOOKS, *(PINNING_HOOKS if pins else ())):
        wrapt.when_imported(hook.module)(partial(_apply, activation, hook))
    return activation


def _apply(activation: Activation, hook: Hook, module: ModuleType) -> None:
    """Install one hook. Never raises: an exception would make Python skip the import hooks of other packages."""
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
