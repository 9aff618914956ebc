# SPDX-License-Identifier: Apache-2.0
"""The host-memory runtime, call by call: the same semantics as a GPU's memory calls."""

from __future__ import annotations

import platform
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostvmm.device import HostvmmError, account_path, capacity_bytes, device_info

from experiments.hostvmm.tests.client import (
    INVALID_HANDLE,
    INVALID_VALUE,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    PAGE_BYTES,
    compile_library,
)

ROOT = Path(__file__).parents[3]
PAGES_OF_THE_HOST = 4 * PAGE_BYTES // resource.getpagesize()
FIRST_USE = """
base = client.reserve(4 * PAGE_BYTES)
for n in range(4):
    client.map(base + n * PAGE_BYTES, client.create())
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ctypes.memset(base, 1, 4 * PAGE_BYTES)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert ctypes.string_at(base, 4 * PAGE_BYTES) == b"\\x01" * (4 * PAGE_BYTES)
print(faults)
"""
PREAMBLE = """
import ctypes, os, resource, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from experiments.hostvmm.tests.client import *
from hostvmm.device import device_info
client = Client(Path({library!r}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("hostvmm"))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An emulated device of 8 pages that no other test uses."""
    monkeypatch.setenv("KVCACHED_HOSTVMM_DEVICE", f"test-{uuid.uuid4().hex}")
    monkeypatch.setenv("KVCACHED_HOSTVMM_GIB", str(8 * PAGE_BYTES / 2**30))
    yield
    account_path().unlink(missing_ok=True)


class Script:
    """A process with a client, driven line by line."""

    def __init__(self, library: Path, code: str) -> None:
        preamble = PREAMBLE.format(root=str(ROOT), library=str(library))
        self.process = subprocess.Popen(
            [sys.executable, "-c", preamble + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def finish(self, say: str = "") -> str:
        output, _ = self.process.communicate(say, timeout=60)
        assert self.process.returncode == 0, output
        return output.strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def run(library: Path, code: str) -> str:
    return Script(library, code).finish()


def holding(library: Path, code: str) -> Script:
    """Returns a process that has run ``code``, and then waits for a line."""
    script = Script(library, f"{code}\nprint('held', flush=True)\ninput()")
    assert script.process.stdout is not None and script.process.stdout.readline() == "held\n"
    return script


def test_mapped_memory_is_written_and_read_back(library: Path) -> None:
    """Two addresses of one page see each other's writes; two pages do not."""
    code = """
base = client.reserve(4 * PAGE_BYTES)
one, two = client.create(), client.create()
client.map(base, one); client.map(base + PAGE_BYTES, one); client.map(base + 2 * PAGE_BYTES, two)
ctypes.memset(base, 7, PAGE_BYTES)
print([ctypes.string_at(base + n * PAGE_BYTES + PAGE_BYTES - 1, 1)[0] for n in range(3)])
"""
    assert run(library, code) == "[7, 7, 0]"


@pytest.mark.skipif(
    tuple(int(part) for part in platform.release().split(".")[:2]) < (6, 1), reason="needs a kernel with MADV_COLLAPSE"
)
def test_first_use_costs_no_page_fault_for_each_page_of_the_host(library: Path) -> None:
    """A device's memory is there; without huge pages, 64 MiB took 31 ms of page faults more than on a GPU."""
    assert int(run(library, FIRST_USE)) < PAGES_OF_THE_HOST / 2


def test_memory_without_huge_pages_holds_the_same_bytes(library: Path) -> None:
    """A kernel that has none, or refuses them to this process, gives ordinary pages."""
    refused = "libc = ctypes.CDLL(None)\nassert libc.prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE\n"
    assert int(run(library, refused + FIRST_USE)) >= PAGES_OF_THE_HOST


def test_a_range_can_be_remapped_from_a_page_to_the_zero_page(library: Path) -> None:
    """What kvcached does on unmap: the address does not show the page's bytes any more, but zeros."""
    code = """
base = client.reserve(2 * PAGE_BYTES)
zero, page = client.create(), client.create()
client.map(base, zero); client.map(base + PAGE_BYTES, zero)
client.unmap(base); client.map(base, page); ctypes.memset(base, 9, PAGE_BYTES)
before = ctypes.string_at(base, 1)[0]
client.unmap(base); client.map(base, zero)
print(before, ctypes.string_at(base, PAGE_BYTES) == bytes(PAGE_BYTES), ctypes.string_at(base + PAGE_BYTES, 1)[0])
"""
    assert run(library, code) == "9 True 0"


def test_released_memory_returns_to_the_system_and_to_the_device(library: Path) -> None:
    """Both the emulated account and the kernel's count of this process's shared pages go back to what they were."""
    code = """
def resident():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssShmem"].split()[0]) * 1024
def held():  # blocks of the one memory file behind all pages
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = [link for link in links if os.path.islink(link) and "memfd:kvcached-hostvmm" in os.readlink(link)]
    return sum(os.stat(file).st_blocks * 512 for file in files)
base = client.reserve(4 * PAGE_BYTES)
start = resident()
pages = [client.create() for _ in range(4)]
for n, page in enumerate(pages):
    client.map(base + n * PAGE_BYTES, page)
ctypes.memset(base, 1, 4 * PAGE_BYTES)
assert resident() - start >= 4 * PAGE_BYTES
assert held() == 4 * PAGE_BYTES
assert client.memory() == (4 * PAGE_BYTES, 8 * PAGE_BYTES)
for page in pages:
    client.release(page)
assert client.memory()[0] == 4 * PAGE_BYTES, "memory that is still mapped is still used"
assert ctypes.string_at(base, 1) == b"\\x01"
client.unmap(base, 4 * PAGE_BYTES)
assert held() == 0
assert resident() - start < PAGE_BYTES
assert client.memory()[0] == 8 * PAGE_BYTES
client.free(base, 4 * PAGE_BYTES)
print("ok")
"""
    assert run(library, code) == "ok"


def test_a_full_device_refuses_and_serves_again_after_a_release(library: Path) -> None:
    """Running out is an error with numbers, changes nothing, and ends with the next release."""
    code = """
pages = [client.create() for _ in range(8)]
print(refused(client.create))
assert client.memory()[0] == 0
assert device_info().processes[0].refused_creates == 1
client.release(pages.pop())
assert client.create()
"""
    text = run(library, code)
    assert text.startswith(f"{OUT_OF_MEMORY} ") and "0.0 MiB of 16.0 MiB" in text and "2.0 MiB are needed" in text


def test_processes_share_one_device(library: Path) -> None:
    """Free memory is one number for all processes that name the device, and devices of other names are apart."""
    holder = holding(library, "page = client.create(4 * PAGE_BYTES)")
    assert run(library, "print(client.memory()[0] // PAGE_BYTES)") == "4"
    other = "os.environ['KVCACHED_HOSTVMM_DEVICE'] += '-other'\nprint(client.memory()[0] // PAGE_BYTES)"
    assert run(library, other) == "8"
    found = device_info()
    assert [use.created_bytes for use in found.processes] == [4 * PAGE_BYTES]
    assert found.processes[0].pid == holder.process.pid
    holder.finish("\n")
    assert device_info().free_bytes == 8 * PAGE_BYTES


def test_the_memory_of_a_killed_process_comes_back(library: Path) -> None:
    """No cleanup runs in a killed process; its share is free for the next one all the same."""
    holder = holding(library, "page = client.create(8 * PAGE_BYTES)")
    waiter = Script(library, "input()\nclient.create(8 * PAGE_BYTES)\nprint(len(device_info().processes))")
    holder.kill()
    assert device_info().processes == ()
    assert waiter.finish("\n") == "1"


def test_the_account_is_removed_by_the_last_process(library: Path) -> None:
    """Nothing is left in shared memory after a normal end."""
    first = holding(library, "client.init()")
    run(library, "client.init()")
    assert account_path().exists()
    first.finish("\n")
    assert not account_path().exists()


def test_two_sizes_of_one_device_are_refused(library: Path) -> None:
    """A device has one size; the error names both and the way out."""
    holder = holding(library, "client.init()")
    text = run(library, "os.environ['KVCACHED_HOSTVMM_GIB'] = '1'\nprint(refused(client.init))")
    assert text.startswith(f"{INVALID_VALUE} ")
    assert all(one in text for one in ("16.0 MiB", "1024.0 MiB", "KVCACHED_HOSTVMM_DEVICE"))
    holder.finish("\n")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "four", "4GiB", "0.0001"])
def test_the_library_refuses_the_sizes_that_the_package_refuses(library: Path, text: str) -> None:
    """The size is read in both; a value must not mean two things."""
    named = f"KVCACHED_HOSTVMM_GIB='{text}'"
    assert named in run(library, f"os.environ['KVCACHED_HOSTVMM_GIB'] = {text!r}\nprint(refused(client.init))")
    with pytest.raises(HostvmmError, match=named):
        capacity_bytes({"KVCACHED_HOSTVMM_GIB": text})


@pytest.mark.parametrize("gib", ["4", "0.1", "0.0625", "1.7"])
def test_the_library_and_the_package_agree_on_the_size(
    library: Path, monkeypatch: pytest.MonkeyPatch, gib: str
) -> None:
    """hipMemGetInfo's total is the package's capacity, to the byte."""
    monkeypatch.setenv("KVCACHED_HOSTVMM_GIB", gib)
    assert int(run(library, "print(client.memory()[1])")) == device_info().capacity_bytes


def test_a_forked_child_inherits_nothing(library: Path) -> None:
    """It counts for itself, cannot free the parent's memory, and does not keep it after the parent let go."""
    code = f"""
base = client.reserve(PAGE_BYTES)
page = client.create()
client.map(base, page)
ctypes.memset(base, 5, PAGE_BYTES)
child = os.fork()
if child == 0:
    assert refused(lambda: client.release(page)).startswith("{INVALID_HANDLE} ")
    own = client.create()
    assert client.memory()[0] == 6 * PAGE_BYTES
    assert not any("memfd:kvcached" in line and f"{{base:x}}" in line for line in open("/proc/self/maps"))
    os._exit(17)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert client.memory()[0] == 7 * PAGE_BYTES
print(ctypes.string_at(base, 1)[0])
"""
    assert run(library, code) == "5"


def test_an_unmapped_address_faults(library: Path) -> None:
    """Reserved is not accessible: a read past the mapped pages ends the process, as on a GPU."""
    script = Script(library, "base = client.reserve(PAGE_BYTES)\nctypes.string_at(base, 1)")
    script.process.communicate(timeout=60)
    assert script.process.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        ("client.map(base, page); client.map(base, page)", INVALID_VALUE),
        ("client.map(base + 4 * PAGE_BYTES, page)", INVALID_VALUE),
        ("client.map(base + 4096, page)", INVALID_VALUE),
        ("client.map(base, page, 2 * PAGE_BYTES)", INVALID_VALUE),
        ("client.unmap(base)", INVALID_VALUE),
        ("client.map(base, page); client.unmap(base, 2 * PAGE_BYTES)", INVALID_VALUE),
        ("client.map(base, page); client.free(base, 4 * PAGE_BYTES)", INVALID_VALUE),
        ("client.free(base, PAGE_BYTES)", INVALID_VALUE),
        ("client.release(page); client.release(page)", INVALID_HANDLE),
        ("client.release(page); client.map(base, page)", INVALID_HANDLE),
        ("client.create(PAGE_BYTES + 4096)", INVALID_VALUE),
        ("client.reserve(4096)", INVALID_VALUE),
        ("client.create(device=16)", 101),
    ],
)
def test_a_mistake_is_refused_and_changes_nothing(library: Path, mistake: str, code: int) -> None:
    """The checks a GPU driver makes; without them a bug in the caller would look like success here only."""
    script = f"""
base = client.reserve(4 * PAGE_BYTES)
page = client.create()
try:
    {mistake}
except RuntimeFailure as error:
    print(error.code, client.memory()[0] // PAGE_BYTES)
"""
    released = "client.release" in mistake
    assert run(library, script) == f"{code} {8 if released else 7}"


def test_thousands_of_pages_need_one_descriptor(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of open files does not bound the pool."""
    monkeypatch.setenv("KVCACHED_HOSTVMM_GIB", "0.5")
    code = """
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
base = client.reserve(200 * PAGE_BYTES)
for n in range(200):
    client.map(base + n * PAGE_BYTES, client.create())
print("ok")
"""
    assert run(library, code) == "ok"


def test_too_few_allowed_mappings_are_named_with_what_is_needed(library: Path) -> None:
    """Every page is a mapping of its own; the kernel's refusal names the setting, its value and the one needed."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit}: filling it takes too long")
    code = f"""
pages = {limit} + 1000
base = client.reserve(pages * PAGE_BYTES)
zero = client.create()
mapped = 0
try:
    while True:
        client.map(base + mapped * PAGE_BYTES, zero)
        mapped += 1
except RuntimeFailure as error:
    assert error.code == {OPERATING_SYSTEM}, error.code
    print(mapped, error)
"""
    mapped, text = run(library, code).split(" ", 1)
    assert int(mapped) > limit - 1000
    assert f"all {limit} memory mappings" in text
    assert "vm.max_map_count" in text
    remedy = int(text.rsplit("vm.max_map_count=", 1)[1])
    assert remedy > limit + 1000


def test_too_little_address_space_is_named(library: Path) -> None:
    """A reservation that the process may not have is an error that names the limit."""
    limit = "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
    text = run(library, limit + "print(refused(lambda: client.reserve(1 << 40)))")
    assert text.startswith(f"{OUT_OF_MEMORY} ") and "ulimit -v" in text


def test_a_reservation_takes_no_memory_and_honours_the_wished_address(library: Path) -> None:
    """Address space far beyond the device is free of charge."""
    code = """
base = client.reserve(1 << 40, 0x1f0000000000)
print(hex(base), client.memory()[0] // PAGE_BYTES)
"""
    assert run(library, code) == "0x1f0000000000 8"


def test_the_reader_counts_what_the_library_did(library: Path) -> None:
    """device_info in another process sees creates, maps, unmaps and sizes."""
    code = """
base = client.reserve(2 * PAGE_BYTES)
page = client.create(); client.map(base, page); client.map(base + PAGE_BYTES, page); client.unmap(base)
"""
    script = holding(library, code)
    (use,) = device_info().processes
    assert (use.created_bytes, use.mapped_bytes) == (PAGE_BYTES, PAGE_BYTES)
    assert (use.creates, use.releases, use.maps, use.unmaps) == (1, 0, 2, 1)
    script.finish("\n")


def test_threads_share_the_process_state_without_losing_counts(library: Path) -> None:
    """kvcached maps from its engine, its listener and its reserve thread at once."""
    code = """
import threading
base = client.reserve(8 * PAGE_BYTES)
def work(n):
    for _ in range(200):
        page = client.create()
        client.map(base + n * PAGE_BYTES, page)
        client.unmap(base + n * PAGE_BYTES)
        client.release(page)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
use = device_info().processes[0]
print(client.memory()[0] // PAGE_BYTES, use.creates, use.releases, use.maps, use.unmaps)
"""
    assert run(library, code) == "8 1600 1600 1600 1600"
