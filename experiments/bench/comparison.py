# SPDX-License-Identifier: Apache-2.0
"""What does a hand-over cost? Each question compares arms, whose servers run at the same time and take turns.

Targets: printed, each with its limit. The results have the question's name, and a plot may lie beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy
from rich.table import Table

from experiments.common.client import AnswerError, Client, http_client, offered_blocks
from experiments.common.device import nixl
from experiments.common.report import Run, Verdict, make_table
from experiments.common.servers import Asking, Running, Server, ServerSpec, prefill_and_decode

# The machine's speed varies from minute to minute by more than arms differ. So the servers of all arms run throughout,
# and the arms take turns request by request, with a different arm first each time.
KVCACHED: Mapping[str, str] = {"ENABLE_KVCACHED": "true", "KVCACHED_CONTIGUOUS_LAYOUT": "true"}
APART: Mapping[str, str] = {**KVCACHED, "KVCACHED_CONTIGUOUS_LAYOUT": "false"}
"""kvcached's non-contiguous layout."""

One = TypeVar("One")


@dataclass(frozen=True)
class Arm:
    """One way of handing over.

    Attributes:
        environment: of both servers; empty for stock vLLM on its own memory.
        is_streamed: both servers get their requests at once, and blocks are transferred while prefill computes. Else
            decode gets the parameters of prefill's answer.
        asks: decode is asked, and asks prefill.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    connector: str = "NixlConnector"
    is_streamed: bool = False
    asks: bool = False

    @property
    def servers(self) -> str:
        """A key for the configuration of its servers; arms with the same key share servers."""
        return f"{self.connector}{dict(self.extra)}{dict(self.environment)}"


def pair_specs(arm: Arm, place: str, environment: Mapping[str, str], **more: Any) -> list[ServerSpec]:
    """Return the configurations of P and D of an arm; ``place`` makes their names different."""
    config = nixl("", arm.extra, kv_connector=arm.connector)
    return prefill_and_decode(f"{arm.name}-{place}", config, environment={**environment, **arm.environment}, **more)


def in_turn(items: Sequence[One], turn: int) -> Sequence[One]:
    """Return the items with a different one first in each turn."""
    first = turn % len(items)
    return (*items[first:], *items[:first])


FORMS = ("{}", "{} tokens", "{} at a time")
"""How settings of a `Comparison` are written."""


@dataclass(frozen=True)
class Comparison:
    """Arms that take turns with the same load.

    Attributes:
        specs: returns the configurations of P and D of an arm.
        ask: sends so many prompts of so many tokens at once, and returns the figures of each.
        rounds: how often, by prompt tokens and number at a time.
        prepare: is called with the first part of the settings before its load is sent.
    """

    arms: Sequence[Arm]
    specs: Callable[[Arm], list[ServerSpec]]
    ask: Callable[[Router, int, int], Awaitable[Sequence[Mapping[str, float]]]]
    rounds: Mapping[tuple[int, int], int]
    prepare: Callable[[str, Router], Awaitable[None]] | None = None

    def measure(self, run: Run, samples: Samples, *names: str) -> None:
        """Start all pairs, send the load to all arms in turn, once for each of ``names``, and stop the servers."""
        with contextlib.ExitStack() as stack:
            pairs: dict[str, list[Server]] = {}
            for arm in self.arms:
                # Started one after another: on few cores, all together would start too slowly.
                if arm.servers not in pairs:
                    start = Asking if any(one.asks and one.servers == arm.servers for one in self.arms) else Running
                    launched = stack.enter_context(start(self.specs(arm), run.logs, run.update))
                    pairs[arm.servers] = launched.ready()
            asyncio.run(self._send(run, samples, pairs, names))

    async def _send(
        self, run: Run, samples: Samples, pairs: Mapping[str, Sequence[Server]], names: Sequence[str]
    ) -> None:
        longest, most = (max(sizes) for sizes in zip(*self.rounds, strict=True))
        turns = itertools.count()
        async with http_client(most) as http:
            routers = [Router(arm, *pairs[arm.servers], http=http) for arm in self.arms]  # type: ignore[misc]
            for router in routers:
                # Not measured: the handshake, both sides' first steps and the first touch of their memory.
                run.update(f"{router.arm.name}: warming up")
                await self.ask(router, longest, most)
            for name in names:
                if self.prepare:
                    await self.prepare(name, routers[0])
                for (length, number), times in self.rounds.items():
                    run.update(f"{name}: {length} tokens, {number} at a time")
                    for router in itertools.chain(*(in_turn(routers, next(turns)) for _ in range(times))):
                        for figures in await self.ask(router, length, number):
                            samples.add((name, length, number), router.arm.name, **figures)


class Handed(NamedTuple):
    """When a client asked, and when each token of the answer came.

    In seconds of ``time.perf_counter``, which on Linux is the monotonic clock that all processes share.
    """

    asked: float
    tokens: list[float]

    @property
    def first_token_seconds(self) -> float:
        return self.tokens[0] - self.asked


class Router:
    """Hands prompts over from a prefill to a decode server, each a different prompt."""

    names = itertools.count()

    def __init__(self, arm: Arm, prefill: Server, decode: Server, http: httpx.AsyncClient) -> None:
        self.arm = arm
        self.coordinates = prefill.coordinates
        self.prefill, self.decode = Client(prefill.base_url, http), Client(decode.base_url, http)

    async def hand_over(self, length: int, tokens: int = 1, *, late_seconds: float | None = None) -> Handed:
        """Hand a prompt of ``length`` tokens over, and stream ``tokens`` tokens of its answer. ``late_seconds``: so
        long after prefill's answer decode gets its request, also where the arm streams."""
        number = next(self.names)
        name = f"request-{number}"
        prompt = [2 + (number * 131 + place * 7 + place * place) % 500 for place in range(length)]

        async def token_times(**params: Any) -> list[float]:
            parts = self.decode.stream(prompt, max_tokens=tokens, salt=name, request_id=name, **params)
            return [seconds async for seconds, _ in parts]

        asked = time.perf_counter()
        if self.arm.asks:
            return Handed(asked, await token_times())
        if self.arm.is_streamed and late_seconds is None:
            params = {**self.coordinates, "do_remote_prefill": True, "transfer_id": name}
            decoding = asyncio.create_task(token_times(kv_transfer_params=params))
            await self.prefill.offer(prompt, salt=name, request_id=name, transfer_id=name)
            return Handed(asked, await decoding)
        params = await self.prefill.offer(prompt, salt=name, request_id=name)
        if not offered_blocks(params) and self.arm.connector == "NixlConnector":
            raise AnswerError(f"{name}: found no blocks in prefill's answer; expected a hand-over. See prefill's log.")
        await asyncio.sleep(late_seconds or 0.0)
        return Handed(asked, await token_times(kv_transfer_params=params))


# -------------------------------------------------------------------------------------------- what was measured of them


Setting = tuple[Any, ...]
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Column:
    """One column of a table: a statistic of a figure, times ``scale``."""

    heading: str
    figure: str
    scale: float = 1e3
    digits: int = 0
    of: Statistic = statistics.median

    def cell(self, values: Sequence[float]) -> str:
        return f"{self.of(values) * self.scale:,.{self.digits}f}" if values else ""


@dataclass
class Samples:
    """Figures of arms in settings. ``forms``: how each part of a setting is written, such as "{} tokens"."""

    forms: tuple[str, ...] = FORMS
    figures: dict[tuple[Setting, str], dict[str, list[float]]] = field(default_factory=dict)

    def add(self, setting: Setting, arm: str, **figures: float) -> None:
        for name, value in figures.items():
            self.figures.setdefault((setting, arm), {}).setdefault(name, []).append(value)

    @property
    def settings(self) -> list[Setting]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(setting for setting, _ in self.figures))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for _, arm in self.figures))

    def values(self, setting: Setting, arm: str, figure: str) -> list[float]:
        """Return all values of a figure; none if it was not measured there."""
        return self.figures.get((setting, arm), {}).get(figure, [])

    def median(self, setting: Setting, arm: str, figure: str) -> float:
        return statistics.median(self.values(setting, arm, figure))

    def words(self, setting: Setting) -> str:
        return ", ".join(form.format(part) for form, part in zip(self.forms, setting, strict=True))

    def table(self, title: str, columns: Sequence[Column]) -> Table:
        headings = [form.format("").strip() for form in self.forms]
        rows = [
            [*map(str, setting), arm, *(column.cell(self.values(setting, arm, column.figure)) for column in columns)]
            for setting, arm in itertools.product(self.settings, self.arms)
            if (setting, arm) in self.figures
        ]
        return make_table(title, [*headings, "arm", *(column.heading for column in columns)], rows)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"setting": dict(zip(self.forms, setting, strict=True)), "arm": arm, **figures}
            for (setting, arm), figures in self.figures.items()
        ]

    def compare(
        self,
        arm: str,
        other: str,
        figure: str,
        words: str,
        *,
        most: float | None = None,
        least: float | None = None,
        where: Callable[[Setting], bool] = lambda _: True,
        by_round: bool = False,
    ) -> list[Verdict]:
        """Return a target for each setting that has both arms: a figure of ``arm`` as a multiple of that of ``other``.

        Args:
            most, least: the limit; one of them.
            by_round: the median is that of the ratios of each round, in which both had the same prompts; else the ratio
                is that of both medians.
        """
        rows = []
        for setting in filter(where, self.settings):
            ours, theirs = (self.values(setting, one, figure) for one in (arm, other))
            if not ours or not theirs:
                continue
            if by_round:
                ratio = statistics.median([one / beside for one, beside in zip(ours, theirs, strict=True)])
            else:
                ratio = statistics.median(ours) / statistics.median(theirs)
            is_reached = (most is None or ratio <= most) and (least is None or ratio >= least)
            limit = f"<= {most}" if least is None else f">= {least}"
            rows.append(Verdict(f"{self.words(setting)}: {words} ({limit})", f"{ratio:.2f} x", is_reached))
        return rows


def percentile(hundredths: int) -> Statistic:
    """Return a statistic: the smallest value that at least ``hundredths`` percent of the values do not exceed."""
    return lambda values: float(numpy.percentile(values, hundredths, method="inverted_cdf"))
