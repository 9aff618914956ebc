# SPDX-License-Identifier: Apache-2.0
"""A process that imports vLLM, and says in JSON what became of kvcached's version windows, or what kvcached changes.

usage: windows_probe.py state [CONTACT]     CONTACT: MODULE:CLASS.METHOD, which gets other parameters when imported
       windows_probe.py changes
       windows_probe.py memory              what a worker on a GPU would be told of its memory (vLLM 0.32 and later)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from types import SimpleNamespace
from typing import Any

import wrapt

OF_RUNNER = ">=0.29.0,<0.31.0"


def state(contact: str) -> dict[str, Any]:
    if contact:
        name, _, qualname = contact.partition(":")
        owner, _, method = qualname.rpartition(".")

        def change(module: types.ModuleType) -> None:
            setattr(getattr(module, owner), method, lambda self, other: None)

        wrapt.register_post_import_hook(change, name)
    vllm = importlib.import_module("vllm")
    ranges = importlib.import_module("kvcached.integration.version_utils").VersionRange
    refused = importlib.import_module("kvcached.utils").KVCachedConfigError
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    try:
        core.__init__(object.__new__(core), SimpleNamespace(use_v2_model_runner=False))
        refusal = ""
    except refused as error:
        refusal = f"{type(error).__name__}: {error}"
    return {"contains": ranges(OF_RUNNER).contains(vllm.__version__), "refusal": refusal}


def changes() -> list[str]:
    """What kvcached replaces in vLLM, by module and name. This process starts with the gate shut."""
    vllm = importlib.import_module("vllm")
    contacts = importlib.import_module("kvcached_nixl.vllm.patches.windows").CONTACTS
    for contact in contacts:
        importlib.import_module(contact.module)
    before = _functions()
    ranges = importlib.import_module("kvcached.integration.version_utils").VersionRange
    original = ranges.contains
    ranges.contains = lambda self, ver: original(self, ver) or self.range_spec.endswith(",<0.31.0")
    os.environ.update(KVCACHED_AUTOPATCH="1", ENABLE_KVCACHED="true")
    vars(importlib.import_module("kvcached.integration.vllm.autopatch"))["_patch_vllm"](vllm)
    after = _functions()
    return sorted(name for name, one in after.items() if name in before and one is not before[name])


def memory() -> dict[str, Any]:
    """The budgets without and with weights that another process holds; whether profiling has the configuration."""
    importlib.import_module("vllm")
    module: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
    config = importlib.import_module("vllm.config")
    torch = importlib.import_module("torch")
    snapshot, cache = SimpleNamespace(total_memory=1000, free_memory=1000), SimpleNamespace(gpu_memory_utilization=0.5)
    budgets = [module.request_memory(snapshot, cache), module.request_memory(snapshot, cache, 100)]
    try:
        module.request_memory(snapshot, cache, 500)
        refusal = ""
    except importlib.import_module("kvcached_nixl.errors").Refused as error:
        refusal = str(error)
    # kvcached's path without vLLM's snapshot of a GPU's memory calls these two before it runs the model.
    torch.cuda.empty_cache = torch.cuda.reset_peak_memory_stats = lambda: None
    module.maybe_apply_startup_plan = lambda worker: None
    of_worker, seen = config.VllmConfig(), []

    def profile_run() -> None:
        seen.append(config.get_current_vllm_config() is of_worker)
        raise InterruptedError

    worker = object.__new__(module.Worker)
    vars(worker).update(
        vllm_config=of_worker,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        requested_memory=500,
        model_runner=SimpleNamespace(profile_run=profile_run),
    )
    with contextlib.suppress(InterruptedError):
        worker.determine_available_memory()
    return {"budgets": budgets, "refusal": refusal, "configured": seen}


def _functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm.") or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                found[f"{name}.{attribute}"] = value
            elif isinstance(value, type) and value.__module__ == name:
                methods = {key: one for key, one in vars(value).items() if isinstance(one, kinds)}
                found.update({f"{name}.{attribute}.{key}": one for key, one in methods.items()})
    return found


if __name__ == "__main__":
    what, *more = sys.argv[1:]
    asked = {"state": lambda: state(*(more or [""])), "changes": changes, "memory": memory}
    print("\n" + json.dumps(asked[what]()))
