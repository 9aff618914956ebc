# SPDX-License-Identifier: Apache-2.0
"""Which requests wait for an answer of a prefill server, who is asked, and how a request goes on."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from support.clocks import ManualClock
from support.engine_fakes import context

from kvcached_nixl.scheduler.asking import servers
from kvcached_nixl.scheduler.asking.asking import Asking
from kvcached_nixl.scheduler.asking.local import LocalPrefills
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.params import HEADROOM_KEY
from kvcached_nixl.wire.question import Outcome, Question, engine_in

SILENCE_SECONDS = 120.0
BLOCK = 16
CHUNK = 8 * BLOCK
MOST = 64 * BLOCK
ANSWER = {"do_remote_prefill": True, "remote_engine_id": "p"}
DEAD = Outcome("refused", is_of_server=True)
BUSY = Outcome("HTTP 503", is_of_server=True, is_busy=True, retry_after_seconds=3.0)
ODD = Outcome("HTTP 500")


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int = 4 * BLOCK
    block_hashes: tuple[bytes, ...] = ()
    priority: int = 0
    can_be_asked: bool = True
    params: Any = None
    adapter: str = ""
    awaits_grammar: bool = False
    ends_in_media: bool = False

    @property
    def question(self) -> Question | None:
        """As vLLM's: not twice, since it has the parameters of the first answer then."""
        could, self.can_be_asked = self.can_be_asked, False
        return Question(self.request_id, range(self.num_prompt_tokens), self.adapter) if could else None


@dataclass
class Blocks:
    """The engine's blocks: ``released`` are the requests that may begin, with their parameters."""

    requests: dict[str, Request] = field(default_factory=dict)
    num_free: int = 100
    num_used: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    goes_by_priority: bool = False
    caches_prefixes: bool = True
    most_running: int = 64
    released: dict[str, Any] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    chunk_tokens: int = 0

    def hold(self, request_id: str) -> None:
        self.held.append(request_id)

    def limit_chunks(self, num_tokens: int) -> None:
        self.chunk_tokens = num_tokens

    def num_needed(self, request_id: str) -> int:
        return self.requests[request_id].num_prompt_tokens // BLOCK

    def num_cached_tokens(self, request_id: str) -> int:
        return self.cached.get(request_id, 0)

    def release(self, request_id: str, params: Any) -> None:
        self.released[request_id] = params


@dataclass
class Asker:
    """Nobody is asked: ``asked`` has the questions, by number, and the test answers. What servers say at once of what
    they have cached is in ``says``, by URL; None: the test answers that, too."""

    asked: dict[int, tuple[str, str]] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    transfer_ids: dict[int, str] = field(default_factory=dict)
    checking: list[Server] = field(default_factory=list)
    checked: deque[tuple[Server, bool]] = field(default_factory=deque)
    cancelled: list[int] = field(default_factory=list)
    answers: deque[tuple[int, Any]] = field(default_factory=deque)
    looked_up: list[tuple[str, Server]] = field(default_factory=list)
    cached: deque[tuple[str, Server, Any]] = field(default_factory=deque)
    says: dict[str, Any] | None = field(default_factory=dict)
    least_tokens: int | None = None

    def look_up(self, server: Server, question: Question, least_tokens: int, most_seconds: float) -> None:
        self.looked_up.append((question.request_id, server))
        self.least_tokens = least_tokens
        if self.says is not None:
            self.cached.append((question.request_id, server, self.says.get(server.url)))

    def ask(self, number: int, server: Server, question: Question) -> None:
        self.asked[number] = (server.url, question.request_id)
        self.transfer_ids[number] = question.transfer_id
        self.addresses[number] = server.address

    def check(self, server: Server) -> None:
        self.checking.append(server)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    @property
    def has_answers(self) -> bool:
        return bool(self.answers or self.cached)

    def close(self) -> None:
        """Has no thread."""


class Step(NamedTuple):
    request_id: str
    num_computed_tokens: int = 4 * BLOCK


@dataclass
class Fetching:
    failures: dict[str, HandOverFailed] = field(default_factory=dict)
    arrived_: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unneeded_: list[Any] = field(default_factory=list)
    received: set[str] = field(default_factory=set)

    def arrived(self, request: Any, *, computes: bool, is_asked: bool) -> None:
        self.arrived_.append(request.request_id)

    def refuse(self, request: Any, failure: Exception, *, computes: bool) -> bool:
        self.refused[request.request_id] = str(failure)
        return computes

    def answered(self, request: Any, params: Any) -> None:
        """No client reads ``usage``."""

    def unneeded(self, params: Any) -> None:
        self.unneeded_.append(params)

    def failure_of(self, request: Any) -> HandOverFailed | None:
        return self.failures.get(request.request_id)

    def is_tried(self, request: Any) -> bool:
        return True

    def forget(self, request: Any) -> None:
        del self.failures[request.request_id]

    def end(self, request: Any, failure: HandOverFailed) -> bool:
        self.failures[request.request_id] = failure
        return request.request_id not in self.received


class Decode:
    def __init__(
        self,
        *urls: str,
        recomputes: bool = True,
        is_required: bool = False,
        pushes: bool = False,
        local_tokens: int | None = 0,
        queue_seconds: float = math.inf,
        **blocks: Any,
    ) -> None:
        self.clock, self.asker, self.blocks, self.fetching = ManualClock(100.0), Asker(), Blocks(**blocks), Fetching()
        self.names: dict[str, tuple[str, ...]] = {}
        engine = context(
            self.blocks,  # type: ignore[arg-type]
            self.clock,
            mode=TransferMode.PUSH if pushes else TransferMode.PULL,
            recomputes=recomputes,
            timeout_seconds=SILENCE_SECONDS,
            max_num_batched_tokens=MOST,
            block_sizes=(BLOCK,),
        )
        settings = AskSettings(
            urls or ("http://p1",), is_required, queue_seconds=queue_seconds, max_local_prefill_tokens=local_tokens
        )
        with mock.patch.object(servers, "Resolver", lambda *_: SimpleNamespace(take=self._changed)):
            self.asking = Asking(engine, settings, self.asker, self.fetching)  # type: ignore[arg-type]
        self.asking.local = LocalPrefills(CHUNK, self.asking.local.break_even)

    def _changed(self) -> dict[str, tuple[str, ...]]:
        changed, self.names = self.names, {}
        return changed

    def arrives(self, request_id: str, **changed: Any) -> bool:
        request = self.blocks.requests[request_id] = Request(request_id, **changed)
        held = self.asking.arrived(request)  # type: ignore[arg-type]
        self.turn()
        if self.asker.cached:
            self.turn()
        return held

    def turn(self, *, may_ask: bool = True) -> None:
        self.asking.turn(may_ask=may_ask)

    def number(self, request_id: str) -> int:
        return max(number for number, (_, one) in self.asker.asked.items() if one == request_id)

    def by_url(self, url: str) -> Server:
        return next(one for one in self.asking.servers.all if one.url == url)

    def url(self, request_id: str) -> str:
        return self.asker.asked[self.number(request_id)][0]

    def is_asked(self, request_id: str) -> bool:
        return any(one == request_id for _, one in self.asker.asked.values())

    def answers(self, request_id: str, found: Any = None) -> None:
        self.asker.answers.append((self.number(request_id), found or ANSWER))
        self.turn()


def test_only_that_is_asked_for_which_finds_room() -> None:
    """What is free, and half of all blocks more."""
    decode = Decode(num_free=4, num_used=8)
    for one in "abcd":
        decode.arrives(one)
    assert decode.is_asked("b") and not decode.is_asked("c")
    decode.answers("a")
    decode.blocks.num_free, decode.blocks.num_used = 0, 12
    decode.asking.window.settle("a")
    decode.turn()
    assert not decode.is_asked("c")
    decode.blocks.num_free, decode.blocks.num_used = 2, 10
    decode.turn()
    assert decode.is_asked("c") and not decode.is_asked("d")


def test_a_server_that_fails_for_several_in_a_row_rests() -> None:
    decode = Decode()
    for one in "ab":
        decode.arrives(one)
        decode.answers(one, ODD)
        decode.answers(one, ODD)
    decode.arrives("c")
    assert decode.is_asked("c"), "it has failed for two prompts, twice for each"
    decode.answers("c", ODD)
    decode.arrives("d")
    assert not decode.is_asked("d") and "d" in decode.fetching.refused


def silent() -> Decode:
    decode = Decode("http://p1", "http://p2")
    decode.arrives("a")
    assert decode.asking.due_at_seconds == decode.clock.now_seconds() + SILENCE_SECONDS
    decode.clock.advance(SILENCE_SECONDS)
    decode.turn()
    return decode


def test_a_slow_server_is_waited_for_as_long_as_it_is_well() -> None:
    decode = silent()
    (server,) = decode.asker.checking
    for _ in range(9):
        assert decode.asking.due_at_seconds == decode.clock.now_seconds() + SILENCE_SECONDS
        decode.asker.checked.append((server, True))
        decode.turn()
        assert not decode.asker.cancelled
        decode.clock.advance(SILENCE_SECONDS)
        decode.turn()
    decode.asker.checked.append((server, True))
    decode.turn()
    assert decode.asker.cancelled == [1], "it never answers anybody"


def answered(*urls: str) -> Decode:
    decode = Decode(*urls)
    decode.arrives("a")
    decode.answers("a")
    return decode


def test_a_name_stands_for_all_its_servers() -> None:
    decode = Decode("http://prefill:8000")
    decode.names["http://prefill:8000"] = ("10.0.0.1", "10.0.0.2")
    for one in "abcd":
        decode.arrives(one)
    assert sorted(decode.asker.addresses.values()) == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]


def test_one_that_has_left_is_not_asked_and_its_answer_counts() -> None:
    decode = Decode("http://prefill:8000")
    decode.names["http://prefill:8000"] = ("10.0.0.1",)
    decode.arrives("a")
    decode.names["http://prefill:8000"] = ("10.0.0.2",)
    decode.arrives("b")
    assert decode.asker.addresses == {1: "10.0.0.1", 2: "10.0.0.2"}
    decode.answers("a")
    assert decode.fetching.arrived_ == ["a"]


def test_addresses_that_come_back_owe_what_they_owed() -> None:
    decode = Decode("http://prefill:8000")
    decode.names["http://prefill:8000"] = ("10.0.0.1", "10.0.0.2")
    decode.arrives("a")
    for addresses in (("10.0.0.3",), ("10.0.0.1", "10.0.0.2")):
        decode.names["http://prefill:8000"] = addresses
        decode.turn()
    decode.clock.advance(SILENCE_SECONDS)
    decode.turn()
    assert len(decode.asker.checking) == 1
    decode.answers("a")
    assert decode.fetching.arrived_ == ["a"] and decode.asking.due_at_seconds is None


def hashes(*names: str) -> tuple[bytes, ...]:
    """Four blocks for each name, as of a prompt that begins with the names before it."""
    return tuple(f"{names[: place + 1]} {block}".encode() for place in range(len(names)) for block in range(4))


def test_the_server_that_has_the_beginning_is_asked_for_the_rest() -> None:
    decode = Decode("http://p1", "http://p2", "http://p3")
    for name in ("system", "other", "third"):
        decode.arrives(name, block_hashes=hashes(name, "a"), num_prompt_tokens=8 * BLOCK)
    first = {name: decode.url(name) for name in ("system", "other", "third")}
    assert len(set(first.values())) == 3
    for name in first:
        decode.answers(name)
        decode.asking.computed([Step(name)])  # type: ignore[list-item]
    for place in range(6):
        name = ("third", "system", "other")[place % 3]
        decode.arrives(f"{name} {place}", block_hashes=hashes(name, f"b{place}"), num_prompt_tokens=8 * BLOCK)
        assert decode.url(f"{name} {place}") == first[name]


def test_unless_it_has_more_to_compute_than_that_saves() -> None:
    decode = Decode("http://p1", "http://p2", num_free=10_000)
    urls = set()
    for place in range(6):
        name = f"r{place}"
        decode.arrives(name, block_hashes=hashes("system", name), num_prompt_tokens=8 * BLOCK)
        urls.add(decode.url(name))
    assert len(urls) == 2


def test_a_server_that_was_away_has_nothing_cached() -> None:
    decode = Decode("http://p1", "http://p2")
    decode.arrives("a", block_hashes=hashes("system", "a"), num_prompt_tokens=8 * BLOCK)
    first = decode.url("a")
    decode.answers("a", DEAD)
    decode.answers("a")
    second = decode.url("a")
    decode.clock.advance(60)
    decode.arrives("b", block_hashes=hashes("system", "b"), num_prompt_tokens=8 * BLOCK)
    assert first != second == decode.url("b")


@pytest.mark.parametrize(
    ("said", "counts"), [(9000, True), (-1, False), ("9000", False), (None, False), (2**70, False)]
)
def test_a_server_that_others_keep_busy_is_asked_less(said: Any, counts: bool) -> None:
    decode = Decode("http://p1", "http://p2")
    decode.arrives("a")
    busy = decode.url("a")
    decode.answers("a", {**ANSWER, HEADROOM_KEY: {"queued_tokens": said}})
    urls = []
    for place in range(40):
        decode.arrives(f"r{place}")
        urls.append(decode.url(f"r{place}"))
        decode.asking.gone(f"r{place}")
    assert (busy not in urls) is counts
    decode.clock.advance(60)
    for place in range(40):
        decode.arrives(f"s{place}")
        urls.append(decode.url(f"s{place}"))
        decode.asking.gone(f"s{place}")
    assert busy in urls, "it counts for a while"


# ----------------------------------------------------------------------------------------------------------------- push

OF_P = {**ANSWER, "remote_host": "h", "remote_port": 5600, "tp_size": 2}
OF_ANOTHER = {**OF_P, "remote_engine_id": "again"}


def pushing(**changed: Any) -> Decode:
    """Decode that knows the engine of its only server."""
    decode = Decode(pushes=True, **changed)
    decode.arrives("first")
    assert "first" not in decode.blocks.released, "nobody knows yet where it would register"
    decode.answers("first", OF_P)
    decode.asking.computed([Step("first")])  # type: ignore[list-item]
    return decode


@pytest.mark.parametrize("is_computed", [True, False])
def test_an_answer_may_fail_when_the_kv_is_here(is_computed: bool) -> None:
    decode = pushing()
    decode.arrives("a")
    decode.fetching.received.add("a")
    if is_computed:
        decode.asking.computed([Step("a")])  # type: ignore[list-item]
    decode.answers("a", ODD)
    decode.fetching.failures.clear()
    assert not decode.asking.may_ask_again("a") and not decode.asking.questions.asked


def rolled(decode: Decode, found: Any) -> None:
    """Each server has another engine than it had when it answered last. Asks for "a" until it is asked unnamed."""
    for one in decode.asking.servers.all:
        decode.asking.servers.heard(one, engine_in(OF_P))
    decode.arrives("a")
    assert decode.fetching.arrived_ == ["a"], "it has gone on with the engine of before"
    if isinstance(found, HandOverFailed):
        decode.fetching.failures["a"] = found
    else:
        decode.answers("a", found)
    assert decode.asking.may_ask_again("a")
    decode.asking.holds_again(decode.blocks.requests["a"])  # type: ignore[arg-type]
    decode.turn()
    assert decode.number("a") == 2 and decode.fetching.arrived_ == ["a"], "it waits for an answer"


@pytest.mark.parametrize("found", [HandOverFailed(FailureCause.UNREACHABLE, "another engine"), OF_ANOTHER], ids=str)
def test_engines_that_have_gone_are_no_tries(found: Any) -> None:
    """Prefill servers were restarted, one after another, while nobody asked them."""
    decode = Decode("http://p1", "http://p2", pushes=True, recomputes=False)
    rolled(decode, found)
    decode.answers("a", ODD)
    decode.turn()
    assert decode.number("a") == 3, "this was the first"
    decode.answers("a", ODD)
    assert "a" in decode.fetching.refused or not decode.asking.may_ask_again("a")


@pytest.mark.parametrize("adapter", ["", "new"])
def test_kv_that_is_late_is_a_try(adapter: str) -> None:
    """Each time costs a whole timeout. Its answer shows whether the adapter has another version there."""
    decode = Decode("http://p1", "http://p2", pushes=True, recomputes=False)
    late, is_named = HandOverFailed(FailureCause.DEADLINE, "late"), []
    for _ in range(5):
        for one in decode.asking.servers.all:
            decode.asking.servers.heard(one, engine_in(OF_P))
        if not is_named:
            decode.arrives("a", adapter=adapter)
        decode.turn()
        is_named.append(decode.asking._wanted["a"].named is not None)
        decode.answers("a", OF_P)
        decode.fetching.failures["a"] = late
        if not decode.asking.holds_again(decode.blocks.requests["a"]):  # type: ignore[arg-type]
            break
    assert is_named == [True, not adapter]
    assert sum(one.num_failures for one in decode.asking.servers.all) == (1 if adapter else 2)


def counted(decode: Decode) -> tuple[dict[str, int], dict[str, int]]:
    """What came of questions, and why prompts are computed here; without zeros."""
    figures = decode.asking.figures
    ended, computed = (
        {one.value: count for one, count in of.items() if count} for of in (figures.ended, figures.computed)
    )
    return ended, computed


def test_what_came_of_questions_is_counted() -> None:
    decode = Decode("http://p1", "http://p2")
    for one, found in (("a", ANSWER), ("b", BUSY), ("c", ODD), ("d", DEAD), ("e", Outcome("HTTP 400", is_final=True))):
        decode.arrives(one)
        decode.answers(one, found)
        decode.asking.gone(one)
        decode.clock.advance(60)
    decode.turn()
    figures = decode.asking.figures
    assert (figures.held, figures.asked, figures.promised_blocks) == (0, 0, 0)
    decode.arrives("f")
    decode.arrives("g", block_hashes=(b"same",))
    decode.arrives("h", block_hashes=(b"same",))
    figures = decode.asking.figures
    assert (figures.held, figures.asked, figures.promised_blocks) == (1, 2, 8)
    decode.asking.gone("f")
    ended, computed = counted(decode)
    again = ended.pop("left") - 1
    assert ended == {"answered": 1, "busy": 1, "failed": 1, "unreachable": 1, "refused": 1}
    assert again == 4 and not computed, "those that had failed were asked for again"


def test_why_prompts_are_computed_here_is_counted() -> None:
    decode = Decode(cached={"cached": 4 * BLOCK})
    decode.arrives("short", num_prompt_tokens=BLOCK)
    decode.arrives("image", can_be_asked=False)
    decode.arrives("cached")
    for one in ("lost", "odd"):
        decode.arrives(one)
    decode.answers("lost", ODD)
    decode.answers("lost", ODD)
    decode.answers("odd", DEAD)
    decode.arrives("later")
    found = counted(decode)[1]
    assert found == {"short": 1, "not_askable": 1, "cached": 1, "failed": 1, "unreachable": 2}


def test_what_is_computed_here_is_computed_by_priority() -> None:
    """As many at a time as fit into a chunk; one that has ended meanwhile is not begun."""
    decode = Decode(goes_by_priority=True)
    decode.arrives("first", num_prompt_tokens=CHUNK)
    for name, priority in (("low", 9), ("gone", 0), ("high", 1)):
        decode.arrives(name, priority=priority, num_prompt_tokens=CHUNK)
    for name in ("first", "low", "gone", "high"):
        decode.answers(name, Outcome("HTTP 400", is_final=True))
    decode.asking.gone("gone")
    begun = list(decode.blocks.released)
    for name in ("first", "high"):
        decode.asking.computed([Step(name, CHUNK)])
        decode.turn()
    assert [*begun, *list(decode.blocks.released)[len(begun) :]] == ["first", "high", "low"]
