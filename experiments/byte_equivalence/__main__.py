# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/byte_equivalence/run.sh``: set up, serve, compare, report. ``--help`` explains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments.common.command_line import add_mode, add_word, make_parser, run_main

DESCRIPTION = """\
Is the output of prefill/decode disaggregation over kvcached identical to that of one stock vLLM instance?

Sets up everything (environment, a small model with random weights), starts real servers, and compares token ids,
log-probabilities and the SHA-256 of every transferred KV block, on the sending and on the receiving side.
Before anything is called equal, planted corruptions must be caught, and zeroing a KV block must change the output.
The first arm of a full run zeroes each block, the other arms every twentieth."""

EPILOG = """\
arms:
  single instance, stock               the reference
  stock P/D                            the same connector without kvcached
  kvcached P/D, non-contiguous         one region per layer, K and V apart
  kvcached P/D, contiguous             all layers of a block side by side
  kvcached P/D, staged                 through a slab, because registrations do not follow kvcached's pages
  The kvcached arms run with pull and with push. Clients ask decode alone, and decode asks prefill. Some arms are also
  driven as by a router that names each server to the other: P first (all blocks are transferred when P has computed
  the whole prompt), and with push D first (they are transferred while P computes, chunk by chunk).
  A full run adds: direct to staged, and staged to direct; a slab on the device; tensor parallel 2; two P and two D;
  vLLM's model runner V2 where kvcached accepts it (0.28).

exit status:
  0  everything equal, every corruption caught, and kvcached did unmap and remap pages during the run
  1  a difference, or a corruption that was not caught
  2  setup failed: the environment, a server

examples:
  bash experiments/byte_equivalence/run.sh                    all arms, one request at a time and 32 at a time
  bash experiments/byte_equivalence/run.sh --quick            the same in float32 only, ten minutes
  bash experiments/byte_equivalence/run.sh --brief            the same with one arm per transfer mode, three minutes
  bash experiments/byte_equivalence/run.sh --vllm 0.28.0
  bash experiments/byte_equivalence/run.sh --arm contiguous   only arms whose name contains this (and the reference)
  bash experiments/byte_equivalence/run.sh --model nemotron-h --quick     states beside attention

Results: a table on the terminal; in experiments/byte_equivalence/results/ one JSON file per run with every difference,
and last-VERSION.json (last-VERSION-quick.json) with the rows of the table."""

KEEPS_ROWS = "last-VERSION.json keeps its rows of the other arms"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``arguments`` (``sys.argv`` if None); exits for ``--help`` and for invalid arguments (status 2)."""
    parser = make_parser(DESCRIPTION, EPILOG)
    add_mode(parser, KEEPS_ROWS)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const="quick",
        default="full",
        help="float32 only, fewer zeroed blocks, forked engines",
    )
    size.add_argument(
        "--brief",
        dest="size",
        action="store_const",
        const="brief",
        help="as --quick, with one arm per transfer mode; does not write last-VERSION.json",
    )
    add_word(parser, "--arm", "arms", f"repeatable; {KEEPS_ROWS}", action="append", default=[])
    parser.add_argument(
        "--model",
        metavar="FAMILY",
        help="a family of experiments/common/families.py (gemma4, nemotron-h, ...) in place of the model with "
        "grouped-query attention; writes last-VERSION-FAMILY.json",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_main("byte_equivalence.run", parse())
