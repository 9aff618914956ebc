# SPDX-License-Identifier: Apache-2.0
"""Changes the servers behind a router while clients ask, and counts what these get."""

from __future__ import annotations

import asyncio
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

from experiments.bench_serve.arms import Arm
from experiments.bench_serve.measure import bench
from experiments.common.model import ModelShape, make_model
from experiments.common.router import ADMINISTRATOR, routed
from experiments.common.servers import GIVES_BACK, Running, Server, ServerError, ServerSpec
from experiments.common.transfer_config import role

Say = Callable[[str], None]

KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK}
MODEL = ModelShape(max_positions=4096)
PROMPTS = 12
TOKENS = 24
AT_ONCE = 4
STEP_SECONDS = 150.0
SETTLE_SECONDS = 2.0
SHUTDOWN_SECONDS = 30
"""``--shutdown-timeout``."""
BUSY_LOOPS, BUSY_SECONDS = 10, 60.0
ZERO_SECONDS = 10.0
BENCH_PROMPTS, BENCH_AT_ONCE = 16, 2
NAMES = ("prefill-1", "decode-1", "prefill-2", "decode-2")
"""In the order in which they are changed: of two prefills and two decodes, there is always a pair that fits."""


class Outcome(enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "503: try again"
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
        bench_completed, bench_failed: requests of ``vllm bench serve``.
        failed_hand_overs: that decode servers counted; those of servers that were stopped are lost with them.
        retries: attempts that the router repeated.
    """

    mode: str
    change: str
    seconds: float
    outcomes: dict[str, int]
    bench_completed: int
    bench_failed: int
    failed_hand_overs: int
    retries: int


def spec(name: str, mode: str | None, executable: Path | None = None) -> ServerSpec:
    """Return the configuration of a server; without ``mode``, of the stock instance."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": role(name),
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"num_threads": 0, "transfer_mode": mode, "kv_lease_duration": 10.0},
    }
    made = ServerSpec(
        name=name,
        model=make_model(MODEL),
        dtype="float32",
        max_num_batched_tokens=256,
        kv_transfer=transfer if mode else None,
        environment=KVCACHED if mode else {},
        arguments=("--shutdown-timeout", str(SHUTDOWN_SECONDS)),
        forks=True,
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


CHANGES = ("restart", "version", "terminate", "scale to zero", "busy", "kill")


def measure(
    mode: str, before: Path, expected: Mapping[int, str], changes: Sequence[str], logs: Path, say: Say
) -> list[Phase]:
    """Start four servers and a router, and go through ``changes``."""
    with Running([spec(name, mode, before) for name in NAMES], logs) as launched:
        servers = launched.ready()
        with routed(servers[::2], servers[1::2], logs / "router.log", "--attempts", "3") as url:
            fleet = Fleet(launched, url)
            acts: dict[str, Callable[[], None]] = {
                "restart": lambda: fleet.change_each(mode, before),
                "version": lambda: fleet.change_each(mode, None),
                "terminate": fleet.terminate_each,
                "scale to zero": fleet.scale_to_zero,
                "busy": starve,
                "kill": lambda: fleet.kill_and_replace(0, 1),
            }
            # So that the router knows where to push to.
            asyncio.run(_ask_once(url, expected))
            return [_phase(mode, change, acts[change], fleet, expected, logs, say) for change in changes]


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
    """The servers, and the router's administrator."""

    def __init__(self, launched: Running, url: str) -> None:
        self._launched = launched
        self.url = url
        self._admin = httpx.Client(base_url=url, headers=ADMINISTRATOR, trust_env=False, timeout=STEP_SECONDS)

    @property
    def servers(self) -> list[Server]:
        return self._launched.servers

    def change_each(self, mode: str, executable: Path | None) -> None:
        """Replace each server as an operator does it: drain, wait, remove, stop, start, add."""
        for place, name in enumerate(NAMES):
            time.sleep(SETTLE_SECONDS)
            server = self.servers[place]
            known = server.base_url.removeprefix("http://")
            self._ask("POST", f"/{known}/drain")
            self._until(lambda known=known: self._state(known)["drained"])  # type: ignore[misc]
            self._ask("DELETE", f"/{known}")
            server.stop()
            successor = self._launched.replace(place, spec(name, mode, executable))
            self._until(successor.is_ready)
            self._ask("POST", "", {"role": name.partition("-")[0], "url": successor.base_url})
            self._until(lambda known=known: self._state(known).get("kind") is not None)  # type: ignore[misc]

    def terminate_each(self) -> None:
        """Send SIGTERM to each server, as an orchestrator that scales down does it, and start it again; the router is
        told of neither."""
        for place, name in enumerate(NAMES):
            time.sleep(SETTLE_SECONDS)
            server = self.servers[place]
            os.kill(server.process.pid, signal.SIGTERM)
            try:
                server.process.wait(2 * SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise ServerError(f"found that {name} still runs {2 * SHUTDOWN_SECONDS} s after SIGTERM") from error
            self._bring_back(place)

    def scale_to_zero(self) -> None:
        """Send SIGTERM to all servers, decode first, and start them again when none has run for a while."""
        time.sleep(SETTLE_SECONDS)
        for kind in ("decode", "prefill"):
            some = [one for name, one in zip(NAMES, self.servers, strict=True) if name.startswith(kind)]
            for server in some:
                os.kill(server.process.pid, signal.SIGTERM)
            for server in some:
                try:
                    server.process.wait(2 * SHUTDOWN_SECONDS)
                except subprocess.TimeoutExpired as error:
                    raise ServerError(f"found {server.spec.name} {2 * SHUTDOWN_SECONDS} s after SIGTERM") from error
        time.sleep(ZERO_SECONDS)
        successors = [self._launched.replace(place) for place in range(len(NAMES))]
        for successor in successors:
            self._wait_for(successor)
        # Requests go on for a while.
        time.sleep(ZERO_SECONDS)

    def _bring_back(self, place: int) -> None:
        self._wait_for(self._launched.replace(place))

    def _wait_for(self, successor: Server) -> None:
        self._until(successor.is_ready)
        known = successor.base_url.removeprefix("http://")
        self._until(lambda: self._state(known).get("state") == "up" and self._state(known)["kind"] is not None)

    def kill_and_replace(self, *places: int) -> None:
        """Kill servers without a notice, and start them again; the router is told of neither."""
        for place in places:
            time.sleep(SETTLE_SECONDS)
            self.servers[place].kill()
            time.sleep(SETTLE_SECONDS)
            self._bring_back(place)

    def counted(self) -> tuple[int, int]:
        """Return how many hand-overs have failed, by the servers, and how many attempts the router has repeated."""
        failed = sum(_sum_of(one.base_url, "kvcached_nixl:handover_failures_total") for one in self.servers)
        return failed, _sum_of(self.url, "kvcached_nixl_router_retries_total")

    def _state(self, name: str) -> dict[str, Any]:
        listed = self._admin.get("/instances").json()["instances"]
        return next((one for one in listed if one["name"] == name), {})

    def _ask(self, method: str, path: str, body: object = None) -> None:
        answer = self._admin.request(method, f"/instances{path}", json=body)
        if answer.status_code >= 300:
            raise ServerError(f"found {method} /instances{path} answered {answer.status_code}: {answer.text}")

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STEP_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise ServerError(f"found no change in {STEP_SECONDS:.0f} s: {self._admin.get('/instances').text}")
            time.sleep(0.1)


def _phase(
    mode: str, change: str, act: Callable[[], None], fleet: Fleet, expected: Mapping[int, str], logs: Path, say: Say
) -> Phase:
    begun, (failed_before, retries_before) = time.monotonic(), fleet.counted()

    async def run() -> tuple[Counter[Outcome], list[tuple[int, int]]]:
        changing = asyncio.create_task(asyncio.to_thread(act))
        benching = asyncio.create_task(asyncio.to_thread(_bench_until, changing.done, mode, change, fleet.url, logs))
        outcomes = await _ask_until(fleet.url, expected, changing.done)
        await changing
        return outcomes, await benching

    outcomes, benched = asyncio.run(run())
    failed, retries = fleet.counted()
    found = Phase(
        mode,
        change,
        round(time.monotonic() - begun, 1),
        {kind.value: outcomes[kind] for kind in Outcome if outcomes[kind]},
        sum(completed for completed, _ in benched),
        sum(one for _, one in benched),
        max(0, failed - failed_before),
        retries - retries_before,
    )
    say(f"{mode}, {change}: {found.outcomes}, bench {found.bench_completed} and {found.bench_failed} failed")
    return found


def _bench_until(has_ended: Callable[[], bool], mode: str, change: str, url: str, logs: Path) -> list[tuple[int, int]]:
    found = []
    folder = logs / change
    folder.mkdir(parents=True, exist_ok=True)
    while not has_ended():
        arm, model = Arm(change, mode), make_model(MODEL)
        run = bench(arm, url, model, folder, at_a_time=BENCH_AT_ONCE, prompts=BENCH_PROMPTS, seed=len(found))
        found.append((run.completed, run.failed))
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
    except openai.APIStatusError as error:
        if error.status_code == httpx.codes.SERVICE_UNAVAILABLE and error.response.headers.get("retry-after"):
            return Outcome.REFUSED
        return Outcome.BEFORE
    except openai.OpenAIError as error:
        # A stream that was kept alive while it waited: its status had been sent, so the refusal is an event.
        if isinstance(error, openai.APIError) and str(error.code) == "503" and not begun:
            return Outcome.REFUSED
        if not expected.startswith("".join(begun)):
            return Outcome.WRONG
        return Outcome.AFTER if begun else Outcome.BEFORE
    return Outcome.RIGHT if (text, reason) == (expected, "length") else Outcome.WRONG


def _sum_of(url: str, name: str) -> int:
    try:
        lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=STEP_SECONDS).text.splitlines()
    except httpx.TransportError:
        return 0
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))
