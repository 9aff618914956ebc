# SPDX-License-Identifier: Apache-2.0
"""The import hooks: where they are installed, when they are not, and what each does to a call."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcached_nixl.hostvmm import HOOKS, HostvmmError, activate, activation, is_hostvmm_build
from kvcached_nixl.hostvmm.recognition import BUILD_TAG

ON = {"ENABLE_KVCACHED": "true"}
INTERFACES = "kvcached.integration.vllm.interfaces"
INTERFACES_SOURCE = """
class torch:
    dtype = "kept"
def init_kvcached(tp_rank=0, world_size=1, pp_rank=0, is_worker=False, device=None, async_sched=False):
    calls.append(("init", tp_rank, is_worker, device))
def start_worker_listener_thread(rank, pp_rank=0, device_index=None):
    calls.append(("listen", rank, pp_rank, device_index))
def alloc_kv_cache(kvcache_shape, block_size, dtype, device, num_layers): pass
def get_kv_cache_manager(num_blocks, block_size, cell_size, num_layers, num_kv_buffers=2):
    return "manager"
calls = []
"""
MODEL_RUNNER_V2_SOURCE = """
def allocate_kv_cache(config, device, layout, kernel_block_sizes=None):
    import torch
    return torch.cuda.get_device_properties(device).total_memory
def cache_geometry(config):
    from types import SimpleNamespace
    return SimpleNamespace(num_pools=config)
"""
MakeModule = Callable[..., types.ModuleType]


def install_metadata(folder: Path, build: str | None) -> None:
    info = folder / "kvcached-0.1.6.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.6\n")
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\n" + (f"Build: {build}\n" if build else "") + "Tag: cp311-abi3-any\n"
    )


def make_other_modules(make_module: MakeModule) -> None:
    """Every module of the table must exist here, or its hook would wait for its import in another test."""
    make_module("kvcached.integration.vllm.patches", "def _worker_physical_release_barrier(worker): raise OSError")
    make_module("kvcached.integration.vllm.model_runner_v2", MODEL_RUNNER_V2_SOURCE)
    make_module(
        "vllm.v1.worker.cpu_worker", "class CPUWorker:\n    def determine_available_memory(self): return 1 << 40"
    )
    assert {hook.module for hook in HOOKS} <= set(sys.modules)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on sys.path, so that its kvcached metadata is found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch, make_module: MakeModule) -> types.ModuleType:
    """A stand-in for kvcached's vLLM interface, with the hooks in place."""
    module = make_module(INTERFACES, INTERFACES_SOURCE)
    make_other_modules(make_module)
    monkeypatch.setattr(activation, "is_hostvmm_build", lambda: True)
    monkeypatch.setenv("KVCACHED_HOSTVMM_DEVICE", "never-opened-by-anyone")
    monkeypatch.setenv("KVCACHED_HOSTVMM_GIB", "0.25")
    result = activate(ON)
    assert not result.refused
    return module


@pytest.mark.parametrize(("build", "expected"), [(BUILD_TAG, True), (None, False), ("1", False)])
def test_the_build_is_recognised_by_its_wheel_tag(site: Path, build: str | None, expected: bool) -> None:
    """A kvcached built for a GPU carries no such tag, and installing one replaces it."""
    install_metadata(site, build)
    assert is_hostvmm_build() is expected


@pytest.mark.parametrize("value", [None, "false", "0", ""])
def test_nothing_happens_while_kvcached_is_off(
    monkeypatch: pytest.MonkeyPatch, make_module: MakeModule, value: str | None
) -> None:
    """Without ENABLE_KVCACHED every name stays the object it was, even with the host build."""
    module = make_module(INTERFACES, INTERFACES_SOURCE)
    before = dict(vars(module))
    monkeypatch.setattr(activation, "is_hostvmm_build", lambda: True)
    result = activate({} if value is None else {"ENABLE_KVCACHED": value})
    assert not result.active
    assert dict(vars(module)) == before


def test_nothing_happens_with_a_gpu_build(site: Path, make_module: MakeModule) -> None:
    """With any other kvcached every name stays the object it was."""
    install_metadata(site, None)
    module = make_module(INTERFACES, INTERFACES_SOURCE)
    before = dict(vars(module))
    result = activate(ON)
    assert not result.active
    assert dict(vars(module)) == before


def test_activation_imports_no_engine(tmp_path: Path) -> None:
    """It runs at every interpreter start: no torch, vLLM or kvcached may be imported by it."""
    install_metadata(tmp_path, BUILD_TAG)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from kvcached_nixl.hostvmm import activate\n"
        "assert activate({'ENABLE_KVCACHED': '1'}).active\n"
        "print([name for name in ('torch', 'vllm', 'kvcached', 'numpy') if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    finished = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_the_kv_cache_is_planned_within_the_device(hooked: types.ModuleType, make_module: MakeModule) -> None:
    """vLLM plans no block that the emulated device cannot back: whole page groups, after headroom and zero page."""
    make_module("kvcached")
    utils = make_module("kvcached.utils", "PAGE_SIZE = 2 << 20\nCONTIGUOUS_LAYOUT = True\nGPU_UTILIZATION = 0.95")
    sys.modules["kvcached"].utils = utils  # type: ignore[attr-defined]
    worker = sys.modules["vllm.v1.worker.cpu_worker"].CPUWorker()
    worker.model_runner = types.SimpleNamespace(get_kv_cache_spec=lambda: dict.fromkeys("abcd"))
    # 256 MiB, 95 % of it, less one zero page of 16 MiB: 227 MiB, of which 14 groups of 16 MiB.
    assert worker.determine_available_memory() == 14 * 16 << 20


def test_a_second_activation_changes_nothing(hooked: types.ModuleType) -> None:
    """Every entry point may activate; the hooks are placed once."""
    before = dict(vars(hooked))
    again = activate(ON)
    assert again.active
    assert not again.applied
    assert {name: id(value) for name, value in vars(hooked).items()} == {
        name: id(value) for name, value in before.items()
    }


def test_a_missing_name_is_recorded_and_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, make_module: MakeModule
) -> None:
    """An exception in an import hook would silently drop the other hooks on that module."""
    make_module(INTERFACES, "torch = None")
    make_other_modules(make_module)
    monkeypatch.setattr(activation, "is_hostvmm_build", lambda: True)
    found = activate(ON)
    refused = {hook.attribute for hook, _ in found.refused}
    # What stops the start: the gate raises these by name.
    assert {name for name, _ in found.refusals()} == {f"hostvmm: {attribute}" for attribute in refused}
    assert refused == {hook.attribute for hook in HOOKS if hook.module == INTERFACES} - {"torch"}


def test_the_worker_is_told_an_emulated_device_of_its_rank(hooked: types.ModuleType) -> None:
    """`cpu` becomes `cuda:N`: N is the worker's rank, 0 for the engine core."""
    hooked.init_kvcached(2, 4, is_worker=True, device="cpu")
    hooked.init_kvcached(world_size=4)
    assert hooked.calls == [("init", 2, True, "cuda:2"), ("init", 0, False, "cuda:0")]


def test_the_listener_selects_no_cuda_device(hooked: types.ModuleType) -> None:
    """Selecting one would end the listener thread, and every map request would wait for ever."""
    hooked.start_worker_listener_thread(1, 0, device_index=3)
    assert hooked.calls == [("listen", 1, 0, None)]


def test_only_the_interface_module_sees_the_emulated_cuda(hooked: types.ModuleType) -> None:
    """The rest of torch is passed through, and the real module is not changed."""
    assert hooked.torch.dtype == "kept"
    assert hooked.torch.cuda.is_available()
    assert hooked.torch.cuda.get_device_properties("cuda:0").total_memory == 256 << 20
    assert not hasattr(hooked.torch.__wrapped__, "cuda")


def made_for_v2(make_module: MakeModule, num_pools: int) -> object:
    """Allocate for model runner V2; what kvcached was told of the device."""
    pytest.importorskip("torch")
    make_module("kvcached")
    utils = make_module("kvcached.utils", "PAGE_SIZE = 2 << 20\nCONTIGUOUS_LAYOUT = False\nGPU_UTILIZATION = 0.95")
    sys.modules["kvcached"].utils = utils  # type: ignore[attr-defined]
    for name in ("kvcached.integration", "kvcached.integration.vllm"):
        make_module(name)
    runner = sys.modules["kvcached.integration.vllm.model_runner_v2"]
    sys.modules["kvcached.integration.vllm"].model_runner_v2 = runner  # type: ignore[attr-defined]
    return runner.allocate_kv_cache(num_pools, "cpu", "LBNHC")


def test_model_runner_v2_is_told_the_emulated_device(hooked: types.ModuleType, make_module: MakeModule) -> None:
    """It imports torch where it asks, so torch itself answers for that long, and only for that long."""
    torch = pytest.importorskip("torch")
    stock = torch.cuda.get_device_properties
    assert made_for_v2(make_module, 4) == 256 << 20
    assert torch.cuda.get_device_properties is stock


def test_model_runner_v2_gets_no_pool_that_cannot_be_mapped(
    hooked: types.ModuleType, make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcached_nixl.hostvmm.hooks.spare_mappings", lambda: (4096, 65530))
    with pytest.raises(HostvmmError, match="memory mappings"):
        made_for_v2(make_module, 4)


def test_the_release_barrier_needs_no_cuda(hooked: types.ModuleType) -> None:
    """vLLM sends it to workers by name, so it must be a plain function of an importable module."""
    barrier = sys.modules["kvcached.integration.vllm.patches"]._worker_physical_release_barrier
    assert barrier(object()) is True
    assert getattr(sys.modules[barrier.__module__], barrier.__qualname__) is barrier


@pytest.mark.parametrize(("layers", "num_blocks", "accepted"), [(4, 1000, True), (4, 3, False), (80, 1000, False)])
def test_a_pool_that_would_wait_for_ever_is_refused(
    hooked: types.ModuleType, make_module: MakeModule, layers: int, num_blocks: int, accepted: bool
) -> None:
    """Too few planned blocks, or too small a device, stop the engine before kvcached waits for its first block."""
    make_module("kvcached")
    utils = make_module("kvcached.utils", "PAGE_SIZE = 2 << 20\nCONTIGUOUS_LAYOUT = True\nGPU_UTILIZATION = 0.95")
    sys.modules["kvcached"].utils = utils  # type: ignore[attr-defined]
    if accepted:
        assert hooked.get_kv_cache_manager(num_blocks, 32, 256, layers) == "manager"
    else:
        with pytest.raises(HostvmmError, match="wait for ever"):
            hooked.get_kv_cache_manager(num_blocks, 32, 256, layers)
