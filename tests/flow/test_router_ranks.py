# SPDX-License-Identifier: Apache-2.0
"""The router with data-parallel servers: a push reaches the rank that decode was told about."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.router_under_test import UnderTest, quiet, right, serving_before, until
from support.stub_servers import Asked, Fabric, Stub, stubs

from kvcached_nixl.proxy.instance import Instance
from kvcached_nixl.proxy.rank_count import NOBODY

HEADER = "x-data-parallel-rank"


@asynccontextmanager
async def parallel(
    *sizes: int, decodes: int = 1, pushes: bool = True, first_rank: int = 0, **options: Any
) -> AsyncIterator[UnderTest]:
    """A prefill server for each of ``sizes``, with so many ranks."""
    fabric = Fabric()
    ps = [Stub(fabric, pushes=pushes) for _ in sizes]
    for one, size in zip(ps, sizes, strict=True):
        one.ranks, one.first_rank = size, first_rank
    ds = [Stub(fabric, pushes=pushes) for _ in range(decodes)]
    async with stubs(*ps, *ds), serving_before(ps, ds, **options) as at:
        yield at


def served(server: Stub) -> list[Asked]:
    """What a prefill server was asked, but for the question how many ranks it has."""
    return [one for one in server.asked if one.headers.get(HEADER) != str(NOBODY)]


def questions(server: Stub) -> int:
    return len(server.asked) - len(served(server))


def pushed(server: Stub) -> list[Asked]:
    return [one for one in served(server) if one.params.get("transfer_id")]


async def ask(at: UnderTest, count: int, first: int = 0) -> None:
    """So many, each right, one after the other."""
    for number in range(first, first + count):
        assert right(await at.complete(f"p{number}"), f"p{number}")


def instance(at: UnderTest, name: str) -> Instance:
    """Returns what the router knows of a server."""
    return next(one for one in at.router.app.fleet if one.name == name)


async def known(at: UnderTest, server: Stub) -> list[Any]:
    """The engine ids of its ranks that the router knows."""
    ranks = (await at.instances())[server.name].get("ranks")
    return [one["engine_id"] for one in ranks or ()]


@pytest.mark.parametrize("first_rank", [0, 4], ids=["internal", "hybrid"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_push_reaches_the_rank_that_decode_was_told_of(size: int, first_rank: int) -> None:
    """From the first answer of each on; with hybrid load balancing the header counts from 0, and the ids do not."""

    async def run() -> None:
        async with parallel(size, first_rank=first_rank) as at:
            await ask(at, 1 + 5 * size)
            (prefill,) = at.prefills
            assert questions(prefill) == 1
            # One that says what the server is, one of each rank that says where it is, and all others at once.
            assert len(pushed(prefill)) == 4 * size
            assert Counter(int(one.headers[HEADER]) for one in pushed(prefill)) == dict.fromkeys(range(size), 4)
            assert await known(at, prefill) == [prefill.engine_of(rank) for rank in range(size)]
            assert not any(one.was_computed or one.was_cut for one in at.decodes[0].asked)
            assert HEADER not in "".join("".join(one.headers) for one in at.decodes[0].asked)
            assert await at.count("retries_total") == 0
            await quiet(at)

    asyncio.run(run())


def test_many_at_once_from_the_first_request_on() -> None:
    """While nothing is known and several clients find it out at the same time."""

    async def run() -> None:
        async with parallel(2, 4, decodes=2) as at:
            for turn in range(4):
                names = [f"p{turn} {number}" for number in range(40)]
                answers = await asyncio.gather(*(at.complete(name) for name in names))
                assert all(right(*one) for one in zip(answers, names, strict=True))
            assert [questions(one) for one in at.prefills] == [1, 1]
            assert await at.count("retries_total") == 0
            assert not any(one.was_cut for server in (*at.prefills, *at.decodes) for one in served(server))
            assert sum(len(pushed(one)) for one in at.prefills) > 80
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize(("ranks", "pushes"), [(0, True), (0, False), (2, False)], ids=["one", "one, pull", "pull"])
def test_who_need_not_be_named_is_not(ranks: int, pushes: bool) -> None:
    """Servers with one engine, and prefill that is asked before decode, get the usual requests without a rank."""

    async def run() -> None:
        async with parallel(ranks, pushes=pushes) as at:
            await ask(at, 6)
            (prefill,) = at.prefills
            assert len(prefill.asked) == 6 and len(pushed(prefill)) == (5 if pushes else 0)
            assert not any(HEADER in one.headers for one in (*prefill.asked, *at.decodes[0].asked))
            assert (await at.instances())[prefill.name].get("ranks") is None

    asyncio.run(run())


@pytest.mark.parametrize("name", ["p_dp1", "p_dp0"])
def test_one_rank_behind_an_address_of_its_own(name: str) -> None:
    """External load balancing: its id is a rank's, and it takes no other. It is asked once, and pushed to unnamed."""

    async def run() -> None:
        async with parallel(0) as at:
            (prefill,) = at.prefills
            prefill.engine_id = name
            await ask(at, 6)
            assert questions(prefill) == 1 and len(pushed(prefill)) == 5
            assert not any(HEADER in one.headers for one in served(prefill))

    asyncio.run(run())


def test_the_least_loaded_rank_computes() -> None:
    """Ranks are compared by themselves: the other one of two does not wait behind a long prompt."""

    async def run() -> None:
        async with parallel(2) as at:
            await ask(at, 7)
            (prefill,) = at.prefills
            seen = len(prefill.asked)
            prefill.prefill_seconds = 0.5
            long = asyncio.create_task(at.complete("x" * 4000))
            await until(lambda: len(prefill.asked) > seen, "prefill is not asked")
            busy = prefill.asked[-1].rank
            ranks = (await at.instances())[prefill.name]["ranks"]
            assert [one["requests"] for one in ranks] == [int(rank == busy) for rank in range(2)]
            prefill.prefill_seconds = 0.0
            await ask(at, 6, first=100)
            assert {one.rank for one in prefill.asked[seen + 1 :]} == {1 - busy}
            assert (await long).status_code == 200
            await quiet(at)

    asyncio.run(run())


def test_a_prompt_returns_to_the_rank_that_has_its_beginning() -> None:
    async def run() -> None:
        async with parallel(2, 2, policy="prefix-affinity") as at:
            for number in range(12):
                assert (await at.complete(f"warm {number} {number * 7}" * 200)).status_code == 200
            seen = [len(one.asked) for one in at.prefills]
            for turn in range(8):
                prompt = f"{turn % 4}" * 1000 + f" {turn}"
                assert right(await at.complete(prompt), prompt)
            homes: dict[str, set[tuple[str, int]]] = {}
            for server, before in zip(at.prefills, seen, strict=True):
                for one in server.asked[before:]:
                    homes.setdefault(one.body["prompt"][:1000], set()).add((server.name, one.rank))
            assert len(homes) == 4 and all(len(one) == 1 for one in homes.values())
            assert len(set().union(*homes.values())) == 4

    asyncio.run(run())


def test_a_rank_that_was_started_again_is_learnt_anew_alone() -> None:
    """The other goes on being pushed to; no client has an error."""

    async def run() -> None:
        async with parallel(2) as at:
            await ask(at, 9)
            (prefill,) = at.prefills
            before = await known(at, prefill)
            prefill.restarted_ranks[1] = 1
            seen = len(prefill.asked)
            await ask(at, 9, first=100)
            assert await known(at, prefill) == [before[0], prefill.engine_of(1)] != before
            assert await at.count("retries_total", cause="restarted") == 1
            assert all(one.params.get("transfer_id") for one in prefill.asked[seen:] if one.rank == 0)
            assert [one.was_cut for one in at.decodes[0].asked].count(True) == 1
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize("noticed", [False, True], ids=["at once", "noticed"])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 0), (0, 2)])
def test_a_server_that_has_another_number_of_ranks_is_learnt_anew(before: int, after: int, noticed: bool) -> None:
    """Also where it is back under its name before any health check has failed."""

    async def run() -> None:
        options: dict[str, Any] = {} if noticed else {"health_interval_seconds": 60.0}
        async with parallel(before, **options) as at:
            (prefill,) = at.prefills
            await ask(at, 13)
            await prefill.stop()
            if noticed:
                await until(lambda: instance(at, prefill.name).state.value == "down", "not down")
            prefill.ranks = after
            await prefill.restart()
            if noticed:
                await until(lambda: instance(at, prefill.name).is_usable, "not up")
            await ask(at, 20, first=100)
            seen = len(prefill.asked)
            await ask(at, 12, first=200)
            assert all(one.params.get("transfer_id") for one in prefill.asked[seen:])
            assert {one.rank for one in prefill.asked[seen:]} == set(range(max(1, after)))
            assert (len(await known(at, prefill))) == after
            await quiet(at)

    asyncio.run(run())


def test_a_request_may_quote_the_refusal() -> None:
    """A 400 that is the client's own says what the client has sent; nothing is forgotten for it."""

    async def run() -> None:
        async with parallel(2) as at:
            await ask(at, 9)
            (prefill,) = at.prefills
            prefill.faults.append("400 data_parallel_rank 7 is out of range [0, 1).")
            answer = await at.complete("odd")
            assert answer.status_code == 400 and "out of range" in answer.text
            seen = len(prefill.asked)
            await ask(at, 6, first=100)
            assert all(one.params.get("transfer_id") for one in prefill.asked[seen:])
            assert questions(prefill) == 1

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["header is lost", "no number", "balancer"])
def test_ranks_that_cannot_be_told_apart_are_asked_one_after_the_other(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that drops the header, a server that does not know it, several engines behind one address."""

    async def run() -> None:
        async with parallel(2) as at:
            (prefill,) = at.prefills
            if kind == "header is lost":
                # Only after it has been understood once.
                await ask(at, 2)
            if kind == "balancer":
                prefill.engine_of = lambda rank: f"engine {rank}"  # type: ignore[method-assign]
            prefill.heeds_ranks = False
            # What has to be found out may cost attempts, and no client its answer.
            await ask(at, 12, first=100)
            seen = len(prefill.asked)
            retries = await at.count("retries_total")
            await ask(at, 12, first=200)
            assert await at.count("retries_total") == retries <= 3
            assert not any(one.params.get("transfer_id") or HEADER in one.headers for one in prefill.asked[seen:])
            assert sum("X-data-parallel-rank" in one.getMessage() for one in caplog.records) == 1

    asyncio.run(run())


def test_a_server_that_cannot_say_it_now_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcached_nixl.proxy.ranks.AGAIN_SECONDS", 0.0)

    async def run() -> None:
        async with parallel(2) as at:
            (prefill,) = at.prefills
            await ask(at, 1)
            for fault in ("503", "close", "500", "429"):
                prefill.faults.append(fault)
                seen = len(prefill.asked)
                await ask(at, 1, first=seen + 10)
                # The question and the request, which does not wait for its answer.
                assert len(prefill.asked) == seen + 2
            await ask(at, 6, first=100)
            assert len(pushed(prefill)) == 4 and questions(prefill) == 5

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_decode_that_does_not_meet_the_prefill_it_was_told_of_is_tried_with_one_that_says_where_it_is(
    stream: bool,
) -> None:
    """It may say so before prefill has answered, which then never tells the router that it is another one."""

    async def run() -> None:
        async with parallel(2) as at:
            await ask(at, 9)
            (prefill,), (decode,) = at.prefills, at.decodes
            prefill.restarted_ranks.update({0: 1, 1: 1})
            prefill.prefill_seconds = 0.2
            decode.faults.append("unmet")
            answer = await at.complete("p", stream=stream)
            assert answer.status_code == 200 and '"error"' not in answer.text
            assert decode.asked[-1].params["remote_engine_id"] in {prefill.engine_of(rank) for rank in range(2)}
            assert "kvcached_nixl" in decode.asked[-1].params

    asyncio.run(run())
