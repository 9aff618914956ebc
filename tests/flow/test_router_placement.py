# SPDX-License-Identifier: Apache-2.0
"""Where the router sends a request: to servers that fit each other, by weight, to decode alone where it costs less."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from support.router_under_test import UnderTest, learn, quiet, right, serving, until
from support.stub_servers import Stub, stubs

PUSHES = pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])

# ------------------------------------------------------------------------------------------------------- pairs that fit


def of_models(at: UnderTest) -> None:
    """The first prefill and the first decode server serve model 1, the second ones model 2."""
    for servers in (at.prefills, at.decodes):
        for number, one in enumerate(servers, 1):
            one.model_id = number


async def kinds_known(at: UnderTest) -> None:
    while any(one["kind"] is None for one in (await at.instances()).values()):
        await asyncio.sleep(0.01)


@PUSHES
def test_only_servers_that_fit_are_paired(pushes: bool) -> None:
    async def run() -> None:
        async with serving(2, 2, pushes=pushes) as at:
            of_models(at)
            await kinds_known(at)
            await learn(at)
            answers = await asyncio.gather(*(at.complete(f"prompt {number}", max_tokens=4) for number in range(60)))
            assert all(right(one, f"prompt {number}") for number, one in enumerate(answers))
            assert all(one.asked for one in (*at.prefills, *at.decodes))
            assert not any(one.was_computed for server in at.decodes for one in server.asked)
            assert await at.count("retries_total") == 0
            await quiet(at)

    asyncio.run(run())


@PUSHES
def test_a_rolling_change_of_the_model_costs_no_error(pushes: bool) -> None:
    """One after the other, each server is drained, and comes back with another model, under load."""

    async def load(at: UnderTest, ended: asyncio.Event, number: int) -> int:
        count = 0
        while not ended.is_set():
            prompt = f"{number} {count}"
            answer = await at.complete(prompt, max_tokens=4)
            assert right(answer, prompt), answer.text
            count += 1
        return count

    async def run() -> None:
        async with serving(3, 3, pushes=pushes, queue_timeout_seconds=10.0) as at:
            servers = [*at.prefills, *at.decodes]
            for one in servers:
                one.model_id, one.token_seconds = 1, 0.002
            await kinds_known(at)
            ended = asyncio.Event()
            loads = [asyncio.create_task(load(at, ended, number)) for number in range(8)]
            for one in (server for pair in zip(at.prefills, at.decodes, strict=True) for server in pair):
                await at.administer("POST", f"/{one.name}/drain")
                while not (await at.instances())[one.name]["drained"]:
                    await asyncio.sleep(0.005)
                await one.stop()
                await at.administer("DELETE", f"/{one.name}")
                one.model_id = 2
                await one.start()
                role = "prefill" if one in at.prefills else "decode"
                assert (await at.administer("POST", json={"role": role, "url": one.url})).status_code == 201
                while (await at.instances())[one.name]["kind"] is None:
                    await asyncio.sleep(0.005)
            ended.set()
            assert min(await asyncio.gather(*loads)) > 5
            assert not any(one.was_computed for server in at.decodes for one in server.asked)
            assert await at.count("requests_total", outcome="ok") == await at.count("requests_total")
            await quiet(at)

    asyncio.run(run())


def test_without_a_pair_that_fits_a_request_waits_for_one() -> None:
    async def run() -> None:
        async with serving(1, 1, queue_timeout_seconds=5.0) as at:
            at.prefills[0].model_id, at.decodes[0].model_id = 1, 2
            await kinds_known(at)
            waiting = asyncio.create_task(at.complete(max_tokens=4))
            await until(lambda: at.router.app.in_flight == 1, "the request has not come")
            another = Stub(at.prefills[0].fabric)
            another.model_id = 1
            async with stubs(another):
                await at.administer("POST", json={"role": "decode", "url": another.url})
                assert right(await waiting)
            assert len(another.asked) == 1
            assert not at.decodes[0].asked

    asyncio.run(run())


@pytest.mark.parametrize("decode_alone", [False, True])
def test_without_a_pair_that_fits_there_is_an_error_or_decode_computes(decode_alone: bool) -> None:
    async def run() -> None:
        async with serving(1, 1, decode_alone=decode_alone, queue_timeout_seconds=0.2) as at:
            at.prefills[0].model_id, at.decodes[0].model_id = 1, 2
            await kinds_known(at)
            answer = await at.complete(max_tokens=4)
            if decode_alone:
                assert right(answer)
                assert await at.count("decode_alone_total", reason="no_prefill") == 1
            else:
                assert answer.status_code == 503
                assert "same model" in answer.json()["error"]["message"]
            assert not at.prefills[0].asked

    asyncio.run(run())


def test_a_model_that_was_changed_in_place_is_seen_at_the_first_failure() -> None:
    """As a trainer does it that sends new weights to prefill first, then to decode."""

    async def model_of(at: UnderTest, server: Stub) -> str:
        return ((await at.instances())[server.name]["kind"] or "--").split("-")[1][-1:]

    async def run() -> None:
        async with serving(1, 2, health_interval_seconds=0.5) as at:
            of_models(at)
            at.decodes[1].model_id = 1
            while await model_of(at, at.decodes[1]) != "1":
                await asyncio.sleep(0.01)
            # From here on nothing but a failure makes the router look again in time.
            at.router.app.fleet.options = replace(at.router.app.fleet.options, health_interval_seconds=60.0)
            assert all([right(await at.complete(max_tokens=4)) for _ in range(2)])
            await asyncio.sleep(1.5)
            at.prefills[0].model_id = at.decodes[0].model_id = 2
            for _ in range(4):
                await at.complete(max_tokens=4)
            await until(lambda: len(at.prefills[0].asked) > 2, "nothing was tried")
            while [await model_of(at, one) for one in (*at.prefills, *at.decodes)] != ["2", "2", "1"]:
                await asyncio.sleep(0.01)
            before = len(at.decodes[1].asked)
            assert all([right(await at.complete(max_tokens=4)) for _ in range(10)])
            assert len(at.decodes[1].asked) == before

    asyncio.run(run())


@pytest.mark.parametrize("is_killed", [False, True], ids=["drained", "killed"])
def test_requests_whose_last_decode_that_fits_goes_away_go_to_another_pair(is_killed: bool) -> None:
    async def run() -> None:
        async with serving(2, 2, queue_timeout_seconds=5.0) as at:
            of_models(at)
            await kinds_known(at)
            for one in at.prefills:
                one.prefill_seconds = 0.5
            asking = [asyncio.create_task(at.complete(f"p{number}", max_tokens=4)) for number in range(40)]
            await until(lambda: len(at.prefills[0].asked) + len(at.prefills[1].asked) == 40, "prefill is not asked")
            assert at.prefills[0].asked
            if is_killed:
                await at.decodes[0].stop()
            else:
                await at.administer("POST", f"/{at.decodes[0].name}/drain")
            answers = await asyncio.gather(*asking)
            assert all(right(one, f"p{number}") for number, one in enumerate(answers))

    asyncio.run(run())


def test_a_server_whose_metrics_do_not_come_is_up_all_the_same() -> None:
    async def run() -> None:
        async with serving(1, 1, all_up=False) as at:
            for one in (*at.prefills, *at.decodes):
                one.metrics_seconds = 3600.0
            begun = time.monotonic()
            while any(one["state"] != "up" for one in (await at.instances()).values()):
                await asyncio.sleep(0.01)
            assert time.monotonic() - begun < 4.0
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_what_is_outdated_is_looked_at_again_while_a_request_waits() -> None:
    """The look that has just found no pair that fits does not stand for the next ten."""

    async def run() -> None:
        async with serving(1, 1, health_interval_seconds=0.2, queue_timeout_seconds=4.0) as at:
            at.prefills[0].model_id, at.decodes[0].model_id = 1, 2
            await kinds_known(at)
            at.router.app.fleet.options = replace(at.router.app.fleet.options, health_interval_seconds=60.0)
            for one in at.router.app.fleet:
                one.suspected.set()
            await asyncio.sleep(1.2)
            at.decodes[0].model_id = 1
            assert right(await at.complete(max_tokens=4))

    asyncio.run(run())


def test_a_dead_server_is_found_in_time_when_it_comes_back_although_requests_wait() -> None:
    """What waits for a pair asks the servers that are up, and does not make the pauses between checks longer."""

    async def run() -> None:
        async with serving(2, 1, queue_timeout_seconds=8.0) as at:
            at.prefills[0].model_id, at.prefills[1].model_id, at.decodes[0].model_id = 1, 2, 2
            await kinds_known(at)
            await at.prefills[1].stop()
            while (await at.instances())[at.prefills[1].name]["state"] == "up":
                await asyncio.sleep(0.01)
            asking = [asyncio.create_task(at.complete(max_tokens=4)) for _ in range(40)]
            await asyncio.sleep(0.8)
            await at.prefills[1].start()
            begun = time.monotonic()
            assert all(map(right, await asyncio.gather(*asking)))
            assert time.monotonic() - begun < 3.0

    asyncio.run(run())


def test_readiness_needs_a_pair_that_fits() -> None:
    async def run() -> None:
        async with serving(1, 1) as at:
            for paths, status in ((("/livez",), 200), (("/health", "/readyz"), 503)):
                at.prefills[0].model_id, at.decodes[0].model_id = 1, 2
                await kinds_known(at)
                assert {(await at.http.get(f"{at.url}{path}")).status_code for path in paths} == {status}

    asyncio.run(run())


def test_what_fails_alone_makes_nobody_look_at_the_whole_fleet() -> None:
    async def run() -> None:
        async with serving(2, 2, attempts=1) as at:
            for one in at.decodes:
                one.faults.append("500")
            watched = [one for one in at.router.app.fleet if one.name in {server.name for server in at.prefills}]
            assert (await at.complete(max_tokens=4, echo=True, logprobs=1)).status_code == 502
            assert not any(one.suspected.is_set() for one in watched)

    asyncio.run(run())


# -------------------------------------------------------------------------------------------------------------- weights


def test_a_canary_gets_its_share() -> None:
    async def run() -> None:
        async with serving(2, 2, health_interval_seconds=1.0) as at:
            of_models(at)
            for one in at.router.app.fleet:
                one.suspected.set()
            await kinds_known(at)
            weighed = await at.administer("POST", f"/{at.prefills[1].name}/weight", json={"weight": 0.1})
            assert weighed.json()["weight"] == 0.1
            for _ in range(10):
                assert all(map(right, await asyncio.gather(*(at.complete(max_tokens=4) for _ in range(40)))))
            # Of 400 at one in eleven, with more than five standard deviations to both sides.
            assert 6 < len(at.prefills[1].asked) < 70
            assert len(at.decodes[1].asked) == len(at.prefills[1].asked)

    asyncio.run(run())


def test_a_canary_gets_no_more_where_decode_computes_alone() -> None:
    async def run() -> None:
        async with serving(1, 2, alone_most_tokens=1000) as at:
            await measured(at)
            await at.administer("POST", f"/{at.decodes[1].name}/weight", json={"weight": 0.01})
            before = len(at.decodes[1].asked)
            for _ in range(10):
                assert all(map(right, await asyncio.gather(*(at.complete(max_tokens=4) for _ in range(20)))))
            assert computed(at) > 150
            assert len(at.decodes[1].asked) - before < 15

    asyncio.run(run())


@pytest.mark.parametrize("weight", ["0", "-1", "1001", "NaN", '"1"', "true"])
def test_a_weight_that_is_none_is_refused(weight: str) -> None:
    async def run() -> None:
        async with serving() as at:
            content, name = f'{{"weight": {weight}}}', at.prefills[0].name
            headers = {"Content-Type": "application/json", "Authorization": "Bearer the-administrator"}
            answer = await at.http.post(f"{at.url}/instances/{name}/weight", content=content, headers=headers)
            assert answer.status_code == 400
            assert (await at.instances())[name]["weight"] == 1
            assert (await at.administer("POST", "/127.0.0.1:1/weight", json={"weight": 1})).status_code == 404

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------------- decode alone

LONG = "x" * 40_000


async def measured(at: UnderTest) -> None:
    """Prefill takes long, the router has measured it, and decode is fast."""
    at.prefills[0].prefill_seconds = 0.3
    assert (await at.complete("measured " * 100, max_tokens=1, stream=True)).status_code == 200


def computed(at: UnderTest) -> int:
    return sum(one.was_computed for server in at.decodes for one in server.asked)


def test_decode_computes_what_is_short_and_what_it_has_cached() -> None:
    async def run() -> None:
        async with serving(1, 2, alone_most_tokens=1000) as at:
            await measured(at)
            assert computed(at) == 0
            assert right(await at.complete("short", max_tokens=4), "short")
            assert computed(at) == 1
            # Too long, and not cached at first. Prompts are compared as far as 16 KiB.
            for expected in (1, 1):
                assert right(await at.complete(LONG, max_tokens=4), LONG)
                assert computed(at) == expected
            turn = "y" * 12_000
            for expected in (1, 2):
                assert right(await at.complete(turn, max_tokens=4), turn)
                assert computed(at) == expected
            assert await at.count("decode_alone_total", reason="cheaper") == 2
            (cached,) = [one for one in at.decodes if any(turn in str(asked.body) for asked in one.asked)]
            assert sum(turn in str(asked.body) for asked in cached.asked) == 2
            await quiet(at)

    asyncio.run(run())


def test_a_server_that_is_added_again_has_nothing_cached() -> None:
    """Under the same name, and never seen down: what it had went with its process."""

    async def run() -> None:
        async with serving(alone_most_tokens=1000) as at:
            await measured(at)
            decode, turn = at.decodes[0], "y" * 12_000
            for _ in range(2):
                assert right(await at.complete(turn, max_tokens=4), turn)
            assert computed(at) == 1
            assert (await at.administer("DELETE", f"/{decode.name}")).status_code == 204
            await at.administer("POST", json={"role": "decode", "url": decode.url})
            while (await at.instances())[decode.name]["state"] != "up":
                await asyncio.sleep(0.01)
            assert right(await at.complete(turn, max_tokens=4), turn)
            assert computed(at) == 1

    asyncio.run(run())


def test_decode_computes_nothing_itself_unless_it_may() -> None:
    async def run() -> None:
        async with serving() as at:
            await measured(at)
            assert right(await at.complete("short", max_tokens=4), "short")
            assert computed(at) == 0

    asyncio.run(run())


def test_a_decode_with_streams_leaves_the_prompt_to_prefill() -> None:
    """Each stream there would stand still while the prompt is computed."""

    async def run() -> None:
        async with serving(alone_most_tokens=1000) as at:
            for tokens in (100, 1000, 4000) * 8:
                at.router.app.fleet.costs.prefilled(tokens / 1000, tokens)
                at.router.app.fleet.costs.handed_over(0.1)
            prompt = "p" * 3600
            assert right(await at.complete(prompt, max_tokens=4), prompt)
            assert computed(at) == 1
            at.decodes[0].token_seconds = 0.1
            more = {"max_tokens": 20, "stream": True, "prompt_logprobs": 1}
            streams = [asyncio.create_task(at.complete(**more)) for _ in range(20)]
            await until(lambda: len(at.decodes[0].asked) == 21, "the streams have not begun")
            prompt = "q" * 3600
            assert right(await at.complete(prompt, max_tokens=4), prompt)
            assert computed(at) == 21
            await asyncio.gather(*streams)

    asyncio.run(run())


def test_prefill_keeps_nothing_for_a_request_that_decode_computes_after_all() -> None:
    async def run() -> None:
        async with serving() as at:
            at.prefills[0].faults.append("no params")
            at.decodes[0].token_seconds = 0.2
            asking = asyncio.create_task(at.complete(max_tokens=8, stream=True))
            await until(lambda: bool(at.decodes[0].asked), "decode is not asked")
            assert (await at.instances())[at.prefills[0].name]["keeping"] == 0
            await asking

    asyncio.run(run())


def test_a_tool_or_system_prompt_counts_as_what_decode_would_compute() -> None:
    async def run() -> None:
        async with serving(alone_most_tokens=1000) as at:
            await measured(at)
            at.decodes[0].asked.clear()
            long = [{"type": "function", "function": {"name": "x" * 40_000}}]
            body = {"model": "model", "messages": [{"role": "user", "content": "x"}], "tools": long, "max_tokens": 4}
            assert (await at.http.post(f"{at.url}/v1/chat/completions", json=body)).status_code == 200
            assert computed(at) == 0

    asyncio.run(run())


# ------------------------------------------------------------------------------------------- what decode has not taken


@PUSHES
def test_what_decode_refuses_is_given_back(pushes: bool) -> None:
    """Else prefill would keep the KV until its lease ends, as often as a client asks for too many tokens."""

    async def run() -> None:
        async with serving(pushes=pushes) as at:
            await learn(at)
            decode = at.decodes[0]
            decode.refusal_seconds = 0.1
            decode.faults.append("400 max_tokens is too large")
            before = len(decode.asked)
            answer = await at.complete(max_tokens=4)
            assert (answer.status_code, "too large" in answer.text) == (400, True)
            await until(lambda: len(decode.asked) == before + 2, "nothing was given back")
            refused, taken = decode.asked[-2:]
            assert taken.params == refused.params
            assert taken.body["max_tokens"] == 1
            assert taken.headers["x-request-id"] != refused.headers["x-request-id"]
            if not pushes:
                await until(lambda: not decode.fabric.offers, "prefill keeps what nobody will take")
            await quiet(at)

    asyncio.run(run())


# -------------------------------------------------------------------------------------------------------- keeping alive


def events_of(text: str) -> tuple[int, list[Any], bool]:
    """Returns how often the stream was kept alive before the first event, the events, and whether the stream ended as
    one does."""
    parts = text.removesuffix("\n\n").split("\n\n")
    waits = next((place for place, one in enumerate(parts) if one), len(parts))
    assert all(parts[waits:])
    found = [json.loads(one.removeprefix("data: ")) for one in parts[waits:] if one.startswith("data: {")]
    return waits, found, text.endswith("data: [DONE]\n\n")


def test_a_stream_that_waits_is_kept_alive() -> None:
    async def run() -> None:
        async with serving(keep_alive_seconds=0.05) as at:
            at.prefills[0].prefill_seconds = 1.0
            answer = await at.complete(max_tokens=4, stream=True)
            waits, events, is_whole = events_of(answer.text)
            assert waits >= 3
            assert len(events) == 4
            assert is_whole
            assert right(await at.complete(max_tokens=4))
            await quiet(at)

    asyncio.run(run())


def test_a_stream_that_waits_is_tried_elsewhere_all_the_same() -> None:
    async def run() -> None:
        async with serving(2, 2, keep_alive_seconds=0.05) as at:
            for one in at.prefills:
                one.prefill_seconds = 0.2
            for one in at.decodes:
                one.faults.append("kv")
            at.decodes[1].faults.clear()
            for _ in range(2):
                waits, events, is_whole = events_of((await at.complete(max_tokens=4, stream=True)).text)
                assert (waits > 1, len(events), is_whole) == (True, 4, True)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["500", "400 too long"])
def test_a_stream_that_waits_in_vain_ends_with_an_error(fault: str) -> None:
    async def run() -> None:
        async with serving(keep_alive_seconds=0.05, attempts=1) as at:
            at.prefills[0].prefill_seconds = 0.2
            at.decodes[0].faults.append(fault)
            answer = await at.complete(max_tokens=4, stream=True)
            waits, (error,), is_whole = events_of(answer.text)
            assert (answer.status_code, waits > 1, is_whole) == (200, True, False)
            assert error["error"]["code"] == (400 if fault.startswith("4") else 502)
            await at.prefills[0].stop()
            while (await at.instances())[at.prefills[0].name]["state"] == "up":
                await asyncio.sleep(0.01)
            answer = await at.complete(max_tokens=4, stream=True)
            _, (error,), is_whole = events_of(answer.text)
            assert (error["error"]["code"], is_whole) == (503, False)
            # What is not streamed keeps its status.
            assert (await at.complete(max_tokens=4)).status_code == 503
            await quiet(at)

    asyncio.run(run())


def test_an_error_after_a_wait_is_one_to_anthropic_s_client_too() -> None:
    """It ignores events without a name, and would take the stream for an empty answer."""

    async def run() -> None:
        async with serving(keep_alive_seconds=0.05, attempts=1) as at:
            at.prefills[0].prefill_seconds = 0.2
            at.decodes[0].faults.append("500")
            body = {"model": "model", "max_tokens": 4, "stream": True, "messages": [{"role": "user", "content": "x"}]}
            text = (await at.http.post(f"{at.url}/v1/messages", json=body)).text
            name, _, data = text.split("\n\n")[-2].partition("\n")
            assert name == "event: error"
            said = json.loads(data.removeprefix("data: "))
            assert (said["type"], "answered 500" in said["error"]["message"]) == ("error", True)

    asyncio.run(run())


def test_a_whole_answer_after_a_wait_ends_with_an_error() -> None:
    async def run() -> None:
        async with serving(keep_alive_seconds=0.05) as at:
            at.prefills[0].prefill_seconds = 0.2
            at.decodes[0].faults.append("whole")
            answer = await at.complete(max_tokens=4, stream=True)
            _, (error,), is_whole = events_of(answer.text)
            assert ("in one piece" in error["error"]["message"], is_whole) == (True, False)
            assert await at.count("requests_total", outcome="defect") == 0
            await quiet(at)

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------------------- usage


@PUSHES
@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_prefill_had_cached(stream: bool, pushes: bool) -> None:
    async def run() -> None:
        async with serving(pushes=pushes) as at:
            at.prefills[0].cached_tokens = 3
            at.decodes[0].usage = {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 500}}  # type: ignore[dict-item]
            await learn(at)
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            text = (await at.complete(max_tokens=4, **options)).text
            found = [one for one in text.replace("data: ", "").split("\n\n") if "usage" in one]
            (usage,) = [json.loads(one)["usage"] for one in found]
            assert usage == {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 3}}

    asyncio.run(run())
