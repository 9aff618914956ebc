# SPDX-License-Identifier: Apache-2.0
"""worker/push_handshake.py: who writes to whom, and which peers are met, refused or gone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvcached_nixl.errors import PeerRefused
from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.handshake import PushHandshake
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import Peer
from kvcached_nixl.worker.push_commands import Connected, PeerGone
from kvcached_nixl.worker.push_handshake import Query, connector, contributors

MAX_RANKS = 12
MAX_HEADS = 24
OURS = "kvcached_nixl/3 push [auto; 2 planes of cells of 2 bytes] abc"
PLANES = Planes((4096, 8192), 8, 2, 2, 2, 16, 4, 1)
PEER = Peer(EngineId("p"), "10.0.0.2", 5601, 2, 1)
HANDSHAKE = PushHandshake(EngineId("p"), 2, 1, b"\x00agent", 3, PLANES)


def named(prefill_size: int, tp_rank: int, tp_size: int, is_latent: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prefill = RemotePrefill("p", "h", 1, prefill_size)
    return contributors(prefill, tp_rank=tp_rank, tp_size=tp_size, is_latent=is_latent)


def sizes() -> list[tuple[int, int]]:
    """(prefill's, decode's) of which one divides the other."""
    numbers = range(1, MAX_RANKS + 1)
    return [(theirs, ours) for theirs in numbers for ours in numbers if theirs % ours == 0 or ours % theirs == 0]


@pytest.mark.parametrize(
    ("prefill_size", "tp_size", "expected", "latent"),
    [
        (1, 1, [((0,), ())], [((0,), ())]),
        (1, 2, [((0,), ()), ((0,), ())], [((0,), ()), ((0,), ())]),
        (2, 1, [((0, 1), ())], [((0,), (1,))]),
        (2, 4, [((0,), ()), ((0,), ()), ((1,), ()), ((1,), ())], [((0,), ()), ((0,), ()), ((1,), ()), ((1,), ())]),
        (4, 2, [((0, 1), ()), ((2, 3), ())], [((0,), (1,)), ((2,), (3,))]),
    ],
    ids=["1 to 1", "1 to 2", "2 to 1", "2 to 4", "4 to 2"],
)
def test_contributors_of_each_rank_of_decode(
    prefill_size: int,
    tp_size: int,
    expected: list[tuple[tuple[int, ...], tuple[int, ...]]],
    latent: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """(writers, others); of a latent that all ranks have, one rank is enough."""
    assert [named(prefill_size, rank, tp_size, False) for rank in range(tp_size)] == expected
    assert [named(prefill_size, rank, tp_size, True) for rank in range(tp_size)] == latent


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize(("prefill_size", "tp_size"), [(3, 2), (2, 3), (4, 6)])
def test_sizes_that_do_not_divide_are_an_error_that_names_both(
    prefill_size: int, tp_size: int, is_latent: bool
) -> None:
    with pytest.raises(ValueError, match=f"{prefill_size} and decode's {tp_size} do not divide"):
        named(prefill_size, 0, tp_size, is_latent)


@pytest.mark.parametrize(("prefill_size", "tp_size"), sizes(), ids=str)
def test_a_rank_of_prefill_hears_of_every_rank_of_decode_that_it_shares_heads_with(
    prefill_size: int, tp_size: int
) -> None:
    """And of no other: it waits for as many as there are. Rank r of n has the share from r/n to (r+1)/n."""
    for rank in range(tp_size):
        overlapping = tuple(
            theirs
            for theirs in range(prefill_size)
            if theirs * tp_size < (rank + 1) * prefill_size and rank * prefill_size < (theirs + 1) * tp_size
        )
        assert named(prefill_size, rank, tp_size, False) == (overlapping, ())
        writers, others = named(prefill_size, rank, tp_size, True)
        assert (*writers, *others) == overlapping
        assert len(writers) == 1
    for is_latent in (False, True):
        writing = [theirs for rank in range(tp_size) for theirs in named(prefill_size, rank, tp_size, is_latent)[0]]
        declined = [theirs for rank in range(tp_size) for theirs in named(prefill_size, rank, tp_size, is_latent)[1]]
        assert {*writing, *declined} == set(range(prefill_size)), "none waits for its lease to end"
        assert not set(writing) & set(declined)
        # What PushSender waits for before it lets go of a request.
        assert {writing.count(theirs) for theirs in writing} == {max(1, tp_size // prefill_size)}


@pytest.mark.parametrize(("prefill_size", "tp_size"), sizes(), ids=str)
def test_writers_have_every_head_of_the_rank_they_write_to(prefill_size: int, tp_size: int) -> None:
    """With heads split or, where there are fewer than ranks, repeated, as vLLM does."""

    def heads_of(rank: int, size: int, total: int) -> set[int]:
        first = rank * total // size
        return set(range(first, first + max(1, total // size)))

    for total in range(1, MAX_HEADS + 1):
        if any(total % size and size % total for size in (prefill_size, tp_size)):
            continue
        for rank in range(tp_size):
            writers, _ = named(prefill_size, rank, tp_size, False)
            written: set[int] = set().union(*(heads_of(theirs, prefill_size, total) for theirs in writers))
            assert written >= heads_of(rank, tp_size, total), (total, rank)


# ----------------------------------------------------------------------------------------------------------- handshake


def answering(compatibility: str = OURS, metadata: bytes | None = None) -> Query:
    """A side channel that answers for one rank, and for no other address."""

    def query(host: str, port: int, tp_rank: int) -> tuple[str, bytes]:
        assert (host, port, tp_rank) == ("10.0.0.2", 5601, 1)
        return compatibility, msgspec.msgpack.encode(HANDSHAKE) if metadata is None else metadata

    return query


def failing(cause: Exception) -> Query:
    def query(host: str, port: int, tp_rank: int) -> tuple[str, bytes]:
        raise cause

    return query


def meet(query: Query) -> Connected:
    return connector(query, OURS)(PEER)


def test_a_peer_that_offers_the_same_is_met() -> None:
    """Its agent, its device and its memory are what it says."""
    assert meet(answering()) == Connected(b"\x00agent", 3, PLANES)


@pytest.mark.parametrize(
    "theirs",
    ["abc", OURS.replace("push", "pull"), OURS + " ", ""],
    ids=["stock", "pull", "almost", "nothing"],
)
def test_a_peer_that_offers_something_else_is_refused_in_words(theirs: str) -> None:
    """Before a byte of its metadata is looked at: it may be in another protocol."""
    with pytest.raises(PeerRefused) as refusal:
        meet(answering(theirs, b"of another protocol"))
    error = refusal.value
    assert repr(theirs) in error.found
    assert "engine p at 10.0.0.2:5601" in error.found
    assert repr(OURS) in error.expected
    assert "kv_load_failure_policy" in error.consequence
    assert '"transfer_mode": "push"' in error.remedy


def test_nobody_at_the_address_is_a_peer_that_is_gone() -> None:
    with pytest.raises(PeerGone, match=r"nobody listens at 10\.0\.0\.2:5601"):
        meet(failing(ConnectionRefusedError()))


@pytest.mark.parametrize("cause", [TimeoutError("slow"), ConnectionResetError("reset"), OSError("no route to host")])
def test_what_is_not_known_to_be_gone_is_not_called_so(cause: Exception) -> None:
    """It may still write, so its blocks must not be given back."""
    with pytest.raises(type(cause)) as raised:
        meet(failing(cause))
    assert raised.value is cause


@pytest.mark.parametrize(
    "changed", [{"engine_id": EngineId("q")}, {"tp_rank": 0}, {"tp_size": 4}], ids=["engine", "rank", "size"]
)
def test_another_rank_at_the_address_means_that_the_one_asked_for_is_gone(changed: dict[str, EngineId | int]) -> None:
    """An engine draws its id at its start: another one is another life."""
    other = msgspec.structs.replace(HANDSHAKE, **changed)
    with pytest.raises(PeerGone, match=r"answers at 10\.0\.0\.2:5601") as gone:
        meet(answering(metadata=msgspec.msgpack.encode(other)))
    assert f"engine {other.engine_id} (rank {other.tp_rank} of {other.tp_size})" in str(gone.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sound: b"",
        lambda sound: sound[:-3],
        lambda sound: b"\xc1" + sound,
        lambda sound: msgspec.msgpack.encode({"engine_id": "p"}),
    ],
    ids=["empty", "cut off", "rubbish", "fields are missing"],
)
def test_metadata_that_cannot_be_read_is_an_error_and_nobody_is_gone(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(msgspec.DecodeError):
        meet(answering(metadata=spoil(msgspec.msgpack.encode(HANDSHAKE))))
