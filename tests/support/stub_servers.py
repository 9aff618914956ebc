# SPDX-License-Identifier: Apache-2.0
"""Servers with vLLM's HTTP interface, on real sockets, with the faults that a test chooses. They compute nothing.

The tokens of an answer follow from the prompt, so a wrong answer shows. Servers that share a `Fabric` can hand over:
decode accepts parameters only if a prefill of its fabric made them for the same prompt or has that ``transfer_id``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvcached_nixl.wire.manifest import PROTOCOL

HOST = "127.0.0.1"
END = b"data: [DONE]\n\n"


def prompt_of(body: dict[str, Any]) -> str:
    return json.dumps(body.get("prompt", body.get("messages")))


HAND_OVER_FAILED = "KV hand-over failed: cause=lease attempt=7 request=cmpl-d-1 prefill_request=cmpl-p-1"
"""As a decode server says it of one whose KV has not come (fault ``kv``)."""


def reason_of(fault: str) -> str | None:
    """Returns the finish reason of an answer."""
    reason = fault.removeprefix("reason ") if fault.startswith("reason ") else "length"
    return None if reason == "none" else reason


def tokens_of(body: dict[str, Any]) -> list[str]:
    """Returns the tokens that the model generates for a prompt."""
    count = body.get("max_completion_tokens") or body.get("max_tokens") or 4
    seed = hashlib.sha256(prompt_of(body).encode()).hexdigest()
    return [f"t{seed[place % 60 : place % 60 + 4]} " for place in range(count)]


@dataclass
class Asked:
    """One POST that a server received."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    was_computed: bool = False
    was_cut: bool = False
    rank: int = 0

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}


@dataclass
class Fabric:
    """The KV that prefill servers keep for decode, as digests of prompts."""

    offers: dict[str, str] = field(default_factory=dict)
    pushed: dict[str, asyncio.Future[str]] = field(default_factory=dict)

    def meeting(self, engine_id: str, transfer_id: str) -> asyncio.Future[str]:
        """Returns the future through which this prefill engine gives the digest to decode under a ``transfer_id``."""
        return self.pushed.setdefault(f"{engine_id} {transfer_id}", asyncio.get_running_loop().create_future())


class Stub:
    """One server. Each POST takes one of ``faults`` (see `_misbehave`); ``token_seconds`` pass between tokens.

        Each request is answered only after up to ``most_delay_seconds``. A server with a ``model_id`` says it in its
        metrics, and takes no KV of another model. So does one with ``tokens_of_memory``: free, used and queued, numbers
        or text; and prefill answers with its ``headroom``.

    With ``ranks`` 0 it is one engine without data parallelism. Otherwise engine ids end in ``_dp`` and a number that
        starts at ``first_rank``, and the header that names a rank counts from 0, as with vLLM's hybrid load balancing.
        Without the header, or with ``heeds_ranks`` False, a rank is drawn at random.
    """

    def __init__(self, fabric: Fabric, *, pushes: bool = False, engine_id: str | None = None) -> None:
        self.fabric = fabric
        self.pushes = pushes
        self.engine_id = engine_id or secrets.token_hex(4)
        self.start_number = secrets.token_hex(8)
        self.ranks = 0
        self.first_rank = 0
        self.heeds_ranks = True
        self.restarted_ranks: dict[int, int] = {}
        self._draw = random.Random(7)
        self.faults: deque[str] = deque()
        self.asked: list[Asked] = []
        self.token_seconds = 0.0
        self.prefill_seconds = 0.0
        self.refusal_seconds = 0.0
        self.is_healthy = True
        self.stands_still = False
        self.answers_no_checks = False
        self.most_delay_seconds = 0.0
        self.metrics_text = ""
        self.metrics_seconds = 0.0
        self.tokens_of_memory: tuple[object, object, object] | None = None
        self.model_id = 0
        self.cached_tokens: int | None = None
        self.headroom: object = None
        self.usage: dict[str, int] | None = None
        self.failures = 0
        self.pad_bytes = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def name(self) -> str:
        return f"{HOST}:{self.port}"

    async def start(self) -> None:
        """Starts to listen, on its earlier port if it had one."""
        self._server = await asyncio.start_server(self._serve, HOST, self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops as if it were killed: connections are reset."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_listening(self) -> None:
        """Accepts no connection any more, and leaves those that are open as they are."""
        assert self._server is not None
        self._server.close()

    async def restart(self, *, engine_id: str | None = None) -> None:
        """Stops and starts again at the same address, with another incarnation."""
        await self.stop()
        self.start_number = secrets.token_hex(8)
        self.engine_id = engine_id or self.engine_id
        self.fabric.offers.clear()
        await self.start()

    # ------------------------------------------------------------------------------------------------------------ HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                pairs = [line.partition(":") for line in head[1:] if line]
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if self.stands_still or (self.answers_no_checks and path == "/health"):
                    await asyncio.sleep(3600)
                if self.most_delay_seconds:
                    await asyncio.sleep(self._draw.uniform(0, self.most_delay_seconds))
                if method == "GET":
                    await self._get(path, writer)
                else:
                    await self._post(Asked(path, headers, json.loads(body)), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            await self._whole(writer, 200 if self.is_healthy else 503, b"")
        elif path == "/metrics":
            await asyncio.sleep(self.metrics_seconds)
            line = f'kvcached_nixl:handover_failures_total{{cause="lost"}} {self.failures}\n'
            for name, tokens in zip(("free", "used", "queued"), self.tokens_of_memory or (), strict=False):
                line += f"kvcached_nixl:{name}_tokens {tokens}\n"
            await self._whole(writer, 200, (self.metrics_text or line + self._kind()).encode(), "text/plain")
        elif path == "/v1/models":
            await self._json(writer, 200, {"object": "list", "data": [{"id": "model", "object": "model"}]})
        else:
            await self._json(writer, 404, {"detail": "Not Found"})

    def _kind(self) -> str:
        if not self.model_id:
            return ""
        values = {"compatibility": 1.0, "checkpoint": 2.0**51 + self.model_id, "weights": float(self.port)}
        return "".join(f'kvcached_nixl:{name}_id{{engine="0"}} {value}\n' for name, value in values.items())

    def _digest(self, asked: Asked) -> str:
        return hashlib.blake2b(f"{self.model_id} {prompt_of(asked.body)}".encode(), digest_size=16).hexdigest()

    async def _post(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(asked)
        leaving = asyncio.create_task(reader.read(1))
        working = asyncio.create_task(self._answer(asked, writer))
        try:
            await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                asked.was_cut = True
                raise ConnectionResetError
            await working
        finally:
            for task in (leaving, working):
                task.cancel()
            await asyncio.gather(leaving, working, return_exceptions=True)

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        fault = self.faults.popleft() if self.faults else ""
        if fault and await self._misbehave(fault, asked, writer):
            return
        if not self._assign(asked):
            named = asked.headers["x-data-parallel-rank"]
            await self._error(writer, 400, f"data_parallel_rank {named} is out of range [0, {max(1, self.ranks)}).")
        if asked.params.get("do_remote_decode"):
            await asyncio.sleep(self.prefill_seconds)
            await self.answer_prefill(fault, asked, writer)
        else:
            await self.answer_decode(fault, asked, writer)

    def _assign(self, asked: Asked) -> bool:
        """Chooses the rank that computes. Returns False if the header names a rank that does not exist."""
        named = asked.headers.get("x-data-parallel-rank") if self.heeds_ranks else None
        if named is not None:
            asked.rank = int(named)
        else:
            asked.rank = self._draw.randrange(max(1, self.ranks))
        return 0 <= asked.rank < max(1, self.ranks)

    def start_of(self, rank: int) -> str:
        if not self.ranks:
            return self.start_number
        drawn = f"{self.start_number} {rank} {self.restarted_ranks.get(rank, 0)}"
        return hashlib.blake2b(drawn.encode(), digest_size=8).hexdigest()

    def engine_of(self, rank: int) -> str:
        """Returns the engine id of a rank. It changes when only that rank is restarted."""
        again = self.restarted_ranks.get(rank, 0)
        name = self.engine_id + (f"+{again}" if again else "")
        return f"{name}_dp{self.first_rank + rank}" if self.ranks else name

    async def _misbehave(self, fault: str, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        """Applies a fault to a POST. Returns whether the answer is complete."""
        if fault == "close":
            raise ConnectionResetError
        if fault == "hang":
            await asyncio.sleep(3600)
        status, _, message = fault.partition(" ")
        if status.isdigit():
            await asyncio.sleep(self.refusal_seconds)
            await self._error(writer, int(status), (message or f"said {fault}") + "x" * self.pad_bytes)
        if fault == "garbage":
            await self._whole(writer, 200, b'{"kv_transfer_params": {"remote_port": "x"', "application/json")
            return True
        if fault == "garbage params":
            await self._json(writer, 200, {"kv_transfer_params": {"do_remote_prefill": True, "remote_port": "x"}})
            return True
        if fault == "whole":
            # In one piece, whatever was asked for.
            asked.body["stream"] = False
        if fault == "half head":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
            raise ConnectionResetError
        if fault == "no http":
            writer.write(b"\x00\x01\x02 what is this\r\n\r\n")
            raise ConnectionResetError
        if fault in ("endless", "comments", "bad chunk"):
            await self._send_without_end(fault, asked, writer)
        return False

    async def _send_without_end(self, fault: str, asked: Asked, writer: asyncio.StreamWriter) -> None:
        kind = b"text/event-stream" if fault == "comments" or asked.body.get("stream") else b"application/json"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % kind)
        if fault == "bad chunk":
            writer.write(b"5\r\ndata:\r\nzzz\r\n")
            await asyncio.sleep(3600)
        piece = b"x" * 65536 if fault == "endless" else b": nothing\n\n" * 6000
        while True:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()

    # ----------------------------------------------------------------------------------------------------------- roles

    async def answer_prefill(self, fault: str, asked: Asked, writer: asyncio.StreamWriter) -> None:
        params = None if fault == "no params" else self.offer(asked)
        choices = [{"index": 0, "text": "".join(tokens_of(asked.body)), "finish_reason": "length"}]
        await self._json(writer, 200, {"id": "cmpl", "choices": choices, "kv_transfer_params": params})

    def offer(self, asked: Asked) -> dict[str, Any]:
        request_id = f"cmpl-{asked.headers['x-request-id']}-0-{secrets.token_hex(4)}"
        digest = self._digest(asked)
        self.fabric.offers[request_id] = digest
        transfer_id = asked.params.get("transfer_id")
        engine_id = self.engine_of(asked.rank)
        if self.pushes and transfer_id and not (meeting := self.fabric.meeting(engine_id, transfer_id)).done():
            meeting.set_result(digest)
        return {
            **{"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id},
            "transfer_mode": "push" if self.pushes else "pull",
            "remote_request_id": request_id,
            "remote_block_ids": [[]],
            "remote_engine_id": engine_id,
            "remote_host": HOST,
            "remote_port": 5600 + self.first_rank + asked.rank,
            "tp_size": 1,
            **({} if self.cached_tokens is None else {"remote_prefill_cached_tokens": self.cached_tokens}),
            **({} if self.headroom is None else {"kvcached_nixl_headroom": self.headroom}),
            "something_new": {"kept": [1, 2.50]},
            "kvcached_nixl": {
                **{
                    "protocol": PROTOCOL,
                    "incarnation": self.start_of(asked.rank),
                    "request_id": request_id,
                    "digest": digest,
                },
                **{
                    "num_tokens": 1,
                    "block_sizes": [16],
                    "context_parallel": [1, 1],
                    "lease_seconds": 30.0,
                    "num_media": 0,
                },
                "groups": [{"first_token": 0, "block_ids": [7]}],
            },
        }

    async def answer_decode(self, fault: str, asked: Asked, writer: asyncio.StreamWriter) -> None:
        digest = self._digest(asked)
        params, given = asked.params, None
        if params.get("do_remote_prefill"):
            if fault == "unmet":
                fault = "kv"
                given = digest
            elif "kvcached_nixl" in params:
                given = self.fabric.offers.pop(params["remote_request_id"], None)
            else:
                given = await self.fabric.meeting(params["remote_engine_id"], params["transfer_id"])
            if given != digest:
                fault = "kv"
        asked.was_computed = given is None
        is_chat = asked.path.endswith("chat/completions")
        if asked.body.get("stream"):
            await self._stream(fault, asked, writer, is_chat)
        elif fault == "kv":
            await self._json(writer, 500, {"error": {"message": f"{HAND_OVER_FAILED}.", "code": 500}})
        else:
            tokens = tokens_of(asked.body)
            await asyncio.sleep(self.token_seconds * len(tokens))
            text = "".join(tokens)
            said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            answer = {"id": asked.headers["x-request-id"], "object": "x", "model": "model", "created": 1}
            said["pad"] = "x" * self.pad_bytes
            choices = [{"index": 0, "finish_reason": reason_of(fault), **said}] if fault != "no tokens" else []
            if fault == "half body":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
                await writer.drain()
                raise ConnectionResetError
            usage = {} if self.usage is None else {"usage": self.usage}
            await self._json(writer, 200, answer | usage | {"choices": choices, "kv_transfer_params": None})

    async def _stream(self, fault: str, asked: Asked, writer: asyncio.StreamWriter, is_chat: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")

        def event(choice: dict[str, Any]) -> bytes:
            said = {"id": "x", "object": "x", "model": "model", "created": 1, "choices": [{"index": 0, **choice}]}
            return b"data: " + json.dumps(said).encode() + b"\n\n"

        async def send(piece: bytes) -> None:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()

        failed = {"error": {"message": HAND_OVER_FAILED, "type": "x", "param": None, "code": 500}}
        error = b"data: " + json.dumps(failed).encode() + b"\n\n"
        if is_chat:
            await send(event({"delta": {"role": "assistant", "content": ""}}))
        is_whole = fault != "kv"
        tokens = tokens_of(asked.body) if fault not in ("kv", "no events", "no tokens") else []
        reasons = [None] * (len(tokens) - 1) + [reason_of(fault)]
        for place, (token, reason) in enumerate(zip(tokens, reasons, strict=False)):
            await asyncio.sleep(self.token_seconds)
            whole = event(
                {"text": token, "delta": {"content": token}, "finish_reason": reason, "pad": "x" * self.pad_bytes}
            )
            if fault.endswith(f" {place}") and not (is_whole := await self._break(fault.split(" ")[0], whole, send)):
                break
            if fault == "in halves":
                await send(whole[:17])
                await asyncio.sleep(0.001)
                whole = whole[17:]
            await send(whole)
        if asked.body.get("stream_options", {}).get("include_usage"):
            await send(
                b"data: "
                + json.dumps({"id": "x", "choices": [], "usage": self.usage or {"total_tokens": 1}}).encode()
                + b"\n\n"
            )
        if not is_whole:
            await send(error + END)
        elif fault not in ("no done", "no events"):
            await send(END)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    async def _break(fault: str, whole: bytes, send: Callable[[bytes], Awaitable[None]]) -> bool:
        """Applies a fault in front of a token. Returns False if the server itself reports the error in the stream."""
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "inside":
            await send(whole[:20])
        if fault != "error":
            raise ConnectionResetError
        return False

    async def _error(self, writer: asyncio.StreamWriter, status: int, message: str) -> None:
        """Answers with an error and closes the connection, as a server may for errors found while computing."""
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        await self._json(writer, status, {"error": error})
        await asyncio.sleep(0.002)
        raise ConnectionResetError

    async def _json(self, writer: asyncio.StreamWriter, status: int, body: object) -> None:
        await self._whole(writer, status, json.dumps(body).encode(), "application/json")

    @staticmethod
    async def _whole(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "text/plain") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()


@asynccontextmanager
async def stubs(*servers: Stub) -> AsyncIterator[None]:
    """Runs the servers while the ``with`` block runs."""
    for one in servers:
        await one.start()
    try:
        yield
    finally:
        for one in servers:
            with contextlib.suppress(asyncio.CancelledError):
                await one.stop()
