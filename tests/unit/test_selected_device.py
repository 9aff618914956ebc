# SPDX-License-Identifier: Apache-2.0
"""Rank 1 of 2 on a machine without a GPU: each of its threads selects device 1 before it does anything else.

torch's accelerator functions are replaced by recorders that note the calling thread. They refuse device operations on a
thread that has not selected the device, because such a call would create a context on device 0.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.kvcached_memory import Geometry
from support.memory_transport import Network
from support.worker_fakes import Asking
from unit.worker.test_build import Stock

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.proof import __main__ as prover
from kvcached_nixl.proof.result import Question
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.transport.agent import select_device
from kvcached_nixl.worker import facade as starting
from kvcached_nixl.worker.background import Work
from kvcached_nixl.worker.geometry.layout import Layout
from kvcached_nixl.worker.memory_registration import Registered
from kvcached_nixl.worker.transfer.slab import Slab

RANK_1 = torch.device("cuda", 1)
SECONDS = 10.0


class Platform:
    """Two devices, of which each thread has one of its own, at first device 0; and what each thread did, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.did: dict[str, list[str]] = defaultdict(list)
        self.broken = False
        self._own = threading.local()
        zeros, empty = torch.zeros, torch.empty

        def made(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if pin_memory:
                self.uses("pinned memory")
            if torch.device(options.get("device") or "cpu").type == "cpu":
                return zeros(*shape, **options)
            assert options["device"] == "cuda:1"
            self.uses("a context")
            return zeros(*shape)

        def unset(*shape: Any, **options: Any) -> torch.Tensor:
            if options.get("device") == RANK_1:
                self.uses("its memory")
                del options["device"]
            return empty(*shape, **options)

        patch.setattr(torch, "empty", unset)
        patch.setattr(torch.accelerator, "set_device_index", self.select)
        patch.setattr(torch, "zeros", made)
        patch.setattr(torch, "Stream", lambda device: Stream(self, device))
        patch.setattr(torch, "Event", lambda device: Event(self))

    def select(self, index: int) -> None:
        if self.broken:
            raise RuntimeError("no such device")
        self._own.index = index
        self.notes(f"selects {index}")

    def uses(self, what: str) -> None:
        """Something that belongs to the device."""
        self.notes(what)
        assert getattr(self._own, "index", 0) == 1, f"{what} on {threading.current_thread().name} is device 0's"

    def notes(self, what: str) -> None:
        self.did[threading.current_thread().name].append(what)


class Stream:
    def __init__(self, platform: Platform, device: torch.device) -> None:
        assert device == RANK_1
        self._platform = platform
        platform.uses("a stream")

    def __enter__(self) -> None:
        self._platform.uses("a stream begins")

    def __exit__(self, *_: object) -> None:
        self._platform.uses("a stream ends")

    def synchronize(self) -> None:
        self._platform.uses("a stream is waited for")


class Event:
    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def record(self) -> None:
        """In the stream of the engine's thread, whose device vLLM has selected."""

    def query(self) -> bool:
        self._platform.uses("an event is asked")
        return True


ANSWERS = {"get_agent_metadata": b"nixl", "get_new_notifs": {}, "initialize_xfer": "handle", "check_xfer_state": "DONE"}
QUIET = ("get_agent_metadata", "get_reg_descs", "get_xfer_descs", "transfer")


class Agent:
    """NIXL's, as far as a worker and a member of the prover use it: each other call uses the device."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **_: Any) -> Any:
            if name not in QUIET:
                # vLLM has selected the device of the thread that registers memory.
                (self._platform.notes if name == "register_memory" else self._platform.uses)(name)
            return ANSWERS.get(name, arguments[0] if arguments else None)

        return call


def stock(platform: Platform) -> Stock:
    """vLLM's worker, rank 1 of 2."""
    return Stock(agent=Agent(platform), memory_type="VRAM", device_id=1, kernel_blocks_per_block=1)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    return Platform(monkeypatch)


LAYERS = Geometry(num_pools=2).layers_of_groups()


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Layout:
    """In ordinary memory, which says that it is device 1's."""
    geometry = Geometry(num_pools=2)
    caches, _ = geometry.allocate()
    made = geometry.layout(caches)
    monkeypatch.setattr(Layout, "device", RANK_1)
    return made


@pytest.fixture
def new_threads() -> Iterator[Callable[[], set[str]]]:
    before = set(threading.enumerate())
    yield lambda: {one.name for one in threading.enumerate() if one not in before}


def test_a_thread_that_selects_has_the_context_too(platform: Platform) -> None:
    """Torch selects nothing where the device is the thread's already, so rank 0 would have no context."""
    select_device("cuda", 1)
    assert platform.did[threading.current_thread().name] == ["selects 1", "a context"]


def test_every_thread_of_a_worker_selects_its_device_first(
    platform: Platform, layout: Layout, new_threads: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer thread, which NIXL and events are asked on; those that copy and that digest, with their streams."""
    monkeypatch.setattr(starting, "open_gate", lambda *_: Network().open_gate("e"))
    slab = Slab(layout, 4, torch.device("cpu"))
    there, channel = Registered(layout, LAYERS, slab, "VRAM"), Asking()
    side = starting.build_worker(stock(platform), there, Settings(TransferMode.PULL), channel, Clock())
    (made,) = (name for name in platform.did if name.startswith("kvcached-nixl-slab"))
    assert platform.did[made] == ["selects 1", "a context", "pinned memory", "its memory"]
    names = new_threads()
    assert names == {"kvcached-nixl-transfer", "kvcached-nixl-copies", "kvcached-nixl-checksums"}
    # They have selected it when the worker has started: graphs are captured next.
    for name in names:
        assert platform.did[name][:2] == ["selects 1", "a context"], name
    context = side.thread._context
    staging = context.staging
    assert staging is not None
    copied, digested = threading.Event(), threading.Event()
    staging.copier.submit(Work("a copy", lambda: None, lambda *_: copied.set()))
    context.checksums.background.submit(Work("a digest", lambda: None, lambda *_: digested.set()))  # type: ignore[arg-type]
    assert copied.wait(SECONDS) and digested.wait(SECONDS)
    side.close()
    assert not channel.asked, "nobody is to be asked"
    assert "get_new_notifs" in platform.did["kvcached-nixl-transfer"]
    for name in ("kvcached-nixl-copies", "kvcached-nixl-checksums"):
        assert platform.did[name][2:] == ["a stream", "a stream begins", "a stream ends", "a stream is waited for"]


@pytest.mark.parametrize("staged", [False, True])
def test_a_device_that_cannot_be_selected_ends_the_start(platform: Platform, layout: Layout, staged: bool) -> None:
    """It raises in the worker that starts the thread; nothing waits for a thread that has ended."""
    slab = Slab(layout, 4, torch.device("cpu")) if staged else None
    platform.broken = True
    there = Registered(layout, LAYERS, slab)
    with pytest.raises(RuntimeError, match="no such device"):
        starting.build_worker(stock(platform), there, Settings(TransferMode.PULL), Asking(), Clock())


def test_a_member_of_the_prover_does_what_a_worker_does(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is made with the device selected; a peer is met, and bytes are moved, on another thread that has it."""

    def make_agent(backends: Any) -> Agent:
        platform.uses("an agent")
        return Agent(platform)

    monkeypatch.setattr(prover, "make_agent", make_agent)
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    threads = torch.get_num_threads()
    try:
        one = prover.Member(Question("cuda", 1, "VRAM", ("UCX",)), "", is_elastic=False, has_memory=True)
    finally:
        torch.set_num_threads(threads)
    one.register()
    one.meet(b"peer")
    one.move("READ", "ordinary", 0, [0], prover.MIXED)
    here = platform.did.pop(threading.current_thread().name)
    assert here[:3] == ["selects 1", "a context", "an agent"] and "register_memory" in here
    assert not {"add_remote_agent", "initialize_xfer", "check_xfer_state"} & set(here)
    (there,) = platform.did.values()
    moves = ("add_remote_agent", "initialize_xfer", "check_xfer_state", "release_xfer_handle")
    assert there == ["selects 1", "a context", *moves]
