# SPDX-License-Identifier: Apache-2.0
"""Changes servers while clients ask, and counts what these get. Decode asks prefill; nginx is before decode."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

from experiments.common.asking import asks
from experiments.common.counted import count
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import GIVES_BACK, Running, Server, ServerError, ServerSpec
from experiments.common.transfer_config import nixl
from experiments.fleet_change.balancer import balanced

Say = Callable[[str], None]

KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK}
MODEL = ModelShape(max_positions=4096)
PROMPTS = 12
TOKENS = 24
AT_ONCE = 6
STEP_SECONDS = 150.0
SETTLE_SECONDS = 2.0
SHUTDOWN_SECONDS = 30
"""``--shutdown-timeout``."""
BUSY_LOOPS, BUSY_SECONDS = 10, 60.0
GONE_SECONDS = 10.0
PREFILLS, DECODES = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
AFTER = ServerSpec.executable


class Outcome(enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"
    BEFORE = "error before the first token"
    AFTER = "error in a stream that had begun"
    NO_END = "no end"


class Request(NamedTuple):
    number: int
    streams: bool


@dataclass(frozen=True)
class Phase:
    """What clients got during one change.

    Attributes:
        outcomes: of the official client's requests, by `Outcome`.
        failed_hand_overs: requests that got no KV, as decode servers have counted; those of servers that were stopped
            are lost with them.
    """

    mode: str
    change: str
    seconds: float
    outcomes: dict[str, int]
    failed_hand_overs: int


def spec(name: str, mode: str | None, executable: Path | None = None) -> ServerSpec:
    """Return the configuration of a server; without ``mode``, of the stock instance."""
    extra = {"transfer_mode": mode, "kv_lease_duration": 10.0}
    made = ServerSpec(
        name=name,
        model=make_model(MODEL),
        dtype="float32",
        max_num_batched_tokens=256,
        kv_transfer=nixl(name, extra, kv_load_failure_policy="recompute") if mode else None,
        environment=KVCACHED if mode else {},
        arguments=("--shutdown-timeout", str(SHUTDOWN_SECONDS)),
    )
    return made if executable is None else dataclasses.replace(made, executable=executable)


def expected_of(before: Path, logs: Path, say: Say) -> dict[int, str]:
    """Return the answer to each prompt, of one stock instance.

    Prompts are left out to which the two versions say something else: they compute in another order.
    """
    say("one stock instance of each version")
    with Running([spec("alone-before", None, before), spec("alone-after", None)], logs) as launched:
        old, new = (asyncio.run(_answers(one.base_url)) for one in launched.ready())
    agreed = {number: text for number, text in old.items() if new[number] == text}
    if len(agreed) < PROMPTS // 2:
        raise ServerError(f"found that the versions agree on {len(agreed)} of {PROMPTS} prompts; expected most")
    return agreed


CHANGES = ("restart", "version", "busy", "kill a prefill", "kill all prefills", "kill a decode")


def measure(
    mode: str, before: Path, expected: Mapping[int, str], changes: Sequence[str], logs: Path, say: Say
) -> list[Phase]:
    """Start four servers and a balancer, and go through ``changes``."""
    with contextlib.ExitStack() as stack:
        prefills = stack.enter_context(Running([spec(name, mode, before) for name in PREFILLS], logs))
        decodes = stack.enter_context(
            Running([asks(spec(name, mode, before), prefills.servers) for name in DECODES], logs)
        )
        prefills.ready()
        url = stack.enter_context(balanced(decodes.ready(), logs / "nginx"))
        fleet = Fleet(prefills, decodes, url)
        acts: dict[str, Callable[[], None]] = {
            "restart": lambda: fleet.restart_each(None),
            "version": lambda: fleet.restart_each(AFTER),
            "busy": starve,
            "kill a prefill": lambda: fleet.kill(prefills, 0),
            "kill all prefills": lambda: fleet.kill(prefills, 0, 1),
            "kill a decode": lambda: fleet.kill(decodes, 0),
        }
        asyncio.run(_ask_once(url, expected))
        return [_phase(mode, change, acts[change], fleet, expected, say) for change in changes]


def starve() -> None:
    """Run ten processes beside the servers that do nothing but compute."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(BUSY_LOOPS)]
    try:
        time.sleep(BUSY_SECONDS)
    finally:
        for one in busy:
            one.kill()
            one.wait()


class Fleet:
    """The servers. Nobody is told of what happens to them."""

    def __init__(self, prefills: Running, decodes: Running, url: str) -> None:
        self._prefills, self._decodes = prefills, decodes
        self.url = url

    def restart_each(self, executable: Path | None) -> None:
        """Send SIGTERM to each server, as an orchestrator does it, and start it again, maybe with another vLLM.

        A prefill and a decode in turn: of two each, there is always a pair that fits.
        """
        for place in range(len(PREFILLS)):
            for some in (self._prefills, self._decodes):
                time.sleep(SETTLE_SECONDS)
                server = some.servers[place]
                os.kill(server.process.pid, signal.SIGTERM)
                try:
                    server.process.wait(2 * SHUTDOWN_SECONDS)
                except subprocess.TimeoutExpired as error:
                    name = server.spec.name
                    raise ServerError(f"found {name} still running {2 * SHUTDOWN_SECONDS} s after SIGTERM") from error
                new = server.spec if executable is None else dataclasses.replace(server.spec, executable=executable)
                _wait_for(some.replace(place, new))
        time.sleep(SETTLE_SECONDS)

    def kill(self, some: Running, *places: int) -> None:
        """Kill servers without a notice, and start them again after a while."""
        time.sleep(SETTLE_SECONDS)
        for place in places:
            some.servers[place].kill()
        time.sleep(GONE_SECONDS)
        for successor in [some.replace(place) for place in places]:
            _wait_for(successor)
        time.sleep(SETTLE_SECONDS)

    def failed_hand_overs(self) -> int:
        """Return how many hand-overs have failed, as decode servers that run now have counted."""
        found = 0
        for one in self._decodes.servers:
            # Its counts have ended with a server that is away.
            with contextlib.suppress(httpx.TransportError):
                found += count([one], "kvcached_nixl:handover_failures_total")
        return found


def _wait_for(server: Server) -> None:
    deadline = time.monotonic() + STEP_SECONDS
    while not server.is_ready():
        if time.monotonic() > deadline:
            raise ServerError(f"found {server.spec.name} not ready after {STEP_SECONDS:.0f} s:\n{server.tail()}")
        time.sleep(0.1)


def _phase(
    mode: str, change: str, act: Callable[[], None], fleet: Fleet, expected: Mapping[int, str], say: Say
) -> Phase:
    begun, failed_before = time.monotonic(), fleet.failed_hand_overs()

    async def run() -> Counter[Outcome]:
        changing = asyncio.create_task(asyncio.to_thread(act))
        outcomes = await _ask_until(fleet.url, expected, changing.done)
        await changing
        return outcomes

    outcomes = asyncio.run(run())
    found = Phase(
        mode,
        change,
        round(time.monotonic() - begun, 1),
        {kind.value: outcomes[kind] for kind in Outcome if outcomes[kind]},
        max(0, fleet.failed_hand_overs() - failed_before),
    )
    say(f"{mode}, {change}: {found.outcomes}")
    return found


# ------------------------------------------------------------------------------------------------- the official client


def _prompt(number: int) -> list[int]:
    return [3 + (7 * place + 31 * number) % 500 for place in range(100 + 40 * (number % 6))]


def _client_of(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=STEP_SECONDS)


async def ask(client: Any, request: Request, begun: list[str]) -> tuple[str, str | None]:
    """Return the text and why it ended. ``begun`` gets each piece of a stream as it comes."""
    asked = {"model": "model", "prompt": _prompt(request.number), "max_tokens": TOKENS, "temperature": 0}
    answer = await client.completions.create(**asked, stream=request.streams, extra_body={"ignore_eos": True})
    if not request.streams:
        return answer.choices[0].text, answer.choices[0].finish_reason
    reason = None
    async for part in answer:
        for choice in part.choices:
            begun.append(choice.text)
            reason = choice.finish_reason
    return "".join(begun), reason


async def _answers(url: str) -> dict[int, str]:
    async with _client_of(url) as client:
        return {number: (await ask(client, Request(number, False), []))[0] for number in range(PROMPTS)}


async def _ask_once(url: str, expected: Mapping[int, str]) -> None:
    async with _client_of(url) as client:
        for number in expected:
            await ask(client, Request(number, True), [])


async def _ask_until(url: str, expected: Mapping[int, str], has_ended: Callable[[], bool]) -> Counter[Outcome]:
    """Ask on and on, `AT_ONCE` at a time."""
    found: Counter[Outcome] = Counter()
    numbers = list(expected)

    async def one(client: Any, place: int) -> None:
        while not has_ended():
            place += 1
            request = Request(numbers[place % len(numbers)], streams=place % 3 > 0)
            outcome = await judged(client, request, expected[request.number])
            found[outcome] += 1

    async with _client_of(url) as client:
        await asyncio.gather(*(one(client, 5 * number) for number in range(AT_ONCE)))
    return found


async def judged(client: Any, request: Request, expected: str) -> Outcome:
    begun: list[str] = []
    try:
        text, reason = await asyncio.wait_for(ask(client, request, begun), STEP_SECONDS)
    except (TimeoutError, asyncio.TimeoutError, openai.APITimeoutError):
        return Outcome.NO_END
    except openai.OpenAIError:
        if not expected.startswith("".join(begun)):
            return Outcome.WRONG
        return Outcome.AFTER if begun else Outcome.BEFORE
    return Outcome.RIGHT if (text, reason) == (expected, "length") else Outcome.WRONG
