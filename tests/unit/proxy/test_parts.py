# SPDX-License-Identifier: Apache-2.0
"""The router's small parts: guard, events, options, keys, addresses."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.address import address_of
from kvcached_nixl.proxy.api import ApiRoute, api_of
from kvcached_nixl.proxy.asked import Alone
from kvcached_nixl.proxy.auth import require_key
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.client import draw_id, passed_on
from kvcached_nixl.proxy.command import Router
from kvcached_nixl.proxy.events import MOST_EVENT_BYTES, Events
from kvcached_nixl.proxy.failure import Refusal, RouterFailure, error_body, hand_over_tags
from kvcached_nixl.proxy.health import MOST_PAUSE_SECONDS, pause_seconds
from kvcached_nixl.proxy.metrics import Metrics
from kvcached_nixl.proxy.options import Options, add_arguments, from_arguments

# ---------------------------------------------------------------------------------------------------------------- guard


class Late(Exception):
    """What a test ends a guard with."""


def test_a_guard_ends_what_waits_and_the_task_goes_on() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(Late), Guard() as guard:
            loop.call_later(0.01, guard.end, Late())
            await asyncio.sleep(60)
        # The task is not cancelled any more, and an expired limit cancels nothing.
        with Guard() as guard:
            guard.limit(0.01, Late())
        await asyncio.sleep(0.03)
        guard.end(Late())
        await asyncio.sleep(0)

    asyncio.run(run())


def test_a_limit_that_is_moved_on_ends_nothing_and_one_that_is_not_does() -> None:
    async def run() -> None:
        with pytest.raises(Late), Guard() as guard:
            guard.limit(0.01, KeyError())
            guard.limit(3600, KeyError())
            # The timer of the first goes off, and finds another limit.
            await asyncio.sleep(0.05)
            guard.limit(0.01, Late())
            await asyncio.sleep(3600)

    asyncio.run(run())


def test_of_two_guards_the_one_that_is_ended_fails() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(Late), Guard() as outer:
            with Guard():
                loop.call_later(0.01, outer.end, Late())
                await asyncio.sleep(60)
            raise AssertionError("the inner one has swallowed it")
        with Guard():
            with pytest.raises(Late), Guard() as inner:
                loop.call_later(0.01, inner.end, Late())
                await asyncio.sleep(60)
            await asyncio.sleep(0)

    asyncio.run(run())


def test_of_two_guards_that_end_in_one_tick_the_outer_one_ends_what_follows() -> None:
    """A client that leaves in the moment in which a leg fails: the retry must end, too."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(Late), Guard() as outer:
            with pytest.raises(KeyError), Guard() as inner:
                loop.call_later(0.01, lambda: (inner.end(KeyError()), outer.end(Late())))
                await asyncio.sleep(60)
            await asyncio.sleep(60)

    asyncio.run(run())


def test_an_error_of_its_own_is_not_hidden_and_somebody_else_s_cancel_is_one() -> None:
    async def run() -> None:
        with pytest.raises(KeyError), Guard():
            raise KeyError

        async def wait() -> None:
            with Guard() as guard:
                guard.limit(60, Late())
                await asyncio.sleep(60)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------------------- events

STREAM = b"".join(
    b'data: {"choices": [{"index": 0, "text": "%d\\n\\n", "finish_reason": %s}]}\n\n'
    % (number, b'"stop"' if number == 19 else b"null")
    for number in range(20)
)
STREAM += b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'


def test_however_a_stream_is_cut_whole_events_come_out_in_order() -> None:
    draw = random.Random(1)
    for _ in range(500):
        events, out, rest = Events(api_of(ApiRoute.COMPLETIONS)), [], STREAM
        while rest:
            size = draw.choice([1, 2, 3, 30, 400])
            out.append(events.cut(rest[:size]))
            rest = rest[size:]
        assert b"".join(out) == STREAM and events.is_complete and events.count == 20 and not events.has_error
        assert events.is_whole
        assert all(not piece or piece.endswith(b"\n\n") for piece in out)


def test_a_stream_that_stops_anywhere_is_not_complete() -> None:
    for end in range(len(STREAM)):
        events = Events(api_of(ApiRoute.COMPLETIONS))
        events.cut(STREAM[:end])
        assert not events.is_complete


def test_an_error_is_seen_and_text_that_looks_like_one_is_not() -> None:
    events = Events(api_of(ApiRoute.COMPLETIONS))
    events.cut(b"data: " + json.dumps({"text": '\n\ndata: {"error"'}).encode() + b"\n\n")
    assert not events.has_error
    events.cut(b'data: {"error": {}}\n\n')
    assert events.has_error


@pytest.mark.parametrize(
    ("event", "is_whole"),
    [
        (b'{"choices":[{"index":0,"text":"a","finish_reason":"length"}]}', True),
        (b'{"choices": [ {"delta": {}, "finish_reason": "tool_calls"}]}', True),
        (b'{"choices":[{"index":0,"text":"","finish_reason":null}]}', False),
        (b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}', False),
        (b'{"choices":[{"index":0,"text":"","finish_reason":"error"}]}', False),
        (json.dumps({"choices": [{"text": '"finish_reason": "stop"', "finish_reason": None}]}).encode(), False),
        (
            b'{"choices":[{"index":0,"finish_reason":"length"}]}\n\n'
            b'data: {"choices":[{"index":1,"finish_reason":"abort"}]}',
            False,
        ),
    ],
)
def test_an_answer_has_come_to_its_end_where_a_choice_says_why(event: bytes, is_whole: bool) -> None:
    events = Events(api_of(ApiRoute.COMPLETIONS))
    events.cut(b"data: " + event + b"\n\ndata: [DONE]\n\n")
    assert events.is_complete and events.is_whole == is_whole


def sse(*events: tuple[str, dict[str, Any]]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(said).encode()) for name, said in events)


TEXT = {"delta": "event: error\n\nevent: response.completed\n\n"}
BEGIN = (("response.created", {}), ("response.in_progress", {}))
OF_RESPONSES = [
    ((*BEGIN, ("response.output_text.delta", TEXT), ("response.completed", {})), True, False),
    ((*BEGIN, ("response.output_text.delta", TEXT), ("response.incomplete", {})), True, False),
    ((*BEGIN, ("response.output_text.delta", TEXT)), False, False),
    ((*BEGIN, ("response.output_text.delta", TEXT), ("response.failed", {})), False, True),
    ((*BEGIN, ("error", {})), False, True),
]
MESSAGE = (("message_start", {}), ("content_block_start", {}), ("content_block_delta", TEXT))
OF_MESSAGES = [
    ((*MESSAGE, ("message_delta", {"delta": {"stop_reason": "end_turn"}}), ("message_stop", {})), True, False),
    ((*MESSAGE, ("message_delta", {"delta": {"stop_reason": None}}), ("message_stop", {})), False, False),
    ((*MESSAGE, ("message_delta", {"delta": {}}), ("message_stop", {})), False, False),
    ((*MESSAGE,), False, False),
    ((*MESSAGE, ("error", {"type": "error"})), False, True),
]


@pytest.mark.parametrize(
    ("route", "said", "is_whole", "has_error"),
    [(ApiRoute.RESPONSES, *one) for one in OF_RESPONSES] + [(ApiRoute.MESSAGES, *one) for one in OF_MESSAGES],
)
def test_streams_with_named_events_end_as_their_endpoint_says(
    route: ApiRoute, said: tuple[Any, ...], is_whole: bool, has_error: bool
) -> None:
    """However they are cut, and whatever the generated text looks like."""
    whole, draw = sse(*said), random.Random(2)
    for _ in range(50):
        events, rest, out = Events(api_of(route)), whole, b""
        while rest:
            size = draw.choice([1, 5, 40, 4000])
            out += events.cut(rest[:size])
            rest = rest[size:]
        assert out == whole and (events.is_complete and events.is_whole, events.has_error) == (is_whole, has_error)
        assert events.count == sum(
            name not in ("response.created", "response.in_progress", "message_start", "error") for name, _ in said
        )


def test_an_event_without_an_end_is_refused() -> None:
    events = Events(api_of(ApiRoute.COMPLETIONS))
    with pytest.raises(ValueError, match="event"):
        for _ in range(2 + MOST_EVENT_BYTES // (1 << 20)):
            events.cut(b"x" * (1 << 20))


# -------------------------------------------------------------------------------------------------------------- options


def parsed(*words: str, environ: dict[str, str] | None = None) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(list(words)), environ or {})


def test_servers_come_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    file.write_text('{"prefill": ["http://a:1"], "decode": ["http://b:2", "http://[::1]:3"]}')
    found = parsed("--servers", str(file), "--prefill", "http://c:4", "--policy", "round-robin", "--attempts", "3")
    assert found.prefill == ("http://a:1", "http://c:4") and found.decode == ("http://b:2", "http://[::1]:3")
    assert (found.policy, found.attempts, found.port) == ("round-robin", 3, Options().port)


def test_keys_come_from_the_environment_and_are_in_no_text() -> None:
    found = parsed(environ={"KVCACHED_NIXL_API_KEY": "a-key", "KVCACHED_NIXL_ADMIN_KEY": "b", "HOME": "/"})
    assert (found.api_key, found.admin_key, found.upstream_key) == ("a-key", "b", "")
    assert "a-key" not in repr(found)


@pytest.mark.parametrize(
    "words",
    [
        ["--prefill", "nothing"],
        ["--prefill", "http://a:1", "--decode", "http://a:1"],
        ["--prefill", "http://a:1/v1"],
        ["--attempts", "0"],
        ["--inter-token-timeout", "0"],
        ["--inter-token-timeout", "nan"],
        ["--port", "70000"],
        ["--servers", "/no/such/file"],
    ],
    ids=str,
)
def test_what_cannot_be_used_stops_the_start_in_words(words: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        parsed(*words)
    assert refused.value.expected and refused.value.remedy


@pytest.mark.parametrize(
    "servers", [b'{"prefill": ["http://\xff:80"]}', b'{"prefill": 1}', b"", b"\xef\xbb\xbf{}"], ids=repr
)
def test_a_file_of_servers_that_cannot_be_read_stops_the_start_in_words(servers: bytes, tmp_path: Path) -> None:
    (tmp_path / "servers").write_bytes(servers)
    with pytest.raises(SettingsError, match="--servers"):
        parsed("--servers", str(tmp_path / "servers"))


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "192.0.2.1"], ids=["no name", "too long", "of another host"])
def test_an_address_that_cannot_be_listened_at_stops_the_start_in_words(host: str) -> None:
    async def run() -> None:
        with pytest.raises(SettingsError, match="cannot listen"):
            await Router(Options(host=host, port=0)).serve()

    asyncio.run(run())


@pytest.mark.parametrize("key", ["a\nb", "a\xe9", " a", "a ", " "])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    """Spaces around a header's value are no part of it: nobody could send such a key."""
    with pytest.raises(SettingsError, match="key"):
        parsed(environ={"KVCACHED_NIXL_API_KEY": key})


@pytest.mark.parametrize(
    ("url", "name"),
    [("http://a:1", "a:1"), ("http://A/", "a:80"), ("https://a", "a:443"), ("http://[::1]:8", "[::1]:8")],
)
def test_a_server_is_called_by_host_and_port(url: str, name: str) -> None:
    assert address_of(url) == name


# ----------------------------------------------------------------------------------------------------------------- keys


def request(*more: tuple[str, str], **headers: str) -> Any:
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return make_mocked_request("POST", "/v1/completions", headers=CIMultiDict([*named, *more]))


@pytest.mark.parametrize(
    "said", [None, "", "Bearer", "Bearer ", "Bearer x", "Basic key", "key", "Bearer key2", "Bearer ke"]
)
def test_a_wrong_key_is_refused(said: str | None) -> None:
    headers = {} if said is None else {"authorization": said}
    with pytest.raises(Refusal) as refused:
        require_key(request(**headers), "key")
    assert refused.value.status == 401


def test_the_right_key_is_taken_and_two_are_not() -> None:
    require_key(request(authorization="Bearer key"), "key")
    require_key(request(authorization="bearer  key "), "key")
    require_key(request(), "")
    with pytest.raises(Refusal):
        require_key(request(("authorization", "Bearer key"), authorization="Bearer key"), "key")


def test_ids_and_headers() -> None:
    """A client's id is shown to it, and begins the router's own; one that could not be logged is not taken."""
    own, shown = draw_id(request(x_request_id="a.b:c-1"))
    assert shown == "a.b:c-1" and own.startswith("a.b:c-1-") and own != draw_id(request(x_request_id="a.b:c-1"))[0]
    for odd in ("a b", "a,b", "\x7f", "x" * 200, ""):
        assert draw_id(request(x_request_id=odd))[1].startswith("router-")
    kind = {"Content-Type": "application/json"}
    found = passed_on(request(authorization="Bearer a", x_data_parallel_rank="7", cookie="c"), "")
    assert found == {**kind, "Authorization": "Bearer a"}
    assert passed_on(request(authorization="Bearer a"), "own") == {**kind, "Authorization": "Bearer own"}
    assert passed_on(request(authorization="Bearer ä", traceparent="00-1"), "") == {**kind, "traceparent": "00-1"}


def test_an_error_has_vllm_s_shape() -> None:
    assert json.loads(error_body(503, "words", "n")) == {
        "error": {"message": "words", "type": "ServiceUnavailableError", "param": "n", "code": 503}
    }
    assert all(one.value == one.value.lower() for one in RouterFailure)


def test_a_server_that_is_down_is_looked_at_later_each_time_and_one_that_is_suspected_soon() -> None:
    assert pause_seconds(0, True, 2.0, 3) == 2.0 and pause_seconds(1, True, 2.0, 3) == 0.2
    down = [pause_seconds(failures, False, 2.0, 3) for failures in range(1, 40)]
    assert down[:5] == [2.0, 2.0, 2.0, 4.0, 8.0]
    assert down == sorted(down) and down[-1] == MOST_PAUSE_SECONDS


def test_the_router_needs_neither_vllm_nor_torch() -> None:
    """It runs where no model does."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('vllm', 'torch', 'nixl', 'kvcached', 'numpy')));"
        "import kvcached_nixl.proxy.command, kvcached_nixl.__main__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_line_is_read_without_any_library_of_the_router_s() -> None:
    """So that --help and what is wrong with an option can be said before one is installed."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('aiohttp', 'anyio', 'prometheus_client')));"
        "import kvcached_nixl.proxy.options"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("said", "tags"),
    [
        (b'{"error": {"message": "KV hand-over failed: cause=lease attempt=7 request=d prefill_request=p."}}', "p."),
        (b'data: {"error": {"message": "KV hand-over failed: cause=lease attempt=7 request=d"}}', "d"),
        (b'{"error": {"message": "KV hand-over failed: cause=no_manifest"}}', "cause=no_manifest"),
        (b'{"error": {"message": "KV memory is short: cause=no_blocks request=d: found 3"}}', "request=d:"),
        (b'{"error": {"message": "KV hand-over failed: cause=LEASE"}}', ""),
        (b'{"error": {"message": "cause=lease attempt=7"}}', ""),
        (b"", ""),
    ],
)
def test_what_a_server_says_of_a_failed_hand_over_is_found(said: bytes, tags: str) -> None:
    found = hand_over_tags(said)
    assert found.endswith(tags) and bool(found) == bool(tags)
    assert '"' not in found and "\n" not in found


def test_counters_without_a_server_begin_at_0() -> None:
    """Where one appears with its first count, Prometheus sees no rise, and no alert fires."""
    found = Metrics(tuple, int).text().decode()
    for name, label, values in (
        ("retries", "cause", [one.value for one in RouterFailure]),
        ("decode_alone", "reason", [one.value for one in Alone]),
        ("handovers", "direction", ["pull", "push", "alone"]),
    ):
        for value in values:
            assert f'kvcached_nixl_router_{name}_total{{{label}="{value}"}} 0.0' in found
