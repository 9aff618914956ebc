# SPDX-License-Identifier: Apache-2.0
"""The router with faulty servers and clients: a right answer or an error, in time, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.router_under_test import HELLO, check, learn, quiet, right, serving, until
from support.stub_servers import HAND_OVER_FAILED, tokens_of

pytestmark = pytest.mark.long

# -------------------------------------------------------------------------------------------- before the answer

PREFILL_FAULTS = ["close", "500", "503", "429", "garbage", "garbage params", "half head", "no http", "302"]


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_a_prefill_leg_that_fails_is_tried_elsewhere(fault: str, pushes: bool) -> None:
    """In a push decode's leg is aborted at once, and both are sent again under another name."""

    async def run() -> None:
        async with serving(2, 2, pushes=pushes) as at:
            await learn(at)
            at.prefills[0].faults.append(fault)
            answers = [await at.complete(max_tokens=4) for _ in range(2)]
            if fault == "302":
                assert sorted(one.status_code for one in answers) == [200, 502]
            else:
                assert all(right(one) for one in answers)
                assert await at.count("retries_total") == 1
            decoded = [one for server in at.decodes for one in server.asked]
            names = [one.params["transfer_id"] for one in decoded if one.params.get("transfer_id")]
            assert len(set(names)) == len(names)
            assert not any(one.was_computed for one in decoded)
            assert sum(one.was_cut for one in decoded) == (1 if pushes else 0)
            await quiet(at)

    asyncio.run(run())


DECODE_FAULTS = [
    *((fault, stream) for fault in ("close", "500", "503", "half head", "kv", "garbage") for stream in (False, True)),
    ("half body", False),
    ("die 0", True),
    ("no events", True),
    ("no tokens", True),
    ("reason abort", False),
]


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(("fault", "stream"), DECODE_FAULTS)
def test_a_decode_leg_that_fails_before_its_first_token_is_tried_anew(
    fault: str, stream: bool, pushes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where vLLM has said 200 already and its stream begins with an error."""

    caplog.set_level(logging.INFO, logger="kvcached_nixl.proxy.requests")

    async def run() -> None:
        async with serving(2, 2, pushes=pushes) as at:
            await learn(at)
            for server in at.decodes:
                server.faults += [fault] * (2 if fault == "503" and not pushes else 1)
            answer = await at.complete(max_tokens=4, stream=stream)
            # All attempts fail; a busy decode leaves what prefill keeps, so each attempt asks two of those. What the
            # client has is an error, and no token.
            assert answer.status_code in (502, 503), answer.text
            assert answer.json()["error"]["code"] == answer.status_code
            if fault == "kv":
                # It leads from the client's error and the router's log to decode's own log line.
                _, _, tags = HAND_OVER_FAILED.partition(": ")
                assert tags in answer.json()["error"]["message"]
                (line,) = [line for line in caplog.messages if f" status={answer.status_code} " in line]
                assert tags in line
            assert ("retry-after" in answer.headers) == (answer.status_code == 503)
            assert right(await at.complete(max_tokens=4))
            at.decodes[0].faults.append(fault)
            for _ in range(2):
                answer = await at.complete(max_tokens=4, stream=stream)
                assert answer.status_code == 200
                assert '"error"' not in answer.text
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_busy_decode_costs_no_second_prefill(status: str) -> None:
    """It has not taken what prefill keeps, so another one gets it."""

    async def run() -> None:
        async with serving(1, 2) as at:
            for server in at.decodes:
                server.faults.append(status)
            at.decodes[1].faults.clear()
            for _ in range(2):
                assert right(await at.complete(max_tokens=4))
            assert len(at.prefills[0].asked) == 2
            assert not any(one.was_computed for server in at.decodes for one in server.asked[1:])
            assert await at.count("retries_total", cause="upstream_busy") == 1
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize("fault", ["kv", "no events", "no tokens"])
def test_a_chat_that_begins_with_a_role_and_an_error_is_tried_anew(fault: str, usage: bool, chat: bool) -> None:
    """vLLM says the role before it says that there is nothing to say, and where it does not say so."""

    async def run() -> None:
        async with serving() as at:
            at.decodes[0].faults.append(fault)
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
            path = "/v1/chat/completions" if chat else "/v1/completions"
            asked = {**prompt, "stream": True, "stream_options": {"include_usage": usage}}
            answer = await at.http.post(at.url + path, json=asked)
            assert answer.status_code == 200 and '"error"' not in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
            assert await at.count("retries_total", cause="broken" if fault == "no events" else "handover") == 1

    asyncio.run(run())


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("status", ["400", "404", "422"])
def test_a_server_s_no_is_the_client_s_answer(status: str, pushes: bool) -> None:
    """It is passed on with the server's own message, without a second try."""

    async def run() -> None:
        async with serving(2, 1, pushes=pushes) as at:
            await learn(at)
            for server in at.prefills:
                server.faults.append(status)
            seen = sum(len(one.asked) for one in at.prefills)
            answer = await at.complete(max_tokens=4)
            assert answer.status_code == int(status)
            assert answer.json()["error"]["message"] == f"said {status}"
            assert sum(len(one.asked) for one in at.prefills) == seen + 1
            await quiet(at)

    asyncio.run(run())


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
def test_a_prefill_that_hands_nothing_over_is_counted_and_warned_of_once(
    pushes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode computes the prompt: the tokens are right, and a warning is logged."""

    async def run() -> None:
        async with serving(pushes=pushes) as at:
            await learn(at)
            at.prefills[0].faults.extend(["no params"] * 3)
            for _ in range(3):
                assert right(await at.complete(max_tokens=4))
            assert await at.count("prefills_without_parameters_total", instance=at.prefills[0].name) == 3
            assert await at.count("decode_alone_total", reason="no_parameters") == 3
            assert sum("without kv_transfer_params" in line for line in caplog.messages) == 1
            assert right(await at.complete(max_tokens=4))
            assert not at.decodes[0].asked[-1].was_computed
            await quiet(at)

    caplog.set_level(logging.WARNING)
    asyncio.run(run())


class Wrong:
    """A policy that chooses nobody."""

    def choose(self, candidates: object, request: object) -> int:
        return 99


def test_a_policy_that_fails_is_a_500_that_is_counted(make_module: Callable[..., ModuleType]) -> None:
    make_module("wrong_policy").Wrong = Wrong  # type: ignore[attr-defined]

    async def run() -> None:
        async with serving(policy="wrong_policy:Wrong") as at:
            assert (await at.complete()).status_code == 500
            assert await at.count("requests_total", outcome="defect") == 1
            await quiet(at)

    asyncio.run(run())


def test_hand_overs_that_decode_reports_as_failed_are_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """One that was recomputed looks like any other; only decode knows."""

    async def run() -> None:
        async with serving(health_interval_seconds=0.02) as at:
            await asyncio.sleep(0.3)
            at.decodes[0].failures = 3
            while await at.count("reported_handover_failures_total", instance=at.decodes[0].name) < 3:
                await asyncio.sleep(0.02)
            assert any("3 more hand-overs that brought no KV" in line for line in caplog.messages)

    caplog.set_level(logging.WARNING)
    asyncio.run(run())


# -------------------------------------------------------------------------------------------- mid-stream


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("fault", ["die 2", "inside 2", "no done", "hang 2", "reason none", "reason abort"])
def test_a_stream_that_breaks_off_ends_with_an_error_event(fault: str, pushes: bool) -> None:
    """It comes after complete events with right tokens, in vLLM's format, without the [DONE] that marks completion."""

    async def run() -> None:
        async with serving(pushes=pushes, inter_token_timeout_seconds=0.3) as at:
            await learn(at)
            at.decodes[0].faults.append(fault)
            answer = await at.complete(max_tokens=4, stream=True)
            *tokens, error, rest = answer.text.split("\n\n")
            assert rest == "" and "[DONE]" not in tokens[-1:]
            said = [json.loads(one.removeprefix("data: ")) for one in tokens if "[DONE]" not in one]
            most = 2 if fault.endswith("2") else 4
            # What comes in one piece with a [DONE] that is not true goes the same way.
            least = 3 if fault.startswith("reason") else most
            assert least <= len(said) <= most
            assert [one["choices"][0]["text"] for one in said] == tokens_of(HELLO)[: len(said)]
            found = json.loads(error.removeprefix("data: "))["error"]
            assert set(found) == {"message", "type", "param", "code"} and found["code"] in (502, 504)
            assert right(await at.complete(max_tokens=4))
            await quiet(at)

    asyncio.run(run())


def test_an_error_that_a_server_streams_itself_passes_as_it_is() -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].faults.append("error 2")
            answer = await at.complete(max_tokens=4, stream=True)
            assert answer.text.count('"error"') == 1 and answer.text.endswith("data: [DONE]\n\n")
            assert await at.count("requests_total", outcome="server") == 1

    asyncio.run(run())


def test_events_in_pieces_are_put_together() -> None:
    async def run() -> None:
        async with serving() as at:
            at.decodes[0].faults.append("in halves")
            answer = await at.complete(max_tokens=4, stream=True)
            said = [json.loads(one.removeprefix("data: ")) for one in answer.text.split("\n\n")[:-2]]
            assert [one["choices"][0]["text"] for one in said] == tokens_of(HELLO)

    asyncio.run(run())


# -------------------------------------------------------------------------------------------- servers come and go


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
def test_servers_killed_and_brought_back_under_load(pushes: bool) -> None:
    """Each request has a right answer or an error; and when all are back, all are right."""

    async def run() -> None:
        async with serving(2, 2, pushes=pushes, attempts=3) as at:
            for server in (*at.prefills, *at.decodes):
                server.token_seconds = server.prefill_seconds = 0.005
            answered: list[bool] = []
            is_over = False

            async def client(number: int) -> None:
                async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
                    turn = 0
                    while not is_over:
                        turn += 1
                        prompt = f"{number}-{turn}"
                        body = {"prompt": prompt, "max_tokens": 4, "stream": turn % 2 == 0}
                        answer = await http.post(f"{at.url}/v1/completions", json=body)
                        check(answer, body)
                        answered.append(answer.status_code == 200)

            clients = [asyncio.create_task(client(number)) for number in range(8)]
            for server in (at.prefills[0], at.decodes[1], at.prefills[1], at.decodes[0]):
                await asyncio.sleep(0.3)
                await server.stop()
                await asyncio.sleep(0.3)
                await server.restart(engine_id=server.engine_id + "x")
            await asyncio.sleep(0.5)
            is_over = True
            await asyncio.gather(*clients)
            assert sum(answered) > 10 and sum(answered) > len(answered) / 2
            for _ in range(4):
                assert right(await at.complete(max_tokens=4))
            await quiet(at)

    asyncio.run(run())


ALL_FAULTS = [*PREFILL_FAULTS, "no params", "kv", "half body", "die 1", "inside 2", "error 2", "no done"]
ALL_FAULTS += ["no events", "no tokens", "reason none", "reason abort", "in halves"]


@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_among_faults_that_are_drawn_no_token_is_wrong_and_nothing_is_left(seed: int, pushes: bool) -> None:
    """Servers that fail in every way they know, clients that leave at any moment."""
    draw = random.Random(seed)

    async def run() -> None:
        async with serving(2, 2, pushes=pushes, decode_alone=seed == 2, attempts=3) as at:
            for server in (*at.prefills, *at.decodes):
                server.faults.extend(draw.choice([*ALL_FAULTS, "", "", ""]) for _ in range(60))
                server.token_seconds = server.prefill_seconds = 0.001

            async def one(number: int) -> None:
                body = {"prompt": f"p{number}", "max_tokens": 4, "stream": number % 2 == 0}
                asking = at.http.post(f"{at.url}/v1/completions", json=body)
                if number % 7 == 0:
                    with contextlib.suppress(asyncio.TimeoutError, httpx.HTTPError):
                        await asyncio.wait_for(asking, 0.01 * draw.random())
                    return
                check(await asking, body)

            for begin in range(0, 160, 16):
                await asyncio.gather(*(one(number) for number in range(begin, begin + 16)))
            for server in (*at.prefills, *at.decodes):
                server.faults.clear()
            await quiet(at)
            assert not any(one["keeping"] for one in (await at.instances()).values())
            while any(one["state"] != "up" for one in (await at.instances()).values()):
                await asyncio.sleep(0.02)
            for number in range(4):
                assert right(await at.complete(f"q{number}", max_tokens=4), f"q{number}")

    asyncio.run(run())


@pytest.mark.parametrize("engine_id", ["same", "another"])
def test_a_prefill_that_was_started_again_is_learnt_anew(engine_id: str) -> None:
    """Between two looks at its health, on the same address: what was learnt of it does not hold any more."""

    async def run() -> None:
        async with serving(pushes=True, health_interval_seconds=5.0) as at:
            await learn(at)
            (prefill,) = at.prefills
            old = prefill.start_number
            await prefill.restart(engine_id=prefill.engine_id if engine_id == "same" else "another")
            assert right(await at.complete(max_tokens=4))
            (found,) = [one for one in (await at.instances()).values() if one["role"] == "prefill"]
            assert found["incarnation"] == prefill.start_number != old
            assert found["engine_id"] == prefill.engine_id
            assert await at.count("retries_total", cause="restarted") == (0 if engine_id == "same" else 1)
            assert right(await at.complete(max_tokens=4))
            assert at.decodes[0].asked[-1].params["remote_engine_id"] == prefill.engine_id

    asyncio.run(run())


def test_what_waits_for_a_server_that_stands_still_does_not_wait_for_ever() -> None:
    """Nothing is heard of it for long, its silent legs end, and are tried elsewhere; later it is asked again."""

    async def run() -> None:
        async with serving(2, 1, health_interval_seconds=0.1, unresponsive_timeout_seconds=0.5) as at:
            still, other = at.prefills
            still.prefill_seconds = 3600.0
            waiting = [asyncio.create_task(at.complete(max_tokens=4)) for _ in range(4)]
            await until(lambda: len(still.asked) >= 1, "the server that stands still is not asked")
            still.stands_still = True
            assert all(right(one) for one in await asyncio.gather(*waiting))
            assert (await at.instances())[still.name]["state"] == "silent"
            assert await at.count("ejections_total", instance=still.name) == 1
            still.prefill_seconds, still.stands_still = 0.0, False
            while (await at.instances())[still.name]["state"] != "up":
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize("alone", [False, True])
def test_without_any_prefill_decode_computes_only_if_it_may(alone: bool) -> None:
    async def run() -> None:
        async with serving(decode_alone=alone) as at:
            await at.prefills[0].stop()
            while (await at.instances())[at.prefills[0].name]["state"] == "up":
                await asyncio.sleep(0.01)
            answer = await at.complete(max_tokens=4)
            health = await at.http.get(f"{at.url}/health")
            if alone:
                assert right(answer) and at.decodes[0].asked[-1].was_computed and health.status_code == 200
            else:
                assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
                assert "No prefill server is up" in answer.text and health.status_code == 503

    asyncio.run(run())


def test_a_prefill_that_fails_every_time_is_done_without_if_decode_may() -> None:
    async def run() -> None:
        async with serving(decode_alone=True) as at:
            at.prefills[0].faults.extend(["500", "500"])
            assert right(await at.complete(max_tokens=4))
            assert await at.count("decode_alone_total", reason="no_prefill") == 1

    asyncio.run(run())


def test_a_decode_that_cannot_be_reached_leaves_prefill_s_kv_to_another() -> None:
    """Nothing was delivered, so prefill need not compute again."""

    async def run() -> None:
        async with serving(1, 2, health_interval_seconds=5.0, policy="round-robin") as at:
            await at.decodes[0].stop()
            for _ in range(2):
                assert right(await at.complete(max_tokens=4))
            assert len(at.prefills[0].asked) == 2
            assert await at.count("legs_total", role="decode", outcome="unreachable") == 1

    asyncio.run(run())


def test_a_server_that_never_answers_has_a_time_limit() -> None:
    async def run() -> None:
        async with serving(
            prefill_timeout_seconds=0.2, response_timeout_seconds=0.2, first_token_timeout_seconds=0.2, attempts=1
        ) as at:
            at.prefills[0].faults.append("hang")
            begun = time.monotonic()
            assert (await at.complete()).status_code == 504
            for stream in (False, True):
                at.decodes[0].faults.append("hang")
                assert (await at.complete(stream=stream)).status_code == 504
            assert time.monotonic() - begun < 5
            await until(lambda: [one.was_cut for one in at.decodes[0].asked] == [True, True], "decode goes on")
            await quiet(at)

    asyncio.run(run())


def test_an_answer_without_an_end_is_not_read_for_ever() -> None:
    async def run() -> None:
        async with serving(max_response_bytes=1 << 20) as at:
            at.decodes[0].faults.append("endless")
            answer = await at.complete()
            assert answer.status_code == 502 and "longer than" in answer.text
            at.prefills[0].faults.extend(["endless"] * 2)
            assert (await at.complete()).status_code == 502
            await quiet(at)

    asyncio.run(run())
