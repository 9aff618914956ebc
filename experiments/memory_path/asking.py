# SPDX-License-Identifier: Apache-2.0
"""A client of a pair."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any

import httpx

from experiments.common.client import AnswerError, Client
from experiments.common.servers import Server

TOKENS = 2


class Asking:
    """Sends requests to a prefill and a decode server, each with a different prompt."""

    def __init__(self, prefill: Server, decode: Server, http: httpx.AsyncClient) -> None:
        self.prefill, self.decode = Client(prefill.base_url, http), Client(decode.base_url, http)
        self._coordinates: Mapping[str, object] = prefill.coordinates
        self._names = itertools.count()

    async def ask(self, length: int, *, streamed: bool = False, late_seconds: float = 0.0) -> float:
        """Hand a prompt of ``length`` tokens over; returns when decode's first token came (monotonic seconds).

        Args:
            streamed: decode gets its request at once. Otherwise it gets the parameters of prefill's answer,
                ``late_seconds`` after that answer.
        """
        number = next(self._names)
        name = f"request-{number}"
        prompt = [2 + (number * 131 + place * 7 + place * place) % 500 for place in range(length)]
        params = {"do_remote_decode": True, "transfer_id": name}
        prefilling = self.prefill.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=params)
        if streamed:
            asked = {**self._coordinates, "do_remote_prefill": True, "transfer_id": name}
            decoding = asyncio.create_task(self._decode(prompt, name, asked))
            await prefilling
            return await decoding
        offered = (await prefilling).get("kv_transfer_params")
        if not offered:
            raise AnswerError(f"{name}: found no kv_transfer_params in prefill's answer; nothing was handed over.")
        await asyncio.sleep(late_seconds)
        return await self._decode(prompt, name, offered)

    async def _decode(self, prompt: list[int], name: str, params: dict[str, Any]) -> float:
        arrived = await self.decode.token_times(
            prompt, max_tokens=TOKENS, salt=name, request_id=name, kv_transfer_params=params
        )
        return arrived[0] - time.perf_counter() + time.monotonic()
