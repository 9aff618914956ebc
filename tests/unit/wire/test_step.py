# SPDX-License-Identifier: Apache-2.0
"""wire/step.py: what goes to the workers of an engine, and comes back."""

from __future__ import annotations

import random
import typing

import msgspec

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.causes import RevocationCause
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import (
    ORDER,
    AwaitClaim,
    EndRenewal,
    FetchSpec,
    Finish,
    LeaseRenewal,
    OfferUpdate,
    Preempt,
    Revocation,
    Revoke,
    Step,
    StepCommand,
    Stop,
    UnneededOffer,
    WakeAddress,
    Withdraw,
)

PREFILL = RemotePrefill("p", "h", 1, 1)
WAKE = WakeAddress("127.0.0.1", 1, "k")


P1, D1 = PrefillRequestId("p"), DecodeRequestId("d")
EVERY: list[StepCommand] = [
    Revoke(P1, Revocation(RevocationCause.WEIGHTS, "why")),
    LeaseRenewal(D1, PREFILL, "n", 30.0),
    EndRenewal(D1),
    FetchSpec(1, D1, PREFILL, None, "n", "", 4, 0, 4, (BlockRange(0, (1,)),)),
    OfferUpdate(P1, "n", "", 4, (BlockRange(0, (1,)),), 4, None),
    AwaitClaim(P1, 1),
    Withdraw(1, "why"),
    UnneededOffer(PREFILL, "p", "n", ""),
    Preempt(P1, 1),
    Finish(P1),
    Stop(P1, "why"),
]
"""One of each kind, in the order in which workers take them in."""


def test_workers_take_commands_in_in_one_order_however_they_were_told() -> None:
    """Revocations first; a lease begins before it ends; an offer is made before it is stopped. Of one kind, the order
    in which they were told counts."""
    assert [type(one) for one in EVERY] == [*ORDER]
    assert {*ORDER} == {*typing.get_args(StepCommand)}
    for seed in range(50):
        told = random.Random(seed).sample(EVERY, len(EVERY))
        assert Step("h", 1, WAKE, "s", [*told, *told]).in_order() == [one for one in EVERY for _ in range(2)]
    withdrawals = [Withdraw(number, "") for number in (3, 1, 2)]
    assert Step("h", 1, WAKE, "s", [*withdrawals]).in_order() == withdrawals


def test_what_is_withheld_is_one_requests_tokens() -> None:
    """An offer without tokens stays: who has registered for it is told of its end."""
    empty, full = (msgspec.structs.replace(EVERY[4], ready_tokens=number) for number in (0, 4))
    other = msgspec.structs.replace(full, request_id=PrefillRequestId("other"))
    step = Step("h", 1, WAKE, "s", [empty, full, other, Finish(P1)])
    step.withhold(P1)
    assert step.commands == [empty, other, Finish(P1)]
    step.withhold(P1, even_empty=True)
    assert step.commands == [other, Finish(P1)] and step.of(OfferUpdate) == [other]
