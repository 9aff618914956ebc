# SPDX-License-Identifier: Apache-2.0
"""Engines on one in-memory network, a router, and faults of engines. Single-threaded, on a virtual clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from experiments.common.engines import Engine, Pool, Request, asks_decode, asks_prefill, host_words
from experiments.common.memory_transport import Network
from experiments.mesh.members import BLOCK_SIZE, NUM_BLOCKS, Case, End, Member, Memory, Task
from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.params import RemotePrefill

ROUND_SECONDS = 2.0
"""Virtual time of a round; a hand-over takes about ten rounds."""
LEASE_SECONDS, TIMEOUT_SECONDS = 30.0, 60.0
ASK_SECONDS = 5.0
"""Time after which an unanswered handshake fails."""
LATE_ROUNDS, AWAY_ROUNDS = 3, (10, 60)
SETTLE_ROUNDS = 400
LONGEST_PROMPT_BLOCKS = 8
SHARE_ABORTED, SHARE_CACHED = 0.04, 0.2
MOVED, REPLACED = "restarted at another port", "replaced by another engine"
LEFT, VANISHED, CUT = "ended, and back later", "vanished without a word, and back later", "lost a connection"
TROUBLES = ("restarted", MOVED, REPLACED, LEFT, VANISHED, CUT)


class NotAtRest(Exception):
    """Engines still have state of requests that have ended."""


class SideChannel:
    """Stands in for the side channel. Answers arrive in the next round, or never."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def ask(self, host: str, port: int, tp_rank: int) -> Future[tuple[str, bytes]]:
        future: Future[tuple[str, bytes]] = Future()
        self._mesh.questions.append((self._mesh.clock.now_seconds(), host, port, tp_rank, future))
        return future

    def wake(self, host: str, port: int, key: str) -> None:
        member = self._mesh.listening.get((host, port))
        if member is not None and member.engine.handover.wake_address.key == key:
            member.engine.handover.side_channel.woken()

    def close(self) -> None:
        """Nothing to close."""


class Mesh:
    """See the module.

    Args:
        num: number of engines of each role.
        at_once: number of hand-overs under way at the same time.
        events: number of hand-overs per fault of an engine; 0 for no faults.

    Attributes:
        ends: number of ended hand-overs, by what the client got.
        done: number of faults, by kind.
        roles: running engines; those in ``frozen`` cannot be reached.
        cuts: pairs of prefill and decode engine whose connection was lost, until one of them has noticed.
        later: (round, action to run in it).
    """

    def __init__(self, mode: TransferMode, num: int, at_once: int, events: int, seed: int = 1) -> None:
        self.mode = mode
        self.settings = Settings(mode, LEASE_SECONDS, TIMEOUT_SECONDS)
        self.clock = ManualClock()
        self.network = Network()
        self.questions: list[tuple[float, str, int, int, Future[tuple[str, bytes]]]] = []
        self.listening: dict[tuple[str, int], Member] = {}
        self.ends: Counter[End] = Counter()
        self.done: Counter[str] = Counter()
        self.retired_seconds = 0.0
        self.round = 0
        self.draw = random.Random(seed)
        self.numbers = itertools.count(1)
        self._at_once = at_once
        self._events = events
        self._to_start = 0
        self._started = 0
        self._open: dict[Case, None] = {}
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.frozen: set[Member] = set()
        self.cuts: set[tuple[Member, Member]] = set()
        self.roles: dict[str, list[Member]] = {
            role: [self.start(RemotePrefill(f"{role}-{one}", f"host-{role}-{one}", 5600)) for one in range(num)]
            for role in ("prefill", "decode")
        }

    @property
    def members(self) -> list[Member]:
        """All running engines."""
        return [member for role in self.roles.values() for member in role]

    @property
    def seconds(self) -> float:
        """CPU time of this process for hand-overs in all engines, including engines that have ended."""
        return self.retired_seconds + sum(member.seconds for member in self.members)

    @property
    def roots(self) -> list[object]:
        """The objects of each engine from which all of its state of hand-overs can be reached."""
        return [root for one in self.members for root in (one.engine.handover, one.engine.side)]

    def run(self, count: int) -> None:
        """Run ``count`` hand-overs until each has ended."""
        self._to_start += count
        while self._to_start or self._open:
            while self._to_start and len(self._open) < self._at_once and self._begin():
                self._to_start -= 1
                self._started += 1
                if self._events and not self._started % self._events:
                    self._trouble()
            self._advance()

    def settle(self) -> None:
        """Run rounds until no engine has state of any request; engines that are away come back first."""
        until = self.round + SETTLE_ROUNDS
        while self.later or self.frozen or not all(member.is_settled for member in self.members):
            if self.round >= until:
                left = [member.agent for member in self.members if not member.is_settled]
                raise NotAtRest(
                    f"{len(left)} engines ({', '.join(left[:5])}) after {SETTLE_ROUNDS * ROUND_SECONDS:g} s"
                )
            self._advance()

    def rest(self, seconds: float) -> None:
        """Run rounds without new requests for ``seconds`` of virtual time."""
        until = self.clock.now_seconds() + seconds
        while self.clock.now_seconds() < until:
            self._advance()

    # ------------------------------------------------------------------------------------------------------- one round

    def _advance(self) -> None:
        self.round += 1
        self.clock.advance(ROUND_SECONDS)
        due = [action for at, action in self.later if at <= self.round]
        self.later = [(at, action) for at, action in self.later if at > self.round]
        for action in due:
            action()
        for case in [case for case in self._open if case.aborts_at is not None and case.aborts_at <= self.round]:
            self._abort(case)
        self._answer_questions()
        awake = [member for member in self.members if member not in self.frozen]
        for member in awake:
            member.step()
        for member in awake:
            member.turn()
        self.network.deliver_all()

    def _answer_questions(self) -> None:
        asked, self.questions = self.questions, []
        for question in asked:
            at, host, port, tp_rank, future = question
            member = self.listening.get((host, port))
            if member is None:
                future.set_exception(ConnectionRefusedError(f"no engine listens at {host}:{port}"))
            elif member not in self.frozen:
                future.set_result(member.engine.answers[tp_rank])
            elif self.clock.now_seconds() - at < ASK_SECONDS:
                self.questions.append(question)
            else:
                future.set_exception(TimeoutError(f"{host}:{port} does not answer"))

    # ------------------------------------------------------------------------------------------------------- the router

    def _begin(self) -> bool:
        """Begin one more hand-over; returns False if one role has no engine at the moment."""
        sides = [[one for one in self.roles[role] if one not in self.frozen] for role in ("prefill", "decode")]
        if not all(sides):
            return False
        prefill, decode = (self.draw.choice(side) for side in sides)
        draw = self.draw
        number = next(self.numbers)
        case = Case(
            number,
            num_tokens=draw.randint(1, LONGEST_PROMPT_BLOCKS) * BLOCK_SIZE,
            prefill=prefill,
            decode=decode,
            is_decode_first=self.mode is TransferMode.PUSH and draw.random() < 0.5,
            aborts_at=self.round + draw.randint(0, 12) if draw.random() < SHARE_ABORTED else None,
            troubles=(prefill.troubles, decode.troubles),
            is_cut=(prefill, decode) in self.cuts,
        )
        self._open[case] = None
        # For the prefill request: the case stays open until prefill has answered.
        case.waiting = 1
        if case.is_decode_first:
            self._ask_decode(case, asks_decode(prefill.engine.own, case.name))
            self.later.append((self.round + draw.randint(0, LATE_ROUNDS), lambda: self._ask_prefill(case)))
        else:
            self._ask_prefill(case)
        return True

    def _ask_prefill(self, case: Case) -> None:
        task = case.prefill_task = self._task(case, asks_prefill(case.name), "p")
        if case.prefill.is_alive and not case.is_aborted:
            case.prefill.add(task)
        else:
            self.answered(task, None)

    def _ask_decode(self, case: Case, params: dict[str, Any]) -> None:
        task = self._task(case, params, "d")
        if not case.decode.is_alive or case.is_aborted:
            return
        if self.draw.random() < SHARE_CACHED:
            task.num_cached = self.draw.randrange(0, case.num_tokens + 1, BLOCK_SIZE)
        task.rounds = self.draw.randint(0, 2)
        case.decode_task = task
        case.waiting += 1
        case.decode.add(task)

    def _task(self, case: Case, params: dict[str, Any], side: str) -> Task:
        request_id = f"{case.name}-{side}-{case.number:08x}"
        return Task(Request(request_id, [case.number, *range(1, case.num_tokens)], params), case)

    def answered(self, task: Task, params: dict[str, Any] | None) -> None:
        """Called with an ended prefill request, and the parameters for decode's request, None without any."""
        case = task.case
        if params is not None and not case.is_decode_first:
            self._ask_decode(case, params)
        elif params is None and case.decode_task is not None and self.draw.random() < 0.5:
            # On an error, a router aborts the other half, too; some routers do not.
            case.is_aborted = True
            case.decode.abort(case.decode_task)
        self._less(case)

    def ended(self, task: Task, has_kv: bool) -> None:
        """Called with an ended decode request, and whether it had its KV."""
        task.case.has_kv = has_kv
        self._less(task.case)

    def _less(self, case: Case) -> None:
        case.waiting -= 1
        if not case.waiting:
            del self._open[case]
            self.ends[case.end] += 1
            if case.is_cut and case.is_moved:
                self.cuts.discard((case.prefill, case.decode))

    def _abort(self, case: Case) -> None:
        case.aborts_at, case.is_aborted = None, True
        for member, task in ((case.prefill, case.prefill_task), (case.decode, case.decode_task)):
            if task is not None and member not in self.frozen:
                member.abort(task)

    # ---------------------------------------------------------------------------------------------------------- engines

    def start(self, address: RemotePrefill) -> Member:
        memory, agent = Memory(), f"agent-{next(self.numbers)}"
        transport = self.network.agent(agent)
        transport.keeps_posted = False
        order = list(range(1, NUM_BLOCKS))
        self.draw.shuffle(order)
        engine = Engine(
            address,
            self.settings,
            self.clock,
            transport,
            SideChannel(self),
            memory.planes,
            Pool(order),
            host_words(),
            lambda: self.network.open_gate(agent),
        )
        member = Member(engine, memory, agent, self)
        self.listening[address.host, address.port] = member
        return member

    def end(self, member: Member) -> RemotePrefill:
        """End its process; all requests of its clients fail. Returns its address."""
        self.network.kill(member.agent)
        self.retired_seconds += member.seconds
        member.is_alive = False
        self.frozen.discard(member)
        for role in self.roles.values():
            if member in role:
                role.remove(member)
        address = member.engine.own
        self.cuts = {pair for pair in self.cuts if member not in pair}
        if self.listening.get((address.host, address.port)) is member:
            del self.listening[address.host, address.port]
        for task in list(member.tasks.values()):
            self._gone(member, task)
        return address

    def _gone(self, member: Member, task: Task) -> None:
        """Called for each request of an engine that has ended: its client loses the connection."""
        if task.state.name == "ENDED":
            return
        if task.case.prefill_task is task:
            self.answered(task, None)
        else:
            self.ended(task, False)

    # ----------------------------------------------------------------------------------------------- faults of engines

    def _trouble(self) -> None:
        """Inflict a random fault on a random engine, unless it is the only reachable one of its role."""
        role = self.draw.choice(list(self.roles))
        living = [one for one in self.roles[role] if one not in self.frozen]
        if len(living) < 2:
            return
        kind, member = self.draw.choice(TROUBLES), self.draw.choice(living)
        self.done[kind] += 1
        if kind == CUT:
            self._cut(role, member)
        elif kind == VANISHED:
            # It cannot be reached. After a while its host is back and refuses traffic of earlier connections.
            self.network.vanish(member.agent)
            self.frozen.add(member)
            member.troubles += 1
            self._later(lambda: self.restart(role, member))
        elif kind == LEFT:
            own = self.end(member)
            self._later(lambda: self.roles[role].append(self.start(own)))
        else:
            number = next(self.numbers)
            changes: dict[str, Any] = {
                MOVED: {"port": 5600 + number % 50_000},
                REPLACED: {"engine_id": f"new-{number}"},
            }
            self.restart(role, member, **changes.get(kind, {}))

    def restart(self, role: str, member: Member, **changes: Any) -> None:
        """End an engine, and start one at its address, or where ``changes`` say."""
        self.roles[role].append(self.start(msgspec.structs.replace(self.end(member), **changes)))

    def _later(self, action: Callable[[], None]) -> None:
        self.later.append((self.round + self.draw.randint(*AWAY_ROUNDS), action))

    def _cut(self, role: str, member: Member) -> None:
        far = self.draw.choice(self.roles["decode" if role == "prefill" else "prefill"])
        for one, two in ((member, far), (far, member)):
            self.network.agents[one.agent].lose(two.agent)
            one.troubles += 1
        self.cuts.add((member, far) if role == "prefill" else (far, member))
