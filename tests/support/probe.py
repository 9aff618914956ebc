# SPDX-License-Identifier: Apache-2.0
"""Run in a subprocess: performs the actions given as arguments, in order, then prints its final state as JSON.

python probe.py ACTION...

enable        sets ENABLE_KVCACHED in os.environ
vllm          imports vllm
kvcached      imports kvcached's autopatch
install       calls kvcached_nixl.install()
plugins       imports vllm and calls its load_general_plugins()
uninstall     calls kvcached_nixl.uninstall()
create=NAME   creates a connector through vLLM's factory; "create=MultiConnector:NixlConnector" one inside another,
              'create=NixlConnector{"transfer_mode": "push"}' one with extra configuration
spawn, fork   performs the remaining actions in a child process
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import types
from typing import Any

KV = "vllm.distributed.kv_transfer.kv_connector"


def act(action: str, created: list[str]) -> None:
    verb, _, argument = action.partition("=")
    if verb == "enable":
        os.environ["ENABLE_KVCACHED"] = "True"
    elif verb == "vllm":
        importlib.import_module("vllm")
    elif verb == "kvcached":
        importlib.import_module("kvcached.integration.vllm.autopatch")
    elif verb in ("install", "uninstall"):
        getattr(importlib.import_module("kvcached_nixl"), verb)()
    elif verb == "plugins":
        importlib.import_module("vllm")
        importlib.import_module("vllm.plugins").load_general_plugins()
    elif verb == "create":
        created.append(create(argument))
    else:
        raise SystemExit(f"unknown action {action!r}")


def create(name: str) -> str:
    """Returns the class name of the connector that vLLM's factory created, or the error."""
    factory = importlib.import_module(f"{KV}.factory").KVConnectorFactory
    name, brace, configuration = name.partition("{")
    parent, _, child = name.partition(":")
    extra: dict[str, Any] = {"connectors": [{"kv_connector": child}]} if child else {}
    extra |= json.loads(brace + configuration or "{}")
    transfer = types.SimpleNamespace(kv_connector=parent, kv_connector_extra_config=extra, kv_buffer_device="cpu")
    try:
        role = types.SimpleNamespace(name="WORKER")
        config = types.SimpleNamespace(
            kv_transfer_config=transfer, kv_events_config=None, parallel_config=types.SimpleNamespace(worker_cls="auto")
        )
        made = factory.create_connector(config, role, None)
    except Exception as error:  # noqa: BLE001 - it is the result
        return f"{type(error).__name__}: {error}"
    return type(made).__name__


def state(created: list[str]) -> dict[str, Any]:
    """Returns the state in which tests look for differences between two processes."""
    result: dict[str, Any] = {"created": created, "ours": "kvcached_nixl.activation.bootstrap" in sys.modules}
    result["imported"] = sorted(name for name in ("wrapt", "kvcached_nixl", "torch") if name in sys.modules)
    if result["ours"] and all(importlib.util.find_spec(name) for name in ("wrapt", "packaging")):
        import kvcached_nixl

        report = kvcached_nixl.status()
        result["outcomes"] = {o.name: [o.state.value, o.reason] for o in report.outcomes}
        result["notes"] = {o.name: list(o.notes) for o in report.outcomes}
        result["refusals"] = {name: str(cause) for name, cause in report.refusals}
    result["wrapped"], result["traces"] = layers()
    return result


def layers() -> tuple[dict[str, int], list[str]]:
    """Returns the number of wrappers around each function and each attribute of a class of vLLM's, and traces of
    kvcached's own patch that would be noticed."""
    wrapped: dict[str, int] = {}
    traces: list[str] = []
    modules = [m for n, m in sorted(sys.modules.items()) if n.startswith("vllm.") and m is not None]
    for module in modules:
        for name, entry in vars(module).items():
            if type(entry).__name__ == "FunctionWrapper" and entry.__module__ == module.__name__:
                wrapped[f"{module.__name__.rpartition('.')[2]}.{name}"] = 1
        for cls in (c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__):
            for attribute, entry in vars(cls).items():
                depth = 0
                entry = entry.fget if isinstance(entry, property) else entry
                while type(entry).__name__ == "FunctionWrapper":
                    depth, entry = depth + 1, entry.__wrapped__
                if depth:
                    wrapped[f"{cls.__qualname__}.{attribute}"] = depth
                if attribute == "_original_get_layout":
                    traces.append(f"{cls.__qualname__}.{attribute}")
    return dict(sorted(wrapped.items())), sorted(set(traces))


def run(actions: list[str]) -> dict[str, Any]:
    created: list[str] = []
    for index, action in enumerate(actions):
        if action == "spawn":
            output = subprocess.run(
                [sys.executable, __file__, *actions[index + 1 :]], check=True, capture_output=True, text=True
            ).stdout
            child: dict[str, Any] = json.loads(output.splitlines()[-1])
            return child
        if action == "fork":
            return fork(actions[index + 1 :])
        act(action, created)
    return state(created)


def fork(rest: list[str]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(run(rest)))
    process.start()
    result: dict[str, Any] = here.recv()
    process.join()
    return result


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
