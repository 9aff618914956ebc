# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/fuzzed_router/run.sh``: send malformed requests to the router, judge the answers."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.command_line import MODES, run_main
from experiments.common.targets import Verdict
from experiments.fuzzed_parameters.modes import make_fuzz_parser, run_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from experiments.common.servers import Server, ServerSpec
    from experiments.fuzzed_router.traffic import Found, Fuzz

RESULTS = Path(__file__).resolve().parent / "results"
FILES = 256
# The experiments' model has no chat template.
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"

DESCRIPTION = """\
What do clients of the router get for malformed requests?

Starts a prefill and a decode server over kvcached, with pull and then with push, and two routers in front of them: one
with default options, one with --client-params --decode-alone. Sixteen connections at a time send requests that are
drawn from a seed. A fifth are valid requests, whose answer was taken from decode alone before. The others are bodies
with fields of a wrong type or out of range, unknown, repeated or nested too deep; bodies whose bytes were changed, cut
off or encoded differently; valid bodies with kv_transfer_params from the client, as experiments/fuzzed_parameters draws
them; and odd methods, paths, headers, lengths, chunks and trailers, bodies that do not end, several requests on one
connection, answers that are read a few bytes at a time. Each router may open 256 files, and a hundred connections to it
send nothing, or half a head, all the time.

A 200 is compared with the answer of decode alone to the same body if sampling is greedy. A 5xx counts as the server's
own if decode fails in the same way when asked directly; the router answers 502 for a server's 500, and names it."""

EPILOG = """\
targets, each mode:
  every request gets a 4xx with an error in OpenAI's format, or the right answer; for data that is not HTTP, any 4xx or
  a closed connection
  every valid request gets the right answer
  every request ends within 60 s
  both servers and both routers stay alive and afterwards serve every valid request correctly; the routers exit with 0
  requests were handed over in the direction of the mode

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json, with the first 20 requests that missed a target, and the bytes sent."""


def parse() -> argparse.Namespace:
    return make_fuzz_parser(DESCRIPTION, EPILOG, "connections").parse_args()


def specs(mode: str) -> list[ServerSpec]:
    """Return the configurations of P and D, with a chat template and a context so short that no answer is long."""
    import dataclasses

    from experiments.fuzzed_parameters.__main__ import specs as without_chat

    return [
        dataclasses.replace(one, max_model_len=512, arguments=("--chat-template", TEMPLATE))
        for one in without_chat(mode, "recompute")
    ]


def judge(mode: str, found: Found, handed: int, trouble: str) -> list[Verdict]:
    """Return the targets of one mode.

    Args:
        handed: number of requests that were handed over in the direction of the mode.
        trouble: description of a failure of a server or a router, or "".
    """
    total, missed, hangs = found.verdicts.total(), found.missed_count, found.verdicts["no end"]
    valid = f"{found.valid_right} of {found.valid}"
    return [
        Verdict(f"{mode}: 4xx or a right answer", f"{total - missed} of {total}", missed == 0 < total),
        Verdict(f"{mode}: valid requests answered correctly", valid, 0 < found.valid == found.valid_right),
        Verdict(f"{mode}: no request hangs", f"{hangs}", hangs == 0),
        Verdict(f"{mode}: servers and routers are alive and serve correctly", trouble[:60] or "yes", not trouble),
        Verdict(f"{mode}: requests handed over in this direction", f"{handed}", handed > 0),
    ]


def counted(url: str) -> dict[str, int]:
    """Return a router's counters: hand-overs by direction, retries, and prompts that decode computed itself."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    said: dict[str, int] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False).text):
        for one in family.samples:
            name = one.name.removeprefix("kvcached_nixl_router_").removesuffix("_total")
            if one.name.endswith("_total") and name in _COUNTED:
                key = " ".join([name, one.labels.get("direction", "")]).strip()
                said[key] = said.get(key, 0) + int(one.value)
    return said


_COUNTED = ("handovers", "retries", "decode_alone", "prefills_without_parameters", "reported_handover_failures")


def fuzz_mode(
    mode: str, options: argparse.Namespace, logs: Path, progress: Callable[[str], None]
) -> tuple[list[Verdict], dict[str, Any]]:
    """Run one mode; returns its verdicts and its part of the results file.

    Raises:
        ServerError: a server or a router did not start.
    """
    import httpx

    from experiments.common.router import routed
    from experiments.common.servers import ServerError, running
    from experiments.fuzzed_router.messages import BODY_BYTES, CLIENT_SECONDS
    from experiments.fuzzed_router.traffic import Found

    limits = (f"--max-body-bytes={BODY_BYTES}", f"--client-timeout={CLIENT_SECONDS}")
    found, counts, trouble = Found(), {}, ""
    with running(specs(mode), logs, progress) as (prefill, decode):
        fuzz: Fuzz | None = None
        try:
            with (
                routed([prefill], [decode], logs / f"{mode}-router.log", *limits, files=FILES) as plain,
                routed(
                    [prefill],
                    [decode],
                    logs / f"{mode}-router-trusting.log",
                    *(*limits, "--client-params", "--decode-alone"),
                    files=FILES,
                ) as trusting,
            ):
                fuzz = make_fuzz(prefill, decode, plain, trusting, mode, options.seed, progress)
                found = fuzz.found
                try:
                    asyncio.run(fuzz.run(options.count))
                except (AssertionError, httpx.HTTPError, ServerError) as error:
                    trouble = f"{type(error).__name__}: {error}"
                else:
                    counts = {"plain": counted(plain), "trusting": counted(trusting)}
        except ServerError as error:
            if fuzz is None:
                raise
            trouble = f"{trouble} {error}".strip()
    handed = sum(one.get(f"handovers {mode}", 0) for one in counts.values())
    return judge(mode, found, handed, trouble), {
        "mode": mode,
        "connections": found.verdicts.total(),
        "verdicts": dict(found.verdicts),
        "counted by the routers": counts,
        "by change": dict(sorted(found.by_change.items())),
        "missed": found.missed,
        "trouble": trouble,
        "sent last": list(found.last) if trouble else [],
    }


def make_fuzz(
    prefill: Server, decode: Server, plain: str, trusting: str, mode: str, seed: int, progress: Callable[[str], None]
) -> Fuzz:
    from experiments.fuzzed_router.traffic import Fuzz

    servers: Sequence[Server] = (prefill, decode)

    def check_alive() -> None:
        for server in servers:
            server.check_alive()

    return Fuzz(prefill.base_url, decode.base_url, plain, trusting, mode, seed, progress, check_alive)


def main(options: argparse.Namespace) -> int:
    """Run the modes and return the exit status."""
    modes = MODES if options.mode is None else (options.mode,)
    return run_modes("the router and malformed requests", modes, fuzz_mode, options, RESULTS)


if __name__ == "__main__":
    run_main(main, parse())
