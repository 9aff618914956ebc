# SPDX-License-Identifier: Apache-2.0
"""The installed kvcached on host memory: its own operations, unmodified, over real mappings."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hostvmm import is_hostvmm_build

PREAMBLE = """
import sys
import torch
from kvcached import vmm_ops as ops
from hostvmm.device import device_info
PAGE = 2 << 20
def start(layers, pages, contiguous, kv_buffers=2):
    ops.init_kvcached("cuda:0", PAGE, contiguous)
    return ops.create_kv_tensors(kv_buffers * pages * PAGE, 2, "cuda:0", layers, num_kv_buffers=kv_buffers)
"""

pytestmark = [
    pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory"),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated device of 64 pages that no other test uses."""
    monkeypatch.setenv("KVCACHED_HOSTVMM_DEVICE", f"test-{uuid.uuid4().hex}")
    monkeypatch.setenv("KVCACHED_IPC_NAME", f"test-{uuid.uuid4().hex[:12]}")
    monkeypatch.setenv("KVCACHED_HOSTVMM_GIB", "0.125")
    monkeypatch.delenv("ENABLE_KVCACHED", raising=False)


def run(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, timeout=240, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.strip()


def test_the_installed_extension_is_selfcontained() -> None:
    """No HIP library is looked up at run time, and no HIP name is offered to other libraries of the process. Libraries
    are looked for where the Python's own extensions look for them, and nowhere else."""
    code = """
import re, subprocess, sysconfig
from kvcached import _C
needed = subprocess.run(["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True).stdout
names = subprocess.run(["nm", "-D", "--defined-only", _C.__file__], capture_output=True, text=True, check=True).stdout
searched = {place for found in re.findall("R(?:UN)?PATH.*\\\\[(.*)\\\\]", needed) for place in found.split(":")}
assert "amdhip" not in needed and searched <= {sysconfig.get_config_var("LIBDIR")}, needed
print([line for line in names.splitlines() if " hip" in line])
"""
    assert run(code) == "[]"


@pytest.mark.parametrize("contiguous", [False, True])
def test_pages_come_and_go_under_kvcacheds_tensors(contiguous: bool) -> None:
    """Written pages read back; unmapped ones read zeros; the device's free memory follows each step."""
    code = f"""
contiguous = {contiguous}
tensors = start(2, 8, contiguous)
assert all(tensor.device.type == "cpu" for tensor in tensors)
zero_pages = 4 if contiguous else 1
assert device_info().used_bytes == zero_pages * PAGE
step = 4 * PAGE if contiguous else PAGE  # kvcached addresses compound pages in the contiguous layout
ops.map_to_kv_tensors([0, step])
assert device_info().used_bytes == (zero_pages + 8) * PAGE
for tensor in tensors:
    tensor[: 2 * PAGE // 2] = 3
ops.unmap_from_kv_tensors([0])
assert device_info().used_bytes == (zero_pages + 4) * PAGE
first, second = tensors[0][: PAGE // 2], tensors[0][step // 2 : step // 2 + 8]
assert not first.any(), "the address is backed by the zero page again"
assert (second == 3).all() if not contiguous else not second.any()
ops.unmap_from_kv_tensors([step])
assert device_info().used_bytes == zero_pages * PAGE
ops.shutdown_kvcached()
del tensors, tensor, first, second
assert device_info().used_bytes == 0
print("ok")
"""
    assert run(code) == "ok"


def test_every_unbacked_address_is_the_same_zero_page() -> None:
    """A write to one unbacked page shows in all of them, as on a GPU: nothing faults, nothing is private."""
    code = """
tensor = start(1, 8, False)[0]
tensor[5] = 9
print(int(tensor[5 + PAGE // 2]), int(tensor[5 + 7 * PAGE // 2]))
ops.map_to_kv_tensors([0])
print(int(tensor[5]))
"""
    assert run(code).split() == ["9", "9", "0"]


def test_running_out_is_kvcacheds_own_error_and_is_rolled_back() -> None:
    """The exception carries the numbers; pages mapped by the failed call are returned, and a release helps."""
    code = """
start(4, 32, False)
offsets = [n * PAGE for n in range(7)]  # eight pages each: 56, and one zero page
ops.map_to_kv_tensors(offsets)
used = device_info().used_bytes
try:
    ops.map_to_kv_tensors([7 * PAGE, 8 * PAGE])
except RuntimeError as error:
    print(error)
assert device_info().used_bytes == used
ops.unmap_from_kv_tensors(offsets[:1])
ops.map_to_kv_tensors([8 * PAGE])
assert device_info().used_bytes == used
"""
    text = run(code)
    assert "out of memory" in text
    assert "128.0 MiB (KVCACHED_HOSTVMM_GIB)" in text


def test_kvcacheds_page_allocator_sees_the_emulated_device() -> None:
    """Free physical pages are the device's, less kvcached's headroom, and fall when another process takes memory."""
    code = """
import subprocess
allocator = ops.PageAllocator(2, 16 * PAGE, PAGE, 1, num_kv_buffers=2, ipc_name="", enable_page_prealloc=False)
start(2, 16, False)
before = allocator.get_avail_physical_pages()
other = '''
import sys
from kvcached import vmm_ops as ops
ops.init_kvcached("cuda:0", 2 << 20, False)
ops.create_kv_tensors(32 << 20, 2, "cuda:0", 2)
ops.map_to_kv_tensors([0, 2 << 20])
print("held", flush=True)
sys.stdin.read()
'''
with subprocess.Popen([sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
    assert peer.stdout.readline().strip() == "held"
    during = allocator.get_avail_physical_pages()
    peer.kill()
print(before, during, allocator.get_avail_physical_pages())
"""
    before, during, after = map(int, run(code).splitlines()[-1].split())
    # 64 pages of 2 MiB, 95 % usable, one zero page: 59 pages are 14 groups. The peer holds a zero page and two groups.
    assert (before, during, after) == (14, 12, 14)


def test_a_full_table_of_mappings_is_an_error_with_the_kernels_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvcached's exception names vm.max_map_count; without the runtime's text it would be a bare failure."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit}: filling it takes too long")
    code = f"""
try:
    start(1, {limit // 2 + 1000}, False)
except RuntimeError as error:
    print(error)
"""
    assert "vm.max_map_count" in run(code)
