# SPDX-License-Identifier: Apache-2.0
"""What is on the screen: figures, aligned columns at every width, and nothing that a terminal would obey."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.metrics_servers import engine_text, router_text

from kvcached_nixl.cli.top.cells import cell, short
from kvcached_nixl.cli.top.columns import ENGINE_COLUMNS, ROUTER_COLUMNS, Column, Figure, Unit
from kvcached_nixl.cli.top.command import to_json
from kvcached_nixl.cli.top.fleet import Fleet
from kvcached_nixl.cli.top.look import Look, Span, read_series
from kvcached_nixl.cli.top.screen import frame
from kvcached_nixl.cli.top.target import target_of_url

WIDTHS = (0, 1, 20, 40, 60, 80, 120, 200)


def look(text: str, at_seconds: float = 0.0) -> Look:
    return Look(at_seconds, read_series(text.splitlines())[0], is_router="kvcached_nixl_router" in text)


def fleet_of(looks: dict[str, list[str]], unanswered: dict[str, str] | None = None) -> Fleet:
    """A fleet whose servers have given these answers, two seconds apart."""
    fleet = Fleet([target_of_url(f"http://{name}") for name in (*looks, *(unanswered or {}))])
    for one in fleet:
        for place, text in enumerate(looks.get(one.target.name, ())):
            one.answered(look(text, 2.0 * place))
        if one.target.name in (unanswered or {}):
            one.failed((unanswered or {})[one.target.name])
    fleet.follow()
    return fleet


ROUTED = {"10.0.0.1:8100": ("prefill", 1.0), "10.0.0.2:8200": ("decode", 1.0), "10.0.0.3:8200": ("decode", 0.0)}
BUCKETS = {"0.1": 4.0, "0.5": 9.0, "+Inf": 10.0}
BUSY = {
    "10.0.0.9:8000": [
        router_text(ROUTED, {"ok": 10.0}, dict.fromkeys(BUCKETS, 0.0)),
        router_text(ROUTED, {"ok": 30.0, "full": 2.0}, BUCKETS, waiting_requests=7.0, ejections_total=1.0),
    ],
    "10.0.0.1:8100": [engine_text(), engine_text(running=3.0, waiting=5.0, kept_offers=4.0, revoked_blocks=2.0)],
    "10.0.0.2:8200": [
        engine_text(handovers=10.0, moved_bytes=0.0, failed_lease=4.0),
        engine_text(handovers=17.0, moved_bytes=float(300 << 20), failed_lease=6.0, failed_peer=1.0),
    ],
}


def lines_of(fleet: Fleet, width: int, **console: object) -> list[str]:
    """As a terminal, or a pipe, gets them."""
    out = io.StringIO()
    shown = Console(file=out, width=max(width, 300), markup=False, emoji=False, highlight=False, **console)  # type: ignore[arg-type]
    drawn = frame(fleet, width)
    for line in (*drawn.head, *drawn.rows, *drawn.notes):
        shown.print(line, no_wrap=True, overflow="ignore", crop=False)
    return out.getvalue().splitlines()


def row(fleet: Fleet, name: str, width: int = 200) -> str:
    (found,) = [line for line in lines_of(fleet, width) if line[2:].startswith(f"{name} ") and "  " in line[3:]][:1]
    return found


def test_an_engine_has_its_figures() -> None:
    fleet = fleet_of(BUSY, {"10.0.0.3:8200": "connection refused"})
    (decode,) = [line for line in lines_of(fleet, 200) if line.startswith("! 10.0.0.2:8200") and "decode" in line]
    for figure in ("1/1", "16k/64k", "7 +3", "3.5", "150.0 MiB", "3.0 GiB", "lease 6, peer 1"):
        assert f" {figure}" in decode, figure
    (prefill,) = [line for line in lines_of(fleet, 200) if line.startswith("! 10.0.0.1:8100") and "prefill" in line]
    assert [one for one in (" 3 ", " 5 ", " 4 ", " 2 +2") if one not in prefill] == []


def test_a_router_has_its_figures() -> None:
    (line,) = [one for one in lines_of(fleet_of(BUSY), 200) if "full 1" in one and "ok 10" in one]
    for figure in ("prefill 2, decode 4", " 7 ", "0.180 s", ">0.500 s", "1 +1"):
        assert figure in line, figure


def test_a_server_that_does_not_answer_says_why_in_its_row() -> None:
    found = lines_of(fleet_of(BUSY, {"10.0.0.3:8200": "connection refused"}), 80)
    assert "! 10.0.0.3:8200  decode   does not answer: connection refused" in found
    assert found[0].startswith("1 router, 2 engines up, 1 server silent   ! 4 to look at")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_line_fits_and_columns_are_aligned(width: int) -> None:
    """Titles and figures end, or begin, at the same places."""
    fleet = fleet_of(BUSY, {"10.0.0.3:8200": "connection refused"})
    found = lines_of(fleet, width)
    assert max(map(len, found)) <= max(1, width)
    if width < 60:
        return
    assert not any("~" in line for line in found if line.startswith(("  engine", "  router"))), "a title is cut"
    title = next(line for line in found if line.startswith("  engine"))
    rows = [line for line in found if line[2:].startswith(("10.0.0.1:8100", "10.0.0.2:8200")) and " run" not in line]
    end = title.index(" run") + len(" run")
    assert [one[end - 1].isdigit() for one in rows if len(one) > end and "  does" not in one][:2] == [True, True]


def test_wider_terminals_have_more_columns_and_narrow_ones_keep_the_most_needed() -> None:
    fleet = fleet_of(BUSY)
    titles = {width: next(one for one in lines_of(fleet, width) if one.startswith("  engine")) for width in WIDTHS[4:]}
    assert all(word in titles[60] for word in ("role", "run", "wait", "tokens"))
    assert "failed" in titles[80] and "bytes/s" in titles[120] and "failed by cause" in titles[200]
    assert len(titles[60]) < len(titles[80]) < len(titles[120]) < len(titles[200])


def test_columns_do_not_jump_with_the_figures() -> None:
    """The same places, whatever the numbers are."""
    quiet = fleet_of({"a:1": [engine_text(), engine_text()]})
    huge = {"used_tokens": 9.99e9, "free_tokens": 9.99e12, "queued_tokens": 1e15, "moved_bytes": 1e18}
    busy = fleet_of({"a:1": [engine_text(), engine_text(running=1e7, failed_lease=1e9, handovers=1e9, **huge)]})
    for width in WIDTHS:
        assert frame(quiet, width).head[-1].plain == frame(busy, width).head[-1].plain
    assert len(row(busy, "a:1")) <= 200


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_long_names_that_begin_alike_are_still_told_apart(width: int) -> None:
    """What they have in common is left out; notes have the whole name."""
    names = [f"vllm-decode-7d9f8b6c5-{one}.inference.svc.cluster.local:8000" for one in ("x2x4j", "9kq7w")]
    drawn = frame(fleet_of({name: [engine_text(quarantined_blocks=1.0)] for name in names}), width)
    assert ["~9kq7w." in drawn.rows[0].plain, "~x2x4j." in drawn.rows[1].plain] == [True, True]
    assert width < 120 or all(any(name in line.plain for line in drawn.notes) for name in names)


def test_names_that_end_alike_and_begin_otherwise_keep_their_beginning() -> None:
    names = [f"{one}-decode.inference.svc.cluster.local:8000" for one in ("blue", "green")]
    drawn = frame(fleet_of({name: [engine_text()] for name in names}), 60)
    assert [line.plain.split()[0][:5] for line in drawn.rows] == ["blue-", "green"]


def test_a_metric_that_no_server_has_costs_no_column() -> None:
    stock = fleet_of({"a:1": ["vllm:num_requests_running 1\n"]})
    titles = frame(stock, 200).head[-1].plain.split()
    assert titles == ["engine", "role", "run"]


HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/bold red]:smile:\x9b31m\u202e"


def test_nothing_that_a_server_says_reaches_the_terminal_as_it_is() -> None:
    """Not as an escape sequence, and not as markup."""
    said = HOSTILE.replace('"', "")
    text = router_text({f"{said}:1": (said, 0.0)}, {said: 5.0})
    engine = f'vllm:num_requests_running 1\nkvcached_nixl:handover_failures_total{{engine="{said}",cause="{said}"}} 5\n'
    fleet = fleet_of({"a:1": [router_text({}), text], "b:1": ["vllm:num_requests_running 1\n", engine]})
    found = "\n".join(lines_of(fleet, 200, force_terminal=False))
    assert all(" " <= one <= "~" or one == "\n" for one in found)
    assert "\\x1b]0;owned\\x07" in found and "[bold red]x[/bold red]" in found
    coloured = "\n".join(lines_of(fleet, 200, force_terminal=True, color_system="truecolor"))
    assert "\x1b]" not in coloured and "\x1b[2J" not in coloured and "\x07" not in coloured and "\x9b" not in coloured
    assert json.dumps(to_json(fleet)).isascii()


@given(st.text(max_size=30), st.text(max_size=30), st.sampled_from(WIDTHS))
def test_no_name_breaks_a_line(name: str, cause: str, width: int) -> None:
    labels = {"cause": cause, "engine": name}
    texts = [
        f'{key}="' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        for key, value in labels.items()
    ]
    series, _ = read_series([f"kvcached_nixl:handover_failures_total{{{','.join(texts)}}} 3"])
    fleet = Fleet([target_of_url("http://a:1")])
    for one in fleet:
        one.answered(Look(0.0, {}))
        one.answered(Look(1.0, series))
    drawn = frame(fleet, width)
    for line in (*drawn.head, *drawn.rows, *drawn.notes):
        assert len(line.plain) <= max(1, width)
        assert line.plain.isascii() and line.plain.isprintable()
    json.dumps(to_json(fleet), allow_nan=False)


def test_colours_are_for_terminals_only() -> None:
    fleet = fleet_of(BUSY, {"10.0.0.3:8200": "connection refused"})
    assert "\x1b" not in "".join(lines_of(fleet, 120, force_terminal=False))
    coloured = lines_of(fleet, 120, force_terminal=True, color_system="standard")
    red = [line for line in coloured if "\x1b[1;31m" in line]
    assert len(red) >= 4


def test_only_what_needs_attention_is_red() -> None:
    """A row without a mark is not, and of one with a mark only what grew."""
    fleet = fleet_of({**BUSY, "10.0.0.7:8200": [engine_text()]})
    quiet, failing = (
        next(line for line in lines_of(fleet, 120, force_terminal=True, color_system="standard") if name in line)
        for name in ("10.0.0.7:8200", "10.0.0.2:8200")
    )
    assert "\x1b[1;31m" not in quiet
    assert "\x1b[1;31m     7 +3\x1b[0m" in failing and "\x1b[1;31m16k/64k" not in failing


def test_no_color_is_respected_and_marks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    fleet = fleet_of(BUSY, {"10.0.0.3:8200": "connection refused"})
    found = "".join(lines_of(fleet, 120, force_terminal=True, color_system="standard"))
    assert "\x1b[1;31m" not in found and "\x1b[31m" not in found and "! " in found


def test_an_output_without_bars_gets_plain_ones() -> None:
    fleet = fleet_of(BUSY)
    assert all(line.plain.isascii() for line in frame(fleet, 200, is_ascii=True).rows)
    assert "##......" in frame(fleet, 200, is_ascii=True).rows[0].plain


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, Unit.NUMBER, "-"),
        (0.0, Unit.NUMBER, "0"),
        (3.14159, Unit.NUMBER, "3.1"),
        (99.96, Unit.NUMBER, "100"),
        (9999.0, Unit.NUMBER, "9999"),
        (12_345.0, Unit.NUMBER, "12.3k"),
        (999_999.0, Unit.NUMBER, "1M"),
        (4.56e9, Unit.NUMBER, "4.56G"),
        (0.0, Unit.BYTES, "0 B"),
        (1023.97, Unit.BYTES, "1.0 KiB"),
        (3 * 2.0**30, Unit.BYTES, "3.0 GiB"),
        (0.1234, Unit.SECONDS, "0.123 s"),
        (12.34, Unit.SECONDS, "12.3 s"),
        (123.4, Unit.SECONDS, "123 s"),
    ],
)
def test_numbers_are_short(value: float | None, unit: Unit, text: str) -> None:
    assert short(value, unit) == text


@given(st.floats(0, 1e15), st.sampled_from([(Unit.NUMBER, 6), (Unit.BYTES, 9)]))
def test_numbers_of_any_size_keep_their_width(value: float, unit: tuple[Unit, int]) -> None:
    assert len(short(value, unit[0])) <= unit[1]


@pytest.mark.parametrize("column", [*ENGINE_COLUMNS, *ROUTER_COLUMNS], ids=lambda column: column.key)
def test_every_column_says_nothing_of_a_server_that_has_nothing(column: Column) -> None:
    """Nothing is not 0."""
    for before in (None, Look(0.0, {})):
        found = cell(column, Span(before, Look(1.0, {})))
        assert found.text == "-"
        values = found.value.values() if isinstance(found.value, dict) else [found.value]
        assert all(one is None for one in values)


def test_a_counter_without_series_is_nought() -> None:
    """It has a counter with labels only from its first event on; what it does not have is not 0."""
    (failed,) = [one for one in ENGINE_COLUMNS if one.key == "failed_handovers"]
    ours, stock = look(engine_text()), look("vllm:num_requests_running 1\n")
    assert (cell(failed, Span(None, ours)).text, cell(failed, Span(None, stock)).text) == ("0", "-")


MOVED, STATES = "kvcached_nixl:moved_bytes_total", "kvcached_nixl:handover_state_seconds"


@pytest.mark.parametrize(
    ("key", "before", "now", "text", "value"),
    [
        ("bytes_per_second", "", f'{MOVED}{{direction="pull"}} 2048', "1.0 KiB", 1024.0),
        ("bytes_per_second", "", "vllm:nixl_bytes_transferred_sum 4096", "2.0 KiB", 2048.0),
        (
            *("bytes_per_second_by_direction", "", f'{MOVED}{{direction="pull",path="host"}} 20'),
            *("pull 10 B", {"pull": 10.0}),
        ),
        ("mapped_bytes", "", "kvcached_nixl:mapped_bytes 1048576", "1.0 MiB", 1048576.0),
        (
            "seconds_by_state",
            f'{STATES}_sum{{state="read"}} 5\n{STATES}_count{{state="read"}} 9\n{STATES}_count{{state="x"}} 1\n',
            f'{STATES}_sum{{state="read"}} 6\n{STATES}_count{{state="read"}} 13\n{STATES}_count{{state="x"}} 1\n',
            "read 0.250 s",
            {"read": 0.25},
        ),
        ("slab_used_slots", "", "kvcached_nixl:slab_used_slots 3\n", "3", 3.0),
    ],
)
def test_figures_of_columns(key: str, before: str, now: str, text: str, value: object) -> None:
    (column,) = [one for one in ENGINE_COLUMNS if one.key == key]
    found = cell(column, Span(look(before), look(now, 2.0)))
    assert (found.text, found.value) == (text, value)


def test_titles_fit_their_columns_and_keys_are_distinct() -> None:
    for columns in (ENGINE_COLUMNS, ROUTER_COLUMNS):
        assert all(len(one.title) <= one.width for one in columns)
        assert len({one.key for one in columns}) == len(columns)
        assert all(len(one.metrics) >= 2 for one in columns if one.figure in (Figure.BAR, Figure.TOKENS))
