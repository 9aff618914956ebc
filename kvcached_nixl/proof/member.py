# SPDX-License-Identifier: Apache-2.0
"""One of the two processes of a lane, with memory, a NIXL agent, and a pipe over which the prover sends it commands.

It takes the same steps as a server, in the same order and on the same kinds of threads. The main thread stands for the
engine's thread: it selects the device, makes the agent, allocates memory and registers it. A second thread stands for
the transfer thread: it selects the device, connects to the peer and moves bytes. UCX's choice depends on both.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvcached_nixl.current_device import select
from kvcached_nixl.proof.lanes import ucx_of_this_process
from kvcached_nixl.proof.result import Question, Ucx
from kvcached_nixl.transport.agent import (
    Operation,
    Ranges,
    TransferState,
    Transport,
    TransportError,
    make_agent,
    register,
)

PAGE_BYTES = 2 << 20
PAGES = 4
SMALL_BYTES = 4096
BEGIN_SECONDS = 60.0
"""Timeout until a member has memory and an agent: the first use of a device or of UCX may take most of a minute."""
ANSWER_SECONDS = 10.0

MIXED = ((1 << 20, 1), (64 << 10, 8), (4096, 64), (512, 128), (192 << 10, 1))
"""(bytes, count) of a page's descriptors when bytes are compared: UCX moves long and short descriptors in different
ways, and KV has both."""

_PR_SET_PDEATHSIG = 1

Place = str
"""``elastic``: kvcached's pages, mapped or not; ``ordinary``: other memory of the device; ``host``: host memory."""


class MemberAnswer(Exception):
    """A member reported a failure, or did not answer. The message gives the reason."""


def move(
    transport: Transport,
    operation: Operation,
    peer: str,
    local: Ranges,
    remote: Ranges,
    within_seconds: float,
    *,
    is_host: bool = False,
) -> float:
    """Make one transfer, and wait for its end. Returns its duration in seconds.

    Raises:
        TransportError: it was not posted, or has failed.
        TimeoutError: it did not end within ``within_seconds``.
    """
    what = f"a {operation} of {int(remote[:, 1].sum())} bytes in {len(remote)} descriptors"
    begun = time.perf_counter()
    handle = transport.post(operation, peer, local, remote, is_host=is_host)
    while (state := transport.state(handle)) is TransferState.IN_FLIGHT:
        if time.perf_counter() - begun > within_seconds:
            raise TimeoutError(f"{what} did not end")
    if state is TransferState.FAILED:
        raise TransportError(f"{what} failed")
    transport.release(handle)
    return time.perf_counter() - begun


class Member:
    """The commands of a member. All of them run in the forked process."""

    def __init__(self, question: Question, transports: str) -> None:
        if transports:
            os.environ["UCX_TLS"] = transports
        # Without this it is not known which transport carried the bytes.
        os.environ["UCX_PROTO_INFO"] = "y"
        import torch

        # A fork has none of torch's threads, and two members with their agents already use more than two cores.
        torch.set_num_threads(1)
        self._torch = torch
        self._question = question
        device = question.device, question.device_index
        select(*device)
        self._agent = make_agent(question.backends)
        self._transport = Transport(self._agent, question.memory_type, question.device_index)
        self._transfers = ThreadPoolExecutor(1, "transfers", initializer=select, initargs=device)
        self._memory: dict[Place, Any] = {}
        self._peer = ""

    def ucx(self) -> Ucx:
        return ucx_of_this_process()

    def open(self, *, elastic: bool) -> dict[Place, int]:
        """Allocate memory. Returns the address of each place."""
        if elastic:
            from kvcached import vmm_ops

            # kvcached calls its device cuda:N on host memory, too.
            device = f"cuda:{self._question.device_index}"
            vmm_ops.init_kvcached(device, PAGE_BYTES, False)
            (pool,) = vmm_ops.create_kv_tensors(2 * PAGES * PAGE_BYTES, 1, device, 1)
            self._memory["elastic"] = pool.view(self._torch.uint8)[: PAGES * PAGE_BYTES]
        for place, where in (("ordinary", self._question.torch_device), ("host", "cpu")):
            self._memory[place] = self._torch.zeros(PAGES * PAGE_BYTES, dtype=self._torch.uint8, device=where)
        return {place: memory.data_ptr() for place, memory in self._memory.items()}

    def map(self, pages: list[int]) -> None:
        from kvcached import vmm_ops

        vmm_ops.map_to_kv_tensors([page * PAGE_BYTES for page in pages])

    def unmap(self, pages: list[int]) -> None:
        from kvcached import vmm_ops

        vmm_ops.unmap_from_kv_tensors([page * PAGE_BYTES for page in pages])

    def register(self) -> bytes:
        """Register all memory, mapped or not. Returns the agent's metadata for the other member."""
        for place, memory in self._memory.items():
            kind = "DRAM" if place == "host" else self._question.memory_type
            index = 0 if place == "host" else self._question.device_index
            register(self._agent, [(memory.data_ptr(), PAGES * PAGE_BYTES)], self._question.backends, kind, index)
        return self._transport.metadata()

    def meet(self, metadata: bytes) -> None:
        added = self._transfers.submit(self._transport.add_peer, metadata, self._question.device_index)
        self._peer = added.result()

    def fill(self, place: Place, page: int, value: int) -> None:
        self._page(place, page).fill_(value)
        self._synchronize()

    def holds(self, place: Place, page: int, value: int) -> bool:
        self._synchronize()
        return bool((self._page(place, page) == value).all())

    def move(
        self, operation: Operation, here: Place, there: int, pages: list[int], sizes: Sequence[tuple[int, int]] = ()
    ) -> float:
        """Transfer between the same pages of this member's memory and the other member's, which begins at ``there``.

        Args:
            sizes: (bytes, count) of a page's descriptors; by default one descriptor per page.

        Returns: the duration in seconds.
        """
        lengths = np.repeat(*np.array(sizes).T) if sizes else np.array([PAGE_BYTES])
        rows = np.stack((np.cumsum(lengths) - lengths, lengths), axis=1)
        rows = np.concatenate([rows + (page * PAGE_BYTES, 0) for page in pages]).astype(np.int64)
        local, remote = (rows + (base, 0) for base in (self._memory[here].data_ptr(), there))
        ways = self._transport, operation, self._peer, local, remote, ANSWER_SECONDS / 2
        return self._transfers.submit(move, *ways, is_host=here == "host").result()

    def _page(self, place: Place, page: int) -> Any:
        return self._memory[place][page * PAGE_BYTES : (page + 1) * PAGE_BYTES]

    def _synchronize(self) -> None:
        if self._question.device != "cpu":
            self._torch.accelerator.synchronize()


class Remote:
    """The prover's handle of a member."""

    def __init__(self, question: Question, transports: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        # Not a pipe: it would fill up and block the member, because nothing reads it meanwhile.
        self._said = os.memfd_create("said")
        self._process = context.Process(
            target=_serve, args=(theirs, self._pipe, self._said, question, transports), daemon=True
        )
        self._process.start()
        theirs.close()
        self._seconds = BEGIN_SECONDS

    def end(self) -> None:
        """Kill the process, so that a hanging member does not block the prover."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        os.close(self._said)

    @property
    def said(self) -> str:
        """What the member and its libraries have written to standard output and error."""
        return os.pread(self._said, os.fstat(self._said).st_size, 0).decode(errors="replace")

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Send a command and wait for the result.

        Raises:
            MemberAnswer: the member failed, ended, or did not answer in time.
        """
        self.tell(name, *arguments, **options)
        return self.answer()

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        self._told = name
        try:
            self._pipe.send((name, arguments, options))
        except OSError as error:
            raise MemberAnswer(f"the process ended before {name}") from error

    def answer(self) -> Any:
        """Wait for the result of the last command; raises as `call` does."""
        try:
            if not self._pipe.poll(self._seconds):
                raise MemberAnswer(f"{self._told} did not end within {self._seconds:g} s")
            failed, answer = self._pipe.recv()
            self._seconds = ANSWER_SECONDS
        except (EOFError, OSError) as error:
            raise MemberAnswer(f"the process ended in {self._told}") from error
        if failed:
            raise MemberAnswer(failed)
        return answer


def _serve(pipe: Connection, theirs: Connection, said: int, question: Question, transports: str) -> None:
    # If the prover is killed, nothing else ends this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    theirs.close()
    os.dup2(said, 1)
    os.dup2(said, 2)
    member: list[Member] = []

    def do(name: str) -> Callable[..., Any]:
        if not member:
            member.append(Member(question, transports))
        return getattr(member[0], name)  # type: ignore[no-any-return]

    while True:
        try:
            name, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = "", do(name)(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - the prover is told, and records it
            answer = traceback.format_exception_only(error)[-1].strip(), None
        pipe.send(answer)
