# SPDX-License-Identifier: Apache-2.0
"""A run of a pair in which anything may happen next; the same seed is the same run."""

from __future__ import annotations

import random
from collections.abc import Callable

from push_pair import Pair

from kvcached_nixl.ids import PrefillRequestId


class Chaos:
    """Draws what happens next. What cannot happen just now is passed over."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.pair = Pair()
        names = [str(number) for number in range(self.dice.randint(1, 3))]
        self.prompts = {name: (number + 1, self.dice.randint(1, 24)) for number, name in enumerate(names)}
        self.unregistered, self.unstarted = list(names), list(names)
        self.running: list[PrefillRequestId] = []
        self.registered: set[str] = set()
        self._frequent: list[Callable[[], None]] = [
            *[self.network] * 4,
            *[self.pair.step] * 4,
            self.register,
            self.start,
            self.compute,
            self.time,
            self.upset,
        ]

    def happen(self) -> None:
        self.dice.choice(self._frequent)()

    def register(self) -> None:
        if self.unregistered and self.pair.alive[1]:
            name = self.unregistered.pop()
            prompt, tokens = self.prompts[name]
            self.pair.decode.register(name, prompt, tokens, name, self.dice.choice([0, 0, 4]) if tokens > 4 else 0)
            self.registered.add(name)

    def start(self) -> None:
        if self.unstarted and self.pair.alive[0]:
            name = self.unstarted.pop()
            self.running.append(self.pair.prefill.start(f"p{name}", *self.prompts[name], name))

    def compute(self) -> None:
        if self.running and self.pair.alive[0]:
            request = self.dice.choice(self.running)
            self.pair.prefill.compute(request, self.dice.randint(1, 9))
            if self.pair.prefill.requests[request].over:
                self.running.remove(request)

    def compute_the_rest(self) -> None:
        while self.running and self.pair.alive[0]:
            self.compute()

    def network(self) -> None:
        network = self.pair.network
        if not network.pending:
            return
        operation = self.dice.choice(network.pending[-4:])
        kind = self.dice.choice([*["deliver"] * 6, "drop", "fail", "double"])
        if kind == "deliver":
            network.deliver(operation)
        elif kind == "drop":
            network.drop(operation)
        elif kind == "fail":
            network.fail(operation, moved=self.dice.random())
        elif not operation.is_write:
            network.notify(operation)

    def time(self) -> None:
        self.pair.clock.advance(self.dice.choice([1.0, 10.0, 40.0]))

    def upset(self) -> None:
        pair, kind = self.pair, self.dice.choice(["abort prefill", "abort decode", "preempt", "kill"])
        prefill_lives, decode_lives = pair.alive
        if kind == "abort decode" and pair.decode.requests and decode_lives:
            pair.decode.abort(self.dice.choice(list(pair.decode.requests)))
        elif kind == "abort prefill" and self.running and prefill_lives:
            pair.prefill.abort(self.running.pop())
        elif kind == "preempt" and self.running and prefill_lives and len(pair.prefill.pool.free) > 24:
            pair.prefill.preempt(self.dice.choice(self.running))
        elif kind == "kill" and prefill_lives and decode_lives and self.dice.random() < 0.3:
            pair.network.kill(self.dice.choice(["prefill", "decode"]))
