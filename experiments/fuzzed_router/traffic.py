# SPDX-License-Identifier: Apache-2.0
"""Sends malformed and valid requests to routers in front of a pair of servers, and judges each answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from experiments.common.client import Client, http_client
from experiments.common.servers import free_ports
from experiments.fuzzed_parameters.sets import Drawn, draw
from experiments.fuzzed_parameters.traffic import silent_listener
from experiments.fuzzed_router import answers, bodies, messages
from experiments.fuzzed_router.answers import Reply, Said, Unreadable
from experiments.fuzzed_router.bodies import Body
from experiments.fuzzed_router.connection import exchange, idling
from experiments.fuzzed_router.messages import Case, Expects, Message

__all__ = ["FINE", "Found", "Fuzz"]

AT_A_TIME = 16
IDLE_CONNECTIONS = 100
"""Of clients that send nothing, or half a head, to each router all the time."""
HANG_SECONDS = 60.0
RENEWED_EVERY = 50
"""Requests between two checks that the servers are alive, and between two requests for new parameters of prefill."""
KEPT_ANSWERS = 24
KEPT_MISSED = 20
SHOWN_BYTES = 4000
SHARES = (("valid", 20), ("odd", 30), ("mutated", 20), ("params", 15), ("http", 15))
"""Percentage of each kind of request."""
FINE = ("right", "refused", "not compared", "the server's own", "no HTTP", "served")
"""Verdicts that do not miss a target. "not compared": 200 where sampling is random. "the server's own": a failure that
the server itself returns for the same body. "no HTTP": 4xx or a closed connection for data that is not HTTP. "served":
an answer of an endpoint other than completions."""


@dataclass
class Found:
    """Results of the requests.

    Attributes:
        missed: the first requests with a verdict that is not in `FINE`.
        last: the last requests sent, to find the one that ended a server.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    by_change: Counter[str] = field(default_factory=Counter)
    valid: int = 0
    valid_right: int = 0
    missed: list[dict[str, Any]] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=2 * AT_A_TIME))

    @property
    def missed_count(self) -> int:
        return sum(count for verdict, count in self.verdicts.items() if verdict not in FINE)


class Fuzz:
    """Requests to two routers in front of one pair of servers.

    Args:
        plain, trusting: URLs of a router with default options, and of one that accepts clients' parameters.
        check_alive: raises if a server has ended.
    """

    def __init__(
        self,
        prefill: str,
        decode: str,
        plain: str,
        trusting: str,
        mode: str,
        seed: int,
        progress: Callable[[str], None],
        check_alive: Callable[[], None],
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.plain, self.trusting = (urlsplit(one).port or 80 for one in (plain, trusting))
        self.mode, self.seed = mode, seed
        self.random = random.Random(seed)
        self.progress, self.check_alive = progress, check_alive
        self.valid = bodies.valid()
        self.known: list[Said] = []
        self.prompts = [
            place
            for place, (_, one) in enumerate(self.valid)
            if set(one) == _PLAIN_FIELDS and len(one["prompt"]) >= _HANDED_LENGTH
        ]
        self.offers: list[tuple[int, str, dict[str, Any]]] = []
        self.numbers = itertools.count()
        self.found = Found()

    async def run(self, count: int) -> Found:
        """Send ``count`` requests, some of them valid; then each router must serve every valid one correctly.

        Raises:
            ServerError: a server has ended.
            AssertionError: decode alone does not answer a valid request, or a router does not do so at the end.
        """
        async with http_client(AT_A_TIME) as http:
            for path, fields in self.valid:
                content = bodies.encode(bodies.salted(fields, self._salt()))
                reply = await self._direct(http, path, self._for_alone(content))
                assert reply.status == httpx.codes.OK, f"decode alone answers {fields}: {reply.body[:500]!r}"
                self.known.append(answers.read(reply))
            async with idling((self.plain, self.trusting), IDLE_CONNECTIONS):
                await self._ask_all(http, count)
            self.check_alive()
            for place, port in itertools.product(range(len(self.valid)), (self.plain, self.trusting)):
                verdict, detail = await self._ask(http, port, messages.plain(self._body(place), Expects.RIGHT))
                assert verdict == "right", f"{self.valid[place]} at the end: {verdict} {detail}"
        return self.found

    async def _ask_all(self, http: httpx.AsyncClient, count: int) -> None:
        with silent_listener() as silent:
            ports = [*free_ports(1), silent]
            places = asyncio.Semaphore(AT_A_TIME)
            asked: set[asyncio.Task[None]] = set()
            try:
                for number in range(count):
                    if number % RENEWED_EVERY == 0:
                        self.check_alive()
                        await self._renew_offers(http)
                        self.progress(f"{number} of {count}: {dict(self.found.verdicts)}")
                    await places.acquire()
                    # Drawn here, not in the task: the order in which requests end must not change what is drawn.
                    task = asyncio.create_task(self._one(http, *self._draw(ports), places))
                    asked.add(task)
                    task.add_done_callback(asked.discard)
                await asyncio.gather(*asked)
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

    # ----------------------------------------------------------------------------------------------------------- draw

    def _draw(self, ports: Sequence[int]) -> tuple[int, Case]:
        """Return a router's port, and the connection to make."""
        kinds, weights = zip(*SHARES, strict=True)
        (kind,) = self.random.choices(kinds, weights)
        if kind == "valid":
            port = self.random.choice((self.plain, self.plain, self.trusting))
            return port, messages.plain(self._body(self.random.randrange(len(self.valid))), Expects.RIGHT)
        if kind == "params":
            return self.random.choice((self.plain, self.trusting, self.trusting)), self._params(ports)
        if kind == "http":
            valid = [self._body(self.random.randrange(len(self.valid))) for _ in range(3)]
            return self.plain, messages.odd_http(self.random, valid)
        make = bodies.odd if kind == "odd" else bodies.mutated
        # Never to the trusting router: it could let decode compute a million sequences.
        return self.plain, messages.plain(make(self.random, self.valid, self._salt()), Expects.RIGHT_OR_REFUSED)

    def _body(self, place: int) -> Body:
        path, fields = self.valid[place]
        return Body("valid", path, bodies.encode(bodies.salted(fields, self._salt())), place)

    def _params(self, ports: Sequence[int]) -> Case:
        """Return a valid request with parameters from the client, made from parameters that prefill has answered."""
        place, salt, offer = self.random.choice(self.offers)
        others = [one for *_, one in self.random.sample(self.offers, min(4, len(self.offers)))]
        drawn = draw(self.random, [offer, offer, offer, *others], [*ports, int(offer["remote_port"])])
        if self.random.random() < 0.1:
            drawn = Drawn(offer, 1, "none")
        if self.random.random() < 0.3:
            place = self.random.choice(self.prompts)
        path, fields = self.valid[place]
        content = bodies.encode({**bodies.salted(fields, salt), "kv_transfer_params": drawn.params})
        changes = "+".join(sorted(set(drawn.change.split("+"))))
        return messages.plain(Body(f"params {changes}", path, content, place), Expects.RIGHT_OR_REFUSED)

    def _salt(self) -> str:
        """Return a new salt. All have one length, so that `_for_alone` can replace them without changing lengths."""
        return f"s{self.seed:04d}-{next(self.numbers):08d}"

    async def _renew_offers(self, http: httpx.AsyncClient) -> None:
        prefill = Client(self.prefill, http)
        for place in self.random.sample(self.prompts, 4):
            salt = self._salt()
            asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
            if self.mode == "push":
                asked["transfer_id"] = salt
            fields = {**bodies.salted(self.valid[place][1], salt), "max_tokens": 1, "kv_transfer_params": asked}
            reply = await prefill.http.post(f"{prefill.base_url}{bodies.COMPLETIONS}", json=fields)
            offer = reply.json().get("kv_transfer_params") if reply.status_code == httpx.codes.OK else None
            assert offer, f"prefill answers {reply.status_code} without kv_transfer_params: {reply.text[:500]}"
            self.offers = [*self.offers, (place, salt, offer)][-KEPT_ANSWERS:]

    # ------------------------------------------------------------------------------------------------------------ ask

    async def _one(self, http: httpx.AsyncClient, port: int, case: Case, places: asyncio.Semaphore) -> None:
        found, sent = self.found, b"".join(case.pieces)
        try:
            found.last.append(sent[:SHOWN_BYTES].decode("latin-1"))
            verdict, detail = await self._ask(http, port, case)
            found.verdicts[verdict] += 1
            found.by_change[f"{case.change}: {verdict}"] += 1
            if case.change == "valid":
                found.valid += 1
                found.valid_right += verdict == "right"
            if verdict not in FINE and len(found.missed) < KEPT_MISSED:
                router = "plain" if port == self.plain else "trusting"
                shown = {"sent": sent[:SHOWN_BYTES].decode("latin-1"), "sent bytes": len(sent)}
                found.missed.append(
                    {"verdict": verdict, "change": case.change, "router": router, "detail": detail, **shown}
                )
        finally:
            places.release()

    async def _ask(self, http: httpx.AsyncClient, port: int, case: Case) -> tuple[str, str]:
        """Return the verdict on a connection's requests: of the first that is not in `FINE`, else of the last."""
        try:
            heard = await exchange(port, case, HANG_SECONDS)
            said = answers.replies(heard, [one.method for one in case.messages])
            found = [answers.without_waits(one) for one in said]
        except asyncio.TimeoutError:
            return "no end", ""
        except OSError as error:
            return "no connection", repr(error)
        except Unreadable as error:
            return "broken off", str(error)
        try:
            return await self._judge_all(http, case, found)
        except httpx.HTTPError as error:
            return "no answer of decode alone", repr(error)

    async def _judge_all(self, http: httpx.AsyncClient, case: Case, found: Sequence[Reply]) -> tuple[str, str]:
        if case.messages[0].expects is Expects.NO_HTTP:
            statuses = [one.status for one in found]
            is_fine = all(400 <= one < 500 for one in statuses)
            return ("no HTTP", "") if is_fine else (f"no HTTP, but {statuses}", str(found[-1].body[:500]))
        verdict, detail = "dropped", "no answer"
        for message, reply in itertools.zip_longest(case.messages, found):
            if message is None:
                return "an answer too many", str(reply)[:500]
            if reply is None:
                is_said = bool(found) and found[-1].is_last
                return (verdict, detail) if is_said else ("dropped", f"{len(found)} of {len(case.messages)} answers")
            verdict, detail = await self._judge(http, message, reply)
            if verdict not in FINE:
                break
        return verdict, detail

    async def _judge(self, http: httpx.AsyncClient, message: Message, reply: Reply) -> tuple[str, str]:
        expects, status, said = message.expects, reply.status, str(reply.body[:500])
        if expects is Expects.SERVED:
            return ("served", "") if status < 500 else (f"HTTP {status}", said)
        if status == httpx.codes.OK and expects is not Expects.REFUSED:
            return await self._compare(http, message.body, reply)
        if 400 <= status < 500 and expects is not Expects.RIGHT:
            if message.method == "HEAD" or answers.says_error(reply):
                return "refused", ""
        elif expects is not Expects.RIGHT_OR_REFUSED or status < 500:
            return f"HTTP {status}, expected {expects.value}", said
        direct = await self._direct(http, message.body.path, message.body.content)
        if answers.is_same_failure(reply, direct):
            return "the server's own", ""
        return f"HTTP {status}", f"{said}; decode alone answers {direct.status} {direct.body[:500]!r}"

    async def _compare(self, http: httpx.AsyncClient, body: Body, reply: Reply) -> tuple[str, str]:
        """Compare a 200 with the answer of decode alone."""
        try:
            said = answers.read(reply)
        except Unreadable as error:
            direct = await self._direct(http, body.path, body.content)
            is_own = direct.status == httpx.codes.OK and b'"error"' in direct.body and b'"error"' in reply.body
            return ("the server's own", "") if is_own else ("no answer", f"{error}: {reply.body[-500:]!r}")
        if body.known is not None:
            expected = self.known[body.known]
        elif not answers.is_determined(body.content):
            return "not compared", ""
        else:
            direct = await self._direct(http, body.path, self._for_alone(body.content))
            try:
                expected = answers.read(direct)
            except Unreadable:
                return "answered, not by decode alone", f"{said}; {direct.status} {direct.body[:500]!r}"
        return ("right", "") if answers.agrees(said, expected) else ("wrong", f"found {said}, expected {expected}")

    def _for_alone(self, content: bytes) -> bytes:
        """Return the body for decode alone: with another salt, so that no block that was handed over is reused, and
        without the router's fields."""
        content = content.replace(f'"s{self.seed:04d}-'.encode(), f'"a{self.seed:04d}-'.encode())
        if any(name.encode() in content for name in _ROUTERS_OWN):
            fields = json.loads(content)
            content = bodies.encode({key: value for key, value in fields.items() if key not in _ROUTERS_OWN})
        return content

    async def _direct(self, http: httpx.AsyncClient, path: str, content: bytes) -> Reply:
        reply = await http.post(f"{self.decode}{path}", content=content, headers={"Content-Type": "application/json"})
        return Reply(reply.status_code, dict(reply.headers), reply.content)


_HANDED_LENGTH = 33
"""Least length of a prompt that has a full block to hand over."""
_PLAIN_FIELDS = {"model", "prompt", "max_tokens", "temperature", "ignore_eos"}
_ROUTERS_OWN = ("request_id", "kv_transfer_params", "prefix_prompt_ids")
