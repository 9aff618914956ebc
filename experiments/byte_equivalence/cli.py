# SPDX-License-Identifier: Apache-2.0
"""The command line; needs nothing but the standard library, so that ``--help`` needs no environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.common.default_vllm import DEFAULT_VLLM

DESCRIPTION = """\
Does prefill/decode disaggregation over kvcached give what one stock vLLM instance gives?

Sets up everything (environment, a small model with random weights), starts real servers, and compares token ids,
log-probabilities and the SHA-256 of every transferred KV block, on the sending and on the receiving side.
Before anything is called equal, corruptions are planted and have to be caught, and zeroing each KV block has to
change the output (in a full run's first arm each, else every twentieth)."""

EPILOG = """\
arms:
  single instance, stock               the reference
  stock P/D                            the same connector without kvcached
  kvcached P/D, non-contiguous         one region per layer, K and V apart
  kvcached P/D, contiguous             all layers of a block side by side
  kvcached P/D, staged                 through a slab, over registrations that would not follow kvcached's pages
  each of the three: pull; and push in both orders: P first (blocks travel as a whole when P has computed everything)
  and D first (they travel while P computes, chunk by chunk)
  in a full run too: direct to staged and staged to direct; a slab on the device; tensor parallel 2; two P and two D;
  and vLLM's model runner V2 where kvcached accepts it (0.28)

exit status:
  0  everything equal, every corruption caught, kvcached really unmapped and remapped
  1  a difference, or a corruption that was not caught
  2  something could not be set up: the environment, a server

examples:
  bash experiments/byte_equivalence/run.sh                    all arms, one at a time and 32 at a time
  bash experiments/byte_equivalence/run.sh --quick            the same in float32 only, ten minutes
  bash experiments/byte_equivalence/run.sh --brief            of those, one arm each way, three minutes
  bash experiments/byte_equivalence/run.sh --vllm 0.28.0
  bash experiments/byte_equivalence/run.sh --arm contiguous   only arms whose name holds the word (and the reference)

Results: a table on the terminal; experiments/byte_equivalence/results/ gets the JSON, one file per run with all that
was found, and last-VERSION.json (last-VERSION-quick.json) with the rows of the table."""


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    vllm: str
    mode: str | None
    size: Literal["full", "quick", "brief"]
    arms: tuple[str, ...]

    @property
    def is_partial(self) -> bool:
        """Whether arms were chosen."""
        return bool(self.arms or self.mode)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse ``arguments`` (``sys.argv`` if None); ends the process for ``--help`` and for mistakes (status 2)."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM to serve with (%(default)s)")
    parser.add_argument("--mode", metavar="M", help="only arms of one transfer mode, pull or push; as for --arm")
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
        help="the same for one arm each way; writes no last-VERSION.json",
    )
    parser.add_argument(
        "--arm",
        metavar="WORD",
        action="append",
        default=[],
        help="only arms whose name holds WORD, or one of several; what last-VERSION.json has of the others stays",
    )
    found = parser.parse_args(arguments)
    return Options(vllm=found.vllm, mode=found.mode, size=found.size, arms=tuple(found.arm))
