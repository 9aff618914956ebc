# SPDX-License-Identifier: Apache-2.0
"""Read vLLM's private attributes: a missing name is a refusal, unless some supported vLLM lacks it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from kvcached_nixl.errors import ContractChanged

__all__ = ["envs", "first_bound", "is_rocm", "optional", "private"]


def first_bound(modules: Sequence[str], name: str) -> Any:
    """The attribute ``name`` of the first of these modules that has it.

    Raises:
        ContractChanged: no module has it.
    """
    found: Any = None
    for module in filter(_exists, modules):
        found = importlib.import_module(module)
        if name in vars(found):
            break
    return private(found, name)


def _exists(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or _exists(parent)) and importlib.util.find_spec(module) is not None


def envs() -> Any:
    """vLLM's module of environment settings, which reads each one when it is accessed."""
    from vllm import envs as module

    return module


def is_rocm() -> bool:
    """Whether vLLM runs on AMD's GPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def private(owner: Any, name: str) -> Any:
    """Read a private attribute of vLLM. Raises ContractChanged with its name if it is missing."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ContractChanged(
            found=f"{type(owner).__module__}.{type(owner).__qualname__} without {name!r}",
            expected=f"the attribute {name!r} that this package reads",
            consequence="vLLM's state cannot be read; the engine stops before any transfer",
            remedy="use a vLLM version that `python -m kvcached_nixl` lists as supported",
        ) from error


def optional(owner: Any, name: str, default: Any = None) -> Any:
    """Read an attribute that some supported vLLM versions lack, or that an object lacks because it is None.

    ``tests/support/shapes/reads.py`` says which versions have it: a later one without it is found before it is
    supported.
    """
    return getattr(owner, name, default)
