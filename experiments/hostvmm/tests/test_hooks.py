# SPDX-License-Identifier: Apache-2.0
"""The import hooks: when they are installed, and what each does to a call. `test_vllm` has them in a real engine."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import hostvmm
import pytest
from hostvmm import BUILD_TAG, hooks, is_hostvmm_build
from hostvmm.device import HostvmmError
from hostvmm.limits import Pool

from kvcached_nixl.patching import Call


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 256 MiB that nobody uses, in the contiguous layout."""
    monkeypatch.setenv("KVCACHED_HOSTVMM_DEVICE", "never-opened-by-anyone")
    monkeypatch.setenv("KVCACHED_HOSTVMM_GIB", "0.25")
    monkeypatch.setattr(hooks, "_pool", lambda layers, buffers: Pool(256 << 20, 2 << 20, layers, buffers, True, 0.95))


@pytest.mark.parametrize(("build", "expected"), [(BUILD_TAG, True), (None, False), ("1", False)])
def test_the_build_is_recognised_by_its_wheel_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str | None, expected: bool
) -> None:
    """A kvcached built for a GPU carries no such tag, and installing one replaces it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "kvcached-0.1.6.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.6\n")
    tag = f"Build: {build}\n" if build else ""
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\n{tag}Tag: cp311-abi3-any\n")
    assert is_hostvmm_build() is expected


@pytest.mark.parametrize(
    ("value", "is_ours", "count"),
    [("", True, 0), ("0", True, 0), ("true", False, 0), ("TRUE", True, 1)],
)
def test_only_kvcached_on_host_memory_is_hooked_and_once(
    monkeypatch: pytest.MonkeyPatch, value: str, is_ours: bool, count: int
) -> None:
    installed: list[None] = []
    monkeypatch.setenv("ENABLE_KVCACHED", value)
    monkeypatch.setattr(hostvmm, "is_hostvmm_build", lambda: is_ours)
    monkeypatch.setattr(hooks, "install", lambda: installed.append(None))
    hostvmm._install_once.cache_clear()
    hostvmm._activate()
    hostvmm._activate()
    hostvmm._install_once.cache_clear()
    assert len(installed) == count


LATE = """
import os, sys
names = ("hostvmm.hooks", "torch", "kvcached", "numpy")
print([name for name in names if name in sys.modules])
os.environ["ENABLE_KVCACHED"] = "1"
import vllm
print([name for name in names if name in sys.modules])
"""


@pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory")
@pytest.mark.parametrize("on", [{}, {"ENABLE_KVCACHED": "1"}], ids=["off", "on"])
def test_the_start_file_activates_at_the_start_or_when_vllm_is_imported(tmp_path: Path, on: dict[str, str]) -> None:
    """A script may turn kvcached on. An interpreter start imports neither torch nor kvcached for it."""
    (tmp_path / "vllm.py").write_text("import sys; print('hostvmm.hooks' in sys.modules)")
    clean = {name: value for name, value in os.environ.items() if "KVCACHED" not in name}
    finished = subprocess.run(
        [sys.executable, "-c", LATE],
        env={**clean, **on, "PYTHONPATH": str(tmp_path), "KVCACHED_NIXL": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    at_start, during, after = finished.stdout.splitlines()[:3]
    assert (at_start, during) == (("['hostvmm.hooks']", "True") if on else ("[]", "False")), finished.stderr
    assert after.startswith("['hostvmm.hooks'")


@pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory")
def test_engines_on_one_emulated_device_know_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU platform identifies no device."""
    monkeypatch.setenv("ENABLE_KVCACHED", "1")
    code = "from vllm.platforms import current_platform; print(current_platform.get_device_uuid(0))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.stdout.splitlines()[-1:] == ["hostvmm never-opened-by-anyone"], finished.stderr


def test_a_missing_name_ends_the_process() -> None:
    """A pool would wait for ever. Any other exception could be caught, and Python drops an import hook that raised."""
    with pytest.raises(SystemExit, match="found no renamed.init_kvcached"):
        hooks.put("init_kvcached", lambda present: present, types.ModuleType("renamed"))


def test_the_worker_is_told_an_emulated_device_of_its_rank() -> None:
    """`cpu` becomes `cuda:N`: N is the worker's rank, 0 for the engine core."""
    calls = []

    def init(
        tp_rank: int = 0, world_size: int = 1, pp_rank: int = 0, is_worker: bool = False, device: str = ""
    ) -> None:
        calls.append((tp_rank, is_worker, device))

    hooks.init_kvcached(Call(init, None, (2, 4), {"is_worker": True, "device": "cpu"}))
    hooks.init_kvcached(Call(init, None, (), {"world_size": 4}))
    assert calls == [(2, True, "cuda:2"), (0, False, "cuda:0")]


def test_model_runner_v2_is_told_the_emulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports torch where it asks, so torch itself answers for that long, and only for that long."""
    torch = pytest.importorskip("torch")
    geometry = types.SimpleNamespace(cache_geometry=lambda config: types.SimpleNamespace(num_pools=config))
    vllm = types.SimpleNamespace(model_runner_v2=geometry)
    monkeypatch.setitem(sys.modules, "kvcached.integration.vllm", vllm)  # type: ignore[arg-type]
    stock = torch.cuda.get_device_properties

    def allocate(config: int) -> int:
        found: int = torch.cuda.get_device_properties("cpu").total_memory
        return found

    assert hooks.allocate_kv_cache(Call(allocate, None, (4,), {})) == 256 << 20
    assert torch.cuda.get_device_properties is stock
    monkeypatch.setattr(hooks, "spare_mappings", lambda: (4096, 65530))
    with pytest.raises(HostvmmError, match="memory mappings"):
        hooks.allocate_kv_cache(Call(allocate, None, (4,), {}))


def test_the_kv_cache_is_planned_within_the_device() -> None:
    """vLLM plans no block that the emulated device cannot back: whole page groups, after headroom and zero page."""
    runner = types.SimpleNamespace(get_kv_cache_spec=lambda: dict.fromkeys("abcd"))
    worker = types.SimpleNamespace(model_runner=runner)
    # 256 MiB, 95 % of it, less one zero page of 16 MiB: 227 MiB, of which 14 groups of 16 MiB.
    assert hooks.determine_available_memory(Call(lambda: 1 << 40, worker, (), {})) == 14 * 16 << 20
    assert hooks.determine_available_memory(Call(lambda: 1 << 20, worker, (), {})) == 1 << 20


@pytest.mark.parametrize(("layers", "num_blocks", "accepted"), [(4, 1000, True), (4, 3, False), (80, 1000, False)])
def test_a_pool_that_would_wait_for_ever_is_refused(layers: int, num_blocks: int, accepted: bool) -> None:
    """Too few planned blocks, or too small a device, stop the engine before kvcached waits for its first block."""

    def manager(num_blocks: int, block_size: int, cell_size: int, num_layers: int, num_kv_buffers: int = 2) -> str:
        return "manager"

    call = Call(manager, None, (num_blocks, 32, 256, layers), {})
    if accepted:
        assert hooks.get_kv_cache_manager(call) == "manager"
    else:
        with pytest.raises(HostvmmError, match="wait for ever"):
            hooks.get_kv_cache_manager(call)
