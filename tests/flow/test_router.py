# SPDX-License-Identifier: Apache-2.0
"""The router with stub servers: cases without faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.router_under_test import WAIT_SECONDS, UnderTest, serving
from support.stub_servers import tokens_of

from kvcached_nixl.proxy.failure import RouterFailure

CHAT = [{"role": "user", "content": "hello"}]


def text_of(body: dict[str, Any]) -> str:
    return "".join(tokens_of(body))


def events_of(text: str) -> list[Any]:
    """What a stream of events holds; the last must be the end."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def ask(at: UnderTest, *, chat: bool, stream: bool, **more: Any) -> str:
    """The text of one answer."""
    prompt: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": "hello"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = await at.http.post(at.url + path, json={"model": "model", "stream": stream, **prompt, **more})
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        return str(choice["message"]["content"] if chat else choice["text"])
    choices = [event["choices"][0] for event in events_of(answer.text)]
    return "".join(one["delta"]["content"] if chat else one["text"] for one in choices)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
def test_an_answer_is_decode_s_from_prefill_s_kv(pushes: bool, stream: bool, chat: bool) -> None:
    """The first request of a prefill is sequential; then push asks both at once. Nothing is computed twice."""

    async def run() -> None:
        async with serving(2, 2, pushes=pushes) as at:
            for _ in range(6):
                prompt: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": "hello"}
                assert await ask(at, chat=chat, stream=stream, max_tokens=5) == text_of({**prompt, "max_tokens": 5})
            decoded = [one for server in at.decodes for one in server.asked]
            assert len(decoded) == 6 and not any(one.was_computed for one in decoded)
            assert all(len(server.asked) == 3 for server in at.prefills)
            at_once = [one for one in decoded if "kvcached_nixl" not in one.params]
            assert len(at_once) == (4 if pushes else 0)
            direction = "push" if pushes else "pull"
            assert {one["transfer_mode"] for one in (await at.instances()).values()} == {direction, None}
            assert await at.count("requests_total", outcome="ok") == 6

    asyncio.run(run())


def test_prefill_s_leg_is_one_token_and_decode_s_is_the_request() -> None:
    """What the client says reaches decode byte for byte, and prefill all of it that its KV follows from."""
    said = {
        **{"model": "model", "messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
        **{"tool_choice": "auto", "stop": ["\n"], "logprobs": True, "top_logprobs": 3, "min_tokens": 4, "n": 1},
        **{"max_completion_tokens": 6, "stream": True, "stream_options": {"include_usage": True}, "odd": {"a": 1.50}},
        **{"temperature": 0.0, "seed": 7, "cache_salt": "s", "return_token_ids": True, "request_id": "mine"},
    }

    async def run() -> None:
        async with serving() as at:
            body = json.dumps(said).replace("1.5}", "1.50}").encode()
            answer = await at.http.post(
                f"{at.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 200
            (prefill,), (decode,) = at.prefills[0].asked, at.decodes[0].asked
            kept = {"model", "messages", "tools", "tool_choice", "stop", "odd", "temperature", "seed", "cache_salt"}
            given = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            expected = {**{key: said[key] for key in kept}, **given, "kv_transfer_params": asked}
            assert prefill.body == expected | {"request_id": prefill.headers["x-request-id"]}
            own = {"request_id": decode.headers["x-request-id"], "kv_transfer_params": decode.params}
            assert decode.body == said | own
            assert decode.headers["x-request-id"] != prefill.headers["x-request-id"]

    asyncio.run(run())


def test_prefill_s_parameters_reach_decode_as_they_came() -> None:
    """With keys that nobody here knows; `tests/unit/proxy/test_ask.py` has it byte for byte."""

    async def run() -> None:
        async with serving() as at:
            assert (await at.complete()).status_code == 200
            (decode,) = at.decodes[0].asked
            assert decode.params["something_new"] == {"kept": [1, 2.5]}
            assert decode.params["kvcached_nixl"]["incarnation"] == at.prefills[0].start_number
            assert decode.params["remote_engine_id"] == at.prefills[0].engine_id

    asyncio.run(run())


def test_ids_are_never_shared_and_the_client_hears_its_own() -> None:
    """Two clients with one X-Request-Id, and one that is no id: each leg has an id that nobody else has."""

    async def run() -> None:
        async with serving() as at:
            answers = [await at.complete(headers={"X-Request-Id": "same"}) for _ in range(2)]
            odd = await at.complete(headers={"X-Request-Id": "a b, c" + "x" * 300})
            assert [one.headers["x-request-id"] for one in answers] == ["same", "same"]
            assert odd.headers["x-request-id"].startswith("router-")
            ids = [one.headers["x-request-id"] for server in (*at.prefills, *at.decodes) for one in server.asked]
            assert len(set(ids)) == len(ids) == 6
            assert sum(one.startswith("same-") for one in ids) == 4

    asyncio.run(run())


def test_only_some_headers_go_on() -> None:
    """Traces and the key do; what vLLM takes a rank, a session or a priority from does not, and nothing hop by hop."""
    sent = {
        **{"traceparent": "00-aa-bb-01", "tracestate": "x=y", "Authorization": "Bearer theirs"},
        **{"X-data-parallel-rank": "1", "x-session-id": "s", "X-Forwarded-For": "10.0.0.1", "Cookie": "c=1"},
        **{"TE": "trailers", "Proxy-Authorization": "p", "X-Upstream": "http://evil", "Host": "evil.example"},
    }

    async def run() -> None:
        async with serving() as at:
            assert (await at.complete(headers=sent)).status_code == 200
            for server in (at.prefills[0], at.decodes[0]):
                (asked,) = server.asked
                assert asked.headers["traceparent"] == "00-aa-bb-01"
                assert asked.headers["authorization"] == "Bearer theirs"
                assert asked.headers["host"] == server.name
                known = {"host", "accept-encoding", "content-length", "content-type", "x-request-id"}
                assert set(asked.headers) == known | {"traceparent", "tracestate", "authorization"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"prompt_embeds": "AA=="}, "prompt"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
def test_several_hand_overs_at_once_are_refused_in_words_or_left_to_decode(said: dict[str, Any], param: str) -> None:
    async def run() -> None:
        async with serving() as at:
            answer = await at.complete(**{"prompt": "x", **said})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param and param in answer.json()["error"]["message"]
            assert not at.prefills[0].asked and not at.decodes[0].asked
        async with serving(decode_alone=True) as at:
            assert (await at.complete(**{"prompt": "x", **said})).status_code == 200
            assert not at.prefills[0].asked and at.decodes[0].asked[0].was_computed
            assert await at.count("decode_alone_total") == 1

    asyncio.run(run())


@pytest.mark.parametrize("prompt", ["x", [1, 2, 3], ["x"], [[1, 2, 3]]], ids=str)
def test_one_prompt_however_it_is_written_is_one_hand_over(prompt: Any) -> None:
    async def run() -> None:
        async with serving() as at:
            answer = await at.complete(prompt)
            assert answer.json()["choices"][0]["text"] == text_of({"prompt": prompt})
            assert not at.decodes[0].asked[0].was_computed

    asyncio.run(run())


@pytest.mark.parametrize("said", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}, {"max_tokens": 0}], ids=str)
def test_what_decode_computes_anyway_is_not_handed_over(said: dict[str, Any]) -> None:
    """Prefill would compute it for nothing."""

    async def run() -> None:
        async with serving() as at:
            assert (await at.complete(**said)).status_code == 200
            assert not at.prefills[0].asked and "kv_transfer_params" not in at.decodes[0].asked[0].body

    asyncio.run(run())


def test_many_streams_at_once() -> None:
    """Each client has its own tokens."""

    async def run() -> None:
        async with serving(2, 2, pushes=True) as at:
            for server in at.decodes:
                server.token_seconds = 0.002

            async def one(http: httpx.AsyncClient, number: int) -> None:
                body = {"prompt": f"p{number}", "max_tokens": 8}
                answer = await http.post(f"{at.url}/v1/completions", json={**body, "stream": True})
                said = "".join(event["choices"][0]["text"] for event in events_of(answer.text))
                assert said == text_of(body)

            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=WAIT_SECONDS) as http:
                await asyncio.gather(*(one(http, number) for number in range(100)))
            assert all(one["requests"] == one["outstanding_tokens"] == 0 for one in (await at.instances()).values())

    asyncio.run(run())


def test_models_health_metrics_and_the_page() -> None:
    async def run() -> None:
        async with serving() as at:
            assert (await at.http.get(f"{at.url}/v1/models")).json()["data"][0]["id"] == "model"
            assert (await at.http.get(f"{at.url}/health")).json() == {
                "up": {"prefill": 1, "decode": 1},
                "draining": False,
            }
            page = await at.http.get(f"{at.url}/")
            assert page.headers["content-type"].startswith("text/html")
            # Nothing from elsewhere, whatever the page says.
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "http://" not in page.text and "https://" not in page.text
            assert (await at.metrics())[
                f'kvcached_nixl_router_up{{instance="{at.decodes[0].name}",role="decode"}}'
            ] == 1

    asyncio.run(run())


def test_counters_are_there_before_the_first_event() -> None:
    """Where a counter appears with its first count, Prometheus sees no rise, and no alert fires."""

    async def run() -> None:
        async with serving() as at:
            found = await at.metrics()
            for server, role in ((at.prefills[0], "prefill"), (at.decodes[0], "decode")):
                assert found[f'kvcached_nixl_router_ejections_total{{instance="{server.name}",role="{role}"}}'] == 0
            (prefill, decode) = at.prefills[0].name, at.decodes[0].name
            assert found[f'kvcached_nixl_router_prefills_without_parameters_total{{instance="{prefill}"}}'] == 0
            assert found[f'kvcached_nixl_router_reported_handover_failures_total{{instance="{decode}"}}'] == 0
            assert (await at.complete(max_tokens=4)).status_code == 200
            outcomes = {one: value for one, value in (await at.metrics()).items() if "_requests_total{" in one}
            assert len(outcomes) == 1 + len(RouterFailure) and sum(outcomes.values()) == 1

    asyncio.run(run())


def test_instances_are_added_drained_and_removed_while_requests_run() -> None:
    async def run() -> None:
        async with serving(1, 2) as at:
            leaving, staying = at.decodes
            leaving.token_seconds = staying.token_seconds = 0.2
            running = [asyncio.create_task(at.complete(f"p{number}", max_tokens=10)) for number in range(6)]
            while not leaving.asked:
                await asyncio.sleep(0.01)
            before = len(leaving.asked)
            drained = (await at.administer("POST", f"/{leaving.name}/drain")).json()
            assert drained["draining"] and not drained["drained"]
            refused = await at.administer("DELETE", f"/{leaving.name}")
            assert refused.status_code == 409 and "drain it first" in refused.text
            assert [(await one).status_code for one in running] == [200] * 6
            leaving.token_seconds = staying.token_seconds = 0.0
            seen = len(leaving.asked)
            assert (await at.complete("more")).status_code == 200
            assert len(leaving.asked) == seen >= before
            assert (await at.instances())[leaving.name]["drained"]
            assert (await at.administer("DELETE", f"/{leaving.name}")).status_code == 204
            assert leaving.name not in await at.instances()
            assert leaving.name not in "".join(await at.metrics())
            added = await at.administer("POST", json={"role": "decode", "url": leaving.url})
            assert added.status_code == 201 and added.json()["state"] == "new"
            again = await at.administer("POST", json={"role": "prefill", "url": leaving.url})
            assert again.status_code == 409
            while (await at.instances())[leaving.name]["state"] != "up":
                await asyncio.sleep(0.01)
            for _ in range(4):
                assert (await at.complete("again")).status_code == 200
            assert len(leaving.asked) > seen

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["round-robin", "least-tokens", "power-of-two", "prefix-affinity"])
def test_each_policy_serves(policy: str) -> None:
    """And the one that is for it brings requests back to who has computed their beginning."""

    async def run() -> None:
        async with serving(2, 2, policy=policy) as at:
            for turn in range(8):
                prompt = f"{turn % 2}" * 1000 + f" {turn}"
                answer = await at.complete(prompt, max_tokens=3)
                assert answer.json()["choices"][0]["text"] == text_of({"prompt": prompt, "max_tokens": 3})
            if policy == "prefix-affinity":
                for server in (*at.prefills, *at.decodes):
                    assert len(server.asked) == 4
                    assert len({one.body["prompt"][:1000] for one in server.asked}) == 1

    asyncio.run(run())


def test_ids_that_a_client_has_lead_to_who_has_computed_them() -> None:
    """Whatever its prompt is; and no server hears of them."""

    async def run() -> None:
        async with serving(2, 1, policy="prefix-affinity") as at:
            for turn in range(6):
                ids = [turn % 2] * 100
                hint = {"kv_transfer_params": {"prefix_prompt_ids": ids}} if turn < 3 else {"prefix_prompt_ids": ids}
                assert (await at.complete(f"p{turn}", **hint)).status_code == 200
            assert [len(one.asked) for one in at.prefills] == [3, 3]
            for server in (*at.prefills, *at.decodes):
                assert all("prefix_prompt_ids" not in {**one.body, **one.params} for one in server.asked)

    asyncio.run(run())


def test_what_is_measured() -> None:
    """Requests, legs, time to first token, time in each leg, what is in flight and outstanding."""

    async def run() -> None:
        async with serving() as at:
            at.decodes[0].token_seconds = 0.1
            running = asyncio.create_task(at.complete(max_tokens=4, stream=True))
            while not at.decodes[0].asked:
                await asyncio.sleep(0.01)
            during = await at.metrics()
            name = at.decodes[0].name
            assert during[f'kvcached_nixl_router_in_flight{{instance="{name}",role="decode"}}'] == 1
            assert during[f'kvcached_nixl_router_outstanding_tokens{{instance="{name}",role="decode"}}'] > 4
            assert (await running).status_code == 200
            for series, labels in (
                ("requests_total", {"route": "/v1/completions", "outcome": "ok"}),
                ("legs_total", {"role": "prefill", "outcome": "ok"}),
                ("legs_total", {"role": "decode", "outcome": "ok"}),
                ("handovers_total", {"direction": "pull"}),
                ("time_to_first_token_seconds_count", {"route": "/v1/completions"}),
                ("request_seconds_count", {"route": "/v1/completions"}),
                ("leg_seconds_count", {"role": "prefill"}),
                ("leg_seconds_count", {"role": "decode"}),
            ):
                assert await at.count(series, **labels) == 1, series

    asyncio.run(run())
