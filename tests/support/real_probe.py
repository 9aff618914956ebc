# SPDX-License-Identifier: Apache-2.0
"""Run in a subprocess, with the real vLLM and kvcached; prints JSON.

python real_probe.py untouched     everything is imported: the targets before install(), after install() with the
                                   gate closed, while installed, and after uninstall()
python real_probe.py script        the script opens the gate and imports vLLM, and EngineArgs loads vLLM's plugins
python real_probe.py start         the gate was open when the interpreter started; vLLM is imported
python real_probe.py enabled       the script opens the gate, and imports vLLM where the package has started already
python real_probe.py late          the script opens the gate after it has imported vLLM; a child then starts with it
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from kvcached_nixl.patching import Target
from kvcached_nixl.patching.patch import locate


def entries() -> dict[str, Any]:
    """Returns every object that a patch of the installed vLLM replaces, from the ``__dict__`` that holds it."""
    from kvcached_nixl.vllm.patches import PATCHES

    found: dict[str, Any] = {}
    for patch in PATCHES:
        owner = owner_of(patch.target)
        if owner is not None:
            classes = owner.__mro__ if isinstance(owner, type) else (owner,)
            holder = next((c for c in classes if patch.attribute in vars(c)), None)
            if holder is not None:
                found[f"{holder.__name__.rpartition('.')[2]}.{patch.attribute}"] = vars(holder)[patch.attribute]
    return found


def owner_of(target: Target) -> Any:
    try:
        return locate(target, importlib.import_module(target.module))
    except ModuleNotFoundError:
        return None


def untouched() -> dict[str, Any]:
    import kvcached_nixl

    importlib.import_module("vllm")
    stock = entries()
    kvcached_nixl.install()
    closed = entries()
    os.environ["ENABLE_KVCACHED"] = "1"
    registry = kvcached_nixl.install()
    assert registry is not None
    registry.complete()
    opened, applied = entries(), [o.reason for o in kvcached_nixl.status().outcomes if o.state.value == "applied"]
    left = kvcached_nixl.uninstall()
    after = entries()
    return {
        "targets": sorted(stock),
        "same_when_closed": [name for name in stock if closed[name] is stock[name]],
        "changed_when_open": sorted(name for name in stock if opened[name] is not stock[name]),
        "applied": sorted(".".join(reason.split(".")[-2:]) for reason in applied),
        "same_after": [name for name in stock if after[name] is stock[name]],
        "left": list(left),
    }


def outcomes() -> dict[str, Any]:
    import kvcached_nixl
    from kvcached_nixl.activation.bootstrap import current

    registry = current()
    assert registry is not None
    registry.complete()
    report = kvcached_nixl.status()
    return {
        "outcomes": {o.name: [o.state.value, o.reason] for o in report.outcomes},
        "notes": {o.name: list(o.notes) for o in report.outcomes},
        "refusals": [name for name, _ in report.refusals],
    }


def script() -> dict[str, Any]:
    from kvcached_nixl.activation import lift

    # As where no start file of the package is executed.
    lift()
    os.environ["ENABLE_KVCACHED"] = "true"
    importlib.import_module("kvcached.integration.vllm.autopatch")
    importlib.import_module("vllm")
    assert "kvcached_nixl.activation.bootstrap" not in sys.modules
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model="no-such-model")
    return outcomes()


def enabled() -> dict[str, Any]:
    os.environ["ENABLE_KVCACHED"] = "true"
    return start()


def start() -> dict[str, Any]:
    importlib.import_module("vllm")
    importlib.import_module("kvcached.integration.vllm.autopatch")
    return outcomes()


def late() -> dict[str, Any]:
    importlib.import_module("vllm")
    os.environ["ENABLE_KVCACHED"] = "true"
    block_pool = importlib.import_module("vllm.v1.core.block_pool")
    child = subprocess.run([sys.executable, __file__, "start"], check=True, capture_output=True, text=True).stdout
    return {
        "is_elastic": hasattr(block_pool, "ElasticBlockPool"),
        "is_ours": "kvcached_nixl.activation.bootstrap" in sys.modules,
        "child": json.loads(child.splitlines()[-1]),
    }


if __name__ == "__main__":
    whats = {"untouched": untouched, "script": script, "start": start, "enabled": enabled, "late": late}
    print(json.dumps(whats[sys.argv[1]]()))
