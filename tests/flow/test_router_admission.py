# SPDX-License-Identifier: Apache-2.0
"""Prefill computes nothing that decode has no room for: requests wait at the router, or are told when to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from support.router_under_test import HELLO, UnderTest, check, quiet, serving_before, until
from support.stub_servers import Fabric, Stub, stubs

from kvcached_nixl.proxy import health

PROMPT = "x" * 400
"""About 100 tokens."""
FREE, USED = 250, 0


@asynccontextmanager
async def pair(*, pushes: bool = False, **options: object) -> AsyncIterator[UnderTest]:
    """A router before one prefill and one decode stub, which said once that it can hold two prompts and a half."""
    fabric = Fabric()
    prefill, decode = (Stub(fabric, pushes=pushes) for _ in range(2))
    decode.tokens_of_memory = (FREE, USED, 0)
    options = {"decode_fill": 1.0, "health_interval_seconds": 60.0, **options}
    async with stubs(prefill, decode), serving_before([prefill], [decode], **options) as at:
        yield at


async def asked(at: UnderTest, count: int) -> list[asyncio.Task[httpx.Response]]:
    return [asyncio.create_task(at.complete(PROMPT, max_tokens=4)) for _ in range(count)]


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
def test_prefill_is_asked_for_as_much_as_decode_can_take(pushes: bool) -> None:
    async def run() -> None:
        async with pair(pushes=pushes) as at:
            at.decodes[0].token_seconds = 0.05
            requests = await asked(at, 8)
            most = 0
            while not all(one.done() for one in requests):
                most = max(most, sum(one.requests for one in at.router.app.fleet))
                await asyncio.sleep(0.005)
            for one in requests:
                check(one.result(), {**HELLO, "prompt": PROMPT, "stream": False})
                assert one.result().status_code == 200
            assert len(at.prefills[0].asked) == 8, "none twice"
            assert 0 < most <= (4 if pushes else 2)
            await quiet(at)

    asyncio.run(run())


def test_what_others_leave_of_the_device_counts() -> None:
    """Another engine takes memory, and gives it back: the same requests wait, and then go on."""

    async def run() -> None:
        async with pair(health_interval_seconds=0.05) as at:
            decode = at.decodes[0]
            decode.tokens_of_memory = (10, 0, 40)
            (known,) = (one for one in at.router.app.fleet if one.name == decode.name)
            await until(lambda: known.capacity is not None and known.capacity.tokens == 10, "it was not looked at")
            decode.token_seconds = 0.5
            first, second = await asked(at, 2)
            await asyncio.sleep(0.3)
            assert len(at.prefills[0].asked) == 1, "one alone may be larger than all"
            assert (await at.metrics())["kvcached_nixl_router_waiting_requests"] == 1
            decode.tokens_of_memory = (1000, 0, 0)
            await until(lambda: len(at.prefills[0].asked) == 2, "the second one still waits")
            assert (await at.metrics())["kvcached_nixl_router_waiting_requests"] == 0
            assert [one.status_code for one in await asyncio.gather(first, second)] == [200, 200]

    asyncio.run(run())


def test_what_a_server_said_long_ago_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was full when its metrics were read last. They do not come any more, though it works."""
    monkeypatch.setattr(health, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(health, "METRICS_SECONDS", 0.1)

    async def run() -> None:
        async with pair(health_interval_seconds=0.05) as at:
            decode = at.decodes[0]
            decode.tokens_of_memory = (0, 1000, 5000)
            (known,) = (one for one in at.router.app.fleet if one.name == decode.name)
            await until(lambda: known.capacity is not None and known.capacity.tokens == 1000, "it was not looked at")
            decode.metrics_seconds, decode.token_seconds = 60.0, 0.5
            requests = await asked(at, 3)
            await until(lambda: len(at.prefills[0].asked) == 3, "they still wait")
            assert known.capacity is None and not any(one.done() for one in requests)
            assert [one.status_code for one in await asyncio.gather(*requests)] == [200] * 3

    asyncio.run(run())


def test_who_would_wait_too_long_is_told_when_to_come_back() -> None:
    async def run() -> None:
        async with pair(queue_timeout_seconds=0.4) as at:
            at.decodes[0].token_seconds = 0.3
            answers = await asyncio.gather(*await asked(at, 8))
            assert {one.status_code for one in answers} == {200, 503}
            refused = [one for one in answers if one.status_code == 503]
            assert all(int(one.headers["Retry-After"]) >= 1 for one in refused)
            assert all("no room" in one.json()["error"]["message"] for one in refused)
            assert len(at.prefills[0].asked) == 8 - len(refused), "nothing was computed for them"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_list_of_prompts_may_take_longer_than_one_may_wait(stream: bool) -> None:
    """Else it would never be served, and compute a part of itself at each try."""

    async def run() -> None:
        async with pair(queue_timeout_seconds=0.4) as at:
            at.decodes[0].token_seconds = 0.1
            answer = await at.complete([PROMPT + str(one) for one in range(6)], max_tokens=4, stream=stream)
            assert answer.status_code == 200, answer.text
            assert len(at.prefills[0].asked) == 6, "none twice"
            await quiet(at)

    asyncio.run(run())


def test_without_the_limit_all_are_computed_at_once() -> None:
    async def run() -> None:
        async with pair(decode_fill=0.0) as at:
            at.prefills[0].prefill_seconds = 0.3
            requests = await asked(at, 8)
            await until(lambda: len(at.prefills[0].asked) == 8, "some wait")
            assert {one.status_code for one in await asyncio.gather(*requests)} == {200}

    asyncio.run(run())


FALSE = {
    "endless queue": (FREE, USED, "9e16"),
    "nothing at all": (0, 0, 0),
    "nothing left": (0, 10**15, 0),
    "endless memory": ("9e16", USED, 0),
    "no number": ("NaN", USED, 0),
    "infinite": (FREE, USED, "+Inf"),
    "negative": (-FREE, USED, 0),
    "not said of all": (FREE, USED),
}


@pytest.mark.parametrize("said", FALSE.values(), ids=FALSE.keys())
def test_a_false_capacity_of_one_server_holds_nobody_up(said: tuple[object, object, object]) -> None:
    """A decode server that says nonsense gets less, or no limit; the other one serves as before."""

    async def run() -> None:
        fabric = Fabric()
        prefill, liar, other = (Stub(fabric) for _ in range(3))
        liar.tokens_of_memory, other.tokens_of_memory = said, (1000, 0, 0)
        options = {"decode_fill": 1.0, "health_interval_seconds": 60.0, "queue_timeout_seconds": 20.0}
        async with stubs(prefill, liar, other), serving_before([prefill], [liar, other], **options) as at:
            liar.token_seconds = other.token_seconds = 0.05
            requests = await asked(at, 12)
            most = 0
            while not all(one.done() for one in requests):
                most = max(most, sum(one.requests for one in at.router.app.fleet))
                await asyncio.sleep(0.005)
            assert {one.result().status_code for one in requests} == {200}
            assert most >= 5, "they went one after the other"
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize("said", [(0, 0, 0), (0, 10**15, 0), (1, 0, 10**16)], ids=["no memory", "full", "queue"])
def test_where_no_server_has_room_one_request_at_a_time_is_tried(said: tuple[object, object, object]) -> None:
    async def run() -> None:
        async with pair() as at:
            (known,) = (one for one in at.router.app.fleet if one.name == at.decodes[0].name)
            at.decodes[0].tokens_of_memory, at.decodes[0].token_seconds = said, 0.05
            known.suspected.set()
            await until(lambda: known.room_tokens(1.0) == 0, "it was not looked at")
            requests, most = await asked(at, 4), 0
            while not all(one.done() for one in requests):
                most = max(most, sum(one.requests for one in at.router.app.fleet))
                await asyncio.sleep(0.005)
            assert {one.result().status_code for one in requests} == {200} and most == 1

    asyncio.run(run())


def headroom(free: object, used: object, queued: object) -> dict[str, object]:
    return {"free_tokens": free, "used_tokens": used, "queued_tokens": queued, "kept_offers": 1}


def test_what_prefill_answers_of_its_memory_decides_which_prefill_is_asked() -> None:
    async def run() -> None:
        fabric = Fabric()
        full, other, decode = (Stub(fabric) for _ in range(3))
        full.tokens_of_memory = other.tokens_of_memory = (1000, 0, 0)
        async with (
            stubs(full, other, decode),
            serving_before([full, other], [decode], health_interval_seconds=60.0) as at,
        ):
            await asyncio.gather(*await asked(at, 8))
            assert len(full.asked) == 4, "in turn"
            full.headroom, other.headroom = headroom(50, 950, 0), headroom(1000, 0, 0)
            await asyncio.gather(*await asked(at, 2))
            before = len(full.asked)
            for _ in range(4):
                await asyncio.gather(*await asked(at, 1))
            assert len(full.asked) == before, "it has no room"

    asyncio.run(run())


@pytest.mark.parametrize(
    "said", [0, [], "x", headroom(-1, 0, 0), headroom(1.5, 0, 0), headroom(None, 0, 0), {"free_tokens": 2**80}, {}]
)
def test_a_headroom_that_cannot_be_read_costs_nothing(said: object) -> None:
    async def run() -> None:
        async with pair() as at:
            at.prefills[0].tokens_of_memory = (1000, 0, 0)
            at.prefills[0].headroom = said
            answers = await asyncio.gather(*await asked(at, 3))
            for one in answers:
                check(one, {**HELLO, "prompt": PROMPT, "stream": False})
                assert one.status_code == 200

    asyncio.run(run())
