# SPDX-License-Identifier: Apache-2.0
"""proxy/admission.py: who may start, in which order, and what the others are told."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvcached_nixl.proxy import admission as module
from kvcached_nixl.proxy.admission import Admission
from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.proxy.instance import Instance, Role
from kvcached_nixl.proxy.kind import Capacity, capacity_of


def decode_server(demand: float = 0.0, tokens: float = 100.0) -> Instance:
    server = Instance(Role.DECODE, "http://127.0.0.1:1")
    server.capacity = Capacity(tokens, demand)
    return server


def door_to(server: Instance, fill: float, most_wait_seconds: float) -> Admission:
    return Admission(most_wait_seconds, lambda: server.room_tokens(fill))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


class Request:
    """A request that has started, or waits to."""

    def __init__(self, door: Admission, tokens: int, **options: bool) -> None:
        self.started, self.ending = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(door, tokens, options))

    async def _run(self, door: Admission, tokens: int, options: dict[str, bool]) -> None:
        async with door.admitted(tokens, **options):
            self.started.set()
            await self.ending.wait()

    async def end(self) -> None:
        self.ending.set()
        await self.task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def started(*requests: Request) -> list[bool]:
    return [one.started.is_set() for one in requests]


def test_as_many_start_as_there_is_room_for_and_the_others_in_their_order() -> None:
    async def test() -> None:
        decode = decode_server()
        door = door_to(decode, 1.5, 60.0)
        some = [Request(door, tokens) for tokens in (60, 60, 60, 10, 60)]
        await settle()
        assert started(*some) == [True, True, False, False, False], "a small one does not overtake"
        await some[0].end()
        await settle()
        assert started(*some) == [True, True, True, True, False]
        assert door.waiting_tokens == 60 and door.pending_tokens == 130
        for one in some:
            await one.end()
            await settle()
        assert (door.pending_tokens, door.waiting_tokens) == (0, 0)

    run(test)


def test_what_decode_says_counts_and_what_was_sent_to_it_since() -> None:
    async def test() -> None:
        decode = decode_server(demand=120)
        door = door_to(decode, 1.5, 60.0)
        first = Request(door, 90)
        await settle()
        assert started(first) == [True], "one alone may be larger than all"
        second = Request(door, 10)
        await settle()
        assert started(second) == [False]
        with door.at_decode(decode, 90):
            assert (door.pending_tokens, decode.sent_tokens) == (0, 90)
            # It has said so itself by now.
            decode.capacity, decode.sent_tokens = Capacity(100, 130), 0
            door.look()
            await settle()
            assert started(second) == [True]
        assert decode.sent_tokens == -90, "what has ended since"
        await first.end()
        await second.end()
        assert door.pending_tokens == 0

    run(test)


def test_where_a_server_does_not_say_what_it_can_hold_nobody_waits() -> None:
    async def test() -> None:
        decode = decode_server(demand=1000)
        decode.capacity = None
        door = door_to(decode, 1.5, 60.0)
        some = [Request(door, 60) for _ in range(5)]
        await settle()
        assert all(started(*some))
        for one in some:
            await one.end()

    run(test)


def test_what_does_not_wait_counts_all_the_same() -> None:
    async def test() -> None:
        decode = decode_server()
        door = door_to(decode, 1.0, 60.0)
        some = [Request(door, 90, waits=False) for _ in range(2)]
        last = Request(door, 1)
        await settle()
        assert started(*some, last) == [True, True, False]
        for one in (*some, last):
            await one.end()

    run(test)


def test_one_that_leaves_the_queue_does_not_hold_the_others_up() -> None:
    async def test() -> None:
        decode = decode_server()
        door = door_to(decode, 1.0, 60.0)
        first, large, small = Request(door, 50), Request(door, 90), Request(door, 50)
        await settle()
        assert started(first, large, small) == [True, False, False]
        large.task.cancel()
        await settle()
        assert started(small) == [True]
        for one in (first, small):
            await one.end()

    run(test)


def test_one_that_leaves_as_it_is_let_in_does_not_hold_the_others_up() -> None:
    async def test() -> None:
        decode = decode_server()
        door = door_to(decode, 1.0, 60.0)
        first, second, third = Request(door, 90), Request(door, 90), Request(door, 90)
        await settle()
        first.ending.set()
        await first.task
        second.task.cancel()
        await settle()
        assert started(third) == [True] and door.pending_tokens == 90
        await third.end()
        assert door.pending_tokens == 0

    run(test)


def test_who_would_wait_too_long_is_told_how_long_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        decode = decode_server()
        door = door_to(decode, 1.0, 20.0)
        # The event loop reads this clock, too: far ahead, the test's own time limit would end. Whole: sums are exact.
        now = [math.floor(time.monotonic()) + 1.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        first, second = Request(door, 100), Request(door, 150)
        await settle()
        now[0] += 10.0
        await first.end()
        # 100 tokens have ended in ten seconds.
        third = Request(door, 100)
        await settle()
        assert started(second, third) == [True, False]
        late = Request(door, 150)
        with pytest.raises(Refusal) as refused:
            await late.task
        assert refused.value.cause is RouterFailure.FULL and refused.value.headers == {"Retry-After": "25"}
        assert "100 tokens wait before it" in str(refused.value)
        for one in (second, third):
            await one.end()

    run(test)


def test_who_has_waited_too_long_is_refused() -> None:
    async def test() -> None:
        decode = decode_server()
        door = door_to(decode, 1.0, 0.05)
        first, second = Request(door, 100), Request(door, 100)
        await settle()
        with pytest.raises(Refusal):
            await second.task
        assert door.waiting_tokens == 0
        await first.end()

    run(test)


def test_who_has_waited_in_vain_is_told_of_no_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        door = door_to(decode_server(), 1.0, 20.0)
        now = [math.floor(time.monotonic()) + 1.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        first, second = Request(door, 100), Request(door, 100)
        await settle()
        now[0] += 21.0
        with pytest.raises(Refusal) as refused:
            await second.task
        assert refused.value.headers == {"Retry-After": "20"}, "nothing has ended meanwhile"
        assert "0 tokens wait before it" in str(refused.value), "it does not wait for itself"
        await first.end()

    run(test)


@pytest.mark.parametrize("had_queue", [False, True])
def test_few_requests_before_a_burst_do_not_look_like_a_slow_server(
    had_queue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        door = door_to(decode_server(), 1.0, 5.0)
        now = [math.floor(time.monotonic()) + 1.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        if had_queue:
            some = [Request(door, 100) for _ in range(2)]
            await settle()
            now[0] += 1.0
            for one in some:
                await one.end()
        for _ in range(3):
            now[0] += 8.0
            one = Request(door, 10)
            await settle()
            await one.end()
        burst = [Request(door, 50) for _ in range(12)]
        await settle()
        assert started(*burst) == [True] * 2 + [False] * 10
        if had_queue:
            # A hundred tokens ended in the second in which one waited.
            assert sum(one.task.done() for one in burst) == 0 and door.waiting_tokens == 500
        for one in burst:
            await one.end()
            await settle()

    run(test)


SAID = b"""\
kvcached_nixl:free_tokens{engine="0",model_name="m"} 100.0
kvcached_nixl:used_tokens{engine="0",model_name="m"} 1.5e+03
kvcached_nixl:queued_tokens{engine="0",model_name="m"} 7.0
"""


def test_the_capacity_of_a_server_is_that_of_all_its_engines() -> None:
    assert capacity_of(SAID) == Capacity(1600.0, 1507.0)
    assert capacity_of(SAID + SAID.replace(b'engine="0"', b'engine="1"')) == Capacity(3200.0, 3014.0, num_engines=2)


@pytest.mark.parametrize("said", [b"", SAID[: SAID.rfind(b"kvc")], SAID.replace(b" 1.5e+03", b" NaN"), b"x" + SAID])
def test_metrics_without_it_say_no_capacity(said: bytes) -> None:
    assert capacity_of(said) is None


def test_a_server_whose_device_others_have_taken_has_no_room() -> None:
    assert capacity_of(SAID.replace(b"100.0", b"0.0").replace(b"1.5e+03", b"0.0")) == Capacity(0.0, 7.0)


def test_a_line_that_is_missing_for_one_engine_says_no_capacity() -> None:
    other = SAID.replace(b'engine="0"', b'engine="1"')
    for bad in (b" NaN", b" -1.0", b" +Inf", b" 1e999", b" 0x10"):
        assert capacity_of(SAID + other.replace(b" 100.0", bad)) is None
    assert capacity_of(SAID.replace(b" 100.0", b" 9e99")) == Capacity(9e99 + 1500, 1507.0)


def test_two_that_end_at_once_let_no_more_in_than_there_is_room_for() -> None:
    async def test() -> None:
        door = door_to(decode_server(), 1.0, 60.0)
        first, small = Request(door, 90), Request(door, 10)
        await settle()
        waiting = [Request(door, 90) for _ in range(2)]
        await settle()
        first.ending.set()
        small.ending.set()
        await settle()
        assert started(*waiting) == [True, False] and door.pending_tokens == 90
        for one in waiting:
            one.ending.set()
            await settle()
        assert (door.pending_tokens, door.waiting_tokens) == (0, 0)

    run(test)


def test_what_has_begun_is_not_refused_in_the_middle() -> None:
    """The next sequences of a request: each try would compute a part of it for nothing."""

    async def test() -> None:
        door = door_to(decode_server(), 1.0, 0.05)
        first = Request(door, 100)
        await settle()
        following, other = Request(door, 100, follows=True), Request(door, 100)
        await asyncio.sleep(0.1)
        assert isinstance(other.task.exception(), Refusal) and not following.task.done()
        await first.end()
        await settle()
        assert started(following) == [True]
        await following.end()
        assert (door.pending_tokens, door.waiting_tokens) == (0, 0)

    run(test)


def test_who_is_let_in_and_leaves_at_once_is_not_counted() -> None:
    async def test() -> None:
        door = door_to(decode_server(), 1.0, 60.0)
        first, second = Request(door, 100), Request(door, 100)
        await settle()
        first.ending.set()
        while door.waiting_requests:
            await asyncio.sleep(0)
        second.task.cancel()
        await settle()
        assert (door.pending_tokens, door.waiting_tokens) == (0, 0) and not second.started.is_set()
        third = Request(door, 100)
        await settle()
        assert started(third) == [True]
        await third.end()

    run(test)
