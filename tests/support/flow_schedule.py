# SPDX-License-Identifier: Apache-2.0
"""A random schedule of events, drawn from a seed; the same seed gives the same schedule.

A router gives each task to a prefill and a decode engine, in either order, sometimes with wrong parameters; or clients
talk to decode, which asks prefill, and answers come late, wrong or never. Engines step, devices lag, handshakes and
messages arrive late, twice, in another order or never, engines die, vanish and come back. At the end every engine is
alive or known to be dead, time passes, and no state may be left.

`Schedule.finish` and the checks in `flow_cluster` say what must not happen.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from kvcached_nixl.scheduler import fetch_request as fetching
from kvcached_nixl.scheduler.asking import questions
from kvcached_nixl.settings import SERVER_LOGGER, TransferMode
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.handshake import Tensors, Weights
from kvcached_nixl.wire.question import Outcome
from kvcached_nixl.worker.transfer.transfer_queue import Budget
from support.flow_asker import LOST
from support.flow_cluster import FORGOTTEN_SECONDS, LEASE_SECONDS, TIMEOUT_SECONDS, Cluster
from support.flow_engine import Engine, Kind, Request, Status, Worker
from support.flow_memory import Shape

SHAPES = (
    (Shape(), Shape()),
    (Shape(), Shape(is_head_major=True)),
    (Shape(block_size=8), Shape(ratio=2)),
    (Shape(ratio=2), Shape(block_size=8, ratio=4)),
    (Shape(tp_size=2), Shape()),
    (Shape(), Shape(tp_size=2)),
    (Shape(tp_size=2, block_size=8), Shape(tp_size=2)),
    (Shape(tp_size=2, total_heads=1), Shape(total_heads=1)),
    (Shape(tp_size=2, is_latent=True), Shape(is_latent=True)),
    (Shape(is_latent=True), Shape(tp_size=2, is_latent=True)),
    (Shape(pp_size=2), Shape()),
    (Shape(pp_size=2, tp_size=2), Shape(block_size=8)),
)
SLICE_SECONDS = 4.0
DYING_SECONDS = 1.5
"""How long an engine's workers outlive its core. Less than `receiver.DEAD_SECONDS`."""


class Defects(logging.Handler):
    """Collects exceptions that were caught and logged; none is expected. Other handlers get no records meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    def __enter__(self) -> Defects:
        logger = logging.getLogger(SERVER_LOGGER)
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(SERVER_LOGGER)
        logger.removeHandler(self)
        logger.propagate = True


@dataclass(eq=False)
class Task:
    """One client's request at the router.

    Attributes:
        upstream: prefill's request.
        children: decode's requests; more than one for ``n`` > 1.
    """

    name: str
    prompt: tuple[int, ...]
    prefill: Engine
    decode: Engine
    transfer_id: str | None
    both_at_once: bool
    upstream: Request | None = None
    children: list[Request] = field(default_factory=list)
    is_wrong: bool = False
    adapter: int = 0

    @property
    def asks(self) -> bool:
        """Whether decode asks prefill, and no router does."""
        return bool(self.decode.kind.asks)

    @property
    def has_to_be_sent(self) -> bool:
        return not self.children if self.asks else self.upstream is None or not self.children

    @property
    def is_due(self) -> bool:
        """Whether its next request may be sent now."""
        if self.asks or self.upstream is None or self.both_at_once or self.upstream.status.is_finished:
            return True
        return self.prefill not in self.decode.cluster.alive


class Schedule:
    """Runs the events of one seed. See the module docstring.

    Args:
        calm: no message is lost, nothing fails or dies, parameters are right, and nothing times out: every hand-over
            must succeed.
    """

    def __init__(self, seed: int, *, calm: bool | None = None) -> None:
        self.dice = dice = random.Random(seed)
        self.calm = seed % 4 == 0 if calm is None else calm
        # With these seeds some engines stage.
        self.stages = seed % 3 == 2
        # With these seeds the model has sliding windows.
        self.has_windows = seed % 11 == 6
        # With these seeds kvcached's limits change. Dice of their own: the other events stay those of before.
        self.limits = random.Random(seed) if seed % 7 == 5 and not self.calm else None
        # With these seeds weights are updated and adapters loaded again.
        self.updates = random.Random(seed) if seed % 13 in (3, 9) and not self.calm else None
        # With these seeds decode asks prefill.
        self.asks = seed % 5 == 1
        # What prefill has answered.
        self.said: list[Any] = []
        # With these seeds some hand-overs are verified.
        self.cluster = Cluster(dice.choice([TransferMode.PULL, TransferMode.PUSH]), (seed % 5 == 3) * 0.6)
        shapes, counts = dice.choice(SHAPES), [1, 2, 2, 3] if self.asks else [1, 1, 1, 2]
        self.prefills = [self._start(f"p{number}", shapes[0]) for number in range(dice.choice(counts))]
        self.decodes = [self._start(f"d{number}", shapes[1]) for number in range(dice.choice([1, 1, 1, 2]))]
        self.bases = [tuple(dice.randrange(50) for _ in range(40)) for _ in range(2)]
        self.tasks: list[Task] = []
        self.dying: list[tuple[float, Engine]] = []
        # Transfers take longer than everything else.
        self.slow = dice.random() < 0.5
        self._frequent: list[Callable[[], None]] = [
            *[self._network] * 8,
            *[self._turn] * 6,
            *[self._step] * 7,
            *[self._handshake] * 2,
            *[self._flow] * 2,
            *[self._rush] * 2,
            *[self._task] * 2,
            *[self._route] * 3,
            *[self._copy] * 3,
            self._device,
            self._local,
            self._preempt,
            self._time,
        ]
        if not self.calm:
            self._frequent += [self._upset, self._abort, self._abort]
        if self.updates is not None:
            self._frequent += [self._update] * 3
        if self.asks:
            self._frequent += [self._answer] * 4

    def _start(self, name: str, shape: Shape) -> Engine:
        dice = self.dice
        # With few blocks each is soon reused. With too few, each side waits for the other until the deadline.
        num_blocks = (100 if self.calm else dice.choice([12, 16, 24, 40])) * 4 // shape.block_size + 1
        kind = Kind(
            shape=dataclasses.replace(shape, num_blocks=num_blocks),
            recomputes=dice.random() < 0.6,
            caches_prefixes=dice.random() < 0.7,
            budget=dice.choice([5, 9, 16, 64]),
            depth=dice.choice([1, 2, 2, 4]),
            keeps_stale_output=not self.calm and dice.random() < 0.3,
            token_buffers=dice.choice([1, 2, 8]),
            are_shared=dice.random() < 0.1,
            newest_first=dice.random() < 0.6,
            transfer_queue=Budget(descriptors=dice.choice([1, 2, 1024]), peer_transfers=dice.choice([1, 2, 16])),
            slots=self._slots(),
            drops_blocks=self.has_windows,
            asks=tuple(one.own.engine_id for one in self.prefills) if self.asks and name[0] == "d" else (),
            is_required=self.asks and dice.random() < 0.2,
            local_tokens=dice.choice([None, 0, 12]) if self.asks else 0,
        )
        return self.cluster.engine(name, kind)

    def _slots(self) -> tuple[int, int]:
        """Draws (slots, reserved slots). Most engines that stage have fewer slots than a request has blocks."""
        if not self.stages or self.dice.random() < 0.3:
            return 0, 0
        kept = self.dice.choice([4, 4, 8])
        return (4 * kept if self.dice.random() < 0.7 else 100), kept

    def run(self, num_events: int | None = None) -> None:
        """Runs the schedule and the final checks. Raises AssertionError if one fails."""
        numbers = patch.object(fetching, "draw_attempt", self.cluster.next_number)
        # Prompts are short here.
        looks_up = patch.object(questions, "LEAST_TOKENS", 8)
        with Defects() as defects, numbers, looks_up:
            for _ in range(self.dice.randint(1, 3)):
                self._task()
            for _ in range(self.dice.randint(30, 150) if num_events is None else num_events):
                self.dice.choice(self._frequent)()
            self.finish()
        assert not defects.found, f"an exception was contained: {defects.found[0]}"

    # --------------------------------------------------------------------------------------------------------- events

    def _network(self) -> None:
        wire, dice = self.cluster.wire, self.dice
        pending = [one for one in wire.pending if not wire.is_stuck(one)]
        kind = dice.choice(
            [*["deliver"] * 8, "double", "again", "again", *([] if self.calm else ["drop", "fail", "land"])]
        )
        if kind == "again" and wire.said:
            wire.notify(dice.choice(wire.said))
        elif kind == "land" and wire.rests:
            wire.land(dice.choice(wire.rests))
        elif not pending:
            return
        elif kind == "drop":
            wire.drop(dice.choice(pending))
        elif kind == "fail":
            transfers = [one for one in pending if one.is_transfer]
            if transfers:
                wire.fail(dice.choice(transfers), dice.choice([0.0, 0.5]), rest=dice.random() < 0.5)
        else:
            posted = pending[0] if dice.random() < 0.5 else dice.choice(pending)
            if kind == "double" and not posted.is_transfer:
                wire.notify(posted)
            if not (posted.is_transfer and self.slow and dice.random() < 0.8):
                wire.deliver(posted)

    def _flow(self) -> None:
        """Runs a round in which nothing is late (except transfers, if they are slow)."""
        cluster = self.cluster
        for posted in list(cluster.wire.pending):
            if not (posted.is_transfer and self.slow):
                cluster.wire.deliver(posted)
        for question in list(cluster.questions):
            cluster.answer(question)
        for asked in [one for one in cluster.asked if one.is_ready]:
            asked.deliver()
        for worker in self._workers():
            worker.copy()
        cluster.turn()
        for engine in cluster.running:
            engine.step()

    def _rush(self) -> None:
        """Dispatches another step of a decode engine, and lets the network be faster than its device."""
        cluster = self.cluster
        running = [engine for engine in self.decodes if engine in cluster.running]
        if not running:
            return
        engine = self.dice.choice(running)
        engine.dispatch()
        names = {worker.agent_name for worker in engine.workers}
        for _ in range(4):
            for question in [one for one in cluster.questions if one.asker is engine]:
                cluster.answer(question)
            for posted in [one for one in cluster.wire.pending if names & {one.sender, one.receiver}]:
                if not (posted.is_transfer and self.slow and self.dice.random() < 0.5):
                    cluster.wire.deliver(posted)
            cluster.turn()

    def _turn(self) -> None:
        workers = self._workers()
        for worker in self.dice.sample(workers, min(len(workers), 2)):
            worker.turn()

    def _workers(self) -> list[Worker]:
        return [worker for engine in self.cluster.running for worker in engine.workers]

    def _copy(self) -> None:
        """Runs the oldest copy or checksum of one rank; some of them fail."""
        runners = [one for worker in self._workers() for one in (worker.copier, worker.awaiting_checksum)]
        copiers = [one for one in runners if one is not None and one.asked]
        if copiers:
            copier = self.dice.choice(copiers)
            copier.fails = not self.calm and self.dice.random() < 0.05
            copier.run()
            copier.fails = 0

    def _step(self) -> None:
        running = self.cluster.running
        if running:
            engine = self.dice.choice(running)
            self.dice.choice([engine.dispatch, engine.step, engine.complete])()

    def _device(self) -> None:
        """Lets one rank's device do its next step."""
        waiting = [worker for worker in self._workers() if worker.device.done < worker.device.given]
        if waiting:
            device = self.dice.choice(waiting).device
            device.run(device.done + 1)

    def _handshake(self) -> None:
        if self.cluster.questions:
            question = self.dice.choice(self.cluster.questions)
            self.cluster.answer(question, late=not self.calm and self.dice.random() < 0.1)

    def _task(self) -> None:
        dice = self.dice
        if len(self.tasks) >= 8 or not self.prefills:
            return
        number = len(self.tasks)
        name = f"cmpl-{number}-0" if self.calm or dice.random() < 0.8 else "cmpl-0-0"
        base = dice.choice(self.bases)
        prompt = (*base[: dice.randint(1, 30)], *(dice.randrange(50) for _ in range(dice.choice([0, 0, 3]))))
        transfer_id = None
        if dice.random() < 0.5:
            transfer_id = f"t{number}" if self.calm or dice.random() < 0.7 else "t"
        both = self.cluster.pushes and dice.random() < 0.6 and not self.asks
        prefill, decode = dice.choice(self.prefills), dice.choice(self.decodes)
        task = Task(name, prompt, prefill, decode, transfer_id, both)
        if self.updates is not None:
            task.adapter = self.updates.choice([0, 0, 1])
        self.tasks.append(task)
        if task.asks or (both and dice.random() < 0.5):
            self._send_decode(task)
        else:
            self._send_prefill(task)

    def _local(self) -> None:
        """Adds a local request to decode. It may stop before its scheduler expects it; its blocks are soon reused."""
        engine = self.dice.choice(self.decodes)
        if engine in self.cluster.running and len(engine.requests) < 6:
            prompt = tuple(self.dice.randrange(50) for _ in range(self.dice.randint(1, 12)))
            name = f"local-{self.dice.getrandbits(32):08x}"
            engine.add(Request(name, prompt, None, 12, self.dice.choice([None, 1, 2])))

    def _id(self, task: Task) -> str:
        """Returns a request id; its random suffix differs each time, as in vLLM."""
        return f"{task.name}-{self.dice.getrandbits(32):08x}"

    def _send_prefill(self, task: Task) -> None:
        params: dict[str, Any] = {"do_remote_decode": True}
        if task.transfer_id is not None:
            params["transfer_id"] = task.transfer_id
        stops_at = self.dice.choice([None, 1])
        request = Request(self._id(task), task.prompt, params, self.dice.choice([1, 1, 1, 4]), stops_at)
        request.adapter = task.adapter
        task.upstream = request
        if task.prefill in self.cluster.running:
            task.prefill.add(request)
        else:
            request.status = Status.ERROR

    def _send_decode(self, task: Task) -> None:
        dice, prompt = self.dice, task.prompt
        params: Any = None
        if task.both_at_once:
            own = task.prefill.own
            params = {"do_remote_prefill": True, "remote_engine_id": own.engine_id, "remote_host": own.host}
            params |= {"remote_port": own.port, "tp_size": own.tp_size, "pp_size": own.pp_size}
            if task.transfer_id is not None:
                params["transfer_id"] = task.transfer_id
        elif task.upstream is not None and task.upstream.answer is not None:
            params = copy.deepcopy(task.upstream.answer)
        if not self.calm and dice.random() < 0.25:
            task.is_wrong = True
            prompt, params = self._wrong(prompt, params)
        for _ in range(dice.choice([1, 1, 2, 3]) if task.asks else 1 if self.calm or dice.random() < 0.9 else 2):
            request = Request(self._id(task), prompt, params, dice.choice([1, 3, 8]), dice.choice([None, None, 2]))
            request.adapter = task.adapter
            task.children.append(request)
            if task.decode in self.cluster.running:
                task.decode.add(request)
            else:
                request.status = Status.ERROR

    def _wrong(self, prompt: tuple[int, ...], params: Any) -> tuple[tuple[int, ...], Any]:
        """Returns another prompt, or parameters that were changed on the way."""
        dice, where = self.dice, self.dice.randrange(len(prompt))
        prompts = (
            prompt[:where] + ((prompt[where] + 1) % 50,) + prompt[where + 1 :],
            prompt[: where + 1],
            (*prompt, 7),
        )
        if dice.random() < 0.4 or not isinstance(params, dict):
            return dice.choice(prompts), params
        others = [one.upstream.answer for one in self.tasks if one.upstream is not None and one.upstream.answer]
        if others and dice.random() < 0.2:
            return prompt, copy.deepcopy(dice.choice(others))
        params = dict(params)
        manifest = params.get("kvcached_nixl")
        if manifest is not None and dice.random() < 0.6:
            manifest = params["kvcached_nixl"] = dict(manifest)
            blocks = list(manifest["groups"][0]["block_ids"])
            dice.shuffle(blocks)
            changed: dict[str, Any] = {
                "groups": [{"first_token": 0, "block_ids": dice.choice([blocks, [b + 1 for b in blocks], blocks[1:]])}],
                "digest": "0" * 32,
                "incarnation": "0" * 16,
                "request_id": "cmpl-unknown-0-aaaaaaaa",
                "num_tokens": manifest["num_tokens"] + dice.choice([-1, 1]),
                "block_sizes": [2 * size for size in manifest["block_sizes"]],
                "lease_seconds": 3.0,
                "protocol": 3,
            }
            key = dice.choice(list(changed))
            manifest[key] = changed[key]
            return prompt, params
        changed = {
            "tp_size": dice.choice([2, 3, 10**9, "1", True]),
            "remote_host": dice.choice(["host-d0", "nowhere", ""]),
            "remote_port": dice.choice([1, 0, -1]),
            "remote_engine_id": "p9",
            "do_remote_decode": True,
            "kvcached_nixl": None,
            "transfer_id": dice.choice([3, "x"]),
        }
        key = dice.choice(list(changed))
        params[key] = changed[key]
        return prompt, params

    def _route(self) -> None:
        """Lets the router send the next request of a task."""
        waiting = [task for task in self.tasks if task.has_to_be_sent]
        if not waiting:
            return
        task = self.dice.choice(waiting)
        if task.upstream is None and not task.asks:
            self._send_prefill(task)
        elif task.is_due:
            self._send_decode(task)

    def _answer(self) -> None:
        """A prefill server answers decode, its answer is lost, or another one comes."""
        dice = self.dice
        if not self.cluster.asked:
            return
        one = dice.choice(self.cluster.asked)
        answer = None if one.request is None else one.request.answer
        kind = dice.choice([*["deliver"] * 6, *([] if self.calm else ["lose", "busy", "refuse", "wrong", "old"])])
        if kind == "lose":
            one.ends(LOST)
        elif kind in ("busy", "refuse"):
            is_busy = kind == "busy"
            one.ends(Outcome(kind, is_busy=is_busy, is_final=not is_busy, retry_after_seconds=dice.choice([0.0, 3.0])))
        elif kind == "wrong":
            one.say(self._wrong((1,), answer)[1])
        elif kind == "old" and self.said:
            one.say(dice.choice(self.said))
        elif one.is_ready:
            self.said.append(answer)
            one.deliver()

    def _preempt(self) -> None:
        busy = [engine for engine in self.cluster.running if engine.running]
        if busy:
            engine = self.dice.choice(busy)
            request = self.dice.choice(engine.running)
            engine.running.remove(request)
            engine.preempt(request)

    def _abort(self) -> None:
        live = [
            (engine, request)
            for engine in self.cluster.running
            for request in engine.requests.values()
            if not request.status.is_finished
        ]
        # Prefers requests whose KV is in flight.
        remote = [one for one in live if one[1].status is Status.REMOTE]
        if live:
            engine, request = self.dice.choice(remote if remote and self.dice.random() < 0.6 else live)
            engine.abort(request)

    def _time(self) -> None:
        self._advance(self.dice.choice([0.01, 0.6, 2.0] if self.calm else [0.01, 0.6, 2.0, 5.0, 12.0, 40.0]))

    def _advance(self, seconds: float) -> None:
        if self.limits is not None:
            pool = self.limits.choice([*self.prefills, *self.decodes]).pool
            pool.limit_blocks = self.limits.choice([None, None, 0, 4, 12])
        clock = self.cluster.clock
        until = clock.now_seconds() + seconds
        for at, engine in sorted(self.dying, key=lambda one: one[0]):
            if at <= until:
                clock.advance(max(0.0, at - clock.now_seconds()))
                self.cluster.kill(engine)
                self.dying.remove((at, engine))
        clock.advance(until - clock.now_seconds())

    def _update(self) -> None:
        """Of one engine, of most of them one after the other, or of an adapter."""
        assert self.updates is not None
        dice, engines = self.updates, [*self.prefills, *self.decodes]
        weights = Weights(Tensors("1" * 32, str(dice.randrange(3)) * 32))
        for engine in dice.sample(engines, dice.choice([1, len(engines), len(engines)])):
            if engine not in self.cluster.running:
                continue
            if dice.random() < 0.7:
                engine.update(weights, is_known=dice.random() < 0.5)
            else:
                engine.load_again(1)

    def _upset(self) -> None:
        dice, cluster = self.dice, self.cluster
        engine = dice.choice([*self.prefills, *self.decodes])
        kind = dice.choice(["lose", "lose", "kill", "die", "vanish", "back", "back", "refuse", "accept"])
        if kind == "back":
            self._come_back()
        elif kind in ("refuse", "accept"):
            for worker in engine.workers:
                worker.agent.refuse_posts = kind == "refuse"
        elif engine not in cluster.running or dice.random() < 0.4:
            return
        elif kind == "lose":
            agent = dice.choice(engine.workers).agent
            if agent.peers:
                agent.lose(dice.choice(sorted(agent.peers)))
        elif kind == "vanish":
            cluster.vanish(engine)
        else:
            self._end(engine, at_once=kind == "kill")

    def _come_back(self) -> None:
        for engine in list(self.cluster.frozen):
            self.cluster.come_back(engine)

    def _end(self, engine: Engine, *, at_once: bool) -> None:
        """Ends an engine: its workers at once or a moment later. Most engines are started again."""
        cluster = self.cluster
        if at_once:
            cluster.kill(engine)
        else:
            cluster.stop_listening(engine)
            self.dying.append((cluster.clock.now_seconds() + DYING_SECONDS, engine))
        if self.dice.random() < 0.7:
            self._replace(engine, cluster.engine(engine.own.engine_id, engine.kind))

    def _replace(self, old: Engine, new: Engine) -> None:
        for engines in (self.prefills, self.decodes):
            engines[:] = [new if engine is old else engine for engine in engines]
        for task in self.tasks:
            if task.prefill is old and task.upstream is None:
                task.prefill = new
            if task.decode is old and not task.children:
                task.decode = new

    # ------------------------------------------------------------------------------------------------------- the end

    def finish(self) -> None:
        """Checks that every request ends in time and as it must, and that no state is left."""
        cluster = self.cluster
        self._calm_down()
        for _ in range(4):
            while self._unsent():
                self._route()
                cluster.settle()
            cluster.settle()
        # Requests that need all blocks run one after the other.
        self._wait((len(self.tasks) + 1) * (TIMEOUT_SECONDS + LEASE_SECONDS), lambda: not self._open())
        assert not self._open(), f"they never end: {self._open()}"
        for task in self.tasks:
            for child in task.children:
                self._judge(task, child)
        differing = [engine.own.engine_id for engine in cluster.engines if engine.failures.get(FailureCause.CHECKSUM)]
        assert not differing, f"other bytes than were sent came to {differing}"
        self._wait(FORGOTTEN_SECONDS, lambda: next(cluster.left(), None) is None)
        left = "\n".join(cluster.left())
        assert not left, left

    def _calm_down(self) -> None:
        """Brings every frozen engine back or kills it, so that each engine is alive or known to be dead."""
        for engine in [one for one in self.cluster.engines if one in self.cluster.frozen]:
            self.cluster.come_back(engine)
            if self.dice.random() < 0.3:
                self.cluster.kill(engine)
        self.limits = None
        for engine in self.prefills:
            if self.asks and engine not in self.cluster.alive:
                # Some wait for one that lives.
                self._replace(engine, self.cluster.engine(engine.own.engine_id, engine.kind))
        for engine in self.cluster.alive:
            engine.pool.limit_blocks = None
            for worker in engine.workers:
                worker.agent.refuse_posts = False

    def _wait(self, longest: float, is_reached: Callable[[], bool]) -> None:
        seconds = 0.0
        while not is_reached() and seconds < longest:
            slice_seconds = SLICE_SECONDS if seconds < 100 else 5 * SLICE_SECONDS
            self._advance(slice_seconds)
            self.cluster.settle()
            spinning = [one.own.engine_id for one in self.cluster.running if one.handover.pending]
            assert not spinning, f"{spinning} would step for nothing"
            seconds += slice_seconds

    def _unsent(self) -> list[Task]:
        return [task for task in self.tasks if task.has_to_be_sent and task.is_due]

    def _open(self) -> list[Request]:
        return [
            request
            for task in self.tasks
            for engine, requests in ((task.prefill, [task.upstream]), (task.decode, task.children))
            for request in requests
            if request is not None and engine in self.cluster.alive and not request.status.is_finished
        ]

    def _judge(self, task: Task, child: Request) -> None:
        kind = task.decode.kind
        if kind.recomputes and not kind.is_required and task.decode in self.cluster.alive:
            # Two that have their KV may each lack a block that the other one has.
            starved = task.decode.failures.keys() & {FailureCause.NO_BLOCKS, FailureCause.QUARANTINE}
            assert child.status is not Status.ERROR or not child.num_computed or starved, f"{child} has failed"
        if self.calm:
            assert child.status is Status.STOPPED, f"{child} has failed, and nothing was wrong"
            assert not task.decode.failures, f"{task.decode.failures}, and nothing was wrong"
