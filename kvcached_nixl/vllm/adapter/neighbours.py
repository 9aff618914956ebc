# SPDX-License-Identifier: Apache-2.0
"""Which connectors may be children of a ``MultiConnector`` beside the NIXL connector, on kvcached's memory.

A connector that was written for vLLM's own memory may copy a block after vLLM has freed it, compute where blocks lie,
or register memory once. kvcached unmaps the pages of freed blocks, lays blocks out otherwise, and replaces pages. So a
connector of vLLM is refused unless it was shown to be safe.

Read in vLLM 0.26 to 0.33, and in LMCache 0.5.6. `tests/contract/test_neighbours.py` holds what can be shown without a
GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.vllm import KV_TRANSFER
from kvcached_nixl.vllm.adapter.attributes import optional
from kvcached_nixl.vllm.adapter.locate import FACADE_CLASS_NAMES

TRUSTED = "trusted_connectors"
"""Key of ``kv_connector_extra_config``: class names of other packages' connectors that the operator has checked."""

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

_SERVED_WITHOUT_LATENTS = "ExampleConnector"
_MULTI = "MultiConnector"
_NIXL = frozenset({*FACADE_CLASS_NAMES, _MULTI})
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
    }
)
JUDGED = frozenset({*_REFUSED, _SERVED_WITHOUT_LATENTS, *_NIXL})
"""Every connector that vLLM 0.26 to 0.33 registers. One that is not here is refused, too."""


def connector_classes(factory: Any, config: Any) -> Iterator[type]:
    """The class that a ``KVTransferConfig`` names, and those of the connectors inside it (``MultiConnector``)."""
    cls = factory.get_connector_class(config)
    yield cls
    # Another connector may have anything below this key.
    if _own_name(cls) == _MULTI:
        for child in config.kv_connector_extra_config.get("connectors", ()):
            yield from connector_classes(factory, type(config)(**{"kv_connector_extra_config": {}, **child}))


def require_no_replacement(vllm_config: Any) -> None:
    """Check that vLLM has not put an offloading connector in the place of the one that was asked for.

    ``--kv-offloading-size`` does (``vllm/config/vllm.py``, ``_post_init_kv_transfer_config``).

    Raises:
        SettingsError: it has.
    """
    gib = optional(optional(vllm_config, "cache_config"), "kv_offloading_size")
    name = vllm_config.kv_transfer_config.kv_connector
    if gib is not None and name in _REFUSED:
        raise SettingsError(
            found=f"--kv-offloading-size {gib}, for which vLLM uses {name} in place of any other connector",
            expected="no --kv-offloading-size together with kvcached",
            consequence=f"Nothing would be handed over by NIXL, and {name} {_REFUSED[name]}",
            remedy="Remove --kv-offloading-size, or unset ENABLE_KVCACHED.",
        )


def require_servable(classes: Iterable[type], vllm_config: Any) -> None:
    """Check the connectors beside the NIXL connector.

    Args:
        classes: every connector of the engine.

    Raises:
        SettingsError: one of them may copy bytes of other requests, or memory that is not mapped.
    """
    for cls in classes:
        name = _own_name(cls)
        if name in _NIXL:
            continue
        if name is None:
            _require_trusted(cls.__name__, vllm_config.kv_transfer_config)
            continue
        why = _REFUSED.get(name, _NOT_SHOWN)
        if name == _SERVED_WITHOUT_LATENTS:
            if not vllm_config.model_config.use_mla:
                continue
            why = _RESHAPES
        raise SettingsError(
            found=f"MultiConnector with {cls.__name__} beside the NIXL connector",
            expected="vLLM's ExampleConnector, without multi-latent attention, or another package's connector that "
            f"{TRUSTED} names",
            consequence=f"{name} {why}",
            remedy=f"Remove {cls.__name__} from --kv-transfer-config, or unset ENABLE_KVCACHED.",
        )


def _require_trusted(name: str, config: Any) -> None:
    trusted = config.kv_connector_extra_config.get(TRUSTED, ())
    if isinstance(trusted, (list, tuple)) and name in trusted:
        return
    raise SettingsError(
        found=f"{name} beside the NIXL connector, and {TRUSTED} {trusted!r}",
        expected="connectors of vLLM that were shown to be safe, or such as the operator has checked",
        consequence=f"This package does not know {name}. kvcached unmaps and replaces pages, so a connector has to "
        "copy blocks only while their request holds them, to follow the strides of the tensors that it is given, and "
        "to register no KV memory. Otherwise later requests would get wrong tokens.",
        remedy=f'If {name} does, add "{TRUSTED}": ["{name}"] to the kv_connector_extra_config of MultiConnector. '
        f"Otherwise remove {name}.",
    )


def _own_name(cls: type) -> str | None:
    """The name of vLLM's or LMCache's connector that a class is or extends; None if it only extends vLLM's base."""
    return next((base.__name__ for base in cls.__mro__ if _is_known(base)), None)


def _is_known(cls: type) -> bool:
    # LMCache has connectors of its own, too, for the same kernels.
    return cls.__module__.startswith((f"{KV_TRANSFER}.v1.", "lmcache.")) and cls.__module__ != f"{KV_TRANSFER}.v1.base"


def with_children(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The ``--kv-transfer-config`` of a connector and those of the connectors inside it, however deep. What is no
    configuration is passed over.
    """
    yield config
    extra = config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, Mapping):
            yield from with_children(child)
