# SPDX-License-Identifier: Apache-2.0
"""How late are first tokens of further turns, where KV is kept, is on another server, or is asked for again?

8 conversations of 6 turns, with time to think. One stock instance, which keeps all of it (stock); decode that keeps
it (home); three servers that ask each other, each turn on another one (other); decode that asks prefill for whatever
is missing (asks); and stock P/D behind vLLM's proxy. --only names arms; --rounds is 3.

All arms get the same prompts. The stock instance's answers are the right ones: what is sent in a turn has those to the
earlier turns, so a wrong answer does not spread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import httpx

from experiments.bench import push_vs_pull
from experiments.bench.comparison import KVCACHED, Column, Samples, in_turn, percentile
from experiments.byte_equivalence.compare import LOGPROB_TOLERANCE, compare_answers
from experiments.common.client import Answer as Alone
from experiments.common.client import AnswerError, Client, http_client
from experiments.common.counted import samples as metrics
from experiments.common.counted import settled
from experiments.common.device import nixl, role, with_extra
from experiments.common.model import make_model
from experiments.common.report import Run, Verdict
from experiments.common.servers import HOST, Asking, Running, ServerSpec, free_ports, tag_of
from experiments.stacks.routers import toy_proxy

MODEL = replace(push_vs_pull.MODEL, kv_heads=4)
"""With `KV_BYTES_PER_TOKEN` in float32; on one core a prompt of 8,192 tokens takes about two seconds."""
KV_BYTES_PER_TOKEN = push_vs_pull.KV_BYTES_PER_TOKEN // 2
BLOCK_TOKENS = push_vs_pull.BLOCK_SIZE
BLOCK_BYTES = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
FIRST, FURTHER = "turn 1", "turns 2+"
MESSAGE_TOKENS, ANSWER_TOKENS = (16, 128), 32


@dataclass(frozen=True)
class Arm:
    """Some servers, named after their roles. Clients ask all that are not prefill, each turn another one.

    Attributes:
        start: whom they ask for KV; vLLM's own servers on their own memory ask nobody, and a pair of them is behind
            vLLM's proxy.
    """

    name: str
    sides: tuple[str, ...]
    start: type[Running]
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_stock(self) -> bool:
        return self.start is Running

    def specs(self, messages: Sequence[Sequence[Message]]) -> list[ServerSpec]:
        """Return the configurations of servers that can keep all conversations."""
        tokens = [sum(len(one.tokens) + ANSWER_TOKENS for one in talk) for talk in messages]
        num_blocks = 64 + sum(tokens) * 5 // 4 // BLOCK_TOKENS
        kv_gib = math.ceil(num_blocks * BLOCK_BYTES / 2**30)
        kept = {
            **KVCACHED,
            "KVCACHED_HOSTVMM_GIB": str(2 * kv_gib),
            # By default kvcached forgets what is beyond 16,000 tokens.
            "KVCACHED_MAX_CACHED_TOKENS": "-1",
        }
        return [
            ServerSpec(
                f"{tag_of(self.name)}-{side}",
                make_model(MODEL),
                dtype="float32",
                block_size=BLOCK_TOKENS,
                max_model_len=max(tokens) + BLOCK_TOKENS,
                kv_space_gib=kv_gib,
                kv_transfer=nixl(side, self.extra) if len(self.sides) > 1 else None,
                environment={} if self.is_stock else kept,
                arguments=("--disable-hybrid-kv-cache-manager", "--num-gpu-blocks-override", str(num_blocks)),
                forks=True,
            )
            for side in self.sides
        ]


class Peers(Running):
    """Servers that each ask all the others."""

    def __init__(self, specs: list[ServerSpec], *more: Any) -> None:
        super().__init__(specs, *more)
        found = free_ports(2 * len(specs))
        self.ports = list(zip(found[::2], found[1::2], strict=True))

    def configured(self, spec: ServerSpec) -> ServerSpec:
        assert spec.kv_transfer is not None and None not in self.ports
        others = [ports for place, ports in enumerate(self.ports) if place != len(self.servers)]
        urls = [f"http://{HOST}:{ports[0]}" for ports in others if ports]
        return replace(spec, kv_transfer=with_extra(spec.kv_transfer, {"prefill": urls}))


STOCK = Arm("stock", ("alone",), Running)
HOME = Arm("home", ("prefill", "decode"), Asking)
OTHER = Arm("other", ("peer1", "peer2", "peer3"), Peers)
ASKS = Arm("asks", ("prefill", "decode"), Asking, {"max_local_prefill_tokens": 0})
STOCK_PD = Arm("stock P/D", ("prefill", "decode"), Running)
ARMS = (STOCK, HOME, OTHER, ASKS, STOCK_PD)
COLUMNS = (
    Column("first token p50, ms", "first_token"),
    Column("p90", "first_token", of=percentile(90)),
    Column("x stock", "ratio", 1, 2),
    Column("tokens: prefill", "prefill", 1),
    Column("decode", "decode", 1),
    Column("fetched", "fetched", 1),
    Column("MiB: moved", "moved", 2**-20, 2),
    Column("missing", "missing", 2**-20, 2),
    Column("right", "right", 1, of=sum),
    Column("wrong", "wrong", 1, of=sum),
    Column("errors", "error", 1, of=sum),
)
"""Tokens and MiB are those of a turn; tokens that prefill and decode have computed, and that decode has fetched."""


def main(run: Run) -> int:
    """Start all servers, and let the arms take turns, round by round."""
    load, samples, rounds = Load(2, 3, 1024, 1.5) if run.quick else Load(), Samples(("{}",)), run.times(3, 1)
    messages, problems = load.messages(), list[str]()
    chosen = [STOCK, *run.chosen(ARMS)]
    with contextlib.ExitStack() as stack:
        all_ = [stack.enter_context(serving(run, arm, messages)) for arm in ARMS if arm in chosen]
        talks = asyncio.run(learn(all_[0].urls[0], messages))
        # Not measured: the handshakes, first steps, and the first touch of memory.
        begins = [talk[:2] for talk in talks]
        for number in range(rounds + 1):
            for served in in_turn(all_, number - 1):
                run.update(f"{served.arm.name}: round {number} of {rounds}")
                of, into, thinks = (talks, samples, 1.0) if number else (begins, Samples(samples.forms), 0.0)
                problems += asyncio.run(converse(served, of, f"round-{number}", into, thinks))
        planted = [asyncio.run(plant(one, talks[0][-1])) for one in all_ if one.arm is HOME]
    for setting, arm in list(samples.figures):
        ours, stock = (samples.values(setting, one, "first_token") for one in (arm, STOCK.name))
        if ours and stock:
            samples.add(setting, arm, ratio=statistics.median(ours) / statistics.median(stock))
    table = samples.table(f"conversations, vLLM {run.vllm}; medians", COLUMNS)
    content = {"load": asdict(load), "rounds": rounds, "problems": problems, "samples": samples.as_json()}
    asked = len(all_) * sum(map(len, [*talks * rounds, *begins]))
    return run.conclude([table], [*judge(samples, problems, asked), *planted], content)


@dataclass(frozen=True)
class Serving:
    """An arm whose servers run; ``urls`` are where clients send turns."""

    arm: Arm
    launched: Running
    urls: Sequence[str]

    def place(self, conversation: int, turn: int) -> int:
        """Return which URL a turn is sent to: not that of the turn before, if there are several."""
        return (conversation + turn) % len(self.urls)

    def counted(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for server in self.launched.servers:
            side = "prefill" if role(server.spec.name) == "kv_producer" else "decode"
            for labels, value in metrics(f"{server.base_url}/metrics", "vllm:").items():
                if labels.startswith("vllm:prompt_tokens_by_source_total"):
                    found[side] += int(value) if "local_compute" in labels else 0
                    found["fetched"] += int(value) if "external_kv_transfer" in labels else 0
                elif labels.startswith("vllm:nixl_bytes_transferred_sum"):
                    found["moved"] += int(value)
        return found

    def missing_bytes(self, talks: Sequence[Sequence[Turn]]) -> dict[str, int]:
        """Return how much KV of the prompts' blocks the server that is asked has not computed or fetched before."""
        found = {FIRST: 0, FURTHER: 0}
        for number, talk in enumerate(talks):
            cached: Counter[int] = Counter()
            for place, turn in enumerate(talk):
                server = self.place(number, place)
                blocks = -(-len(turn.prompt) // BLOCK_TOKENS) - cached[server]
                found[FURTHER if place else FIRST] += blocks * BLOCK_BYTES
                # The last token of an answer is not computed.
                cached[server] = (len(turn.prompt) + ANSWER_TOKENS - 1) // BLOCK_TOKENS
        return found


@contextlib.contextmanager
def serving(run: Run, arm: Arm, messages: Sequence[Sequence[Message]]) -> Iterator[Serving]:
    """Start the servers of an arm, and vLLM's proxy before a stock pair."""
    with arm.start(arm.specs(messages), run.logs, run.update) as launched:
        servers = launched.ready()
        if arm.is_stock and len(servers) > 1:
            with toy_proxy(servers[:1], servers[1:], run.logs / "proxy.log", run.say) as url:
                yield Serving(arm, launched, [url])
        else:
            asked = [one for one in servers if role(one.spec.name) != "kv_producer"]
            yield Serving(arm, launched, [one.base_url for one in asked])


async def converse(
    served: Serving, talks: Sequence[Sequence[Turn]], salt: str, samples: Samples, thinks: float
) -> list[str]:
    """Let all clients talk: their first turns one after the other, then the further ones, each after ``thinks`` times
    its own time to think. Returns what was not right."""
    async with http_client(len(talks)) as http:
        clients = [Client(url, http) for url in served.urls]

        def turn(number: int, place: int) -> Awaitable[Got]:
            to, name = clients[served.place(number, place)], f"{salt}-{number}"
            one = talks[number][place]
            return ask(to, one.prompt, one.right, name, f"{name}-{place}")

        async def further(number: int) -> list[Got]:
            found = []
            for place, one in enumerate(talks[number][1:], start=1):
                await asyncio.sleep(one.think_seconds * thinks)
                found.append(await turn(number, place))
            return found

        counts = [settled(served.counted)]
        got = {FIRST: [await turn(number, 0) for number in range(len(talks))]}
        counts.append(settled(served.counted))
        got[FURTHER] = sum(await asyncio.gather(*map(further, range(len(talks)))), [])
        counts.append(settled(served.counted))
    missing = served.missing_bytes(talks)
    for part, before, after in zip(got, counts, counts[1:], strict=False):
        grown = {name: after[name] - before[name] for name in ("prefill", "decode", "fetched", "moved")}
        a_turn = {name: value / len(got[part]) for name, value in {**grown, "missing": missing[part]}.items()}
        for figures in (*(one.figures for one in got[part]), a_turn):
            samples.add((part,), served.arm.name, **figures)
    return [f"{served.arm.name}, {one.problem}" for one in (*got[FIRST], *got[FURTHER]) if one.problem]


async def plant(served: Serving, turn: Turn) -> Verdict:
    """Set one block of a long history to zero on its way, which has to count as wrong."""
    async with http_client(1) as http:
        to = Client(served.urls[0], http)
        await to.probe("arm")
        await to.probe("plant", "zero_a_block", len(turn.prompt) // BLOCK_TOKENS // 2)
        got = await ask(to, turn.prompt, turn.right, "planted", "planted")
    return Verdict("a block set to zero on its way is wrong", got.problem or "not seen", got.verdict == "wrong")


def judge(samples: Samples, problems: Sequence[str], asked: int) -> list[Verdict]:
    def first_tokens(arm: Arm, other: Arm, **limit: float) -> list[Verdict]:
        words = f"first token, {arm.name} / {other.name}"
        where = {"where": lambda setting: setting == (FURTHER,)}
        return samples.compare(arm.name, other.name, "first_token", words, **where, **limit)

    verdicts = first_tokens(HOME, STOCK, most=1.15) + first_tokens(OTHER, STOCK, most=1.3)
    verdicts += first_tokens(ASKS, HOME, least=2.0) + first_tokens(STOCK_PD, HOME, least=2.0)
    for arm in (HOME, OTHER, ASKS):
        moved, missing = (sum(samples.values((FURTHER,), arm.name, one)) for one in ("moved", "missing"))
        if missing:
            words = f"{FURTHER}: {arm.name}, bytes moved / those of missing blocks (<= 1)"
            verdicts.append(Verdict(words, f"{moved / missing:.3f} x", moved <= missing))
    return [*verdicts, Verdict("wrong answers and errors (0)", f"{len(problems)} of {asked}", not problems)]


# -------------------------------------------------------------------------------------------- what clients say, and get


@dataclass(frozen=True)
class Load:
    """The conversations. A client thinks for half of ``think_seconds`` to one and a half of it before each turn: so
    long that on few cores turns mostly have the servers to themselves."""

    conversations: int = 8
    turns: int = 6
    history_tokens: int = 8192
    think_seconds: float = 6.0

    def messages(self) -> list[list[Message]]:
        """Return what clients say: the same in each run. The first message of each conversation stands for its history
        until then; that of the last turn is as long as asked for at most, unless that is too short for the turns."""
        draw = random.Random(17)
        grows = (self.turns - 1) * (MESSAGE_TOKENS[1] + ANSWER_TOKENS)
        first = (self.history_tokens // 2, max(self.history_tokens // 2, self.history_tokens - grows))
        sizes = (first, *[MESSAGE_TOKENS] * (self.turns - 1))

        def one(size: tuple[int, int]) -> Message:
            tokens = [draw.randrange(3, 500) for _ in range(draw.randint(*size))]
            return Message(tokens, self.think_seconds * draw.uniform(0.5, 1.5))

        return [[one(size) for size in sizes] for _ in range(self.conversations)]


class Message(NamedTuple):
    """What a client says in a turn, and for how long it thinks before."""

    tokens: list[int]
    think_seconds: float


class Turn(NamedTuple):
    """A turn: the whole prompt, and the stock instance's answer."""

    prompt: list[int]
    think_seconds: float
    right: Alone


async def learn(url: str, messages: Sequence[Sequence[Message]]) -> list[list[Turn]]:
    """Return the conversations with the answers of the server at ``url``."""
    async with http_client(1) as http:
        asked = Client(url, http)

        async def answered(prompt: list[int], salt: str) -> Alone:
            return await asked.answer(prompt, max_tokens=ANSWER_TOKENS, salt=salt, request_id=salt)

        talks: list[list[Turn]] = []
        for number, said in enumerate(messages):
            history: list[int] = []
            talks.append([])
            for tokens, think_seconds in said:
                prompt = [*history, *tokens]
                talks[-1].append(Turn(prompt, think_seconds, await answered(prompt, f"right-{number}")))
                history = [*prompt, *talks[-1][-1].right.token_ids]
        return talks


class Got(NamedTuple):
    """What a client got: the time to first token, or None with an error; and what was not right."""

    seconds: float | None
    problem: str = ""

    @property
    def verdict(self) -> str:
        return "error" if self.seconds is None else "wrong" if self.problem else "right"

    @property
    def figures(self) -> dict[str, float]:
        times = {} if self.seconds is None else {"first_token": self.seconds}
        return {**{one: float(one == self.verdict) for one in ("right", "wrong", "error")}, **times}


async def ask(to: Client, prompt: list[int], right: Alone, salt: str, name: str) -> Got:
    begun = time.perf_counter()
    try:
        first, found = await to.streamed(prompt, max_tokens=ANSWER_TOKENS, salt=salt, request_id=name)
    except (AnswerError, httpx.HTTPError) as error:
        return Got(None, f"{name}: {error!r}")
    differences = compare_answers(name, right, found, LOGPROB_TOLERANCE["float32"])
    return Got(first - begun, "; ".join(f"{name}: {one.aspect}, {one.text}" for one in differences))
