# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode node, and transfers between them, one arm after the other."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from experiments.common.servers import ServerError
from experiments.transfer_rate.arms import ARMS, Arm, Load, Over, Sample
from experiments.transfer_rate.node import serve
from kvcached_nixl.transport.base import Operation

ANSWER_SECONDS = 180.0


class Remote:
    """Calls methods of a node in another process: ``remote(method, *values)``."""

    def __init__(self, over: Over, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, dict(over.environment), *arguments), daemon=True)
        self._process.start()
        far.close()

    def __call__(self, method: str, *values: Any) -> Any:
        self._connection.send((method, values))
        try:
            if not self._connection.poll(ANSWER_SECONDS):
                raise ServerError(f"{method}: no answer within {ANSWER_SECONDS:g} s")
            is_done, answer = self._connection.recv()
        except EOFError as cause:
            raise ServerError(f"{method}: the node has ended") from cause
        if not is_done:
            raise ServerError(f"{method}: {answer}")
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


@dataclass(frozen=True)
class Pair:
    """Two connected nodes. ``mover`` is the side that READs or WRITEs."""

    prefill: Remote
    decode: Remote
    transport: str
    direction: str
    layout: str

    @property
    def mover(self) -> Remote:
        return self.decode if self.direction == "pull" else self.prefill

    @property
    def operation(self) -> Operation:
        return "READ" if self.direction == "pull" else "WRITE"

    def drawn(self, name: str) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return blocks of the mover and of the other side, and then blocks of decode and of prefill."""
        theirs, ours = self.prefill("draw", name), self.decode("draw", name)
        return (ours, theirs, ours, theirs) if self.direction == "pull" else (theirs, ours, ours, theirs)

    def sample(self, arm: Arm, number: int) -> Sample:
        """Transfer everything once, with ``arm``."""
        name = f"cmpl-{number:08x}-0-{number:08x}"
        parts: dict[str, float] = {}
        if arm.is_ours:
            params = self.prefill("offer", name)
            self.mover("take_parts")
            with self._computing(arm) as pieces:
                begun, reported = self.decode("fetch", f"decode-{name}", params, arm.computing)
            seconds, parts = reported - begun, self.mover("take_parts")
            descriptors = 0
            self.prefill("end", name)
        else:
            here, there, ours, theirs = self.drawn(name)
            with self._computing(arm) as pieces:
                seconds, descriptors = self.mover("move", self.operation, here, there, arm.batched)
            self.decode("check", ours, theirs)
        return Sample(self.transport, self.direction, self.layout, arm.name, seconds, descriptors, parts, tuple(pieces))

    def hold_seconds(self) -> float:
        """Return how long posting one of this package's batches blocks the interpreter."""
        here, there, _, _ = self.drawn("hold")
        found: float = self.mover("hold", self.operation, here, there)
        return found

    @contextmanager
    def _computing(self, arm: Arm) -> Iterator[list[float]]:
        """Let both engines compute if ``arm`` does; afterwards the list has the times of the mover's pieces of work."""
        pieces: list[float] = []
        sides = (self.prefill, self.decode) if arm.computing else ()
        for side in sides:
            side("compute", True)
        try:
            yield pieces
        finally:
            for side in sides:
                found = side("compute", False)
                if side is self.mover:
                    pieces += found


@contextmanager
def pair(over: Over, direction: str, layout: str, load: Load) -> Iterator[Pair]:
    """Yield two connected nodes."""
    nodes = [
        Remote(over, name, direction, layout, load.tokens, seed) for seed, name in enumerate(("prefill", "decode"))
    ]
    try:
        known = [node("introduce") for node in nodes]
        for node, far in zip(nodes, reversed(known), strict=True):
            node("meet", far)
        yield Pair(nodes[0], nodes[1], over.name, direction, layout)
    finally:
        for node in nodes:
            node.close()


def measure(
    over: Over, direction: str, layout: str, load: Load, say: Callable[[str], None]
) -> tuple[list[Sample], float]:
    """Measure all arms in turn for ``load.rounds``, after a round that does not count; and `Pair.hold_seconds`."""
    samples: list[Sample] = []
    with pair(over, direction, layout, load) as made:
        for turn in range(load.rounds + 1):
            # A different arm is first in each round.
            for place in range(len(ARMS)):
                arm = ARMS[(turn + place) % len(ARMS)]
                sample = made.sample(arm, turn * len(ARMS) + place)
                if turn:
                    samples.append(sample)
        held = made.hold_seconds()
    for arm in ARMS:
        seconds = statistics.median(one.seconds for one in samples if one.arm == arm.name)
        say(f"{over.name}, {direction}, {layout}: {arm.name} {load.num_bytes / seconds / 1e9:.2f} GB/s")
    return samples, held
