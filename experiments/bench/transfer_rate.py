# SPDX-License-Identifier: Apache-2.0
"""Which fraction of plain NIXL's rate does a long hand-over reach, with the same bytes in the same descriptors?"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from experiments.bench.node import BLOCK_BYTES, BLOCK_SIZE, LAYOUTS, serve
from experiments.bench.pairs import in_turn
from experiments.bench.samples import Answer, Column, Run, Samples, Setting, percentile
from experiments.common.command_line import MODES
from experiments.common.report import Verdict
from experiments.common.servers import ServerError
from kvcached_nixl.transport.agent import Operation

ANSWER_SECONDS = 180.0
TRANSPORTS: Mapping[str, Mapping[str, str]] = {"shared memory": {}, "TCP": {"UCX_TLS": "tcp"}}
"""By environment variables that UCX reads."""
TOKENS, ROUNDS, QUICK_TOKENS, QUICK_ROUNDS = 65_536, 5, 8_192, 3
LEAST_SHARE, LEAST_COMPUTING_SHARE, MOST_PIECE_RATIO, MOST_HOLD_SECONDS = 0.9, 0.8, 1.02, 0.001


@dataclass(frozen=True)
class Arm:
    name: str
    is_ours: bool = False
    computing: bool = False


PLAIN, OURS = Arm("plain NIXL"), Arm("hand-over", is_ours=True)
PLAIN_COMPUTING = Arm("plain NIXL, engine computing", computing=True)
OURS_COMPUTING = Arm("hand-over, engine computing", is_ours=True, computing=True)
ARMS = (PLAIN, OURS, OURS_COMPUTING, PLAIN_COMPUTING)


def answer(run: Run) -> Answer:
    """Measure every transport, direction and layout."""
    tokens, rounds = (QUICK_TOKENS, QUICK_ROUNDS) if run.quick else (TOKENS, run.rounds or ROUNDS)
    num_bytes = tokens // BLOCK_SIZE * BLOCK_BYTES
    samples, held = Samples(("{}", "{}", "{}")), {}
    for setting in itertools.product(TRANSPORTS, MODES, LAYOUTS):
        if run.only in ", ".join(setting):
            held[setting] = measure(run, samples, setting, tokens, rounds)
            for arm in samples.arms:
                rate = num_bytes / samples.median(setting, arm, "seconds") / 1e9
                run.tell(f"{samples.words(setting)}: {arm} {rate:.2f} GB/s")
    title = f"{tokens:,} tokens, {num_bytes / 2**20:.0f} MiB, NIXL of vLLM {run.vllm}"
    columns = (
        Column("GB/s", "seconds", 1, 2, lambda seconds: num_bytes / statistics.median(seconds) / 1e9),
        Column("ms", "seconds"),
        Column("engine, mean", "piece", digits=1, of=statistics.fmean),
        Column("p99", "piece", digits=1, of=percentile(99)),
    )
    content = {
        **{"tokens": tokens, "bytes": num_bytes, "samples": samples.as_json()},
        "held_seconds": {", ".join(setting): seconds for setting, seconds in held.items()},
    }
    table = samples.table(f"{title}; ms, medians of {rounds}", columns)
    return Answer([table], judge(samples, held), content)


# ------------------------------------------------------------------------------------------------------------ measuring


class Remote:
    """Calls methods of a node in another process: ``remote(method, *values)``."""

    def __init__(self, environment: Mapping[str, str], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, dict(environment), *arguments), daemon=True)
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
    direction: str

    @property
    def mover(self) -> Remote:
        return self.decode if self.direction == "pull" else self.prefill

    @property
    def operation(self) -> Operation:
        return "READ" if self.direction == "pull" else "WRITE"

    def sample(self, samples: Samples, setting: Setting, arm: Arm, number: int, *, counts: bool) -> None:
        """Transfer everything once, with ``arm``."""
        name = f"cmpl-{number:08x}-0-{number:08x}"
        if arm.is_ours:
            params = self.prefill("offer", name)
            with self._computing(arm) as pieces:
                begun, reported = self.decode("fetch", f"decode-{name}", params, arm.computing)
            seconds = reported - begun
            self.prefill("end", name)
        else:
            here, there, ours, theirs = self._drawn(name)
            with self._computing(arm) as pieces:
                seconds = self.mover("move", self.operation, here, there)
            self.decode("check", ours, theirs)
        if counts:
            samples.add(setting, arm.name, seconds=seconds)
            for piece in pieces:
                samples.add(setting, arm.name, piece=piece)

    def hold_seconds(self) -> float:
        """Return how long posting one of this package's batches blocks the interpreter."""
        here, there, _, _ = self._drawn("hold")
        found: float = self.mover("hold", self.operation, here, there)
        return found

    def _drawn(self, name: str) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return blocks of the mover and of the other side, and then blocks of decode and of prefill."""
        theirs, ours = self.prefill("draw", name), self.decode("draw", name)
        return (ours, theirs, ours, theirs) if self.direction == "pull" else (theirs, ours, ours, theirs)

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
def pair(setting: Setting, tokens: int) -> Iterator[Pair]:
    """Yield two connected nodes."""
    transport, direction, layout = setting
    environment = TRANSPORTS[transport]
    nodes = [
        Remote(environment, name, direction, layout, tokens, seed) for seed, name in enumerate(("prefill", "decode"))
    ]
    try:
        known = [node("introduce") for node in nodes]
        for node, far in zip(nodes, reversed(known), strict=True):
            node("meet", far)
        yield Pair(nodes[0], nodes[1], direction)
    finally:
        for node in nodes:
            node.close()


def measure(run: Run, samples: Samples, setting: Setting, tokens: int, rounds: int) -> float:
    """Measure all arms in turn, after a round that does not count; returns `Pair.hold_seconds`."""
    with pair(setting, tokens) as made:
        for turn in range(rounds + 1):
            run.show(f"{samples.words(setting)}: round {turn} of {rounds}")
            for place, arm in enumerate(in_turn(ARMS, turn)):
                made.sample(samples, setting, arm, turn * len(ARMS) + place, counts=turn > 0)
        return made.hold_seconds()


# -------------------------------------------------------------------------------------------------------------- judging


def judge(samples: Samples, held: Mapping[Setting, float]) -> list[Verdict]:
    """Return the targets. ``held``: by setting, how long one post blocks the interpreter."""
    rows = []
    for setting in samples.settings:
        words = samples.words(setting)
        for ours, plain, least, where in (
            (OURS, PLAIN, LEAST_SHARE, ""),
            (OURS_COMPUTING, PLAIN_COMPUTING, LEAST_COMPUTING_SHARE, ", engine computing"),
        ):
            times = [samples.values(setting, arm.name, "seconds") for arm in (plain, ours)]
            if all(times):
                share = statistics.median(times[0]) / statistics.median(times[1])
                target = f"{words}{where}: fraction of plain NIXL's rate (>= {least})"
                rows.append(Verdict(target, f"{share:.2f}", share >= least))
        rows += samples.compare(
            OURS_COMPUTING.name,
            PLAIN_COMPUTING.name,
            "piece",
            "the engine's pieces, beside a hand-over / beside plain NIXL, mean",
            most=MOST_PIECE_RATIO,
            of=statistics.fmean,
            where=lambda one, setting=setting: one == setting,  # type: ignore[misc]
        )
    for setting, seconds in held.items():
        target = f"{', '.join(setting)}: one post blocks the interpreter (<= {MOST_HOLD_SECONDS * 1e3:g} ms)"
        rows.append(Verdict(target, f"{seconds * 1e3:.2f} ms", seconds <= MOST_HOLD_SECONDS))
    return rows
