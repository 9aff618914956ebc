# SPDX-License-Identifier: Apache-2.0
"""A few hundred connections of ``experiments/fuzzed_router``, with stub servers."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from support.router_under_test import quiet, serving_before
from support.stub_servers import Asked, Fabric, Stub, stubs

from experiments.fuzzed_router.messages import BODY_BYTES
from experiments.fuzzed_router.traffic import FINE, Found, Fuzz
from kvcached_nixl.wire.params import Malformed, parse

pytestmark = pytest.mark.long

COUNT = 400
_ROUTERS_NAME = re.compile(r"[0-9a-f]{32}")


class Strict(Stub):
    """Refuses what it cannot compute, and computes what it cannot have, as vLLM does.

    ``wrong`` is how it answers, should a test want to see that noticed.
    """

    wrong = ""

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        asked.headers.setdefault("x-request-id", "none")
        if not self._can_serve(asked):
            error = {"message": "no", "type": "BadRequestError", "param": None, "code": 400}
            await self._json(writer, 400, {"error": error})
            return
        if not self._is_honest(asked):
            asked.body.pop("kv_transfer_params", None)
        if self.wrong and "kv_transfer_params" in asked.body:
            if self.wrong.isdigit():
                self.faults.append(self.wrong)
            else:
                asked.body["max_tokens"] += 1
        await super()._answer(asked, writer)

    @staticmethod
    def _can_serve(asked: Asked) -> bool:
        if not isinstance(asked.body, dict):
            return False
        limits = [asked.body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        name = "messages" if asked.path.endswith("chat/completions") else "prompt"
        return bool(asked.body.get(name)) and all(
            one is None or (type(one) is int and 0 < one <= 512) for one in limits
        )

    def _is_honest(self, asked: Asked) -> bool:
        params = asked.body.get("kv_transfer_params")
        try:
            found = parse(json.dumps(params).encode())
        except Malformed:
            return False
        if found.manifest is not None:
            return found.remote_request_id in self.fabric.offers
        return bool(found.do_remote_decode) or bool(_ROUTERS_NAME.fullmatch(found.transfer_id or ""))


async def fuzz(mode: str, count: int, wrong: str = "") -> Found:
    fabric = Fabric()
    prefill, decode = (Strict(fabric, pushes=mode == "push") for _ in range(2))
    options = {"max_body_bytes": BODY_BYTES, "client_timeout_seconds": 2.0}
    async with (
        stubs(prefill, decode),
        serving_before([prefill], [decode], **options) as plain,
        serving_before([prefill], [decode], client_params=True, decode_alone=True, **options) as trusting,
    ):
        found = Fuzz(prefill.url, decode.url, plain.url, trusting.url, mode, 1, lambda _: None, lambda: None)
        decode.wrong = wrong
        try:
            await found.run(count)
        finally:
            await quiet(plain)
            await quiet(trusting)
        return found.found


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_every_request_is_refused_or_answered_rightly(mode: str) -> None:
    """And nothing is left in the routers."""
    found = asyncio.run(fuzz(mode, COUNT))
    assert found.missed == [] and found.missed_count == 0
    assert found.verdicts.total() == COUNT and found.valid == found.valid_right > COUNT // 8
    assert {"right", "refused", "no HTTP"} <= set(found.verdicts) <= set(FINE)


@pytest.mark.parametrize(("wrong", "verdict"), [("longer", "wrong"), ("500", "HTTP 502, expected right")])
def test_what_goes_wrong_only_behind_the_router_is_missed(wrong: str, verdict: str) -> None:
    """Decode that answers a hand-over wrongly, or not at all; asked alone it is right."""
    with pytest.raises(AssertionError, match=f"at the end: {verdict}"):
        asyncio.run(fuzz("pull", 0, wrong))
