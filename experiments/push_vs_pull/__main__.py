# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/push_vs_pull/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import KEEPS_LAST, add_quick, add_word, make_parser, run_main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from experiments.common.report import Narrator
    from experiments.push_vs_pull.arms import Transport
    from experiments.push_vs_pull.measure import Sample

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
How much sooner does a client get its first token when prefill pushes KV than when decode pulls it?

Starts pairs of real servers, which run at the same time and take turns: stock pull; stock push (vLLM 0.28); and over
kvcached's contiguous memory: pull, push of whole requests, and push streamed chunk by chunk while prefill computes.
Transports: shared memory; TCP; and, where a network namespace can be made, TCP over a link that carries KV 1.2 times
as fast as prefill computes it on this machine. Prompts of 128 to 8,192 tokens, 1, 2, 4 and 8 at a time.
Measures time to first token, time per output token, and how long the transfer continues after prefill's last step."""

EPILOG = """\
targets:
  over TCP, p50 of time to first token, pull / streamed push: >= 1.5 from 1,024 tokens up, never below 1
  streamed push: the transfer time left after the last step does not grow: <= 1.1 x that of a prompt of one chunk
  p50 of time to first token, stock push / streamed push: >= 1.2 from 2,048 tokens up

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json with every sample, versions and hardware; results/last-VERSION.png."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "fewer lengths and requests", KEEPS_LAST)
    add_word(parser, "--transport", "transports", KEEPS_LAST)
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, begin, conclude, last_name
    from experiments.push_vs_pull.arms import TRANSPORTS
    from experiments.push_vs_pull.network import enter
    from experiments.push_vs_pull.report import cells, judge, plot, table_of_cells

    has_network = enter(sys.argv[1:])
    asked_for = [one for one in TRANSPORTS if (options.transport or "").lower() in one.name.lower()]
    transports = [one for one in asked_for if has_network or one.of_prefill is None]
    began, stamp = begin(options.vllm)
    with Narrator(f"push against pull, vLLM {options.vllm}") as narrator:
        for one in asked_for:
            if one not in transports:
                narrator.say(f"{one.name}: left out, no network namespace can be made here (CAP_SYS_ADMIN, ip, tc)")
        samples, rates = _samples(options, transports, has_network, stamp, narrator)

    found = cells(samples)
    table = table_of_cells(found, f"push against pull, vLLM {options.vllm}; milliseconds")
    name = stamp if options.quick or options.transport else last_name(options.vllm)
    content = {
        "began": began,
        "gbit_per_second": rates,
        "cells": [dataclasses.asdict(one) for one in found],
        "samples": [dataclasses.asdict(one) for one in samples],
    }
    status = conclude([table], judge(found), RESULTS / f"{name}.json", content)
    plot(found, f"prefill to decode, vLLM {options.vllm}, 16 KiB of KV a token", RESULTS / f"{name}.png")
    return status


def _samples(
    options: argparse.Namespace,
    transports: Sequence[Transport],
    has_network: bool,
    stamp: str,
    narrator: Narrator,
) -> tuple[list[Sample], dict[str, dict[str, float | None]]]:
    """Return all samples, and for each transport its rate and the rate at which prefill computed KV, in Gbit/s."""
    from experiments.common.model import make_model
    from experiments.push_vs_pull.arms import ARMS, FULL, KV_BYTES_PER_TOKEN, MODEL, QUICK
    from experiments.push_vs_pull.measure import measure
    from experiments.push_vs_pull.network import limit

    model = make_model(MODEL)
    arms = [arm for arm in ARMS if options.vllm.startswith(arm.only)]
    load = QUICK if options.quick else FULL

    def enter_network(transport: Transport, prefill_tokens_per_second: float) -> None:
        makes_gbit = prefill_tokens_per_second * KV_BYTES_PER_TOKEN * 8 / 1e9
        carries_gbit = None if transport.of_prefill is None else round(makes_gbit * transport.of_prefill, 2)
        if has_network:
            limit(carries_gbit)
        rates[transport.name] = {"prefill makes": round(makes_gbit, 2), "it carries": carries_gbit}
        narrator.say(f"over {transport.name}; Gbit/s: {rates[transport.name]}")

    samples: list[Sample] = []
    rates: dict[str, dict[str, float | None]] = {}
    for _, same in itertools.groupby(transports, key=lambda one: dict(one.environment)):
        samples += measure(arms, list(same), model, load, RESULTS / stamp, narrator.update, enter_network)
    return samples, rates


if __name__ == "__main__":
    run_main(main, parse())
