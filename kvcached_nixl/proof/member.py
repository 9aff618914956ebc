# SPDX-License-Identifier: Apache-2.0
"""One of the two processes of a lane: memory, a NIXL agent, and a pipe by which it is told what to do."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvcached_nixl.proof.lanes import ucx_lanes
from kvcached_nixl.proof.result import Question
from kvcached_nixl.transport.agent import NixlTransport, make_agent
from kvcached_nixl.transport.base import Operation, Ranges, State

__all__ = ["PAGES", "PAGE_BYTES", "Answered", "Member", "Remote"]

PAGE_BYTES = 2 << 20
PAGES = 4
SMALL_BYTES = 4096
ANSWER_SECONDS = 10.0

Place = str
"""``elastic``: kvcached's pages, backed or not; ``ordinary``: other memory of the device; ``host``: the host's."""


class Answered(Exception):
    """A member has answered that it failed, or not at all; in words."""


class Member:
    """What a member does when it is told. All of it in the forked process."""

    def __init__(self, question: Question, transports: str) -> None:
        if transports:
            os.environ["UCX_TLS"] = transports
        import torch

        # A fork has none of torch's threads, and two members and their agents are more than two cores already.
        torch.set_num_threads(1)
        self._torch = torch
        self._question = question
        self._agent = make_agent(question.backends)
        self._transport = NixlTransport(self._agent, question.memory_type, question.device_index)
        self._device = question.device if question.device == "cpu" else f"{question.device}:{question.device_index}"
        self._memory: dict[Place, Any] = {}
        self._peer = ""

    def lanes(self) -> tuple[str, ...]:
        """What UCX could choose."""
        return ucx_lanes()

    def open(self, *, elastic: bool) -> dict[Place, int]:
        """Get memory; where each place begins."""
        if elastic:
            from kvcached import vmm_ops

            # kvcached's own word for a device, on host memory, too.
            device = f"cuda:{self._question.device_index}"
            vmm_ops.init_kvcached(device, PAGE_BYTES, False)
            (pool,) = vmm_ops.create_kv_tensors(2 * PAGES * PAGE_BYTES, 1, device, 1)
            self._memory["elastic"] = pool.view(self._torch.uint8)[: PAGES * PAGE_BYTES]
        for place, where in (("ordinary", self._device), ("host", "cpu")):
            self._memory[place] = self._torch.zeros(PAGES * PAGE_BYTES, dtype=self._torch.uint8, device=where)
        return {place: memory.data_ptr() for place, memory in self._memory.items()}

    def map(self, pages: list[int]) -> None:
        from kvcached import vmm_ops

        vmm_ops.map_to_kv_tensors([page * PAGE_BYTES for page in pages])

    def unmap(self, pages: list[int]) -> None:
        from kvcached import vmm_ops

        vmm_ops.unmap_from_kv_tensors([page * PAGE_BYTES for page in pages])

    def register(self) -> bytes:
        """Register everything, whatever is mapped; what the other one needs to know."""
        for place, memory in self._memory.items():
            kind = "DRAM" if place == "host" else self._question.memory_type
            index = 0 if place == "host" else self._question.device_index
            rows = self._agent.get_reg_descs([(memory.data_ptr(), PAGES * PAGE_BYTES, index, "")], kind)
            self._agent.register_memory(rows, backends=list(self._question.backends))
        return self._transport.metadata()

    def meet(self, metadata: bytes) -> None:
        self._peer = self._transport.add_peer(metadata, self._question.device_index)

    def fill(self, place: Place, page: int, value: int) -> None:
        self._page(place, page).fill_(value)
        self._synchronize()

    def holds(self, place: Place, page: int, value: int) -> bool:
        self._synchronize()
        return bool((self._page(place, page) == value).all())

    def move(self, operation: Operation, here: Place, there: int, pages: list[int], *, is_small: bool = False) -> float:
        """Between the same pages of one's own memory and of the other's, which begins at ``there``; takes seconds."""
        step = SMALL_BYTES if is_small else PAGE_BYTES
        offsets = np.concatenate([np.arange(page * PAGE_BYTES, (page + 1) * PAGE_BYTES, step) for page in pages])
        local, remote = (_ranges(base + offsets, step) for base in (self._memory[here].data_ptr(), there))
        begun = time.perf_counter()
        handle = self._transport.post(operation, self._peer, local, remote, is_host=here == "host")
        while (state := self._transport.state(handle)) is State.IN_FLIGHT:
            if time.perf_counter() - begun > ANSWER_SECONDS / 2:
                raise TimeoutError(f"a {operation} of {len(pages)} pages did not end")
        if state is State.FAILED:
            raise OSError(f"a {operation} of {len(pages)} pages failed")
        self._transport.release(handle)
        return time.perf_counter() - begun

    def _page(self, place: Place, page: int) -> Any:
        return self._memory[place][page * PAGE_BYTES : (page + 1) * PAGE_BYTES]

    def _synchronize(self) -> None:
        if self._question.device != "cpu":
            self._torch.accelerator.synchronize()


class Remote:
    """A member, from the prover's side."""

    def __init__(self, question: Question, transports: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, question, transports), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        """Nothing of it is wanted any more; a hanging one does not hold anybody up."""
        self._process.kill()
        self._process.join()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Have it do one thing, and wait.

        Raises:
            Answered: it failed, ended, or did not answer in time.
        """
        self.tell(name, *arguments, **options)
        return self.answer()

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Have it begin one thing."""
        self._told = name
        try:
            self._pipe.send((name, arguments, options))
        except OSError as cause:
            raise Answered(f"the process ended before {name}") from cause

    def answer(self) -> Any:
        """Of what it was told last; raises as `call`."""
        try:
            if not self._pipe.poll(ANSWER_SECONDS):
                raise Answered(f"{self._told} did not end within {ANSWER_SECONDS:g} s")
            failed, answer = self._pipe.recv()
        except (EOFError, OSError) as cause:
            raise Answered(f"the process ended in {self._told}") from cause
        if failed:
            raise Answered(failed)
        return answer


def _serve(pipe: Connection, question: Question, transports: str) -> None:
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
        except Exception as cause:  # noqa: BLE001 - the prover is told, and records it
            answer = traceback.format_exception_only(cause)[-1].strip(), None
        pipe.send(answer)


def _ranges(begins: Any, length: int) -> Ranges:
    return np.stack((begins, np.full(len(begins), length)), axis=1).astype(np.int64)
