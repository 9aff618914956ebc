# SPDX-License-Identifier: Apache-2.0
"""Which connectors may be children of a ``MultiConnector`` beside the NIXL connector, on kvcached's memory.

A connector that was written for vLLM's own memory may copy a block after vLLM has freed it, compute where blocks lie,
or register memory once. kvcached unmaps the pages of freed blocks, lays blocks out otherwise, and replaces pages. So a
connector of vLLM is refused unless it was shown to be safe.

Read in vLLM 0.26 to 0.33, and in LMCache 0.5.6. `tests/contract/test_transfer_config.py` holds what can be shown
without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.vllm import KV_TRANSFER
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import FACADE_CLASS_NAMES
from kvcached_nixl.vllm.adapter.specs import keeps_of
from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, installed_has
from kvcached_nixl.wire.manifest import Keeps

_EXTRA = "kv_connector_extra_config"
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
_NOT_SHOWN = "was not shown to copy the right bytes of kvcached's memory."

_OUTLIVES = (
    "keeps KV where a later engine finds it, by the hash of its tokens. That one may have other weights, and its "
    "requests would get wrong tokens."
)

_TIER = "OffloadingConnector"
_CPU_SPEC = "CPUOffloadingSpec"
_MULTI = "MultiConnector"
_NIXL = frozenset({*FACADE_CLASS_NAMES, _MULTI})
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        _TIER: _FREED,
        "SimpleCPUOffloadConnector": _PLACES,
        "LMCacheConnectorV1": _NEEDS_A_GPU,
        "LMCacheMPConnector": _REGISTERS,
        "MooncakeConnector": _REGISTERS,
        "MooncakeStoreConnector": _REGISTERS,
        "MoRIIOConnector": _REGISTERS,
        "HF3FSKVConnector": _REGISTERS,
        "ExampleConnector": _OUTLIVES,
        "DecodeBenchConnector": "fills blocks with random numbers. Answers would have no meaning.",
        "ExampleHiddenStatesConnector": _NOT_SHOWN,
        "FlexKVConnectorV1": _NOT_SHOWN,
        "HiSparseConnector": _NOT_SHOWN,
    }
)
JUDGED = frozenset({*_REFUSED, *_NIXL})
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
    """Raises SettingsError if vLLM has put an offloading connector in the place of the one that was asked for, as
    ``--kv-offloading-size`` does (``vllm/config/vllm.py``, ``_post_init_kv_transfer_config``)."""
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
    """Raises SettingsError if one of an engine's connectors may copy bytes of other requests, or memory that is not
    mapped, or load what other weights have computed."""
    _require_options(vllm_config)
    for cls in classes:
        name = _own_name(cls)
        if name in _NIXL:
            continue
        if name is None:
            _require_trusted(cls.__name__, vllm_config.kv_transfer_config)
            continue
        why = _REFUSED.get(name, _NOT_SHOWN)
        if is_tier(cls) and installed_has(HITS_DIVERGE):
            _require_spec(vllm_config)
            continue
        raise SettingsError(
            found=f"MultiConnector with {cls.__name__} beside the NIXL connector",
            expected=f"vLLM's OffloadingConnector since vLLM 0.28, or another package's connector that {TRUSTED} names",
            consequence=f"{name} {why}",
            remedy=f"Remove {cls.__name__} from --kv-transfer-config, or unset ENABLE_KVCACHED.",
        )


def _require_options(vllm_config: Any) -> None:
    if optional(optional(vllm_config, "parallel_config"), "enable_fault_tolerance", False):
        raise SettingsError(
            found="--enable-fault-tolerance",
            expected="an engine that ends when a step fails",
            consequence="It would go on after a step that has failed: KV that this step has computed wrongly would be "
            "handed over, and what the step was to tell the workers would be lost.",
            remedy="Remove --enable-fault-tolerance and --fault-tolerance-config, or unset ENABLE_KVCACHED.",
        )
    if (encoders := optional(vllm_config, "ec_transfer_config")) is not None:
        raise SettingsError(
            found=f"--ec-transfer-config with {encoders.ec_connector} beside the NIXL connector",
            expected="embeddings of images, sounds, ... that this engine computes itself, or loads from its own cache",
            consequence="Embeddings are found by the hash of an image alone: another model's, or those of weights of "
            "before, would be used, and answers be wrong.",
            remedy="Remove --ec-transfer-config, or unset ENABLE_KVCACHED.",
        )
    config, outputs = vllm_config.kv_transfer_config, optional(vllm_config, "aux_output_config")
    if optional(outputs, "enable_return_routed_experts") and config.kv_role == "kv_consumer":
        raise SettingsError(
            found="--enable-return-routed-experts on a server that takes KV",
            expected="KV of which no more is wanted than prefill hands over",
            consequence="vLLM would take no KV that came without experts, and compute each prompt again.",
            remedy="Remove --enable-return-routed-experts, or unset ENABLE_KVCACHED.",
        )


def is_tier(cls: type) -> bool:
    """Whether a class is vLLM's ``OffloadingConnector``, and none that extends it."""
    return cls.__name__ == _TIER == _own_name(cls)


def _require_spec(vllm_config: Any) -> None:
    """Check what ``OffloadingConnector`` copies with."""
    config = vllm_config.kv_transfer_config
    extra = config.kv_connector_extra_config
    own = [one.get(_EXTRA) or {} for one in with_children({_EXTRA: extra}) if one.get("kv_connector") == _TIER]
    if len(own) != 1:
        raise SettingsError(
            found=f"{len(own)} configurations of {_TIER} beside the NIXL connector",
            expected="one",
            consequence="The blocks that one of them stores would not be kept until they are stored, and later "
            "requests would get wrong tokens.",
            remedy=f"Name {_TIER} once in --kv-transfer-config.",
        )
    spec, trusted = str(own[0].get("spec_name", _CPU_SPEC)), extra.get(TRUSTED, ())
    why = {"TieringOffloadingSpec": _OUTLIVES, _CPU_SPEC: _NEEDS_A_GPU}.get(spec, _NOT_SHOWN)
    if why is _OUTLIVES or spec not in (trusted if isinstance(trusted, (list, tuple)) else ()):
        raise SettingsError(
            found=f"{_TIER} with {spec} beside the NIXL connector, and {TRUSTED} {trusted!r}",
            expected=f"a spec that the operator has checked, and that {TRUSTED} names",
            consequence=f"{spec} {why}",
            remedy=f"Remove {_TIER} from --kv-transfer-config"
            + ("." if why is _OUTLIVES else f', or add "{TRUSTED}": ["{spec}"] if you have checked it.'),
        )
    unproven = {
        "--speculative-config": optional(vllm_config, "speculative_config") is not None,
        "--pipeline-parallel-size": private(vllm_config, "parallel_config").pipeline_parallel_size > 1,
    }
    for option in (option for option, is_used in unproven.items() if is_used):
        raise SettingsError(
            found=f"{_TIER} beside the NIXL connector, with {option}",
            expected=f"no {option}",
            consequence=f"{_TIER} may store KV of tokens that are rejected afterwards, or of some layers; this was not "
            "run.",
            remedy=f"Remove {_TIER}, or {option}.",
        )


def require_one_group(kv_cache_config: Any) -> None:
    """Raises SettingsError if some blocks of a running request that ``OffloadingConnector`` is to copy are freed or
    overwritten before their tokens end."""
    groups = private(kv_cache_config, "kv_cache_groups")
    kinds = [keeps_of(one.kv_cache_spec) for one in groups]
    if kinds == [Keeps.EVERYTHING]:
        return
    raise SettingsError(
        found=f"{_TIER} beside the NIXL connector, and KV-cache groups that keep: "
        + ", ".join(one.name.lower() for one in kinds),
        expected="one KV-cache group, with full attention",
        consequence=f"{_TIER} copies blocks that have left a sliding window, and states that are overwritten; this was "
        "not run.",
        remedy=f"Remove {_TIER} from --kv-transfer-config, or serve such models without ENABLE_KVCACHED.",
    )


def _require_trusted(name: str, config: Any) -> None:
    trusted = config.kv_connector_extra_config.get(TRUSTED, ())
    if isinstance(trusted, (list, tuple)) and name in trusted:
        return
    raise SettingsError(
        found=f"{name} beside the NIXL connector, and {TRUSTED} {trusted!r}",
        expected="connectors of vLLM that were shown to be safe, or such as the operator has checked",
        consequence=f"This package does not know {name}. kvcached unmaps and replaces pages, so a connector has to "
        "copy blocks only while their request holds them, to follow the strides of the tensors that it is given, to "
        "register no KV memory, and to find no KV of other weights, adapters or salts: when weights change, its "
        "reset_cache() is called. Otherwise later requests would get wrong tokens.",
        remedy=f'If {name} does, add "{TRUSTED}": ["{name}"] to the kv_connector_extra_config of MultiConnector. '
        f"Otherwise remove {name}.",
    )


def _own_name(cls: type) -> str | None:
    """The name of vLLM's or LMCache's connector that a class is or extends; None if it only extends vLLM's base.
    LMCache has connectors of its own, too, for the same kernels."""
    theirs, base = (f"{KV_TRANSFER}.v1.", "lmcache."), f"{KV_TRANSFER}.v1.base"
    known = (one for one in cls.__mro__ if one.__module__.startswith(theirs) and one.__module__ != base)
    return next((one.__name__ for one in known), None)


def with_children(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The ``--kv-transfer-config`` of a connector and those of the connectors inside it, however deep. What is no
    configuration is passed over.
    """
    yield config
    extra = config.get(_EXTRA)
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, Mapping):
            yield from with_children(child)


def extras_of(transfer_config: Any) -> Iterator[Mapping[str, Any]]:
    """``kv_connector_extra_config`` of each connector. NIXL's was checked when the engine started; beside it there may
    be anything."""
    found = (one.get(_EXTRA) for one in with_children(vars(transfer_config)))
    return (one for one in found if isinstance(one, Mapping))
