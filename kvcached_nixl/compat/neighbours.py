# SPDX-License-Identifier: Apache-2.0
"""Which connectors may be children of a ``MultiConnector`` beside the NIXL connector, on kvcached's memory.

A connector that was written for vLLM's own memory may copy a block after vLLM has freed it, compute where blocks lie,
or register memory once. kvcached unmaps the pages of freed blocks, lays blocks out otherwise, and replaces pages. So a
connector of vLLM is refused unless it was shown to be safe.

Read in vLLM 0.19 to 0.33, and in LMCache 0.5.6. `tests/contract/test_neighbours.py` holds what can be shown without a
GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvcached_nixl.compat.locate import FACADE_CLASS_NAMES
from kvcached_nixl.compat.names import KV_TRANSFER
from kvcached_nixl.compat.series import Era
from kvcached_nixl.compat.versions import installed_row
from kvcached_nixl.errors import SettingsError

__all__ = ["JUDGED", "children", "of_other_packages", "require_servable"]

_FREED = (
    "copies a block after vLLM has freed it. By then kvcached may have unmapped its page, or another request uses it: "
    "the engine would end, or the copy would give later requests wrong tokens."
)
_PLACES = (
    "computes where blocks lie from how vLLM would have allocated them. kvcached lays them out otherwise, so other "
    "bytes would be copied, and later requests would get wrong tokens."
)
_REGISTERS = (
    "registers KV memory once, or hands it to another process. kvcached replaces its pages, so transfers would read "
    "and write memory that no request uses any more."
)
_NEEDS_A_GPU = (
    "copies with kernels that need a GPU, and was not run on one with kvcached. Nothing shows that it copies the right "
    "bytes."
)
_RESHAPES = (
    "reshapes a layer's tensor. With kvcached's strides that may be a copy, so prompts would be computed with KV that "
    "was never loaded."
)
_NOT_SHOWN = "was not shown to copy the right bytes of kvcached's memory."

_SERVED_IF_PACKED = "ExampleConnector"
_NIXL = frozenset({*FACADE_CLASS_NAMES, "MultiConnector"})
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "OffloadingConnector": _FREED,
        "SimpleCPUOffloadConnector": _PLACES,
        "LMCacheConnectorV1": _NEEDS_A_GPU,
        "LMCacheMPConnector": _REGISTERS,
        "MooncakeConnector": _REGISTERS,
        "MooncakeStoreConnector": _REGISTERS,
        "MoRIIOConnector": _REGISTERS,
        "HF3FSKVConnector": _REGISTERS,
        "DecodeBenchConnector": "fills blocks with random numbers. Answers would have no meaning.",
        "ExampleHiddenStatesConnector": _NOT_SHOWN,
        "FlexKVConnectorV1": _NOT_SHOWN,
        "HiSparseConnector": _NOT_SHOWN,
        "P2pNcclConnector": _NOT_SHOWN,
    }
)
JUDGED = frozenset({*_REFUSED, _SERVED_IF_PACKED, *_NIXL})
"""Every connector that vLLM 0.19 to 0.33 registers. One that is not here is refused, too."""


def children(factory: Any, config: Any) -> Iterator[type]:
    """The classes of the connectors inside ``config``, a ``KVTransferConfig`` of a ``MultiConnector``, however deep."""
    for child in config.kv_connector_extra_config.get("connectors", ()):
        inner = type(config)(**{"kv_connector_extra_config": {}, **child})
        yield factory.get_connector_class(inner)
        yield from children(factory, inner)


def require_servable(factory: Any, vllm_config: Any) -> None:
    """Check the connectors beside the NIXL connector. Those of other packages are not known here.

    Raises:
        SettingsError: one of them may copy bytes of other requests, or memory that is not mapped.
    """
    for cls in children(factory, vllm_config.kv_transfer_config):
        name = _own_name(cls)
        if name is None or name in _NIXL:
            continue
        why = _REFUSED.get(name, _NOT_SHOWN)
        if name == _SERVED_IF_PACKED:
            if installed_row().shape.era is Era.PACKED and not vllm_config.model_config.use_mla:
                continue
            why = _RESHAPES
        raise SettingsError(
            found=f"MultiConnector with {cls.__name__} beside the NIXL connector",
            expected="another package's connector, or vLLM's ExampleConnector, that from vLLM 0.26 on and without "
            "multi-latent attention",
            consequence=f"{name} {why}",
            remedy=f"Remove {cls.__name__} from --kv-transfer-config, or unset ENABLE_KVCACHED.",
        )


def of_other_packages(factory: Any, config: Any) -> list[str]:
    """Names of the connectors inside ``config`` that are neither vLLM's nor LMCache's, and extend none of theirs."""
    return [cls.__name__ for cls in children(factory, config) if _own_name(cls) is None]


def _own_name(cls: type) -> str | None:
    """The name of vLLM's or LMCache's connector that a class is or extends; None if it only extends vLLM's base."""
    return next((base.__name__ for base in cls.__mro__ if _is_known(base)), None)


def _is_known(cls: type) -> bool:
    # LMCache has connectors of its own, too, for the same kernels.
    return cls.__module__.startswith((f"{KV_TRANSFER}.v1.", "lmcache.")) and cls.__module__ != f"{KV_TRANSFER}.v1.base"
