# SPDX-License-Identifier: Apache-2.0
"""Computes targets, a table and a picture from traced requests. No side effects except the picture's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from experiments.common.plots import make_panels, save
from experiments.common.tables import make_table
from experiments.common.targets import Verdict
from experiments.traces.measure import Arm, Traced

if TYPE_CHECKING:
    from rich.table import Table

WITHIN, AT_WORST = 0.05, 0.10
"""Of the median request, and of any: a span that nobody measures gets longer where processes wait for a core."""
PROCESSES = ("decode", "prefill")
_OF_PREFILL = ("queued", "computing", "sending")
_OF_DECODE = ("held", "asking", "queued", "allocated", "handshake", "moving", "verifying", "reporting", "resuming")
_ALWAYS = {
    *(f"prefill_{state}" for state in _OF_PREFILL),
    *(f"decode_{state}" for state in (*_OF_DECODE, "first_token")),
}


def states_of(arm: Arm) -> set[str]:
    """Return the states that a hand-over goes through."""
    found = set(_ALWAYS)
    if arm.mode == "pull":
        found.add("prefill_offered")
    if arm.mode == "push" or arm.is_staged:
        found.add("decode_waiting")
    if arm.is_staged:
        found.add("decode_copying")
    return found


def judge(arm: Arm, traced: Sequence[Traced]) -> list[Verdict]:
    """Return the targets of an arm."""
    shares = [one.share for one in traced]
    found = f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
    is_reached = abs(median(shares) - 1) <= WITHIN and all(abs(share - 1) <= AT_WORST for share in shares)
    missing = sorted(set.union(*(states_of(arm) - {span.name for span in one.spans} for one in traced)))
    processes = {span.resource["service.name"] for one in traced for span in one.spans}
    return [
        Verdict(f"{arm.name}: spans / time to first token, median 0.95 to 1.05, any 0.9 to 1.1", found, is_reached),
        Verdict(f"{arm.name}: every state is there", ", ".join(missing) or "yes", not missing),
        Verdict(f"{arm.name}: one trace over two processes", ", ".join(sorted(processes)), processes == set(PROCESSES)),
    ]


def table_of(found: Mapping[Arm, Sequence[Traced]]) -> Table:
    """Return a table of the median time in each span, in the order in which they begin."""
    every = [one for traced in found.values() for one in traced]
    names = dict.fromkeys((span.resource["service.name"], span.name) for one in every for span in one.leaves)
    rows = [
        [process, name, *(_milliseconds(traced, process, name) for traced in found.values())]
        for process, name in sorted(names, key=lambda one: PROCESSES.index(one[0]))
    ]
    whole = [f"{median(one.first_token_seconds for one in traced) * 1e3:.1f}" for traced in found.values()]
    columns = ["process", "span", *(arm.name for arm in found)]
    return make_table(
        "median milliseconds before the first token", columns, [*rows, ["client", "time to first token", *whole]]
    )


def _milliseconds(traced: Sequence[Traced], process: str, name: str) -> str:
    sums = [
        [span.seconds for span in one.leaves if (span.resource["service.name"], span.name) == (process, name)]
        for one in traced
    ]
    return f"{median(map(sum, sums)) * 1e3:.2f}" if any(sums) else ""


def plot(found: Mapping[Arm, Traced], path: Path) -> None:
    """Draw the spans of one request of each arm until shortly after its first token, a line each."""
    figure, panels = make_panels(len(found), 13, 7)
    colours = dict(zip(PROCESSES, ("tab:orange", "tab:blue"), strict=True))
    for panel, (arm, one) in zip(panels, found.items(), strict=True):
        begun = one.spans[0].begin
        spans = [span for span in one.parts if span.begin < one.first_token + 0.02]
        lines = list(dict.fromkeys((span.resource["service.name"], span.name) for span in spans))
        last = (one.first_token - begun) * 1e3 * 1.06
        for span in spans:
            place = lines.index((span.resource["service.name"], span.name))
            begin, end = (span.begin - begun) * 1e3, min((span.end - begun) * 1e3, last)
            colour = colours[span.resource["service.name"]]
            panel.barh(place, max(end - begin, last / 400), left=begin, color=colour, edgecolor="white", linewidth=0.4)
        panel.axvline((one.first_token - begun) * 1e3, color="tab:red", linewidth=0.8)
        panel.set_yticks(range(len(lines)), [name for _, name in lines], fontsize=7)
        panel.set(xlabel="ms", xlim=(0, last), title=f"{arm.name} (red: first token)")
        panel.invert_yaxis()
        panel.grid(axis="x", alpha=0.3)
    handles = [panels[0].barh(0, 0, color=colour, label=name) for name, colour in colours.items()]
    panels[0].legend(handles=handles, fontsize=8, loc="lower left")
    save(figure, "", path)
