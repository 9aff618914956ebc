# SPDX-License-Identifier: Apache-2.0
"""The experiment's arithmetic on both sides of its limits, its layouts, and two nodes in this process."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="a worker's half needs torch")

from experiments.bench.node import BLOCK_BYTES, BLOCK_SIZE, CONTIGUOUS, LAYOUTS, PAGE_BYTES, PLANES, Node, cut, planes
from experiments.bench.samples import Samples
from experiments.bench.timing import longest_hold
from experiments.bench.transfer_rate import ARMS, MOST_HOLD_SECONDS, OURS, OURS_COMPUTING, PLAIN, PLAIN_COMPUTING, judge
from experiments.common.memory_transport import Network
from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks, Route
from kvcached_nixl.worker.transfer.transfer_queue import Budget, TransferJob, TransferQueue

SETTING = ("shared memory", "pull", CONTIGUOUS)


def times(**of_arms: float) -> Samples:
    arms = {"plain": PLAIN, "ours": OURS, "plain_computing": PLAIN_COMPUTING, "ours_computing": OURS_COMPUTING}
    samples = Samples(("{}", "{}", "{}"))
    for name, seconds in of_arms.items():
        samples.add(SETTING, arms[name].name, seconds=seconds)
    return samples


@pytest.mark.parametrize(
    ("plain", "ours", "reached"), [(1.0, 1.0, True), (0.9, 1.0, True), (0.89, 1.0, False), (2.0, 1.0, True)]
)
def test_a_hand_over_is_judged_by_its_share_of_plain_nixls_rate(plain: float, ours: float, reached: bool) -> None:
    (verdict,) = judge(times(plain=plain, ours=ours), {})
    assert verdict.reached is reached


@pytest.mark.parametrize(("share", "piece", "expected"), [(0.8, 1.02, [True, True]), (0.79, 1.03, [False, False])])
def test_engines_that_compute_are_compared_with_engines_that_compute(
    share: float, piece: float, expected: list[bool]
) -> None:
    samples = times(plain_computing=share, ours_computing=1.0, ours=9.0)
    samples.add(SETTING, PLAIN_COMPUTING.name, piece=1.0)
    samples.add(SETTING, OURS_COMPUTING.name, piece=piece)
    assert [reached for _, _, reached in judge(samples, {})] == expected


@pytest.mark.parametrize(("seconds", "reached"), [(MOST_HOLD_SECONDS, True), (1.01 * MOST_HOLD_SECONDS, False)])
def test_how_long_a_post_keeps_the_interpreter_is_judged(seconds: float, reached: bool) -> None:
    (verdict,) = judge(times(), {SETTING: seconds})
    assert verdict.reached is reached


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scattered_block_is_as_many_descriptors_as_kvcached_makes_of_it(layout: str) -> None:
    """One, or one for each layer's K and V; neither joined with another block's nor cut."""
    here, there = planes(0, 10, layout), planes(1 << 30, 10, layout)
    found = Route(here, there).descriptors(KernelBlocks([1, 3, 5]), KernelBlocks([7, 2, 4]), 0, 3 * BLOCK_SIZE)
    a_block, length = (1, BLOCK_BYTES) if layout == CONTIGUOUS else (PLANES, PAGE_BYTES)
    assert len(found.local) == 3 * a_block
    assert set(found.local[:, 1].tolist()) == {length}
    assert found.local[:, 1].sum() == 3 * BLOCK_BYTES


@pytest.mark.parametrize("length", [4096, 1 << 18, 1 << 23])
def test_plain_nixl_is_cut_as_a_hand_over_is(length: int) -> None:
    """The batches that are compared are those that `TransferQueue` makes."""
    network = Network()
    one, other = network.agent("one"), network.agent("other")
    peer = one.add_peer(other.metadata())
    ranges = np.stack((np.arange(3000) * length, np.full(3000, length)), axis=1).astype(np.int64)
    budget = Budget(all_bytes=1 << 60, peer_bytes=1 << 60, peer_transfers=10_000)
    posting = TransferQueue(one, ManualClock(), lambda peer: None, budget=budget)
    posting.submit(TransferJob("READ", peer, ranges, ranges, lambda failed: None))
    posting.turn()
    posted = [len(one.local) for one in network.pending if one.local is not None]
    assert [rows.stop - rows.start for rows in cut(ranges[:, 1], budget)] == posted
    assert sum(posted) == 3000


def test_what_keeps_the_interpreter_is_told_from_what_does_not() -> None:
    """Summing a range keeps it, hashing does not; in the clearest of several, since a core may be busy otherwise."""
    numbers, some = range(1_000_000), b"x" * (32 << 20)

    def alone(action: object) -> float:
        begun = time.thread_time()
        assert callable(action)
        action()
        return time.thread_time() - begun

    def keeps() -> None:
        sum(numbers)

    def lets() -> None:
        hashlib.sha256(some).digest()

    assert max(longest_hold(keeps) for _ in range(5)) > 0.5 * min(alone(keeps) for _ in range(5))
    assert min(longest_hold(lets) for _ in range(10)) < 0.5 * min(alone(lets) for _ in range(5))


@pytest.fixture(params=["pull", "push"])
def direction(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=LAYOUTS)
def nodes(request: pytest.FixtureRequest, direction: str) -> Iterator[tuple[Node, Node]]:
    pytest.importorskip("nixl._api", reason="needs an environment: bash experiments/env.sh")
    made = [Node(name, direction, request.param, 512, seed) for seed, name in enumerate(("prefill", "decode"))]
    known = [node.introduce() for node in made]
    for node, far in zip(made, reversed(known), strict=True):
        node.meet(far)
    yield made[0], made[1]
    for node in made:
        node.close()


def test_two_nodes_hand_over_again_and_again(nodes: tuple[Node, Node]) -> None:
    """Decode compares what it received."""
    prefill, decode = nodes
    for number in range(3):
        params = prefill.offer(f"cmpl-{number}")
        begun, reported = decode.fetch(f"decode-{number}", params, False)
        prefill.end(f"cmpl-{number}")
        assert begun < reported < begun + 60


def test_plain_nixl_moves_the_same_and_its_bytes_are_compared(nodes: tuple[Node, Node], direction: str) -> None:
    prefill, decode = nodes
    theirs, ours = prefill.draw("one"), decode.draw("one")
    if direction == "pull":
        decode.move("READ", ours, theirs)
    else:
        prefill.move("WRITE", theirs, ours)
    decode.check(ours, theirs)
    with pytest.raises(RuntimeError):
        decode.check(ours, theirs[1:] + theirs[:1])


def test_an_engine_that_computes_says_what_its_work_took(nodes: tuple[Node, Node]) -> None:
    prefill, _ = nodes
    assert prefill.compute(True) == ()
    until = time.monotonic() + 20
    while not prefill._computing._pieces and time.monotonic() < until:
        time.sleep(0.001)
    assert all(seconds > 0 for seconds in prefill.compute(False))


def test_every_arm_has_a_name_of_its_own() -> None:
    assert len({arm.name for arm in ARMS}) == len(ARMS)
