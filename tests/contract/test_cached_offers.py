# SPDX-License-Identifier: Apache-2.0
"""What prefill has cached of a prompt, handed over without a step of prefill's: vLLM's schedulers, real NIXL."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nodes import BLOCK_SIZE, DECODE_ID, PREFILL_ID, PROMPT, Node, core_request, prompt
from support.waiting import until
from vllm.lora.request import LoRARequest

from kvcached_nixl.scheduler.prefill_offers import OfferRequest
from kvcached_nixl.vllm.patches.arrival import MOST_LOOK_UPS
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY, MANIFEST_KEY

CACHED = (PROMPT - 1) // BLOCK_SIZE * BLOCK_SIZE
"""Tokens of a prompt in whole blocks."""


def computes_nothing(output: Any) -> None:
    assert not output.num_scheduled_tokens


def computed(prefill: Node) -> None:
    prefill.add(PREFILL_ID, None, 1)
    prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    prefill.compute = computes_nothing  # type: ignore[method-assign]


def offered(prefill: Node, **more: Any) -> Future[dict[str, Any]]:
    """What prefill has cached of a prompt is asked for. No step has told its workers yet."""
    computed(prefill)
    return prefill.looked_up(prompt(0, PROMPT), CACHED, **more)


def test_what_is_cached_is_handed_over_without_a_step_and_the_rest_computed(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    answer = offered(prefill)
    assert not answer.done() and prefill.side_of_engine.offering.kept.num_kept == 1, "workers do not know of it"
    until(lambda: prefill.step() and answer.done())
    found = json.loads(json.dumps(answer.result()))
    assert found[CACHED_TOKENS_KEY] == CACHED == found[MANIFEST_KEY]["num_tokens"]
    local = decode.asked(found)
    decode.receives(local, prefill, end=CACHED)
    decode.step_until(lambda: DECODE_ID in decode.ended, prefill)
    prefill.rest(decode)


@pytest.mark.parametrize("why", ["its blocks changed", "enough is left waiting", "the peer waits no longer"])
def test_what_cannot_be_offered_is_not_kept(why: str, pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, or its adapter, are not those that a manifest could name; or peers leave enough waiting."""
    prefill, _ = pair
    if why == "its blocks changed":
        monkeypatch.setattr(OfferRequest, "still_has", lambda *_: False)
    elif why == "enough is left waiting":
        monkeypatch.setattr(type(prefill.side_of_engine), "offers_cached", False)
    answer = offered(prefill, most_seconds=0.0 if why == "the peer waits no longer" else 600.0).result()
    assert answer[CACHED_TOKENS_KEY] == CACHED and "do_remote_prefill" not in answer
    assert not prefill.side_of_engine.offering.kept.num_kept
    prefill.rest()


def test_nothing_is_looked_up_for_a_peer_that_has_left(pair: tuple[Node, Node]) -> None:
    """Peers that look up faster than one thread hashes would all get their answers too late."""
    prefill, _ = pair
    computed(prefill)
    answer = prefill.looked_up(prompt(0, PROMPT), CACHED, most_seconds=1e-9)
    assert answer.result()[CACHED_TOKENS_KEY] == 0


def test_no_more_look_ups_wait_than_an_engine_has_room_for(pair: tuple[Node, Node]) -> None:
    """There is one thread for them, and whoever asks may have left."""
    prefill, _ = pair
    computed(prefill)
    look_up, begin = prefill.core.kvcached_nixl_look_up, threading.Event()
    look_up.__self__._looker.submit(begin.wait)
    token_ids = np.asarray(prompt(0, PROMPT), "<u4").tobytes()
    answers = [look_up(token_ids, "r", None, "", 0, 10.0) for _ in range(MOST_LOOK_UPS + 1)]
    assert [one.done() for one in answers] == [False] * MOST_LOOK_UPS + [True]
    begin.set()
    assert [one.result()[CACHED_TOKENS_KEY] for one in answers] == [CACHED] * MOST_LOOK_UPS + [0]
    assert prefill.looked_up(prompt(0, PROMPT)).result()[CACHED_TOKENS_KEY] == CACHED, "there is room again"


def test_what_another_adapter_of_that_name_has_computed_is_not_offered(pair: tuple[Node, Node], tmp_path: Path) -> None:
    """Its blocks are cached under the name. An API server that loads another one tells the engine only of that."""
    prefill, _ = pair
    before, now = (LoRARequest("a", number, str(tmp_path / str(number))) for number in (1, 2))
    for one in (before, now):
        folder = Path(one.lora_path)
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.bin").write_bytes(bytes([one.lora_int_id]) * 100)
    request = core_request(PREFILL_ID, prompt_token_ids=prompt(0, PROMPT), lora_request=before)
    prefill.enter(request)
    prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    prefill.compute = computes_nothing  # type: ignore[method-assign]
    kept = prefill.looked_up(prompt(0, PROMPT), CACHED, before)
    until(lambda: prefill.step() and kept.done())
    assert kept.result()["do_remote_prefill"]
    prefill.side_of_engine.read.adapter_arrives(now)
    for adapter in (now, before):
        answer = prefill.looked_up(prompt(0, PROMPT), CACHED, adapter)
        assert "do_remote_prefill" not in answer.result(0)
    prefill.rest()
