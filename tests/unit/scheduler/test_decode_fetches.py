# SPDX-License-Identifier: Apache-2.0
"""scheduler/decode_fetches.py: what decode requests, what it refuses, and that every block is freed exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from support.clocks import ManualClock
from support.engine_fakes import (
    TIMEOUT,
    TOKENS,
    Asked,
    Pool,
    at_once,
    context,
    manifest_of,
    of_decode,
    prompt,
    with_states,
)
from support.internals import forbid_scans, leftovers

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.manifest import BlockRange, digest_of
from kvcached_nixl.wire.step import FetchSpec, LeaseRenewal, Step, UnneededOffer

BLOCKS = ([7, 3, 9],)
ALL = (TOKENS, True)
NOTHING = (0, False)
D1 = DecodeRequestId("d1")


class Decode:
    """`DecodeFetches` with a clock and blocks; each call adds to the step that is returned next."""

    def __init__(self, pool: Pool | None = None, **changed: Any) -> None:
        self.clock = ManualClock()
        self.pool = Pool() if pool is None else pool
        self.engine = context(self.pool, self.clock, **changed)
        self.failures = self.engine.failures
        self.fetching = DecodeFetches(self.engine)
        self.attempts = self.fetching.attempts

    def take(self) -> Step:
        return self.engine.take_step()

    def arrive(self, request: Asked) -> None:
        self.fetching.arrived(request)

    def match(self, request: Asked, num_computed: int = 0) -> tuple[int, bool]:
        return self.fetching.matched(request, num_computed)

    def allocate(self, request: Asked, blocks: tuple[list[int], ...] = BLOCKS, num_external: int = TOKENS) -> None:
        self.pool.of[request.request_id] = [(request.request_id, block) for group in blocks for block in group if block]
        self.fetching.allocated(request, blocks, num_external)

    def finish(self, request: Asked) -> None:
        self.fetching.finished(request)

    def collect(
        self, failures: tuple[tuple[int, FailureCause], ...] = (), overs: tuple[int, ...] = ()
    ) -> tuple[set[str], set[str]]:
        told = [(number, HandOverFailed(cause, "as the worker says")) for number, cause in failures]
        return self.fetching.collect(told, overs)  # type: ignore[return-value]

    def wait(self, request: Asked) -> int:
        """Lets a request wait for its KV. Returns its attempt."""
        self.arrive(request)
        self.allocate(request, BLOCKS, self.match(request)[0])
        (wanted,) = self.take().of(FetchSpec)
        return wanted.attempt

    def fails(self, request: Asked, num_computed: int = 0) -> FailureCause:
        """Checks that the request fails as soon as it has blocks. Returns the cause."""
        self.arrive(request)
        missing, is_waiting = self.match(request, num_computed)
        assert is_waiting and missing > 0
        self.allocate(request, BLOCKS, missing)
        step = self.take()
        assert not step.of(FetchSpec) and not step.of(UnneededOffer)
        assert step.of(LeaseRenewal)[-1] == LeaseRenewal(DecodeRequestId(request.request_id))
        (cause,) = self.failures.counts
        assert self.failures.counts == {cause: 1}
        assert self.fetching.has_news
        assert not self.attempts.waiting
        assert self.collect() == ({request.request_id}, {request.request_id})
        assert not self.fetching.has_news
        assert self.engine.holds.num_blocks == 0
        return FailureCause(cause)


# -------------------------------------------------------------------------------------------------------------- arrival


def test_a_name_that_a_heartbeat_cannot_say_is_warned_of_and_fetched_even_so(caplog: pytest.LogCaptureFixture) -> None:
    decode = Decode()
    request = of_decode(manifest=manifest_of(prompt(), request_id="a,b"))
    decode.arrive(request)
    assert not decode.take().has_news
    assert "'a,b'" in caplog.text and "no comma" in caplog.text and "d1" in caplog.text
    assert decode.match(request) == ALL


# ------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("pushes", [True, False])
def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_here(pushes: bool, recomputes: bool) -> None:
    """With ``echo`` and ``logprobs``, vLLM would return uninitialised memory for tokens that it has not computed."""
    decode = Decode(mode=TransferMode.PUSH if pushes else TransferMode.PULL, recomputes=recomputes)
    request = of_decode()
    request.computes_prompt = True
    decode.arrive(request)
    assert decode.match(request) == (0, False)
    decode.allocate(request, BLOCKS, 0)
    step = decode.take()
    assert not step.of(FetchSpec) and [one.digest for one in step.of(UnneededOffer)] == [request.digest(TOKENS)]
    assert step.of(LeaseRenewal)[-1] == LeaseRenewal(D1) and not decode.failures.counts


@pytest.mark.parametrize(
    ("recomputes", "computes", "are_shared", "num_computed", "causes", "ends"),
    [
        (True, True, False, 0, {FailureCause.RANGE: 1}, False),
        (False, True, False, 0, {FailureCause.RANGE: 1}, True),
        (True, False, False, 0, {FailureCause.RANGE: 1}, True),
        # Another connector may have loaded it; or the end of a block is cached here.
        (True, False, True, 0, {}, False),
        (True, False, False, TOKENS // 4 * 4, {}, False),
    ],
)
def test_kv_that_vllm_drops_is_a_failure(
    recomputes: bool, computes: bool, are_shared: bool, num_computed: int, causes: dict[FailureCause, int], ends: bool
) -> None:
    """``cap_external_hit`` of vLLM 0.33 makes (TOKENS, True) (0, False)."""
    decode = Decode(Pool(are_shared=are_shared), recomputes=recomputes)
    request = of_decode()
    decode.fetching.arrived(request, computes=computes, is_asked=True)
    assert decode.match(request, num_computed) == (TOKENS - num_computed, True)
    decode.allocate(request, BLOCKS, 0)
    assert decode.failures.counts == causes
    assert decode.fetching.ending == ({D1} if ends else set())
    assert not decode.take().of(FetchSpec)


def test_tokens_are_not_counted_from_an_end() -> None:
    """vLLM 0.33 leaves the last ones out, where it cuts to whole blocks: the others were taken for these."""
    decode = Decode()
    request = of_decode()
    decode.arrive(request)
    decode.allocate(request, BLOCKS, decode.match(request)[0] - 2)
    assert not decode.take().of(FetchSpec) and decode.failures.counts == {FailureCause.RANGE: 1}
    assert decode.collect() == ({D1}, {D1})


def test_a_session_with_parameters_that_are_no_good_is_computed_here() -> None:
    decode = Decode()
    request = of_decode(remote_port="x")
    request.is_session = True
    decode.arrive(request)
    assert decode.match(request) == (0, False) and not decode.take().has_news


@pytest.mark.parametrize("first", ["the other connector", "our workers"])
def test_blocks_that_another_connector_keeps_are_free_when_both_have_let_go(first: str) -> None:
    """The other connector reports the request to vLLM, so that it is freed once (vllm#46240)."""
    decode = Decode()
    request = of_decode()
    attempt = decode.wait(request)
    decode.finish(request)
    decode.fetching.kept(D1)
    assert not decode.fetching.has_news and decode.attempts.num_quarantined_blocks == 3
    ends = [lambda: decode.attempts.let_go([D1]), lambda: decode.collect(overs=(attempt,))]
    if first == "our workers":
        ends.reverse()
    ends[0]()
    assert not decode.pool.freed
    ends[1]()
    assert sorted(block for _, block in decode.pool.freed) == [3, 7, 9]
    assert decode.collect() == (set(), set()) and not leftovers(decode.fetching, decode.attempts)
    assert decode.attempts.num_quarantined_blocks == 0


def test_a_request_that_no_other_connector_keeps_is_told_to_vllm() -> None:
    """That another connector keeps another request changes nothing."""
    decode = Decode()
    request = of_decode()
    attempt = decode.wait(request)
    decode.finish(request)
    decode.fetching.kept("another")
    assert decode.collect(overs=(attempt,)) == ({D1}, set())
    assert len(decode.pool.freed) == 3


@pytest.mark.parametrize(
    ("first_tokens", "blocks", "is_dropping", "words"),
    [
        ((8,), ([7, 3, 9],), True, "not kept the tokens from 0"),
        ((4,), ([7, 3, 9],), False, "not kept the tokens from 0"),
        ((0,), ([0, 0, 0],), True, "no blocks for the tokens 0 to 9"),
        ((0,), ([7, 0, 9],), True, "no blocks"),
        ((0,), ([0, 3, 9],), False, "no blocks"),
        ((0,), ([7, 3],), False, "no blocks"),
        ((0,), ([],), False, "no blocks"),
        ((0, 0), ([7, 3, 9],), False, "2 KV-cache groups; expected 1"),
        ((0,), ([7, 3, 9], [1, 2, 5]), False, "1 KV-cache groups; expected 2"),
    ],
    ids=str,
)
def test_blocks_that_do_not_hold_the_range_are_refused(
    first_tokens: tuple[int, ...], blocks: tuple[list[int], ...], is_dropping: bool, words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    decode = Decode(drops_blocks=is_dropping, block_sizes=(4,) * len(blocks))
    request = of_decode(manifest=manifest_of(prompt(), first_tokens=first_tokens))
    decode.arrive(request)
    decode.allocate(request, blocks, decode.match(request)[0])
    assert decode.take().of(FetchSpec) == []
    assert decode.failures.counts == {FailureCause.RANGE: 1}
    assert words in caplog.text
    assert decode.collect() == ({D1}, {D1})


# -------------------------------------------------------------------------------------------------------------- refusal


def test_tokens_that_end_inside_a_block_are_refused_under_both_policies() -> None:
    """Another connector in front of this one may have loaded half a block."""
    assert Decode().fails(of_decode(), 3) is FailureCause.RANGE
    decode = Decode(recomputes=True)
    request = of_decode()
    decode.arrive(request)
    assert decode.match(request, 3) == NOTHING
    assert decode.failures.counts == {FailureCause.RANGE: 1}


def test_an_engine_that_only_offers_fetches_nothing() -> None:
    """Rule R8: vLLM frees its blocks while a step that is under way may still write into them."""
    assert Decode(Pool(is_producer=True)).fails(of_decode()) is FailureCause.PARAMETERS


# ----------------------------------------------------------------------------------------------------------------- ends


def test_what_has_come_at_the_last_moment_has_come() -> None:
    decode = Decode()
    attempt = decode.wait(of_decode())
    decode.clock.advance(TIMEOUT)
    assert decode.collect(overs=(attempt,)) == ({D1}, set())
    assert not decode.failures.counts


def test_an_unknown_attempt_means_nothing() -> None:
    """The attempt may be of another connector."""
    decode = Decode()
    decode.wait(of_decode())
    assert decode.collect(failures=((1, FailureCause.LOST),), overs=(1, 2)) == (set(), set())
    assert len(decode.attempts.waiting) == 1


# -------------------------------------------------------------------------------------------------------------- several


def test_steps_cost_what_is_due_and_not_what_waits() -> None:
    """`collect` does not visit the attempts that only wait."""
    decode = Decode()
    for number in range(1000):
        decode.wait(of_decode(f"d{number}"))
    tables = forbid_scans(decode.fetching, decode.attempts)
    assert decode.collect() == (set(), set())
    assert sum(table.num_read for table in tables) == 0


def test_a_failure_is_one_story(caplog: pytest.LogCaptureFixture) -> None:
    """The metric, the log line and the client's error have the same cause label; the reason is in the log."""
    decode = Decode()
    request = of_decode()
    attempt = decode.wait(request)
    decode.collect(failures=((attempt, FailureCause.LEASE),))
    theirs = request.params["kvcached_nixl"]["request_id"]
    tags = f"cause=lease attempt={attempt} request=d1 prefill_request={theirs}"
    assert f"KV hand-over failed: {tags}: as the worker says" in caplog.text
    assert decode.failures.counts == {FailureCause.LEASE: 1}
    assert decode.failures.take_ended() == {}, "it may be computed here"
    decode.finish(request)
    assert decode.failures.take_ended() == {"d1": f"KV hand-over failed: {tags}"}
    assert decode.failures.take_ended() == {}


@pytest.mark.parametrize(
    ("cause", "recomputes", "is_told"),
    [(FailureCause.LOST, True, True), (FailureCause.LOST, False, False), (FailureCause.UNREACHABLE, True, False)],
)
def test_prefill_need_not_keep_what_decode_computes(cause: FailureCause, recomputes: bool, is_told: bool) -> None:
    """Once nothing of the attempt is in flight. What fails here may be sent to another decode engine."""
    decode = Decode(recomputes=recomputes)
    attempt = decode.wait(of_decode())
    decode.collect(failures=((attempt, cause),))
    assert [one.attempt for one in decode.take().of(UnneededOffer)] == [attempt] * is_told


def test_failures_add_up() -> None:
    failures, why = Decode().failures, HandOverFailed(FailureCause.LOST, "planted")
    for _ in range(2):
        failures.not_received("d1", why)
        failures.not_offered("p1", why)
        failures.starved("d1", why)
    assert failures.counts == {FailureCause.LOST: 6}


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_prompt_without_its_media_ends_also_where_another_connector_has_loaded_its_beginning(
    recomputes: bool,
) -> None:
    """The rest of the prompt would be computed here, without its media. vLLM schedules it once more before it ends."""
    decode = Decode(recomputes=recomputes)
    request = of_decode(manifest=manifest_of(prompt(1)))
    request.lacks_media = True
    decode.arrive(request)
    assert decode.match(request) == ALL
    decode.allocate(request, num_external=0)
    assert decode.fetching.ending == {D1} and not decode.attempts.waiting
    decode.fetching.progressed([request.request_id])
    assert decode.fetching.ending == {D1}
    decode.finish(request)
    (told,) = decode.failures.take_ended().values()
    assert told.startswith("KV hand-over failed: cause=media request=d1")


# -------------------------------------------------------------------------------------------------------------- states


def of_states(num_tokens: int, in_manifest: int | None = None) -> Asked:
    """A request of so many tokens; prefill has computed ``in_manifest`` of them."""
    made = None
    if in_manifest is not None:
        made = manifest_of(
            prompt(num_tokens=in_manifest),
            groups=(
                BlockRange(0, tuple(range(1, 1 + -(-in_manifest // 4)))),
                BlockRange(in_manifest - 1, (77,)),
            ),
            block_sizes=(4, 1),
        )
    request = of_decode(manifest=made) if made is not None else at_once()
    request.tokens = prompt(num_tokens=num_tokens)
    return request


def test_states_behind_decodes_last_token_cannot_be_used() -> None:
    """They cannot be taken back by a token."""
    assert Decode(Pool(0, 0), groups=with_states()).fails(of_states(TOKENS, TOKENS)) is FailureCause.DIGEST


@pytest.mark.parametrize("blocks", [([7, 3, 9], [0, 0]), ([7, 3, 9], [5]), ([7, 3], [0, 5])])
def test_without_a_block_for_a_state_nothing_is_fetched(blocks: tuple[list[int], ...]) -> None:
    decode = Decode(Pool(0, 0), groups=with_states())
    request = of_states(TOKENS, TOKENS - 1)
    decode.arrive(request)
    decode.allocate(request, blocks, decode.match(request)[0])
    assert decode.take().of(FetchSpec) == []
    assert decode.failures.counts == {FailureCause.RANGE: 1}


def test_a_push_is_asked_for_all_tokens_but_the_last() -> None:
    """By the digest that prefill has of its shorter prompt."""
    decode = Decode(Pool(0, 0), groups=with_states(), mode=TransferMode.PUSH)
    request = of_states(TOKENS)
    decode.arrive(request)
    assert decode.match(request) == (TOKENS - 1, True)
    decode.allocate(request, ([7, 3, 9], [0, 5]), TOKENS - 1)
    (fetch,) = decode.take().of(FetchSpec)
    assert (fetch.num_tokens, fetch.digest) == (TOKENS - 1, digest_of(prompt(), TOKENS - 1))


@pytest.mark.parametrize(("num_tokens", "ends_in_media"), [(1, False), (2, False), (TOKENS, True)])
def test_a_prompt_that_prefill_leaves_whole_is_computed_here(num_tokens: int, ends_in_media: bool) -> None:
    """At once: nobody will write its states."""
    decode = Decode(Pool(0, 0), groups=with_states(), mode=TransferMode.PUSH)
    request = of_states(num_tokens)
    request.ends_in_media = ends_in_media
    decode.arrive(request)
    assert decode.match(request) == NOTHING
    assert decode.failures.counts == {}


def test_a_failed_one_is_forgotten_before_another_server_is_asked() -> None:
    """Prefill need not keep it, and its lease is not renewed."""
    decode = Decode()
    other = of_decode("d1", manifest=manifest_of(prompt(5)))
    decode.arrive(other)
    decode.take()
    failure = decode.fetching.failure_of(other)
    assert failure is not None and failure.cause is FailureCause.DIGEST
    decode.fetching.forget(other)
    step = decode.take()
    assert step.of(LeaseRenewal)[-1] == LeaseRenewal(D1) and [one.attempt for one in step.of(UnneededOffer)] == [None]
    assert decode.fetching.failure_of(other) is None
    again = of_decode("d1")
    decode.arrive(again)
    assert decode.fetching.failure_of(again) is None and decode.match(again) == ALL
