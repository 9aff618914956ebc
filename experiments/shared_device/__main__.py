# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/shared_device/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.command_line import KEEPS_LAST, add_quick, add_seed, add_word, make_parser, run_main

if TYPE_CHECKING:
    from experiments.common.targets import Verdict

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("table", "overload", "hybrid")

DESCRIPTION = """\
What is elastic memory with prefill/decode worth to an operator?

table      Two models on one device (the emulated one, of host memory) that is smaller than the sum of their peaks.
           Their loads swell at opposite times. Every arm gets the same requests at the same times, whether earlier ones
           were answered or not (open loop), with prompts of 256 to 1,536 tokens:
             static split, stock P/D    half of the device for each model; vLLM's own connector and memory
             static split, stock push   the same with NixlPushConnector
             kvcached without P/D       one server for each model computes prompts and answers
             kvcached's own Nixl patch  as kvcached 0.1.6 ships it, without this package
             this package               decode asks prefill: pull, push, and pull staged through a slab
             ..., without revocation    nothing is taken back for want of memory (give_way_after): not by prefill, nor,
                                        in push, by decode
             ..., behind vllm-router    prefill computes whatever decode can take
           All but this package's are behind vllm-router, too.
overload   One model, whose decode has little memory. Its capacity is measured; then twice as many requests come as it
           can answer, to decode that asks and to vllm-router.
hybrid     As table, with a hybrid model (Nemotron-H: attention and Mamba2 states) in place of one of the two, and fewer
           arms: static split (as many tokens for each model, so less than half for the hybrid one), kvcached without
           P/D, and this package's pull.

Clients leave when they have no token after 15 s. Each answer is compared with that of one stock server."""

EPILOG = """\
columns: goodput is right answers within the latency bound, a second of load. Wasted is the share of prefilled tokens
whose KV no decode has received. Taken back counts offers that prefill revoked, again the requests that a server had to
compute again for want of blocks. Left: clients without a token after 15 s. Retry-After: refusals with that header.

targets: no wrong answer and no request without an end with this package; its memory stays within the device; at twice
the capacity no prefill is wasted where decode asks, and every refusal says when to try again.
Which arm is fastest is reported without a target.

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json with every request, versions and hardware; results/last-VERSION.png and
last-VERSION-hybrid.png: memory over time."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "less load, and two arms if no --arm is given", KEEPS_LAST)
    add_seed(parser)
    parser.add_argument("--part", choices=PARTS, help=f"only this part; {KEEPS_LAST}")
    add_word(parser, "--arm", "arms of the tables", KEEPS_LAST, default="")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, begin, conclude, last_name, write_json
    from experiments.shared_device import overload, report
    from experiments.shared_device.models import FULL_ATTENTION
    from experiments.shared_device.reference import reference_of
    from experiments.shared_device.table import PARTS as TABLES
    from experiments.shared_device.table import measure

    began, stamp = begin(options.vllm)
    logs = RESULTS / stamp
    logs.mkdir(parents=True)
    name = stamp if options.quick or options.part or options.arm else last_name(options.vllm)
    path = RESULTS / f"{name}.json"
    chosen = [options.part] if options.part else PARTS
    found: dict[str, list[Any]] = {"overload": [], "runs": [], "hybrid": []}

    def content() -> dict[str, Any]:
        return {"began": began, "seed": options.seed, **{part: [*map(asdict, some)] for part, some in found.items()}}

    verdicts: list[Verdict] = []
    tables = []
    with Narrator(f"two models on one device, vLLM {options.vllm}") as narrator:
        if "overload" in chosen:
            folders = FULL_ATTENTION.make_models()
            asked = reference_of(FULL_ATTENTION, folders, logs, narrator.update)
            found["overload"] = overload.measure(folders, asked, options.seed, logs, narrator, quick=options.quick)
            tables.append(report.table_of_overload(found["overload"]))
            verdicts += report.judge_overload(found["overload"])
        for part, one in TABLES.items():
            if part not in chosen:
                continue
            is_table = part == "table"
            folders, place = one.device.make_models(), logs if is_table else logs / part
            asked = reference_of(one.device, folders, place, narrator.update)
            runs = found["runs" if is_table else part]
            for ran in measure(one, folders, asked, options, place, narrator):
                runs.append(ran)
                # At once: a run takes a quarter of an hour.
                write_json(path, content())
            tables += report.tables_of(runs, one.title)
            verdicts += report.judge(runs, one.device, "" if is_table else f"{part}: ")
            title = f"memory of one device over time{'' if is_table else f' ({part})'}, vLLM {options.vllm}"
            report.plot(runs, one.device, title, RESULTS / f"{name}{'' if is_table else f'-{part}'}.png")
    return conclude(tables, verdicts, path, content())


if __name__ == "__main__":
    run_main(main, parse())
