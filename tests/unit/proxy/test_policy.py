# SPDX-License-Identifier: Apache-2.0
"""proxy/policy.py and proxy/affinity.py: which server gets a request."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.affinity import MOST_PIECES, MOST_SERVERS, PIECE_BYTES, PrefixTree
from kvcached_nixl.proxy.instance import InstanceLoad
from kvcached_nixl.proxy.policy import (
    POLICIES,
    LeastTokens,
    Policy,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
    Wanted,
    make,
)

SHORT = Wanted(b"", b"short", 2, 16)


def loads(*tokens: int) -> list[InstanceLoad]:
    return [InstanceLoad(f"s{place}", one > 0, one) for place, one in enumerate(tokens)]


def text(name: str, pieces: int = 4) -> Wanted:
    return Wanted(b"", name.encode().ljust(PIECE_BYTES * pieces, b"."), 64 * pieces, 16)


def chosen(policy: Policy, candidates: Sequence[InstanceLoad], wanted: Wanted = SHORT, count: int = 12) -> Counter[int]:
    return Counter(policy.choose(candidates, wanted) for _ in range(count))


def test_round_robin_gives_each_the_same() -> None:
    assert chosen(RoundRobin(), loads(9, 0, 5)) == {0: 4, 1: 4, 2: 4}


def test_least_tokens_gives_to_the_least_loaded_and_takes_turns_among_equals() -> None:
    assert chosen(LeastTokens(), loads(9, 3, 5)) == {1: 12}
    assert chosen(LeastTokens(), loads(0, 0, 0)) == {0: 4, 1: 4, 2: 4}


def test_who_lacks_room_is_done_later() -> None:
    """Tokens for which there is no room count as work before the prompt."""
    wanted = text("a")

    def two(full_tokens: float, busy_tokens: float = math.inf) -> list[InstanceLoad]:
        """With 100 and with 250 tokens to compute, and room for so many."""
        return [InstanceLoad("full", 1, 100, full_tokens), InstanceLoad("busy", 1, 250, busy_tokens)]

    for policy in (LeastTokens(), PowerOfTwo(random.Random(1))):
        assert chosen(policy, two(56.0), wanted) == {1: 12}, "200 of its 256 tokens have to wait for others"
        assert chosen(policy, two(256.0), wanted) == {0: 12}
    policy = PrefixAffinity()
    assert policy.choose(two(56.0), wanted) == 1
    assert policy.choose(two(1000.0), wanted) == 1
    assert policy.choose(two(1000.0, 255.0), wanted) == 0, "its prefix does not help it"


def test_power_of_two_never_gives_to_the_most_loaded_of_three() -> None:
    policy = PowerOfTwo(random.Random(1))
    found = chosen(policy, loads(1, 2, 3), count=300)
    assert found[2] == 0 and found[0] > found[1] > 0
    assert chosen(policy, loads(7)) == {0: 12}


def test_prefix_affinity_returns_to_who_has_computed_the_beginning() -> None:
    policy = PrefixAffinity()
    homes = {name: policy.choose(loads(0, 0, 0), text(name)) for name in "abcdef"}
    assert set(homes.values()) == {0, 1, 2}
    for name, home in homes.items():
        assert chosen(policy, loads(50, 50, 50), text(name)) == {home: 12}


def test_prefix_affinity_does_not_heap_everything_on_one() -> None:
    policy = PrefixAffinity()
    home = policy.choose(loads(0, 0), text("a"))
    busy = [0, 0]
    busy[home] = policy.MOST_AHEAD_TOKENS + 1
    assert policy.choose(loads(*busy), text("a")) == 1 - home
    # Now both have it.
    assert chosen(policy, loads(2, 1), text("a")) == {1: 12}


def test_a_server_that_is_gone_is_not_chosen_for_what_it_had() -> None:
    policy = PrefixAffinity()
    assert policy.choose([InstanceLoad("gone", 0, 0)], text("a")) == 0
    assert policy.choose([InstanceLoad("other", 0, 0)], text("a")) == 0


@pytest.mark.parametrize("name", [name for name, _ in POLICIES])
def test_every_policy_chooses_one_of_those_there_are(name: str) -> None:
    draw, policy = random.Random(7), make(name)
    for _ in range(500):
        candidates = loads(*(draw.randrange(100) for _ in range(draw.randrange(1, 6))))
        wanted = Wanted(draw.randbytes(2), draw.randbytes(draw.randrange(2000)), draw.randrange(99), draw.randrange(99))
        assert 0 <= policy.choose(candidates, wanted) < len(candidates)


def test_a_policy_of_one_s_own(make_module: Callable[..., ModuleType]) -> None:
    make_module(
        "own_policy", "class Last:\n    def choose(self, candidates, request):\n        return len(candidates) - 1"
    )
    assert make("own_policy:Last").choose(loads(1, 2, 3), SHORT) == 2


@pytest.mark.parametrize("name", ["", "best", "no.such.module:A", "json:NoSuch", "json:loads", "collections:Counter"])
def test_a_policy_that_is_none_stops_the_start_in_words(name: str) -> None:
    with pytest.raises(SettingsError, match="round-robin"):
        make(name)


# ----------------------------------------------------------------------------------------------------------------- tree


def test_the_tree_knows_the_longest_beginning() -> None:
    tree = PrefixTree()
    common = b"c" * PIECE_BYTES * 3
    tree.add(b"", common + b"1" * PIECE_BYTES, "one")
    tree.add(b"", common + b"2" * PIECE_BYTES, "two")
    assert tree.servers(b"", common + b"1" * PIECE_BYTES) == ("one",)
    assert tree.servers(b"", common + b"2" * PIECE_BYTES + b"more") == ("two",)
    assert tree.servers(b"", common + b"3" * PIECE_BYTES) == ("two", "one")
    assert tree.servers(b"", b"d" * PIECE_BYTES) == ()
    assert tree.servers(b"salt", common) == ()


def test_pieces_that_are_equal_do_not_make_prompts_equal() -> None:
    """A node is its whole way from the root."""
    tree = PrefixTree()
    one, two = b"1" * PIECE_BYTES, b"2" * PIECE_BYTES
    tree.add(b"", one + two, "x")
    assert tree.servers(b"", two + one) == tree.servers(b"", two) == ()


def test_the_tree_is_bounded_in_every_direction() -> None:
    draw, tree = random.Random(2), PrefixTree(most_nodes=1000)
    for turn in range(5000):
        tree.add(draw.randbytes(1), draw.randbytes(PIECE_BYTES * draw.randrange(1, 9)), f"s{turn}")
    assert len(tree) <= 1000
    long = PrefixTree()
    long.add(b"", b"x" * PIECE_BYTES * 1000, "s")
    assert len(long) == MOST_PIECES
    for turn in range(100):
        long.add(b"", b"x" * PIECE_BYTES, f"s{turn}")
    assert len(long.servers(b"", b"x" * PIECE_BYTES)) == MOST_SERVERS


def test_what_many_share_stays_when_there_is_no_room() -> None:
    tree = PrefixTree(most_nodes=100)
    shared = b"s" * PIECE_BYTES * 2
    for turn in range(1000):
        tree.add(b"", shared + str(turn).encode().ljust(PIECE_BYTES * 3, b"."), "s")
    assert tree.servers(b"", shared) == ("s",)
