# SPDX-License-Identifier: Apache-2.0
"""worker/facade.py: which messages a step sends to the transfer thread, when, and what vLLM is told."""

from __future__ import annotations

from typing import Any, cast

import pytest
from support.engine_fakes import grown
from support.worker_fakes import DIGEST, TOKENS, Local, manifest, wanted

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import (
    FetchSpec,
    Finish,
    LeaseRenewal,
    OfferUpdate,
    Preempt,
    Report,
    Step,
    StepCommand,
    Stop,
    UnneededOffer,
    WakeAddress,
    Withdraw,
)
from kvcached_nixl.worker.facade import MOST_UNTAKEN, WorkerFacade
from kvcached_nixl.worker.facade import Device as FacadeDevice
from kvcached_nixl.worker.transfer.staging import Staging
from kvcached_nixl.worker.transfer_thread import BlocksWritable, Command, Reached, TransferThread

P1 = PrefillRequestId("p-1")
PREFILL = RemotePrefill("remote", "10.0.0.2", 5601, 1)
MANIFEST = manifest(7, 3, 9)


class Thread:
    """Stands in for the transfer thread."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.outcome = set[str](), Report()
        self.engine_computes = False
        self.num_moves = 0

    def engine_moves(self) -> None:
        self.num_moves += 1

    def submit(self, *commands: Command) -> None:
        self.commands += commands

    def take_outcome(self) -> tuple[set[str], Report]:
        outcome, self.outcome = self.outcome, (set(), Report())
        return outcome

    def take(self) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands


class Device:
    """A device that works asynchronously: the test says when each event is reached."""

    def __init__(self) -> None:
        self.events: list[bool] = []
        self.waited: Any = None

    def wait(self) -> None:
        self.waited()

    def record(self) -> Any:
        place = len(self.events)
        self.events.append(False)
        return lambda: self.events[place]


class Worker:
    def __init__(
        self, *, is_read: bool = True, is_known: bool = True, zeroes_blocks: bool = False, **place: Any
    ) -> None:
        self.thread = Thread()
        self.device = Device()
        self.offered: list[Weights] = []
        self.context = Local(**place).side
        self.token_table, self.local = self.context.tokens, self.context.local
        if not is_read:
            self.context.staging = cast(Staging, object())
        self.side = self.facade(zeroes_blocks=zeroes_blocks)
        if is_known:
            self.side.begin_step(step())
            self.side.end_step()
            self.thread.take()

    def facade(self, **more: bool) -> WorkerFacade:
        thread, device = cast(TransferThread, self.thread), cast(FacadeDevice, self.device)
        return WorkerFacade(self.context, thread, device, self.offered.append, **more)


WAKE = WakeAddress("127.0.0.1", 5601, "key")


def step(*commands: StepCommand, **fields: Any) -> Step:
    return Step("10.0.0.1", 5600, WAKE, "0" * 16, [*commands], **fields)


def kinds(commands: list[Command]) -> list[type]:
    """Of commands; of those that wait for the device, what waits."""
    return [type(one.command) if isinstance(one, Reached) else type(one) for one in commands]


def offered(ready: int = TOKENS, blocks: tuple[list[int], ...] = ([7, 3, 9],), request_id: str = "p-1") -> OfferUpdate:
    made = manifest(7, 3, 9, request_id=request_id) if ready >= TOKENS else None
    return OfferUpdate(PrefillRequestId(request_id), "transfer:t", DIGEST, TOKENS, grown(*blocks), ready, made)


def test_a_step_that_is_told_twice_begins_once() -> None:
    """vLLM 0.29 calls it before the forward pass (``handle_preemptions``), and again where loads begin."""
    worker = Worker()
    one = step(wanted(1, MANIFEST), offered(), is_idle=False)
    worker.side.begin_step(one)
    assert kinds(worker.thread.take()) == [FetchSpec, BlocksWritable]
    worker.side.begin_step(one)
    assert worker.thread.take() == []
    worker.side.end_step()
    assert kinds(worker.thread.take()) == [OfferUpdate]


def test_where_vllm_zeroes_blocks_they_are_begun_after_that() -> None:
    """Rule R8: vLLM 0.29 begins a step before it zeroes blocks; and a step may raise before it has."""
    worker = Worker(zeroes_blocks=True)
    one, other = (wanted(number, MANIFEST) for number in (1, 2))
    worker.side.begin_step(step(one))
    assert worker.thread.take() == [one] and worker.device.events == []
    worker.side.begin_step(step(other))
    first, second = worker.thread.take()
    assert isinstance(first, Reached) and first.command == BlocksWritable((1,)) and second == other
    worker.side.blocks_zeroed()
    worker.side.blocks_zeroed()
    (begin,) = worker.thread.take()
    assert isinstance(begin, Reached) and begin.command == BlocksWritable((2,))
    worker.device.events[0] = True
    assert first.is_reached() and not begin.is_reached()


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "staged"])
def test_a_prompt_is_offered_when_the_device_has_ended_it_where_an_answer_does_not_say_so(is_read: bool) -> None:
    """Model runner V2 answers before a draft model has run, so the device is waited for before KV is offered."""
    worker = Worker(is_read=is_read, is_known=False)
    seen: list[tuple[int, bool, list[Command]]] = []
    worker.side = worker.facade(answers_early=True)
    worker.device.waited = lambda: seen.append(
        (len(worker.device.events), bool(worker.token_table.any()), worker.thread.take())
    )
    worker.side.begin_step(step(offered(4, ([7],)), is_idle=False))
    worker.side.end_step()
    assert not seen, "there is no answer yet"
    worker.thread.take()
    worker.side.begin_step(step(offered(), is_idle=False))
    worker.side.end_step()
    assert seen == [(1, False, [])]
    assert bool(worker.token_table.any()) is is_read and len(worker.thread.take()) == 1


def test_a_token_without_room_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    worker.token_table[:] = 1
    worker.side.begin_step(step(offered()))
    worker.side.end_step()
    assert "The ownership-token table is full, so decode will not use the KV of request p-1" in caplog.text
    assert len(worker.thread.take()) == 1


def test_what_a_draft_model_computes_behind_the_model_is_not_offered_before_it_has() -> None:
    """With a draft model, vLLM calls ``get_finished`` between the two, and ``wait_for_save`` after both."""
    worker = Worker(is_read=False)
    worker.side.begin_step(step(offered(4, ([7],)), is_idle=False))
    worker.side.take_sent()
    assert worker.thread.take() == [] and not worker.thread.engine_computes
    worker.side.end_step()
    assert kinds(worker.thread.take()) == [OfferUpdate]


@pytest.mark.parametrize("is_said", [True, False])
def test_what_a_step_was_to_compute_that_has_failed_is_not_offered(is_said: bool) -> None:
    """No ownership token is published, and finished requests are freed. The engine may live on (fault tolerance)."""
    worker = Worker(is_read=True)
    worker.side.begin_step(step(offered(), Finish(P1), is_idle=False))
    if is_said:
        worker.side.end_step(has_failed=True)
    worker.side.take_sent()
    worker.side.begin_step(step())
    assert worker.thread.take() == [Finish(P1)]
    assert not worker.token_table.any()


def test_a_step_is_taken_in_in_the_order_that_it_says() -> None:
    """Commands are submitted in this order."""
    worker = Worker()
    renewed = LeaseRenewal(DecodeRequestId("d1"), PREFILL, "p-1", 30.0)
    released = UnneededOffer(PREFILL, "p-1", "n", DIGEST)
    told = [
        renewed,
        wanted(1, MANIFEST),
        Withdraw(2, "dead"),
        released,
        Preempt(P1, 4),
        Finish(P1),
        Stop(PrefillRequestId("p-2"), "aborted"),
        Stop(PrefillRequestId("p-3"), "early", is_kept=False),
    ]
    worker.side.begin_step(step(*reversed(told)))
    *commands, begin = worker.thread.take()
    assert commands == [*told[:-2], told[-1], told[-2]] and kinds([begin]) == [BlocksWritable]


# ---------------------------------------------------------------------------------------------------- what vLLM is told


def test_a_connector_around_it_that_asks_for_no_report_ends_the_engine() -> None:
    """Blocks of what has ended would be held for ever."""
    worker = Worker()
    worker.thread.outcome = set(), Report({(1, 0)})
    for _ in range(1 + MOST_UNTAKEN):
        worker.side.take_sent()
    with pytest.raises(ContractChanged, match="build_connector_worker_meta"):
        worker.side.take_sent()
    assert worker.side.take_report() == Report({(1, 0)})
    worker.side.take_sent()
