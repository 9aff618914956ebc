# SPDX-License-Identifier: Apache-2.0
"""What NIXL itself keeps of peers that are killed: an agent without vLLM and without this package's connector.

An agent meets a peer, READs from it, and removes it when it has been killed; a new one follows. Its process is read
after each. In one arm it also READs from a peer that has been killed, in another one it is made anew for each peer.
``python -m experiments.lease_recovery.nixl_alone ROUNDS`` writes the readings as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import random
import subprocess
import sys
from typing import Any

import numpy as np

from experiments.bench.plain import Plain, share_cores
from experiments.common.servers import REPOSITORY
from experiments.lease_recovery.growth import Reading, held_by

BYTES = 1 << 16
MOST_READS = 400
KILLED, IN_FLIGHT, ANEW = "peers are killed", "killed with READs posted", "own agent is made anew"


def _memory() -> tuple[Any, Any]:
    """Return memory and where it is, as NIXL wants it: rows of address and length."""
    memory = np.zeros(BYTES, dtype=np.uint8)
    return memory, np.array([(memory.ctypes.data, BYTES)], dtype=np.uint64)


def _peer(pipe: Any) -> None:
    memory, there = _memory()
    plain = Plain(memory.ctypes.data, BYTES)
    pipe.send((plain.metadata(), there))
    pipe.recv()


def _measured(pipe: Any, arm: str) -> None:
    memory, here = _memory()
    plain = Plain(memory.ctypes.data, BYTES)
    while True:
        metadata, there, reads = pipe.recv()
        if arm == ANEW:
            del plain
            plain = Plain(memory.ctypes.data, BYTES)
        plain.meet(metadata)
        for _ in range(reads):
            plain.finish(plain.post("READ", here, there))
        pipe.send("read")
        pipe.recv()
        if arm == IN_FLIGHT:
            # NIXL raises a class of its own for each status, without a common base.
            with contextlib.suppress(Exception):
                plain.finish(plain.post("READ", here, there))
        plain.leave()
        pipe.send("left")


def _started(target: Any, *more: str) -> tuple[Any, Any]:
    """Return a forked process and its pipe; forked, because importing NIXL takes seconds."""
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=target, args=(far, *more), daemon=True)
    process.start()
    far.close()
    return process, near


def measure(arm: str, rounds: int) -> list[Reading]:
    """Return a reading after each peer. ``hand_overs`` are READs."""
    draw, reads, readings = random.Random(3), 0, []
    measured, pipe = _started(_measured, arm)
    for number in range(1, rounds + 1):
        peer, of_peer = _started(_peer)
        some = draw.randrange(MOST_READS)
        pipe.send((*of_peer.recv(), some))
        pipe.recv()
        peer.kill()
        peer.join()
        pipe.send("killed")
        pipe.recv()
        reads += some
        readings.append(Reading(reads, number, held_by(measured.pid)))
    measured.kill()
    return readings


def run(rounds: int) -> dict[str, list[Reading]]:
    """Measure in a process of its own, which imports NIXL; returns the readings by their name."""
    command = [sys.executable, "-m", __name__, str(rounds)]
    found = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True).stdout
    arms = json.loads(found.splitlines()[-1])
    return {f"NIXL alone: {arm}": [Reading(**one) for one in some] for arm, some in arms.items()}


if __name__ == "__main__":
    # Imported before any process is forked.
    import nixl._api

    assert nixl._api
    share_cores()
    found = {arm: measure(arm, int(sys.argv[1])) for arm in (KILLED, IN_FLIGHT, ANEW)}
    print(json.dumps({arm: [dataclasses.asdict(one) for one in some] for arm, some in found.items()}))
