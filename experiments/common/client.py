# SPDX-License-Identifier: Apache-2.0
"""Client of the servers: completions with log-probabilities, the prefill/decode hand-over, and the KV probe."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from kvcached_nixl.wire.params import MANIFEST_KEY, name_of

T = TypeVar("T")
REQUEST_TIMEOUT_SECONDS = 180.0
LOOK_SECONDS = 0.02
TOP_LOGPROBS = 5
_IN_ENGINE = re.compile(r"cmpl-(.+)-0-[0-9a-f]{8}", re.DOTALL)
"""What vLLM makes of a client's request id."""


class AnswerError(RuntimeError):
    """A server's answer is an error or malformed, so it cannot be compared.

    Attributes:
        status: of HTTP, or the code of an error in a stream; 0 if there is none.
        retry_after: whether the answer says when to try again.
    """

    def __init__(self, text: str, status: int = 0, *, retry_after: bool = False) -> None:
        super().__init__(text)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Answer:
    """What a client receives: generated token ids, the log-probability of each, and of the best alternatives."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[str, float]] = field(default_factory=list)

    @property
    def lead(self) -> float:
        """The least lead of any token before the second best one, in nats."""
        ranked = [sorted(one.values(), reverse=True) for one in self.top_logprobs]
        return min((best - second for best, second, *_ in ranked), default=0.0)


@dataclass(frozen=True)
class HandOver:
    """One request through P and D.

    ``transfer`` is its name in the KV probe's records. ``sent_block_ids`` and ``sent_digests`` are per KV-cache group,
    read from P's memory while P kept the blocks for D; empty where only the records of P's probe have them (D asked P,
    or was asked first). If D asked P, ``transfer`` is the client's request id. ``record`` is what D's probe recorded.
    """

    answer: Answer
    transfer: str
    sent_block_ids: list[list[int]] = field(default_factory=list)
    sent_digests: list[list[str]] = field(default_factory=list)
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Offer:
    """What P keeps for D: the parameters of its answer, and its block ids and their digests per KV-cache group."""

    params: dict[str, Any]
    block_ids: list[list[int]]
    digests: list[list[str]]


def clients_id(request_id: str) -> str:
    """Return the client's id of a request, by the engine's id for it."""
    found = _IN_ENGINE.fullmatch(request_id)
    return found[1] if found else request_id


def offered_blocks(params: Mapping[str, Any]) -> list[list[int]]:
    """Return the block ids in P's answer, per group: of the manifest, or a stock server's ``remote_block_ids``."""
    manifest = params.get(MANIFEST_KEY)
    if manifest is not None:
        return [list(group["block_ids"]) for group in manifest["groups"]]
    return [list(group) for group in params.get("remote_block_ids") or []]


class Client:
    """An asynchronous client of one server; all requests name the same model (or adapter)."""

    def __init__(self, base_url: str, http: httpx.AsyncClient, model: str = "model") -> None:
        self.base_url = base_url
        self.http = http
        self.model = model

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        salt: str,
        request_id: str,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send one greedy completion and return the JSON answer; anything but HTTP 200 raises :class:`AnswerError`.

        ``salt`` separates prefix caches: requests share cached blocks only if their salts are equal.
        """
        more: dict[str, Any] = {"logprobs": TOP_LOGPROBS, "return_token_ids": True, "return_tokens_as_token_ids": True}
        if kv_transfer_params is not None:
            more["kv_transfer_params"] = kv_transfer_params
        reply = await self.http.post(**self._completion(prompt, max_tokens, salt, request_id, more))
        self._check(reply, reply.text, request_id)
        return dict(reply.json())

    async def streamed(self, prompt: list[int], *, max_tokens: int, salt: str, request_id: str) -> tuple[float, Answer]:
        """Stream one greedy completion; returns when its first token came, in ``time.perf_counter()`` seconds, and the
        answer."""
        # Not return_token_ids: the first part would have the whole prompt.
        more = {"logprobs": TOP_LOGPROBS, "return_tokens_as_token_ids": True}
        asked = self.stream(prompt, max_tokens=max_tokens, salt=salt, request_id=request_id, **more)
        parts = [one async for one in asked]
        said = [choice["logprobs"] for _, part in parts for choice in part["choices"] if choice["logprobs"]]
        keys = "tokens", "token_logprobs", "top_logprobs"
        found: dict[str, list[Any]] = {key: [one for part in said for one in part[key]] for key in keys}
        ids = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
        return parts[0][0], read_answer({"choices": [{"token_ids": ids, "logprobs": found}]}, max_tokens)

    async def stream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        salt: str,
        request_id: str,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """Send a greedy completion, with ``more`` in its body; yields when each part of its answer came, and the part.
        Raises AnswerError if that is an error, empty or cut short."""
        asked = self._completion(prompt, max_tokens, salt, request_id, {"stream": True, **more})
        asked["headers"] |= headers or {}
        words, is_empty = f"{self.base_url}, {request_id}", True
        async with self.http.stream("POST", **asked) as reply:
            text = "" if reply.is_success else (await reply.aread()).decode(errors="replace")
            self._check(reply, text, request_id)
            async for line in reply.aiter_lines():
                seconds, said = time.perf_counter(), line.removeprefix("data: ")
                if said == "[DONE]" and not is_empty:
                    return
                if said.startswith("{"):
                    part = json.loads(said)
                    if "error" in part:
                        code = str(part["error"].get("code"))
                        status = int(code) if code.isdigit() else 0
                        raise AnswerError(f"{words}: found an error in the stream: {said[:500]}", status)
                    is_empty = False
                    yield seconds, part
        raise AnswerError(f"{words}: found a stream {'without a token' if is_empty else 'that was cut short'}")

    def _check(self, reply: httpx.Response, text: str, what: str) -> None:
        if reply.status_code != httpx.codes.OK:
            said = f"{self.base_url} answered {reply.status_code} to {what}: {text[:2000]}"
            raise AnswerError(said, reply.status_code, retry_after="retry-after" in reply.headers)

    def _completion(
        self, prompt: Sequence[int], max_tokens: int, salt: str, request_id: str, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return httpx's arguments for a greedy completion; ``more`` is of the body."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "cache_salt": salt, **more}
        return {"url": f"{self.base_url}/v1/completions", "json": body, "headers": {"X-Request-Id": request_id}}

    async def offer(self, prompt: list[int], *, salt: str, request_id: str, **more: Any) -> dict[str, Any]:
        """Prefill ``prompt``, as a router asks for it, with ``more`` parameters; returns those for decode. Raises
        AnswerError if there are none."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, **more}
        answer = await self.complete(prompt, max_tokens=1, salt=salt, request_id=request_id, kv_transfer_params=params)
        offered: dict[str, Any] | None = answer.get("kv_transfer_params")
        if not offered:
            raise AnswerError(f"{request_id}: found no kv_transfer_params in prefill's answer; nothing is handed over.")
        return offered

    async def answer(self, prompt: list[int], *, max_tokens: int, salt: str, request_id: str) -> Answer:
        found = await self.complete(prompt, max_tokens=max_tokens, salt=salt, request_id=request_id)
        return read_answer(found, max_tokens)

    async def probe(self, method: str, *args: object) -> dict[str, Any]:
        """Call a KV-probe method on every worker; return the first worker's answer, which is the same for all."""
        return (await self.probe_ranks(method, *args))[0]

    async def probe_ranks(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Call a KV-probe method (see ``server_side/kv_probe.py``) on every worker; return each one's answer."""
        reply = await self.http.post(
            f"{self.base_url}/collective_rpc", json={"method": f"kv_probe_{method}", "args": list(args)}
        )
        self._check(reply, reply.text, method)
        results: list[dict[str, Any]] = reply.json()["results"]
        if not results or not all(isinstance(one, dict) for one in results):
            raise AnswerError(f"{method}: found {results!r}; expected an answer from every worker.")
        return results


def joined(digests: Sequence[list[list[str]]]) -> list[list[str]]:
    """Return one digest per block and KV-cache group, joined from the digests of all ranks' parts of the block."""
    return [["+".join(parts) for parts in zip(*groups, strict=True)] for groups in zip(*digests, strict=True)]


def read_answer(reply: dict[str, Any], max_tokens: int) -> Answer:
    """Return the comparable part of a completion; raises :class:`AnswerError` if it is too short or malformed."""
    choice = reply["choices"][0]
    said = choice["logprobs"]
    answer = Answer(list(choice["token_ids"]), list(said["token_logprobs"]), list(said["top_logprobs"]))
    if not len(answer.token_ids) == len(answer.logprobs) == max_tokens:
        raise AnswerError(
            f"found {len(answer.token_ids)} tokens with {len(answer.logprobs)} log-probabilities; "
            f"expected {max_tokens} (finish_reason {choice.get('finish_reason')!r})."
        )
    return answer


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server. Does what a router does between them, or asks decode, which asks prefill.

    ``coordinates`` is P's address for D; needed where D is asked first. ``keeps_blocks``: P's blocks keep the offered
    KV until D has it, so the client can read them; otherwise only the records of P's probe have their digests.
    """

    prefill: Client
    decode: Client
    coordinates: Mapping[str, object] = field(default_factory=dict)
    keeps_blocks: bool = True
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)

    async def prefill_only(self, prompt: list[int], *, salt: str, request_id: str) -> Offer:
        """Prefill on P and read the digests of the blocks that it now keeps for D."""
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        offered = await self.prefill.offer(prompt, salt=salt, request_id=request_id, **unknown)
        if not (block_ids := offered_blocks(offered)):
            raise AnswerError(
                f"{request_id}: found no blocks in P's answer ({offered!r}); expected kv_transfer_params with "
                "a manifest or remote_block_ids. D would silently compute the prompt itself. See P's log."
            )
        ranks = await self.prefill.probe_ranks("digests", block_ids) if self.keeps_blocks else []
        return Offer(offered, block_ids, joined([rank["digests"] for rank in ranks]))

    async def decode_offered(
        self, offer: Offer, prompt: list[int], *, max_tokens: int, salt: str, request_id: str
    ) -> HandOver:
        params = offer.params
        decoded = await self.decode.complete(
            prompt, max_tokens=max_tokens, salt=salt, request_id=request_id, kv_transfer_params=params
        )
        transfer = name_of(params, "") if params.get("transfer_mode") == "push" else params["remote_request_id"]
        return HandOver(read_answer(decoded, max_tokens), transfer, offer.block_ids, offer.digests)

    async def hand_over(self, prompt: list[int], *, max_tokens: int, salt: str, request_id: str) -> HandOver:
        offer = await self.prefill_only(prompt, salt=salt, request_id=request_id)
        return await self.decode_offered(offer, prompt, max_tokens=max_tokens, salt=salt, request_id=request_id)

    async def asked(self, prompt: list[int], *, max_tokens: int, salt: str, request_id: str) -> HandOver:
        """Ask D, as any client does; D asks P."""
        answer = await self.decode.answer(prompt, max_tokens=max_tokens, salt=salt, request_id=request_id)
        return HandOver(answer, request_id)

    async def decode_first(self, prompt: list[int], *, max_tokens: int, salt: str, request_id: str) -> HandOver:
        """Ask D, wait until its connector has registered the request, and only then ask P."""
        transfer = {"transfer_id": request_id}
        params = {**self.coordinates, **transfer, "do_remote_prefill": True}
        asked = self.decode.complete(
            prompt, max_tokens=max_tokens, salt=salt, request_id=f"{request_id}-decode", kv_transfer_params=params
        )
        decoding, name = asyncio.create_task(asked), name_of(transfer, "")
        try:
            while not decoding.done():
                # One call at a time: vLLM takes no step while calls wait in its queue.
                async with self._looking:
                    pending = (await self.decode.probe("pending"))["pending"]
                if name in pending:
                    params = {**transfer, "do_remote_decode": True}
                    of_prefill = {"salt": salt, "request_id": f"{request_id}-prefill", "kv_transfer_params": params}
                    await self.prefill.complete(prompt, max_tokens=1, **of_prefill)
                    break
                await asyncio.sleep(LOOK_SECONDS)
            # Raises if D answered with an error. If D did not wait for P, the caller reports the missing record.
            return HandOver(read_answer(await decoding, max_tokens), name)
        finally:
            decoding.cancel()


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=2.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


async def at_a_time(limit: int, calls: Iterable[Awaitable[T]]) -> list[T]:
    free = asyncio.Semaphore(limit)

    async def one(call: Awaitable[T]) -> T:
        async with free:
            return await call

    return list(await asyncio.gather(*map(one, calls)))


async def answers_of(
    url: str, prompts: Sequence[list[int]], max_tokens: int, name: str, limit: int = 1, salts: Sequence[str] = ()
) -> list[Answer]:
    """Return a server's answer to each prompt, without a hand-over. ``name``: of these prompts, for ids, and for salts
    if none are given."""
    names = [f"{name}-{number}" for number in range(len(prompts))]
    async with http_client(limit) as http:
        client = Client(url, http)
        asked = zip(prompts, names, salts or names, strict=True)
        answers = (client.answer(each, max_tokens=max_tokens, salt=salt, request_id=one) for each, one, salt in asked)
        return await at_a_time(limit, answers)


def http_client(concurrency: int) -> httpx.AsyncClient:
    """Return a client for ``concurrency`` requests at a time, without TLS: loading certificates takes 25 ms. It ignores
    proxy settings of the environment."""
    return httpx.AsyncClient(
        timeout=REQUEST_TIMEOUT_SECONDS,
        trust_env=False,
        verify=False,
        limits=httpx.Limits(max_connections=4 * concurrency + 8, max_keepalive_connections=0),
    )
