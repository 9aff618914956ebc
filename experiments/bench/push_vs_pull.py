# SPDX-License-Identifier: Apache-2.0
"""How much sooner does a client get its first token when prefill pushes KV than when decode pulls it?

Stock pull; stock push (vLLM 0.28); and over kvcached's contiguous memory: pull, push of whole requests, and push
streamed chunk by chunk while prefill computes. Over shared memory; TCP; and, where a network namespace can be made,
TCP over a link that carries KV 1.2 times as fast as prefill computes it here. --only names transports.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.bench.comparison import KVCACHED, Arm, Column, Comparison, Router, Samples, pair_specs, percentile
from experiments.common.model import ModelShape, make_model
from experiments.common.report import Run, Verdict, finish, make_panels, save
from experiments.common.servers import ServerSpec

MODEL = ModelShape(
    layers=8,
    hidden=256,
    heads=8,
    kv_heads=8,
    head_size=32,
    intermediate=256,
    max_positions=16384,
    sliding_window_tokens=32,
    full_attention_every=8,
)
"""A model with KV_BYTES_PER_TOKEN in float32. All layers keep the KV of all tokens, in one KV-cache group, because
vLLM's hybrid manager is disabled. All layers but one have windowed attention: long prompts compute quickly."""
KV_BYTES_PER_TOKEN = 16 * 1024
CHUNK_TOKENS = 128
"""So the shortest prompt with a target for streaming has eight chunks."""
BLOCK_SIZE = 32
NUM_BLOCKS = 2304
"""A little more than eight of the longest prompts; 1.1 GiB."""
KV_GIB = 2
TOKENS = 16


@dataclass(frozen=True)
class Transport:
    """A transport. ``of_prefill``: its rate as a multiple of the rate at which prefill computes KV of one prompt;
    None for no limit."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    of_prefill: float | None = None


SHARED_MEMORY = Transport("shared memory")
TCP = Transport("TCP", {"UCX_TLS": "tcp"})
TCP_LINK = Transport("TCP, a link", {"UCX_TLS": "tcp"}, 1.2)
"""A little faster than prefill computes KV at the machine's current speed. Comparable: a device that computes 20,000
tokens a second with 128 KiB of KV each, on a link of 25 Gbit/s."""
TRANSPORTS = {one.name: one for one in (SHARED_MEMORY, TCP, TCP_LINK)}

KEPT: Mapping[str, str] = {
    **KVCACHED,
    "KVCACHED_HOSTVMM_GIB": str(2 * KV_GIB),
    # Keep mapped pages mapped, as stock memory is. The kernel clears pages of the emulation when they are first
    # touched, which takes longer than the transfer; a device does not do that. A minimum above 0 would map further,
    # untouched pages.
    "KVCACHED_MIN_RESERVED_PAGES": "0",
    "KVCACHED_MAX_RESERVED_PAGES": str(NUM_BLOCKS),
}
PUSH: Mapping[str, object] = {"transfer_mode": "push"}
PULL = Arm("pull", KEPT)
STOCK_PUSH = Arm("stock push", connector="NixlPushConnector")
STREAMED = Arm("push, streamed", KEPT, PUSH, is_streamed=True)
ARMS = (Arm("stock pull"), STOCK_PUSH, PULL, Arm("push, whole request", KEPT, PUSH), STREAMED)


@dataclass(frozen=True)
class Load:
    """Prompt lengths (tokens), numbers of requests at a time, and the most rounds of each.

    ``tokens``: approximate number of tokens that each setting computes, so longer prompts get fewer rounds, down to a
    minimum.
    """

    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192)
    at_a_time: tuple[int, ...] = (1, 2, 4, 8)
    most_rounds: int = 6
    tokens: int = 24_576

    @property
    def rounds(self) -> dict[tuple[int, int], int]:
        """How often ``at_a_time`` prompts of ``length`` tokens are sent at once."""
        least = {1: 3, 2: 2}
        return {
            (length, number): max(least.get(number, 1), min(self.most_rounds, self.tokens // (length * number)))
            for length in self.lengths
            for number in self.at_a_time
        }


def main(run: Run) -> int:
    has_network = enter(sys.argv[1:])
    if not has_network:
        run.say("without a link: no network namespace can be made here (CAP_SYS_ADMIN, ip, tc)")
    transports = run.chosen(one for one in TRANSPORTS.values() if has_network or one.of_prefill is None)
    arms = [arm for arm in ARMS if arm is not STOCK_PUSH or run.vllm.startswith("0.28")]
    rates: dict[str, dict[str, float | None]] = {}

    async def enter_network(name: str, router: Router) -> None:
        transport = TRANSPORTS[name]
        prompt, seconds = [2] * max(load.lengths), []
        for _ in range(3):
            request = f"speed-{next(router.names)}"
            begun = time.perf_counter()
            await router.prefill.complete(prompt, max_tokens=1, salt=request, request_id=request)
            seconds.append(time.perf_counter() - begun)
        makes_gbit = len(prompt) / statistics.median(seconds) * KV_BYTES_PER_TOKEN * 8 / 1e9
        carries_gbit = None if transport.of_prefill is None else round(makes_gbit * transport.of_prefill, 2)
        if has_network:
            limit(carries_gbit)
        rates[transport.name] = {"prefill makes": round(makes_gbit, 2), "it carries": carries_gbit}
        run.say(f"over {transport.name}; Gbit/s: {rates[transport.name]}")

    load = Load(lengths=(128, 1024, 4096), at_a_time=(1, 4), most_rounds=5) if run.quick else Load()
    samples = Samples()
    for _, group in itertools.groupby(transports, key=lambda one: dict(one.environment)):
        # The same servers can use all of them.
        first, *others = group
        turns = replace(comparison(arms, first, load), prepare=enter_network)
        turns.measure(run, samples, first.name, *(one.name for one in others))
    title = f"push against pull, vLLM {run.vllm}; milliseconds"
    content = {"gbit_per_second": rates, "samples": samples.as_json()}
    plot(samples, run.vllm, run.path.with_suffix(".png"))
    return run.conclude([table_of(samples, title)], judge(samples), content)


def sizes_of(batched_tokens: int, num_blocks: int = NUM_BLOCKS) -> dict[str, Any]:
    return {
        "model": make_model(MODEL),
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": 8704,
        "max_num_batched_tokens": batched_tokens,
        "forks": True,
        "arguments": ("--disable-hybrid-kv-cache-manager", "--num-gpu-blocks-override", str(num_blocks)),
    }


def comparison(arms: Sequence[Arm], transport: Transport, load: Load) -> Comparison:
    def specs(arm: Arm) -> list[ServerSpec]:
        sizes = sizes_of(CHUNK_TOKENS)
        return pair_specs(arm, transport.name, transport.environment, kv_space_gib=KV_GIB, **sizes)

    return Comparison(arms, specs, ask, load.rounds)


async def ask(router: Router, length: int, number: int) -> list[dict[str, float]]:
    """Return each request's time to first token and per token; of one alone, also the transfer after the last step."""
    if number == 1:
        for side in (router.prefill, router.decode):
            await side.probe("time_transfers")
    found = []
    for handed in await asyncio.gather(*(router.hand_over(length, TOKENS) for _ in range(number))):
        seconds = (handed.tokens[-1] - handed.tokens[0]) / (TOKENS - 1)
        found.append({"first_token": handed.first_token_seconds, "token": seconds})
    if number == 1:
        # From the end of prefill's last step until decode's connector has all KV.
        received = (await router.decode.probe("times"))["received"]
        computed = (await router.prefill.probe("times"))["computed"]
        found[0]["left"] = float(received - computed)
    return found


def judge(samples: Samples) -> list[Verdict]:
    def over_tcp(setting: tuple[Any, ...]) -> bool:
        return TRANSPORTS[setting[0]].environment.get("UCX_TLS") == "tcp"

    pull, words = (PULL.name, STREAMED.name, "first_token"), "first token, pull / streamed push"
    rows = samples.compare(*pull, words, least=1.0, where=lambda one: over_tcp(one) and one[1] < 1024)
    rows += samples.compare(*pull, words, least=1.5, where=lambda one: over_tcp(one) and one[1] >= 1024)
    # A streamed push's transfer time after the last step, relative to a one-chunk prompt.
    for transport, length, at_a_time in samples.settings:
        chunk = samples.values((transport, CHUNK_TOKENS, 1), STREAMED.name, "left")
        left = samples.values((transport, length, at_a_time), STREAMED.name, "left")
        if length > CHUNK_TOKENS and chunk and left:
            seconds, most = statistics.median(left), statistics.median(chunk)
            words = f"{transport}, {length} tokens: transfer left after the last step, / one chunk's (<= 1.1 x)"
            rows.append(Verdict(words, f"{seconds * 1e3:.0f} ms of {most * 1e3:.0f} ms", seconds <= 1.1 * most))
    stock = (STOCK_PUSH.name, STREAMED.name, "first_token")
    return rows + samples.compare(*stock, "stock push / streamed push", least=1.2, where=lambda one: one[1] >= 2048)


def table_of(samples: Samples, title: str) -> Table:
    columns = [Column("n", "first_token", 1, of=len)]
    for heading, figure, digits in (("TTFT", "first_token", 0), ("TPOT", "token", 1)):
        columns.append(Column(f"{heading} p50", figure, digits=digits))
        columns += [Column(f"p{share}", figure, digits=digits, of=percentile(share)) for share in (90, 99)]
    return samples.table(title, [*columns, Column("left", "left")])


def plot(samples: Samples, vllm: str, path: Path) -> None:
    transports = list(dict.fromkeys(transport for transport, *_ in samples.settings))
    figure, panels = make_panels(len(transports), 5.2 * len(transports), 4, sharey=True)
    for panel, transport in zip(panels, transports, strict=True):
        lengths = list(dict.fromkeys(length for over, length, _ in samples.settings if over == transport))
        for arm in samples.arms:
            values = [samples.values((transport, length, 1), arm, "first_token") for length in lengths]
            medians, upper = (list(map(of, values)) for of in (statistics.median, percentile(90)))
            panel.plot(lengths, medians, marker="o", markersize=3, label=arm)
            panel.fill_between(lengths, medians, upper, alpha=0.15)
        finish(panel, xscale="log", yscale="log", title=transport, xlabel="prompt, tokens")
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.minorticks_off()
    panels[0].set_ylabel("time to first token, s (p50, shaded to p90)")
    save(figure, f"prefill to decode, vLLM {vllm}, 16 KiB of KV a token", path)


# ------------------------------------------------------------------------------------------ a link between two machines
# A network namespace whose loopback has a rate limit. Linux only. Needs the right to make one (CAP_SYS_ADMIN),
# ``unshare``, ``ip`` and ``tc``.


INSIDE = "EXPERIMENT_OWN_NETWORK"
APART = ("unshare", "--net", "--mount")


def enter(arguments: Sequence[str]) -> bool:
    """Restart this program in a new network namespace. Returns True inside it, False if it cannot be made."""
    if os.environ.get(INSIDE):
        return True
    commands = (
        # UCX looks for interfaces in /sys and needs one besides the loopback. Its traffic still uses the loopback.
        "mount -t sysfs none /sys",
        "ip link set lo up",
        "ip link add link0 type veth peer name link1",
        "ip addr add 192.0.2.1/24 dev link0",
        "ip link set link0 up",
        "ip link set link1 up",
        "tc qdisc add dev lo root pfifo",
    )
    set_up = " && ".join(commands)
    try:
        possible = subprocess.run([*APART, "bash", "-c", set_up], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if possible:
        again = [sys.executable, "-m", "experiments", *arguments]
        os.environ[INSIDE] = "1"
        os.execvp(APART[0], [*APART, "bash", "-c", f'{set_up} && exec "$@"', "bash", *again])
    return False


def limit(gbit_per_second: float | None) -> None:
    """Set the loopback's rate limit, or remove it (None). Call it only inside the namespace."""
    rate = ["pfifo"] if gbit_per_second is None else f"tbf rate {gbit_per_second}gbit burst 256kb latency 20ms".split()
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *rate], check=True)
