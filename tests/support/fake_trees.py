# SPDX-License-Identifier: Apache-2.0
"""Small vllm, kvcached, nixl, torch and aiohttp packages on disk, as any supported vLLM is packaged.

The skeleton (factory, MultiConnector, plugin loader, class hierarchy) is written out below. The methods that patches
target are added from the `Patch` records, so a new patch needs no change here. As a program,

    python fake_trees.py FOLDER VLLM_VERSION [--kvcached VERSION] [--no-nixl] [--change CLASS.METHOD=PARAMETERS]

writes a tree. It runs in a separate interpreter because importing the records imports torch and aiohttp, which are
stubs there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
KV = "vllm.distributed.kv_transfer.kv_connector"

STUB_TORCH = """
import sys, types
class _Stub(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls
    def __or__(cls, other): return cls
    def __ror__(cls, other): return cls
class _Any(metaclass=_Stub):
    def __init__(self, *args, **kwargs): pass
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any
"""

STUBS = {"torch": STUB_TORCH, "aiohttp": "", "yarl": "URL = None"}
"""Dependencies of vLLM that the patches import. Nothing in them is used before a connector works."""

SKELETON = {
    f"{KV}.v1.base": """
        class KVConnectorBase_V1:
            def __init__(self, vllm_config, role, kv_cache_config=None):
                self.role = role
            @classmethod
            def get_required_kvcache_layout(cls, vllm_config):
                return None
            def handle_preemptions(self, kv_connector_metadata):
                return None
            def build_connector_worker_meta(self):
                return None
    """,
    f"{KV}.v1.other_connector": """
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        class OtherConnector(KVConnectorBase_V1):
            pass
    """,
    f"{KV}.v1.multi_connector": """
        import types
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        class MultiConnector(KVConnectorBase_V1):
            def __init__(self, vllm_config, role, kv_cache_config=None):
                super().__init__(vllm_config, role, kv_cache_config)
                self.children = []
                for child in vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]:
                    defaults = {"kv_connector_extra_config": {}, "kv_buffer_device": "cpu"}
                    child = types.SimpleNamespace(**{**defaults, **child})
                    cls = KVConnectorFactory.get_connector_class(child)
                    parallel = vllm_config.parallel_config
                    config = types.SimpleNamespace(
                        kv_transfer_config=child, kv_events_config=None, parallel_config=parallel
                    )
                    self.children.append(cls(config, role, kv_cache_config))
    """,
    f"{KV}.factory": """
        import importlib
        class KVConnectorFactory:
            _registry = {}
            @classmethod
            def register_connector(cls, name, module_path, class_name):
                cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)
            @classmethod
            def get_connector_class(cls, kv_transfer_config):
                return cls._registry[kv_transfer_config.kv_connector]()
            @classmethod
            def create_connector(cls, config, role, kv_cache_config=None):
                return cls.get_connector_class(config.kv_transfer_config)(config, role, kv_cache_config)
        _V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
        KVConnectorFactory.register_connector("OtherConnector", _V1 + ".other_connector", "OtherConnector")
        KVConnectorFactory.register_connector("MultiConnector", _V1 + ".multi_connector", "MultiConnector")
        for _name in ("NixlConnector", "NixlPullConnector", "NixlPushConnector"):
            KVConnectorFactory.register_connector(_name, _V1 + ".nixl", _name)
    """,
    "vllm.plugins": """
        from importlib.metadata import entry_points
        loaded = False
        def load_general_plugins():
            global loaded
            if loaded:
                return
            loaded = True
            for plugin in entry_points(group="vllm.general_plugins"):
                plugin.load()()
    """,
    "vllm.envs": """
        import os
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION = os.getenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION") == "1"
        VLLM_NIXL_SIDE_CHANNEL_HOST = os.getenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
        def __getattr__(name):
            if name != "VLLM_NIXL_SIDE_CHANNEL_PORT":
                raise AttributeError(name)
            return int(os.getenv(name, "5600"))
    """,
    "vllm.utils": "",
    "vllm.utils.network_utils": """
        import os
        def get_ip():
            return os.getenv("VLLM_HOST_IP", "0.0.0.0")
    """,
    "vllm.platforms": """
        import types
        current_platform = types.SimpleNamespace(device_type="cpu")
    """,
    "vllm.v1.core.block_pool": "class ElasticBlockPool: pass  # kvcached's",
    "kvcached.utils": """
        import os
        CONTIGUOUS_LAYOUT = False
        SHM_DIR = "/dev/shm"
        def _obtain_default_ipc_name():
            return os.getenv("KVCACHED_IPC_NAME") or "kvcached_vLLM"
        def get_tp_socket_dir(ipc_name=None):
            return "/tmp/kvcached-tp-" + (ipc_name or DEFAULT_IPC_NAME)
        DEFAULT_IPC_NAME = _obtain_default_ipc_name()
    """,
    "kvcached.kv_cache_manager": """
        from kvcached.utils import DEFAULT_IPC_NAME
        class KVCacheManager:
            def resize(self, new_mem_size):
                return True
    """,
    "kvcached.integration.vllm.interfaces": """
        import torch
        def shutdown_kvcached():
            return True
        def _never(*args, **kwargs):
            raise AssertionError
        init_kvcached = start_worker_listener_thread = alloc_kv_cache = get_kv_cache_manager = _never
    """,
    "kvcached.integration.vllm.patches": """
        def _worker_physical_release_barrier(*args):
            raise AssertionError
        class KVCacheCoordinatorPatch:
            def patch_coordinator(self, kvcoord_mod):
                return True
        class KVCacheManagerAllocateSlotsPatch:
            def patch_allocate_slots(self, kvcache_manager_mod):
                return True
    """,
    "kvcached.integration.vllm.autopatch": """
        import os
        from wrapt.importer import when_imported
        from kvcached.integration.vllm.nixl_compat import NixlConnectorPatch
        @when_imported("vllm")
        def _patch_vllm(vllm):
            if os.getenv("ENABLE_KVCACHED", "").lower() in ("true", "1"):
                NixlConnectorPatch().patch_connector()
    """,
    # Leaves the same trace on the connector as kvcached 0.1.6.
    "kvcached.integration.vllm.nixl_compat": """
        import importlib
        class NixlConnectorPatch:
            def patch_connector(self):
                module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector")
                connector = module.NixlConnector
                @classmethod
                def layout(cls, *args, **kwargs):
                    return None
                if not hasattr(connector, "_original_get_layout"):
                    connector._original_get_layout = connector.get_required_kvcache_layout
                connector.get_required_kvcache_layout = layout
                return True
    """,
}

INIT = (
    "def __init__(self, vllm_config, role, kv_cache_config=None):\n"
    "    super().__init__(vllm_config, role, kv_cache_config)"
)
LAYOUT = '@classmethod\ndef get_required_kvcache_layout(cls, vllm_config):\n    return "HND"'
BASE = "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1"

Classes = dict[str, dict[str, tuple[str, list[str]]]]
"""module -> class ("" for the module itself) -> (bases, sources of its members)."""


def base_pull_push() -> tuple[Classes, dict[str, str]]:
    package = f"{KV}.v1.nixl"
    classes: Classes = {
        f"{package}.connector": {
            "NixlBaseConnector": ("KVConnectorBase_V1", [INIT, LAYOUT]),
            "NixlPullConnector": ("NixlBaseConnector", [INIT]),
            "NixlPushConnector": ("NixlBaseConnector", [INIT]),
        },
        f"{package}.base_worker": {"NixlBaseConnectorWorker": ("", [])},
        f"{package}.metadata": {},
    }
    imports = {
        f"{package}.connector": BASE,
        f"{package}.base_worker": f"from {package}.metadata import *",
        package: f"from {package}.connector import *\nimport {package}.base_worker",
    }
    return classes, imports


def add_patched_members(classes: Classes, changes: Mapping[str, str]) -> None:
    """Adds the members that patches expect to every class. ``changes``: "Class.method" -> other parameters."""
    from kvcached_nixl.patching import ANY_PARAMETERS, parameter_lists
    from kvcached_nixl.vllm.patches import PATCHES

    for patch in PATCHES:
        module, qualname = patch.target.module, patch.target.qualname
        if module.startswith(f"{KV}.v1.nixl") and module not in classes:
            continue
        if module.startswith("kvcached") or module in SKELETON:
            continue
        container = classes.setdefault(module, {}).setdefault(qualname, ("", []))
        name = f"{qualname}.{patch.attribute}"
        if any(f"def {patch.attribute}(" in member for member in container[1]) and name not in changes:
            continue
        decorator = f"@{patch.kind}\n" if patch.kind in ("classmethod", "staticmethod", "property") else ""
        any_of = (
            "self, *args, **kwargs"
            if patch.parameters == ANY_PARAMETERS
            else ", ".join(parameter_lists(patch.parameters)[0])
        )
        parameters = changes.get(name, any_of)
        container[1][:] = [member for member in container[1] if f"def {patch.attribute}(" not in member]
        container[1].append(f"{decorator}def {patch.attribute}({parameters}):\n    return None")


def write(root: Path, version: str, kvcached: str, with_nixl: bool, changes: Mapping[str, str]) -> None:
    classes, imports = base_pull_push()
    add_patched_members(classes, changes)
    sources = {name: textwrap.dedent(text).strip() for name, text in SKELETON.items()}
    sources["vllm"] = f"__version__ = {version!r}"
    sources["kvcached"] = ""
    if with_nixl:
        sources["nixl"] = "__version__ = '1.0'"
    for module, members in classes.items():
        sources[module] = imports.get(module, "") + "\n" + "\n".join(_class(n, *c) for n, c in members.items())
    for module, text in imports.items():
        sources.setdefault(module, text)
    sources[f"{KV}.v1.nixl.connector"] += "\nNixlConnector = NixlPullConnector\n"
    _write_sources(root, {**sources, **STUBS})
    for name, stated in (("vllm", version), ("kvcached", kvcached)):
        info = root / f"{name}-{stated}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {stated}\n")


def _class(name: str, bases: str, members: Sequence[str]) -> str:
    if not name:
        return "\n".join(members)
    body = "\n".join(textwrap.indent(member, "    ") for member in members) or "    pass"
    return f"class {name}({bases}):\n{body}\n"


def _write_sources(root: Path, sources: Mapping[str, str]) -> None:
    packages = {parent for name in sources for parent in _parents(name)}
    for name in packages | set(sources):
        path = root.joinpath(*name.split("."))
        file = path / "__init__.py" if name in packages or "." not in name else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(sources.get(name, "") + "\n")


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def make(root: Path, version: str, *options: str) -> Path:
    """Writes a tree in a fresh interpreter (see the module docstring) and returns its folder."""
    root.mkdir(parents=True)
    _write_sources(root, STUBS)
    subprocess.run(
        [sys.executable, __file__, str(root), version, *options],
        env={"PYTHONPATH": f"{root}:{REPOSITORY}"},
        check=True,
    )
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("version")
    parser.add_argument("--kvcached", default="0.1.6")
    parser.add_argument("--no-nixl", action="store_true")
    parser.add_argument("--change", action="append", default=[])
    options = parser.parse_args()
    changes = dict(change.split("=", 1) for change in options.change)
    write(options.root, options.version, options.kvcached, not options.no_nixl, changes)


if __name__ == "__main__":
    main()
