# SPDX-License-Identifier: Apache-2.0
"""Policies: which server gets a request. ``--policy module:Class`` loads your own class, with one method:

    class Mine:
        def choose(self, candidates: Sequence[Load], request: Wanted) -> int: ...

A policy is created once per role, without arguments, and called on the event loop's thread: it must not block.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.affinity import PrefixTree
from kvcached_nixl.proxy.instance import InstanceLoad

__all__ = ["POLICIES", "LeastTokens", "Policy", "PowerOfTwo", "PrefixAffinity", "RoundRobin", "Wanted", "make"]


class Wanted(NamedTuple):
    """What a policy knows about a request.

    Attributes:
        namespace: requests of two namespaces share no computed blocks.
        prefix: the prompt, as text or as token ids of four bytes each; compared from its beginning.
        prompt_tokens, max_tokens: estimates.
        piece_tokens: tokens of 256 bytes of ``prefix``, estimated.
    """

    namespace: bytes
    prefix: bytes
    prompt_tokens: int
    max_tokens: int
    piece_tokens: int = 64


class Policy(Protocol):
    """Chooses a server among those of one role."""

    def choose(self, candidates: Sequence[InstanceLoad], request: Wanted) -> int:
        """Returns an index into ``candidates``, which is never empty."""
        ...


class RoundRobin:
    """The servers in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, candidates: Sequence[InstanceLoad], request: Wanted) -> int:
        self._turn += 1
        return self._turn % len(candidates)


def tokens_before(server: InstanceLoad, request: Wanted) -> float:
    """How many tokens a server has to complete before it is done with a prompt, without its own.

    Those that it has to compute, and as many as it lacks room for: these have to end before the prompt can begin.
    """
    return server.tokens + max(0.0, request.prompt_tokens - server.room_tokens)


class LeastTokens:
    """The server that would be done soonest, by `tokens_before`. Equal servers in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, candidates: Sequence[InstanceLoad], request: Wanted) -> int:
        self._turn += 1
        count, turn = len(candidates), self._turn
        return min(range(count), key=lambda place: (tokens_before(candidates[place], request), (place - turn) % count))


class PowerOfTwo:
    """Of two random servers the one that would be done sooner, so that independent routers choose different ones."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()

    def choose(self, candidates: Sequence[InstanceLoad], request: Wanted) -> int:
        if len(candidates) == 1:
            return 0
        one, other = self._draw.sample(range(len(candidates)), 2)
        return min(one, other, key=lambda place: tokens_before(candidates[place], request))


class PrefixAffinity:
    """The server that computed the longest prefix of the prompt, unless its load is far above the lowest, or it has no
    room for the prompt.

    "Far" is more than ``MOST_AHEAD_TOKENS`` outstanding tokens.
    """

    MOST_AHEAD_TOKENS = 16_384

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._otherwise = LeastTokens()

    def choose(self, candidates: Sequence[InstanceLoad], request: Wanted) -> int:
        known = self._tree.servers(request.namespace, request.prefix)
        least = min(one.tokens for one in candidates)
        near = [
            place
            for place, one in enumerate(candidates)
            if one.name in known
            and one.tokens <= least + self.MOST_AHEAD_TOKENS
            and one.room_tokens >= request.prompt_tokens
        ]
        place = min(near, key=lambda place: candidates[place].tokens) if near else None
        if place is None:
            place = self._otherwise.choose(candidates, request)
        self._tree.add(request.namespace, request.prefix, candidates[place].name)
        return place


POLICIES: tuple[tuple[str, Callable[[], Policy]], ...] = (
    ("round-robin", RoundRobin),
    ("least-tokens", LeastTokens),
    ("power-of-two", PowerOfTwo),
    ("prefix-affinity", PrefixAffinity),
)


def make(name: str) -> Policy:
    """Create a policy by its name, or by ``module:Class``.

    Raises:
        SettingsError: no such policy exists, or it has no method ``choose``.
    """
    for known, kind in POLICIES:
        if name == known:
            return kind()
    module, colon, attribute = name.partition(":")
    found: object = None
    reason = "no such policy"
    if colon:
        try:
            found = getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
    if found is None or not callable(getattr(found, "choose", None)):
        raise SettingsError(
            found=f"--policy {name} ({reason if found is None else 'an object without a method choose'})",
            expected=f"{', '.join(known for known, _ in POLICIES)} or module:Class, a class without arguments whose "
            "objects have choose(candidates, request)",
            consequence="The router cannot choose a server for a request, and does not start.",
            remedy="Correct --policy, or put the module on PYTHONPATH.",
        )
    return cast(Policy, found)
