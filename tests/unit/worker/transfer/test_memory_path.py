# SPDX-License-Identifier: Apache-2.0
"""kvcached's own pages are registered only where that is proved; elsewhere KV is staged, if that is allowed."""

from __future__ import annotations

import pytest

from kvcached_nixl.errors import MemoryRefused, Unproved
from kvcached_nixl.proof.result import LaneFound, Proof, Question, Rates
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath
from kvcached_nixl.worker.memory_registration import choose

AUTO, DIRECT, HOST, DEVICE = MemoryPath
FAST, SLOW = Rates(8e9, 8e9, 1e6), Rates(1e7, 1e7, 1e3)
GOOD = LaneFound("tcp", "tcp", rates={"elastic": FAST, "ordinary": FAST})
COPIES = LaneFound("cuda_ipc", "all", rates={"elastic": SLOW, "ordinary": FAST})
WRONG = LaneFound("cma", "cma,tcp", wrong=("mapped again (a peer READ)",), rates=GOOD.rates)
UNKNOWN = LaneFound("rc_mlx5", "rc_mlx5,tcp", unusable="no endpoint")
UNUSED = LaneFound("posix", "posix", never="it does not notice the end of a peer")


def proof(*lanes: LaneFound, device: str = "cuda") -> Proof:
    return Proof(Question(device, 0, "DRAM", ("UCX",)), {}, lanes, None, 1.0)


@pytest.mark.parametrize("wish", [AUTO, DIRECT])
def test_what_follows_is_registered(wish: MemoryPath) -> None:
    assert choose(wish, lambda: proof(GOOD, UNUSED)) is DIRECT


@pytest.mark.parametrize("lane", [WRONG, UNKNOWN, COPIES], ids=["wrong", "not known", "slow"])
@pytest.mark.parametrize(("device", "path"), [("cpu", HOST), ("cuda", DEVICE)])
def test_what_does_not_is_staged_and_said(
    caplog: pytest.LogCaptureFixture, lane: LaneFound, device: str, path: MemoryPath
) -> None:
    with caplog.at_level("WARNING", SERVER_LOGGER):
        assert choose(AUTO, lambda: proof(GOOD, lane, device=device)) is path
    assert lane.name in caplog.text and path.value in caplog.text


def test_kvcacheds_pages_are_not_registered_against_the_proof() -> None:
    with pytest.raises(MemoryRefused) as refused:
        choose(DIRECT, lambda: proof(GOOD, WRONG, UNKNOWN))
    words = str(refused.value)
    assert all(one in words for one in ("direct", "cma", "a peer READ", "rc_mlx5", "no endpoint", "UCX_TLS=tcp "))


def test_what_is_slow_is_said_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", SERVER_LOGGER):
        assert choose(DIRECT, lambda: proof(COPIES)) is DIRECT
    assert "cuda_ipc" in caplog.text and "0.01 GB/s" in caplog.text


UNPROVED = Unproved(found="no proof: timed out", expected="one", consequence="The engine stops.", remedy="Ask again.")


def unproved() -> Proof:
    raise UNPROVED


@pytest.mark.parametrize("staged", [HOST, DEVICE])
def test_a_prover_that_cannot_tell_has_kv_staged(caplog: pytest.LogCaptureFixture, staged: MemoryPath) -> None:
    """A slab needs no proof; why there is one is said."""
    with caplog.at_level("WARNING", SERVER_LOGGER):
        assert choose(AUTO, unproved, staged) is staged
    assert "no proof: timed out" in caplog.text and f"memory_path {staged.value}" in caplog.text


def test_a_prover_that_cannot_tell_ends_a_start_with_kvcacheds_pages() -> None:
    with pytest.raises(Unproved, match="timed out"):
        choose(DIRECT, unproved)


@pytest.mark.parametrize("wish", [HOST, DEVICE])
def test_a_slab_that_is_asked_for_needs_no_proof(wish: MemoryPath) -> None:
    def prove() -> Proof:
        raise AssertionError("nothing has to be known of kvcached's pages")

    assert choose(wish, prove) is wish
    with pytest.raises(AssertionError):
        choose(AUTO, prove)
