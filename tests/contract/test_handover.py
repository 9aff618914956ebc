# SPDX-License-Identifier: Apache-2.0
"""A hand-over between two engines, on the installed vLLM: what holds for both directions.

Every byte of a request's KV follows from its tokens and their positions. Tests compare decode's blocks with the bytes
that they must hold, and every other block with the byte that filled it.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest
from packaging.specifiers import SpecifierSet
from support import stock_pair
from support.internals import agents_of
from support.nodes import (
    BLOCKS,
    DECODE_FILLING,
    DECODE_ID,
    IDLE_SECONDS,
    PREFILL_FILLING,
    PREFILL_ID,
    PROMPT,
    USABLE,
    Node,
    mover,
    same,
)
from support.waiting import until
from vllm.utils.network_utils import get_ip
from vllm.v1.request import RequestStatus

from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView
from kvcached_nixl.vllm.adapter.versions import HASHES_AHEAD, installed_row
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY
from kvcached_nixl.worker.facade import WorkerFacade
from kvcached_nixl.worker.transfer.context import WorkerContext

SHORT = {"kv_lease_duration": 0.4}
POLICIES = ["fail", "recompute"]


def test_an_idle_transfer_thread_uses_no_processor_time(pair: tuple[Node, Node]) -> None:
    """On both sides, once they know each other and nothing is owed. Beside a thread that wakes up ten times a second
    and does nothing: on a slow machine both take longer."""
    prefill, decode = pair
    prefill.serves(decode)
    ended = threading.Event()

    def wake_up_and_do_nothing() -> None:
        while not ended.is_set():
            threading.Event().wait(0.1)

    nothing = threading.Thread(target=wake_up_and_do_nothing)
    nothing.start()
    clocks = [time.pthread_getcpuclockid(one.ident) for one in (nothing, *(node.thread._thread for node in pair))]
    before = [time.clock_gettime(clock) for clock in clocks]
    time.sleep(IDLE_SECONDS)
    bare, *used = (time.clock_gettime(clock) - begun for clock, begun in zip(clocks, before, strict=True))
    ended.set()
    nothing.join()
    assert max(used) < 8 * bare, (bare, used)


# ------------------------------------------------------------------------------------------------------- bytes arrive
SAID = [(0, 0), (16.0, 16), (2**63, 0), (-1, 0), (0.5, 0), (True, 0), ("16", 0), (float("nan"), 0), (10**6, PROMPT)]


def test_usage_names_what_was_cached(pair: tuple[Node, Node]) -> None:
    """By prefill, or by decode, if that is more; not all that is handed over. A client may have sent anything."""
    prefill, decode = pair
    block = PROMPT // BLOCKS
    for place, (said, cached) in enumerate(SAID):
        of_prefill, of_decode = f"cmpl-{place}-0-aaaaaaaa", f"cmpl-{place}-0-dddddddd"
        params = prefill.prefilled(of_prefill, 100 * place)
        if has_begun := place % 2:
            decode.add("begun", None, 1, 100 * place, num_tokens=block + 1)
            decode.step_until(lambda: decode.ended.pop("begun", None))
        decode.add(of_decode, {**params, CACHED_TOKENS_KEY: said}, 4, 100 * place)
        decode.step()
        found = decode.scheduler.requests[of_decode].prefill_stats
        decode.step_until(lambda name=of_decode: name in decode.ended, prefill)  # type: ignore[misc]
        assert found.num_cached_tokens == max(cached, has_begun * block), said
        assert found.num_local_cached_tokens + found.num_external_cached_tokens == PROMPT
    prefill.rest(decode)


def test_what_has_ended_may_be_asked_for_before_a_step_is_saved(pair: tuple[Node, Node]) -> None:
    """vLLM's order with a draft model: in V1, and from 0.33 on in V2."""
    for one in pair:
        one.drafts = True
    for first_token in (0, 8):
        pair[0].serves(pair[1], first_token)
    for one in pair:
        one.drafts = False
    pair[0].serves(pair[1], 16)


def test_what_is_registered_stays_so_while_vllm_sleeps(pair: tuple[Node, Node]) -> None:
    """vLLM 0.33 takes KV memory from NIXL when it sleeps, and gives it back when it wakes up; even if sleep mode was
    not enabled, which this connector then does not allow."""
    prefill, decode = pair
    prefill.serves(decode)
    if not asks_about_sleep():
        pytest.skip("this vLLM does not ask its connectors about sleep mode")
    assert not type(decode.engine.worker).supports_sleep_mode(decode.engine.config.kv_transfer_config)
    for one in pair:
        one.engine.worker.unregister_kv_caches()
    prefill.serves(decode, 8)
    for one in pair:
        one.engine.worker.restore_kv_caches()
    prefill.serves(decode, 9)


def asks_about_sleep() -> bool:
    return SpecifierSet(HASHES_AHEAD.later).contains(installed_row().tested)


# -------------------------------------------------------------------------------------------------- requests that end


def fail(*_: Any) -> str:
    raise RuntimeError("no route")


NOT_POSTED = {"transfer": lambda _: "PROC"}
BROKEN: dict[str, dict[str, Callable[..., str]]] = {
    "its state raises": {**NOT_POSTED, "check_xfer_state": fail},
    "its state is an error": {**NOT_POSTED, "check_xfer_state": lambda _: "ERR"},
    "it is not posted": {"transfer": fail, "check_xfer_state": fail},
    "it is not made": {"initialize_xfer": fail},
}


@pytest.mark.parametrize(("broken", "policy"), [*zip(BROKEN, 2 * POLICIES, strict=True)])
def test_a_transfer_that_fails_ends_the_hand_over_by_policy_and_blocks_come_free(
    broken: str, policy: str, direction: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill's at the end of their lease, if decode reads: it may try again. Later requests are served."""
    prefill, decode = node(PREFILL_FILLING, **SHORT), node(DECODE_FILLING, policy=policy, **SHORT)
    prefill.serves(decode)
    with monkeypatch.context() as patching:
        for method, replacement in BROKEN[broken].items():
            patching.setattr(mover(direction, prefill, decode).agent, method, replacement)
        params = prefill.prefilled()
        local = decode.asked(params)
        before = decode.content(local)
        until(lambda: prefill.step() and decode.has_failed)
        assert same(decode.content(local), before)
        decode.ends_by(policy, prefill)
    assert PREFILL_ID in prefill.sent and "KV hand-over failed: cause=" in decode.log.text
    prefill.serves(decode, 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_has_come_and_is_revoked_before_it_is_scheduled_counts_as_computed_no_longer(
    policy: str, node: Callable[..., Node]
) -> None:
    """vLLM finds that it has come, and has no room for it, or no place for its adapter: it may wait for long then."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy)
    blocks = decode.asked(prefill.prefilled())
    with mock.patch.object(decode.scheduler.kv_cache_manager, "allocate_slots", return_value=None):
        decode.step_until(lambda: decode.status(DECODE_ID) == RequestStatus.WAITING, prefill)
    assert decode.scheduler.requests[DECODE_ID].num_computed_tokens
    decode.side_of_engine.revocations.clear()
    # What was given back is others', also where vLLM has cached it.
    decode.fill(blocks, DECODE_FILLING)
    decode.ends_by(policy, prefill)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_connection_that_nixl_has_let_go_of_is_made_anew(
    side: str, direction: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines live: at most one request fails, well before its deadline, and the next ones are served."""
    prefill, decode = node(PREFILL_FILLING, **SHORT), node(DECODE_FILLING, **SHORT)
    prefill.serves(decode)
    one = prefill if side == "prefill" else decode
    met: list[bytes] = []
    add = one.agent.add_remote_agent
    monkeypatch.setattr(one.agent, "add_remote_agent", lambda metadata: met.append(metadata) or add(metadata))
    (peer,) = agents_of(one.context.peers) or [""]
    one.agent.remove_remote_agent(peer)
    decode.add(DECODE_ID, prefill.prefilled())
    decode.step_until(lambda: DECODE_ID in decode.ended, prefill)
    prefill.rest(decode)
    prefill.serves(decode, 8)
    if side == "decode":
        assert len(met) == 1


# ------------------------------------------------------------------------------------------------------------- leases


def test_an_engine_steps_exactly_while_something_has_changed(node: Callable[..., Node]) -> None:
    """An idle prefill gets its blocks back when the lease ends, without another request, and sleeps until then."""
    prefill = node(PREFILL_FILLING, kv_lease_duration=1)
    assert not prefill.scheduler.has_requests()
    prefill.prefilled()
    prefill.settle()
    # It has to be told that the request has ended.
    assert prefill.wakes
    prefill.step()
    for _ in range(3):
        assert not prefill.wakes and prefill.free_blocks == USABLE - BLOCKS
        prefill.settle()
    until(lambda: prefill.wakes)
    prefill.step()
    assert PREFILL_ID in prefill.sent and prefill.free_blocks == USABLE
    assert not prefill.scheduler.has_requests()


# -------------------------------------------------------------------------------------------------------- the two meet


def test_an_engine_that_nobody_holds_is_gone_without_a_collection(pair: tuple[Node, Node]) -> None:
    """In a reference cycle its agent may be freed before the worker releases its handles, which aborts the process."""
    prefill, decode = pair
    prefill.serves(decode)
    for worker in (prefill.worker, decode.worker):
        # These refer to the worker, so it must lead to none of them.
        reached, following = {id(worker)}, [worker]
        while following:
            one = following.pop()
            assert not isinstance(one, (WorkerView, WorkerFacade, WorkerContext))
            for other in gc.get_referents(one):
                if id(other) not in reached and not isinstance(other, (type, ModuleType, FunctionType)):
                    reached.add(id(other))
                    following.append(other)


HOST, ADVERTISED = "VLLM_NIXL_SIDE_CHANNEL_HOST", "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE_HOST"


@pytest.mark.parametrize(
    ("listens_at", "advertised", "reached_at"),
    [("0.0.0.0", "127.0.0.2", "127.0.0.2"), ("[::1]", "", "::1"), ("localhost", "", "localhost")],
)
def test_peers_are_reached_at_what_is_advertised(
    listens_at: str, advertised: str, reached_at: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#53018. In push decode's address goes to prefill with its registration."""
    monkeypatch.setattr(stock_pair, "LISTENS_AT", listens_at)
    if advertised:
        monkeypatch.setenv(ADVERTISED, advertised)
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    prefill.serves(decode)
    assert prefill.transfer_params["cmpl-w-0-aaaaaaa7"]["remote_host"] == reached_at


def test_vllm_finds_this_hosts_address_as_the_package_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_HOST_IP, or that of the way out, or 0.0.0.0."""
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.5")
    assert get_ip() == "10.0.0.5"
    monkeypatch.delenv("VLLM_HOST_IP")

    def no_network(*_: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.warns(UserWarning, match="Failed to get the IP address"):
        assert get_ip() == "0.0.0.0"
