# SPDX-License-Identifier: Apache-2.0
"""What `top` shows of what servers have answered."""

from __future__ import annotations

import pytest
from support.metrics_servers import engine_text

from kvcached_nixl.cli.top import COLUMNS, Look, Server, read, short

URL = "http://10.0.0.1:8000"


def row(*texts: str, seconds: float = 2.0) -> dict[str, str]:
    """The row of a server that has answered with these texts, so many seconds apart."""
    server = Server(URL)
    for place, text in enumerate(texts):
        server.answered(read(text, place * seconds))
    return dict(zip(COLUMNS, server.row(), strict=True))


def test_one_answer_says_what_is_now() -> None:
    found = row(engine_text(running=3, waiting=9, queued_tokens=500, mapped_bytes=2.0**30, failed_lease=6))
    assert found == {
        "server": URL,
        "role": "-",
        "run": "3",
        "wait": "9",
        "KV used": "25% of 64k +500",
        "hand-overs/s": "-",
        "held": "-",
        "asked": "-",
        "free mem": "3.0 GiB",
        "mapped": "1.0 GiB",
        "failed": "lease 6",
    }


def test_two_answers_say_what_has_changed() -> None:
    found = row(
        engine_text(handovers=10, failed_lease=1, failed_refused=0),
        engine_text(handovers=40, failed_lease=3, failed_refused=0, state_decode_queued=9),
    )
    assert found["hand-overs/s"] == "15.0"
    assert found["failed"] == "lease 3 +2"
    assert found["role"] == "decode"


def test_one_that_asks_prefill_is_decode_from_its_start_on() -> None:
    found = row(engine_text(held_requests=4, asked_requests=2))
    assert (found["role"], found["held"], found["asked"]) == ("decode", "4", "2")


def test_a_restarted_server_counts_from_zero() -> None:
    found = row(engine_text(handovers=100, failed_lease=9), engine_text(handovers=4, failed_lease=1))
    assert (found["hand-overs/s"], found["failed"]) == ("2.0", "lease 1 +1")


def test_engines_of_one_server_are_added_up() -> None:
    found = row(engine_text("0", running=1) + engine_text("1", running=2, state_prefill_computing=1.0))
    assert (found["run"], found["KV used"], found["free mem"]) == ("3", "25% of 128k", "6.0 GiB")
    assert found["role"] == "prefill"


def test_what_a_server_does_not_say_is_no_number() -> None:
    found = row('vllm:num_requests_running{engine="0"} 1.0\nvllm:other 5\n')
    assert [title for title, text in found.items() if text != "-"] == ["server", "run"]


@pytest.mark.parametrize("number", ["NaN", "+Inf", "many"])
def test_what_is_no_number_is_left_out(number: str) -> None:
    assert read(f"vllm:num_requests_running {number}\nvllm:num_requests_waiting 2\n", 0.0).values == {
        ("vllm:num_requests_waiting", ""): 2.0
    }


def test_labels_may_contain_anything_and_terminals_do_not_obey_it() -> None:
    cause = r'{cause="a\"} 1,\x", engine="0"}'.replace(r"\x", "\x1b[2J")
    found = row(f"kvcached_nixl:handover_failures_total{cause} 2.0\n")
    assert found["failed"].endswith(r"\x1b[2J 2") and "\x1b" not in found["failed"]


def test_a_server_that_stops_to_answer_shows_nothing_old() -> None:
    server = Server(URL)
    assert server.error == "not heard yet"
    server.answered(Look(0.0, {("vllm:num_requests_running", ""): 1.0}))
    server.error = "connection refused"
    assert server.row() == [URL, *["-"] * (len(COLUMNS) - 1)]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (9999, "9999"), (63_800, "63.8k"), (2_500_000, "2.5M"), (3e9, "3G")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
