# SPDX-License-Identifier: Apache-2.0
"""What is read out of ``/metrics``, and what two answers tell: growth, resets, quantiles; nothing of it can crash."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.metrics_servers import engine_text

from kvcached_nixl.cli.top.columns import wanted_lines
from kvcached_nixl.cli.top.look import MOST_ENGINES, Look, Span, read_series

FAILED = "kvcached_nixl:handover_failures_total"


def look(text: str, at_seconds: float = 0.0) -> Look:
    return Look(at_seconds, read_series(text.splitlines())[0])


def span(before: str, now: str, seconds: float = 2.0) -> Span:
    return Span(look(before, 100.0), look(now, 100.0 + seconds))


def test_a_metric_is_added_up_over_its_series() -> None:
    found = Span(None, look(f'{FAILED}{{cause="lease"}} 2\n{FAILED}{{cause="peer"}} 3.5\n'))
    assert found.total(FAILED) == 5.5
    assert found.totals_by(FAILED, "cause") == {"lease": 2.0, "peer": 3.5}
    assert found.total("kvcached_nixl:other") is None


def test_growth_is_of_each_series() -> None:
    found = span(f'{FAILED}{{cause="lease"}} 2\n', f'{FAILED}{{cause="lease"}} 5\n{FAILED}{{cause="peer"}} 1\n')
    assert found.growth_by(FAILED, "cause") == {"lease": 3.0, "peer": 1.0}
    assert found.growth(FAILED) == 4.0 and found.seconds == 2.0


def test_a_counter_that_a_restart_has_reset_has_grown_by_all_it_has() -> None:
    found = span(f'{FAILED}{{cause="lease"}} 900\n', f'{FAILED}{{cause="lease"}} 4\n')
    assert found.growth(FAILED) == 4.0


def test_one_look_tells_no_growth() -> None:
    found = Span(None, look(f"{FAILED} 4\n"))
    assert (found.growth(FAILED), found.growth_by(FAILED, "cause"), found.seconds) == (None, {}, None)
    assert Span(found.now, found.now).seconds is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999", "9" * 400])
def test_what_is_not_finite_is_not_there(value: str) -> None:
    """Also a number that is finite as an integer only."""
    series, unread = read_series([f"{FAILED} {value}", f'{FAILED}{{cause="lease"}} 1'])
    assert series == {FAILED: {(("cause", "lease"),): 1.0}}
    assert unread == (value == "9" * 400)


def test_sums_and_rates_stay_finite() -> None:
    """Values beyond what a server counts are left out, so that no sum overflows."""
    text = "\n".join(f'{FAILED}{{cause="{one}"}} 1e30' for one in range(1000)) + f"\n{FAILED} 1.7e308\n"
    found = span("", text, seconds=1e-9)
    assert found.total(FAILED) == pytest.approx(1e33) and found.growth(FAILED) == pytest.approx(1e33)


NONSENSE = ["{", f"{FAILED}{{", f'{FAILED}{{a="', f"{FAILED} x", f'{FAILED}{{a="b"}} 1 2 3 x', f"{FAILED}", "= 1"]


@pytest.mark.parametrize("line", NONSENSE)
def test_a_line_that_cannot_be_read_costs_only_itself(line: str) -> None:
    series, unread = read_series([f'{FAILED}{{cause="peer"}} 3', line, f'{FAILED}{{cause="lease"}} 1'])
    assert unread == 1
    assert {"peer", "lease"} <= {value for labels in series[FAILED] for _, value in labels}


@given(st.lists(st.text(max_size=60), max_size=5))
@example([f'{FAILED}{{cause="\x1b[2J"}} 1'])
@example(["\x00", '"', "\\", '{"a"} 1', '{__name__="x"} 1', "#", "# TYPE", "# TYPE a", "# HELP \ud800 b"])
def test_no_text_crashes_it(lines: list[str]) -> None:
    series, unread = read_series(lines)
    assert 0 <= unread <= len(lines)
    assert all(math.isfinite(value) for values in series.values() for value in values.values())


@given(st.binary(max_size=40))
def test_only_wanted_lines_are_kept(rest: bytes) -> None:
    line = rest.replace(b"\n", b"")
    text = b"python_info 1\n" + FAILED.encode() + b"{" + line + b"\n" + FAILED.encode() + b"_more 1\n# TYPE x gauge\n"
    assert wanted_lines().findall(text) == [FAILED.encode() + b"{" + line]


def test_engines_of_one_server_are_told_apart() -> None:
    """Numbers in order, as vLLM's data-parallel ranks."""
    text = "".join(engine_text(one, running=float(one)) for one in ("10", "2", "0"))
    parts = look(text).by_engine()
    assert list(parts) == ["0", "2", "10"]
    assert Span(None, parts["10"]).total("vllm:num_requests_running") == 10.0
    assert list(look(f"{FAILED} 1\n").by_engine()) == [""]
    assert list(look("").by_engine()) == [""]


def test_a_metric_without_series_is_known_by_its_type() -> None:
    """For each of its engines; a histogram by its samples."""
    text = f'# TYPE {FAILED} counter\n# TYPE x histogram\n# TYPE\n# HELP y z\nup{{engine="0"}} 1\nup{{engine="1"}} 1\n'
    found = look(text)
    assert {*found.series} == {FAILED, "x_bucket", "x_count", "x_sum", "up"}
    parts = found.by_engine()
    assert parts["1"].series[FAILED] == {} and Span(parts["1"], parts["1"]).total(FAILED) is None
    later = Look(2.0, read_series([f'{FAILED}{{engine="0"}} 3', 'up{engine="1"} 1'])[0]).by_engine()
    assert Span(parts["0"], later["0"]).growth(FAILED) == 3.0 and Span(parts["1"], later["1"]).growth(FAILED) == 0.0


def test_a_server_cannot_make_up_engines_without_end() -> None:
    text = "\n".join(f'{FAILED}{{engine="{one}"}} 1' for one in range(5000))
    assert len(look(text).by_engine()) == MOST_ENGINES


HISTOGRAM = "x_seconds"


def buckets(**counts: float) -> str:
    names = {"one": "1.0", "two": "2.0", "four": "4.0", "inf": "+Inf"}
    return "".join(f'{HISTOGRAM}_bucket{{le="{names[name]}"}} {count}\n' for name, count in counts.items())


@pytest.mark.parametrize(
    ("counts", "share", "seconds"),
    [
        ({"one": 0, "two": 10, "four": 10, "inf": 10}, 0.5, (1.5, False)),
        ({"one": 5, "two": 10, "four": 10, "inf": 10}, 0.5, (1.0, False)),
        ({"one": 8, "two": 8, "four": 10, "inf": 10}, 0.99, (3.9, False)),
        ({"one": 0, "two": 0, "four": 0, "inf": 10}, 0.5, (4.0, True)),
        ({"one": 0, "two": 0, "four": 0, "inf": 0}, 0.5, None),
        ({"inf": 4}, 0.5, (0.0, True)),
        ({"one": 9, "two": 3, "four": 1, "inf": 10}, 0.5, (5 / 9, False)),
    ],
    ids=["interpolated", "on a bound", "p99", "beyond all", "nothing", "only the last", "not cumulative"],
)
def test_quantiles_come_from_buckets(
    counts: dict[str, float], share: float, seconds: tuple[float, bool] | None
) -> None:
    found = span(buckets(**dict.fromkeys(counts, 0.0)), buckets(**counts)).quantile_seconds(HISTOGRAM, share)
    assert found == (None if seconds is None else (pytest.approx(seconds[0]), seconds[1]))


def test_a_quantile_is_of_the_last_interval_only() -> None:
    """What was observed before does not count; nor does a histogram that was seen once."""
    before, now = buckets(one=1000, two=1000, inf=1000), buckets(one=1000, two=1004, inf=1004)
    assert span(before, now).quantile_seconds(HISTOGRAM, 0.5) == (pytest.approx(1.5), False)
    assert Span(None, look(now)).quantile_seconds(HISTOGRAM, 0.5) is None


def test_buckets_with_odd_bounds_are_no_crash() -> None:
    text = f'{HISTOGRAM}_bucket{{le="nan"}} 3\n{HISTOGRAM}_bucket{{le="x"}} 3\n{HISTOGRAM}_bucket 3\n'
    assert span("", text).quantile_seconds(HISTOGRAM, 0.5) is None
