# SPDX-License-Identifier: Apache-2.0
"""What is elastic memory with prefill/decode worth to an operator?

table      Two models on one device that is smaller than the sum of their peaks; their loads swell at opposite times.
           Every arm gets the same requests at the same times, whether earlier ones were answered or not. The arms: a
           static split with stock P/D, kvcached without P/D, kvcached's own Nixl patch, and this package: pull, push,
           staged, without revocation (give_way_after), and behind vllm-router as the arms of others are.
overload   One model, whose decode has little memory. Its capacity is measured; then twice as many requests come as it
           can answer, to decode that asks and to vllm-router.

Clients leave when they have no token after 15 s. Each answer is compared with that of one stock server.
Goodput is right answers within the latency bound, a second of load. Wasted is the share of prefilled tokens whose KV no
decode has received. Taken back counts offers that prefill revoked, again the requests that a server had to compute
again for want of blocks. Left: clients without a token after 15 s. Retry-After: refusals with that header.

Targets: no wrong answer and no request without an end with this package; its memory stays within the device; at twice
the capacity no prefill is wasted where decode asks, and every refusal says when to try again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.bench.comparison import percentile
from experiments.common.report import Run, Verdict, make_panels, make_table, save
from experiments.shared_device.arms import ARMS, DEVICE_BYTES, PULL, STATIC, Arm
from experiments.shared_device.clients import Outcome, Received, Swell, arrivals, reference_of
from experiments.shared_device.measure import ASKS, TIMES_CAPACITY, Ran, overload, run_arm

FIRST_TOKEN_SECONDS = 5.0
TOKEN_SECONDS = 0.2
"""The latency bound: a request counts if its first token came in time, and its further ones on average."""


def is_good(one: Received) -> bool:
    if one.outcome is not Outcome.RIGHT or one.first_token_seconds is None:
        return False
    gaps = one.gaps_seconds
    return one.first_token_seconds <= FIRST_TOKEN_SECONDS and (not gaps or sum(gaps) / len(gaps) <= TOKEN_SECONDS)


def goodput(ran: Ran) -> float:
    """Return right answers within the latency bound, a second of load."""
    return sum(map(is_good, ran.received)) / ran.load_seconds


def peaks(ran: Ran) -> tuple[int, dict[str, int]]:
    """Return the most bytes of the device that were in use at once, and the most of each model."""
    models: dict[str, int] = {}
    for _, used in ran.samples:
        now: Counter[str] = Counter()
        for name, count in used.items():
            now[name.partition(",")[0]] += count
        models = {model: max(count, models.get(model, 0)) for model, count in now.items()}
    return max((sum(used.values()) for _, used in ran.samples), default=0), models


# --------------------------------------------------------------------------------------------------- tables and targets


PANELS_A_ROW = 4
_SHADES = {"a": ("#4c78a8", "#9ecae9"), "b": ("#f58518", "#ffbf79")}
COLORS = {
    f"{model}, {side}": shades[side == "prefill"]
    for model, shades in _SHADES.items()
    for side in ("alone", "prefill", "decode")
}
_MIB = 2**20
_OUTCOMES = [kind.value.upper() if kind is Outcome.WRONG else kind.value for kind in Outcome]
_SPEED = ("goodput/s", "first token, s: p50", "p99", "between tokens, ms: p50", "p99")
_FATE = (*_OUTCOMES, "Retry-After", "wasted", "taken back", "again", "peak, MiB")


def tables_of(runs: Sequence[Ran], title: str) -> list[Table]:
    words = f"first token <= {FIRST_TOKEN_SECONDS:g} s, further ones <= {TOKEN_SECONDS * 1e3:g} ms on average"
    speed, fate = [], []
    for ran in runs:
        if ran.not_run:
            speed.append([ran.arm, "not run"])
            fate.append([ran.arm, "not run"])
            continue
        # Requests that got no token do not count here; they are among the outcomes.
        firsts = [one.first_token_seconds for one in ran.received if one.first_token_seconds is not None]
        gaps = [gap for one in ran.received for gap in one.gaps_seconds]
        times = [_shown(firsts, share, 1, 2) for share in (50, 99)]
        times += [_shown(gaps, share, 1e3, 0) for share in (50, 99)]
        speed.append([ran.arm, f"{goodput(ran):.2f}", *times])
        outcomes, wasted = Counter(one.outcome for one in ran.received), ran.wasted_share
        counts = (*(outcomes[kind] for kind in Outcome), sum(one.retry_after for one in ran.received))
        again = (f"{ran.counts[one]:g}" for one in ("revoked", "preempted"))
        peak = f"{peaks(ran)[0] / _MIB:.0f}" if ran.samples else "-"
        fate.append([ran.arm, *map(str, counts), "-" if wasted is None else f"{wasted:.1%}", *again, peak])
    reasons = [f"{ran.arm} was not run: {ran.not_run}" for ran in runs if ran.not_run]
    tables = [
        make_table(f"{title}; goodput: right answers a second with {words}", ("arm", *_SPEED), speed),
        make_table("what came of the requests, of prefill and of the memory", ("arm", *_FATE), fate),
    ]
    tables[1].caption = "\n".join(reasons) or None
    return tables


def _shown(values: Sequence[float], hundredths: int, factor: float, digits: int) -> str:
    return f"{percentile(hundredths)(values) * factor:.{digits}f}" if values else "-"


def _bad(ran: Ran, words: str) -> Verdict:
    bad = sum(one.outcome in (Outcome.WRONG, Outcome.NO_END) for one in ran.received)
    words = f"{words}: wrong answers, and requests without an end (0)"
    return Verdict(words, f"{bad} of {len(ran.received)}", not bad)


def judge(runs: Sequence[Ran]) -> list[Verdict]:
    verdicts = []
    for ran in (one for one in runs if one.arm.startswith("this package")):
        if ran.not_run:
            verdicts.append(Verdict(f"{ran.arm}: serves throughout", ran.not_run, False))
            continue
        total, of_models = peaks(ran)
        mib = " and ".join(f"{count / _MIB:.0f}" for count in of_models.values())
        words = f"{ran.arm}: the models' peaks, {mib} MiB, within the device"
        found = f"{total / _MIB:.0f} of {DEVICE_BYTES / _MIB:.0f} MiB"
        verdicts += [_bad(ran, ran.arm), Verdict(words, found, total <= DEVICE_BYTES)]
    return verdicts


def plot(runs: Sequence[Ran], title: str, path: Path) -> None:
    shown = [ran for ran in runs if ran.samples]
    if not shown:
        return
    figure, panels = make_panels(len(shown), 11, 2.6 * math.ceil(len(shown) / PANELS_A_ROW), a_row=PANELS_A_ROW)
    for place, (panel, ran) in enumerate(zip(panels, shown, strict=True)):
        seconds = [at for at, _ in ran.samples]
        engines = [name for name in COLORS if name in ran.samples[0][1]]
        levels = [[used[engine] / _MIB for _, used in ran.samples] for engine in engines]
        panel.stackplot(seconds, *levels, labels=engines, colors=[COLORS[engine] for engine in engines])
        panel.axhline(DEVICE_BYTES / _MIB, color="black", linewidth=1, linestyle="--")
        panel.set_title(ran.arm.removeprefix("this package, "), fontsize=9)
        panel.set(xlabel="seconds", ylim=(0, 1.3 * DEVICE_BYTES / _MIB))
        if place % PANELS_A_ROW == 0:
            panel.set(ylabel="MiB of the device")
        panel.legend(fontsize=6, loc="upper left", ncols=2)
    save(figure, title, path)


def judge_overload(found: Sequence[Ran]) -> list[Verdict]:
    verdicts = []
    for ran in found:
        told = [one.retry_after for one in ran.received if one.outcome is Outcome.REFUSED]
        words = f"overload, {ran.arm}"
        again = f"{sum(told)} of {len(told)}"
        verdicts += [_bad(ran, words), Verdict(f"{words}: refusals that say when to try again", again, all(told))]
        if ran.arm == ASKS:
            share = ran.wasted_share or 0.0
            verdicts.append(Verdict(f"{words}: prefill wasted (0.0 %)", f"{share:.1%}", share < 0.0005))
    return verdicts


# ---------------------------------------------------------------------------------------------------------- a whole run


SECONDS, QUICK_SECONDS = 36.0, 18.0
SWELLS = {"a": Swell(0.2, 2.4, 18.0), "b": Swell(0.2, 2.4, 18.0, phase=0.5)}
QUICK_ARMS = (STATIC, PULL)
OVERLOAD = "overload"


def main(run: Run) -> int:
    chosen, seed = run.chosen([*ARMS, OVERLOAD]), run.options.seed
    arms = [one for one in chosen if isinstance(one, Arm) and (not run.quick or run.options.only or one in QUICK_ARMS)]
    found: dict[str, list[Ran]] = {"overload": [], "runs": []}

    def content() -> dict[str, Any]:
        return {"seed": seed, **{part: [*map(asdict, some)] for part, some in found.items()}}

    asked, verdicts, tables = reference_of(run.logs, run.update), list[Verdict](), list[Table]()
    if OVERLOAD in chosen:
        capacity, found["overload"] = overload(asked, seed, run)
        title = f"{TIMES_CAPACITY:g} x as many requests as decode can answer, which is {capacity:.2f} a second"
        tables += tables_of(found["overload"], title)
        verdicts += judge_overload(found["overload"])
    if arms:
        seconds, runs = QUICK_SECONDS if run.quick else SECONDS, found["runs"]
        loads = (arrivals(name, swell, seconds, len(asked[name].prompts), seed) for name, swell in SWELLS.items())
        load = sorted((one for some in loads for one in some), key=lambda one: one.at_seconds)
        run.say(f"{len(load)} requests in {seconds:.0f} s")
        for arm in arms:
            runs.append(run_arm(arm, asked, load, seconds, run))
            run.say(f"{arm.name}: {runs[-1].not_run or f'{goodput(runs[-1]):.2f} requests a second'}")
            # At once: a run takes a quarter of an hour.
            run.write(content())
        tables += tables_of(runs, "two models on one device")
        verdicts += judge(runs)
        plot(runs, f"memory of one device over time, vLLM {run.vllm}", run.path.with_suffix(".png"))
    return run.conclude(tables, verdicts, content())
