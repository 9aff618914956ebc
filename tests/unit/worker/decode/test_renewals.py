# SPDX-License-Identifier: Apache-2.0
"""worker/decode/receiver.py: the renewals of leases, on a clock that the test moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ManualClock

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import LeaseRenewal
from kvcached_nixl.worker.decode.receiver import MOST_DUE, Renewals

LEASE = 30.0


HERE = RemotePrefill("p", "h", 1)


def test_a_turn_renews_so_many_and_the_next_one_the_others() -> None:
    renewals = Renewals(ManualClock())
    for number in range(3 * MOST_DUE):
        renewals.begin(LeaseRenewal(DecodeRequestId(f"d{number}"), HERE, f"p{number}", LEASE))
    found = [name for _ in range(4) for names in renewals.take_due().values() for name in names]
    assert sorted(found) == sorted(f"p{number}" for number in range(3 * MOST_DUE))


EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "advance"]), st.integers(0, 3), st.integers(0, 2)), max_size=60
)


@given(EVENTS)
def test_what_is_wanted_is_never_without_a_heartbeat_for_longer_than_an_interval(
    events: list[tuple[str, int, int]],
) -> None:
    clock = ManualClock()
    renewals = Renewals(clock)
    wanted: dict[int, int] = {}
    beaten: dict[int, float] = {}
    for event, request, lease in events:
        name = DecodeRequestId(str(request))
        if event == "begin" and request not in wanted:
            wanted[request] = lease
            renewals.begin(LeaseRenewal(name, HERE, str(lease), LEASE))
        elif event == "end":
            renewals.end(name)
            wanted.pop(request, None)
        elif event == "advance":
            clock.advance(1.0)
        for found in renewals.take_due().get(HERE, []):
            assert int(found) in wanted.values()
            beaten[int(found)] = clock.now_seconds()
        for one in wanted.values():
            assert clock.now_seconds() - beaten[one] < LEASE / 6
