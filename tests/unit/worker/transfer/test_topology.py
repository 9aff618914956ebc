# SPDX-License-Identifier: Apache-2.0
"""worker/transfer/topology.py: which ranks have bytes of which ranks, and the ranges between them."""

from __future__ import annotations

import msgspec
import pytest
from support.worker_fakes import Local, Memory

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import GroupMemory, Planes, moves
from kvcached_nixl.worker.geometry.descriptors import Descriptors
from kvcached_nixl.worker.transfer.topology import LocalRank, contributors, fits, ranges, routes

MAX_RANKS = 12
MAX_HEADS = 24


def sizes() -> list[tuple[int, int]]:
    """(prefill's, decode's) of which one divides the other."""
    numbers = range(1, MAX_RANKS + 1)
    return [(theirs, ours) for theirs in numbers for ours in numbers if theirs % ours == 0 or ours % theirs == 0]


@pytest.mark.parametrize("kv_shares", [MAX_TP_SIZE, 1])
@pytest.mark.parametrize(("prefill_size", "tp_size"), [(3, 2), (2, 3), (4, 6), (2048, 1)])
def test_sizes_that_do_not_divide_are_an_error_that_names_both(prefill_size: int, tp_size: int, kv_shares: int) -> None:
    with pytest.raises(ValueError, match=f"{prefill_size} and decode's {tp_size} do not divide"):
        contributors(prefill_size, 0, tp_size, kv_shares)


def test_a_rank_of_prefill_hears_of_every_rank_of_decode_that_it_shares_heads_with() -> None:
    """And of no other: it waits for as many as there are. Rank r of n has the share from r/n to (r+1)/n."""
    for prefill_size, tp_size in sizes():
        for rank in range(tp_size):
            overlapping = tuple(
                theirs
                for theirs in range(prefill_size)
                if theirs * tp_size < (rank + 1) * prefill_size and rank * prefill_size < (theirs + 1) * tp_size
            )
            assert contributors(prefill_size, rank, tp_size, MAX_TP_SIZE) == (overlapping, ())
            writers, others = contributors(prefill_size, rank, tp_size, 1)
            assert (*writers, *others) == overlapping
            assert len(writers) == 1
        for kv_shares in (MAX_TP_SIZE, 1, 2, 4):
            found = [contributors(prefill_size, rank, tp_size, kv_shares) for rank in range(tp_size)]
            writing = [theirs for writers, _ in found for theirs in writers]
            told = [theirs for _, others in found for theirs in others]
            assert {*writing, *told} == set(range(prefill_size)), "none waits for its lease to end"
            assert not set(writing) & set(told)
            # What `OfferRegistry` waits for before it lets go of an offer.
            assert {writing.count(theirs) for theirs in writing} == {max(1, tp_size // prefill_size)}


def test_each_head_of_a_rank_is_written_by_one_rank_that_has_it() -> None:
    """With heads split or, where there are fewer than ranks, repeated, as vLLM does."""

    def heads_of(rank: int, size: int, total: int) -> set[int]:
        first = rank * total // size
        return set(range(first, first + max(1, total // size)))

    for prefill_size, tp_size in sizes():
        for total in range(1, MAX_HEADS + 1):
            if any(total % size and size % total for size in (prefill_size, tp_size)):
                continue
            for rank in range(tp_size):
                writers, _ = contributors(prefill_size, rank, tp_size, total)
                of_writers = [heads_of(theirs, prefill_size, total) for theirs in writers]
                written: set[int] = set().union(*of_writers)
                assert written >= heads_of(rank, tp_size, total), (prefill_size, tp_size, total, rank)
                assert sum(map(len, of_writers)) == len(written), "no head is written by two ranks"


def total_bytes(found: Descriptors) -> int:
    return int(found.local[:, 1].sum())


def group_of(planes: Planes) -> tuple[GroupMemory, ...]:
    return (GroupMemory((planes,)),)


def test_groups_are_moved_together_and_those_without_a_token_left_out() -> None:
    between = routes(group_of(Memory().planes) * 2, group_of(Memory().planes) * 2, is_prefill=False)
    one, two = (
        (KernelBlockRange(0, (1, 2)), KernelBlockRange(0, (3, 4)), 0),
        (KernelBlockRange(0, (5, 6)), KernelBlockRange(0, (7, 8)), 0),
    )
    both, alone = ranges(between, [one, two], 8), ranges(between[:1], [one], 8)
    assert total_bytes(both) == 2 * total_bytes(alone) > 0
    behind = (KernelBlockRange(8, (5,)), KernelBlockRange(8, (7,)), 8)
    assert total_bytes(ranges(between, [one, behind], 8)) == total_bytes(alone)
    with pytest.raises(ValueError, match="no token before 8"):
        ranges(between[:1], [behind], 8)


def test_what_does_not_fit_is_said_in_words() -> None:
    local = Local(tp_size=2)
    remote = local.remote()
    assert fits(local.side.local, remote.handshake()) == ""
    assert "tensor parallel 3; expected a multiple or a divisor of 2" in fits(
        local.side.local, remote.handshake(tp_size=3)
    )
    other = Planes((4096,), (7,), 8, 8, 8, 8, 4, 4, 1)
    assert "1 planes of cells of 8 bytes" in fits(local.side.local, remote.handshake(groups=group_of(other)))


def test_a_pipeline_stage_has_some_of_the_layers_and_any_other_rank_all() -> None:
    whole = Memory().planes
    stage = msgspec.structs.replace(whole, bases=whole.bases[1:], keys=whole.keys[1:])
    all_layers, some_layers, swapped = (
        group_of(whole),
        group_of(stage),
        group_of(msgspec.structs.replace(whole, keys=(1, 0))),
    )

    def said(ours: tuple[GroupMemory, ...], stages: int, theirs: tuple[GroupMemory, ...], their_stages: int) -> str:
        local = LocalRank(EngineId("e"), 1, 0, ours, 1, pp_size=stages)
        return fits(local, Local().remote().handshake(groups=theirs, pp_size=their_stages))

    assert said(all_layers, 1, some_layers, 2) == said(some_layers, 2, all_layers, 1) == ""
    assert said(all_layers, 1, swapped, 1) == "", "planes are known by their keys, whatever their order is"
    assert "other layers" in said(all_layers, 1, some_layers, 1) and "other layers" in said(
        some_layers, 1, all_layers, 1
    )
    assert "2 pipeline stages; expected 1, since this engine has 2" in said(some_layers, 2, some_layers, 2)
    both = (*all_layers, *some_layers)
    assert said(both, 1, both, 1) == "" and said(both, 1, both[::-1], 1) != ""


def test_decode_asks_every_stage_and_a_decode_with_stages_nobody() -> None:
    prefill = RemotePrefill("p", "h", 1, 2, 3)
    writers, others = LocalRank(EngineId("e"), 1, 0, (), 1).contributors(prefill)
    assert [(one.pp_rank, one.tp_rank, one.rank) for one in writers] == [(0, 0, 0), (1, 0, 2), (2, 0, 4)]
    assert [(one.pp_rank, one.tp_rank, one.rank) for one in others] == [(0, 1, 1), (1, 1, 3), (2, 1, 5)]
    with pytest.raises(ValueError, match="expected --pipeline-parallel-size 1 on decode servers"):
        LocalRank(EngineId("e"), 1, 0, (), 1, pp_size=2).contributors(prefill)


def test_ranks_that_would_not_bring_every_head_are_refused() -> None:
    """If decode took ranks for copies of one another that are none, it would keep what its blocks held before."""
    held = group_of(Memory(num_heads=8).planes)

    def said(kv_shares: int, heads_there: int, copies: int = 1) -> str:
        local = LocalRank(EngineId("e"), 1, 0, held, kv_shares)
        planes = msgspec.structs.replace(Memory(num_heads=heads_there).planes, copies=copies)
        return fits(local, Local(tp_size=8).remote().handshake(tp_size=8, groups=group_of(planes)))

    assert said(8, 1) == said(MAX_TP_SIZE, 1) == said(4, 2) == said(MAX_TP_SIZE, 8, copies=8) == ""
    assert said(MAX_TP_SIZE, 4, copies=4) == said(MAX_TP_SIZE, 2, copies=2) == said(4, 2, copies=2) == ""
    assert "1 heads on each of 2 ranks that differ; expected 8 together" in said(2, 1)
    assert "2 heads on each of 2 ranks that differ; expected 8 together" in said(MAX_TP_SIZE, 2, copies=4)


@pytest.mark.parametrize(
    ("sizes_of_tp", "copies", "is_refused"),
    [
        ((4, 4), (1, 4), True),
        ((4, 4), (4, 1), True),
        ((4, 4), (2, 2), False),
        ((2, 4), (2, 1), True),
        ((2, 4), (1, 2), False),
        ((4, 2), (1, 2), True),
        ((4, 2), (4, 2), False),
    ],
)
def test_ranks_that_count_copies_as_no_model_has_them_are_refused(
    sizes_of_tp: tuple[int, int], copies: tuple[int, int], is_refused: bool
) -> None:
    """Both would take a head for one that another rank moves, and checksums of nothing are equal."""
    here, there = (group_of(msgspec.structs.replace(Memory().planes, copies=number)) for number in copies)
    local = LocalRank(EngineId("e"), sizes_of_tp[0], 0, here, MAX_TP_SIZE)
    other = Local(tp_size=sizes_of_tp[1]).remote().handshake(tp_size=sizes_of_tp[1], groups=there)
    expected = f"{copies[1]} copies of each head; expected another number"
    assert (expected in fits(local, other)) is is_refused


def test_of_copies_a_rank_of_decode_gets_the_first_one() -> None:
    """Of those on the ranks that it asks, whatever other engines get; decode may have copies, too."""

    def movers(prefill_size: int, shares: int, decode_size: int, decode_rank: int) -> list[int]:
        theirs, ours = (max(1, size // shares) for size in (prefill_size, decode_size))
        part = max(1, prefill_size // decode_size)
        first = decode_rank * prefill_size // decode_size
        here = msgspec.structs.replace(Memory().planes, copies=ours, copy=decode_rank % ours)
        asked = {
            rank: msgspec.structs.replace(Memory().planes, copies=theirs, copy=rank % theirs)
            for rank in range(first, first + part)
        }
        found = [rank for rank, there in asked.items() if moves(here, there, is_prefill=False)]
        assert found == [rank for rank, there in asked.items() if moves(there, here, is_prefill=True)]
        return found

    for prefill_size, decode_size in sizes():
        for shares in (1, 2, 3, 4, 8, MAX_RANKS):
            if any(size % shares and shares % size for size in (prefill_size, decode_size)):
                continue
            for rank in range(decode_size):
                found = movers(prefill_size, shares, decode_size, rank)
                held = {one * shares // prefill_size for one in found}
                begin, end = (number * shares // decode_size for number in (rank, rank + 1))
                if prefill_size >= shares:
                    assert held == set(range(begin, max(begin + 1, end))) and len(found) == len(held)
                assert found[0] == rank * prefill_size // decode_size


def test_what_only_other_ranks_move_needs_no_descriptor() -> None:
    """A chunk of a hybrid's prompt, whose attention other ranks move; the other way around, this rank moves it."""
    here, copied = group_of(Memory().planes), msgspec.structs.replace(Memory().planes, copies=2, copy=1)
    groups = [(KernelBlockRange(0, (1,)), KernelBlockRange(0, (2,)), 0)]
    between = routes(here, group_of(copied), is_prefill=False)
    found = ranges(between, groups, 4)
    assert total_bytes(found) == len(found.local) == len(found.remote) == 0
    with pytest.raises(ValueError, match="no token before 4"):
        ranges(between, [(*groups[0][:2], 4)], 4)
    assert total_bytes(ranges(routes(here, group_of(copied), is_prefill=True), groups, 4)) > 0
