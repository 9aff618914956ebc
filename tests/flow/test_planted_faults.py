# SPDX-License-Identifier: Apache-2.0
"""Planted faults are caught, by the schedules of the property test or by a case.

The table names what catches each fault. ``schedules`` means the first `SEEDS` of them; a case means that one. More
schedules would catch most of the other faults, too.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
from support import faults
from support import hand_over_cases as cases
from support import memory_pressure_cases as pressure
from support import verified_hand_over_cases as verified
from support.flow_memory import Shape
from support.flow_pair import Pair
from support.flow_schedule import Schedule

from kvcached_nixl.transfer_mode import TransferMode

SEEDS = 300
PULL, PUSH = TransferMode.PULL, TransferMode.PUSH


def schedules() -> None:
    for seed in range(SEEDS):
        Schedule(seed).run()


def case(test: Callable[..., None], *arguments: object) -> Callable[[], None]:
    """A case, with arguments that pytest's fixtures would give it; a mode stands for a pair of engines."""

    def run() -> None:
        makes_pair = "mode" not in inspect.signature(test).parameters
        test(*(Pair(one) if makes_pair and isinstance(one, TransferMode) else one for one in arguments))

    run.__name__ = test.__name__
    return run


def all_of(mode: TransferMode) -> verified.Made:
    """What makes pairs all of whose hand-overs are verified."""
    return functools.partial(Pair, mode, verify_fraction=1.0)


EQUAL = (Shape(), Shape())

CAUGHT_BY: Mapping[faults.Fault, Callable[[], None]] = MappingProxyType(
    {
        # What a hand-over says of itself.
        faults.decode_compares_no_digest: schedules,
        faults.prefill_pairs_by_name_alone: case(
            cases.test_two_prompts_under_one_name_get_their_own_kv, PUSH, "X-Request-Id", "crossed"
        ),
        faults.decode_believes_the_last_write: case(
            cases.test_what_prefill_says_that_it_has_written_is_compared, PUSH, {"digest": "0" * 32}, "digest"
        ),
        faults.the_token_is_not_looked_for: schedules,
        faults.the_token_stands_for_the_request_alone: case(
            cases.test_wrong_parameters_cost_their_request, PULL, "the blocks in another order", True
        ),
        faults.the_token_is_published_with_the_lease_only: schedules,
        faults.the_token_is_never_removed: schedules,
        faults.a_request_that_stops_early_keeps_its_token: schedules,
        faults.the_start_is_not_compared: case(cases.test_a_prefill_that_was_started_again_is_another_one, PUSH),
        # The devices.
        faults.decode_s_blocks_are_not_fenced: schedules,
        faults.prefill_offers_what_its_device_has_not_ended: schedules,
        # Blocks and their ends.
        faults.blocks_are_given_back_at_the_failure: schedules,
        faults.held_blocks_are_never_given_back: schedules,
        faults.stopped_is_said_before_it_is_idle: case(
            cases.test_decode_that_is_aborted_keeps_its_blocks_until_nothing_is_in_flight, PUSH
        ),
        faults.a_failed_transfer_is_taken_for_idle: case(
            cases.test_a_transfer_that_has_failed_is_idle_when_its_peer_was_removed, PULL
        ),
        faults.each_handshake_is_a_connection_of_its_own: case(
            cases.test_one_clients_end_does_not_free_the_blocks_of_another, PULL
        ),
        faults.what_is_given_up_is_taken_for_idle: schedules,
        faults.a_read_that_is_stopped_is_taken_for_idle: schedules,
        faults.a_write_that_is_stopped_is_taken_for_idle: schedules,
        faults.preempted_blocks_are_not_held: schedules,
        faults.blocks_that_are_copied_early_are_not_held: schedules,
        faults.blocks_that_may_be_lost_are_copied: case(
            cases.test_a_staged_pull_that_was_preempted_is_copied_when_it_has_ended
        ),
        faults.what_was_copied_before_a_preemption_is_used: case(
            cases.test_what_was_copied_of_a_pull_that_begins_anew_is_not_used, False
        ),
        faults.preempted_blocks_are_idle_at_once: schedules,
        faults.draining_holds_are_forgotten: schedules,
        faults.prefill_s_blocks_are_free_when_its_request_ends: schedules,
        faults.an_unneeded_offer_is_given_back_while_it_is_read: case(
            cases.test_decode_that_is_aborted_frees_prefill_when_nothing_is_in_flight, PULL, True
        ),
        faults.an_aborted_requests_offer_waits_for_its_lease: case(
            cases.test_decode_that_is_aborted_frees_prefill_when_nothing_is_in_flight, PULL, False
        ),
        faults.nobody_is_told_of_a_request_that_was_aborted: schedules,
        faults.other_ranks_are_not_told_of_a_failure: case(
            cases.test_a_rank_that_fails_ends_the_attempt_on_all_of_them
        ),
        faults.a_withdrawal_is_forgotten: case(cases.test_a_withdrawal_that_overtakes_its_registration_wins, PUSH),
        faults.another_engine_in_its_place_is_taken_for_the_end: case(
            cases.test_workers_whose_engine_was_replaced_write_into_blocks_that_are_held, PUSH
        ),
        faults.nobody_listens_is_taken_for_the_end: case(
            cases.test_workers_that_outlive_their_engine_for_a_moment_write_into_blocks_that_are_held, PUSH
        ),
        faults.who_is_not_heard_of_is_not_fenced: schedules,
        faults.a_gate_is_not_closed_and_counts_as_closed: case(
            cases.test_one_that_stood_still_changes_no_byte_of_what_others_got_meanwhile, False, PUSH
        ),
        faults.who_could_write_past_a_gate_is_fenced_by_it: case(
            cases.test_one_that_stood_still_changes_no_byte_of_what_others_got_meanwhile, True, PUSH
        ),
        faults.the_end_of_a_process_is_not_seen: case(
            cases.test_who_waits_for_blocks_that_are_in_quarantine_is_told_so, True
        ),
        faults.handles_are_kept: schedules,
        # Tokens and ranks.
        faults.a_token_too_few: schedules,
        faults.blocks_are_paired_from_the_first: schedules,
        faults.decode_s_prefix_is_fetched_again: schedules,
        faults.prefill_offers_more_than_it_has_computed: schedules,
        faults.another_rank_contributes: schedules,
        faults.one_rank_of_several_contributes: schedules,
        faults.blocks_of_the_kernel_are_not_counted: schedules,
        faults.heads_are_not_told_apart: schedules,
        # Messages and time.
        faults.the_last_write_is_taken_for_all_of_them: case(
            cases.test_decode_goes_on_when_every_write_has_arrived, PUSH
        ),
        faults.writes_are_counted_and_not_told_apart: schedules,
        faults.anybody_is_believed: schedules,
        faults.leases_never_expire: schedules,
        faults.leases_are_not_renewed: case(
            cases.test_a_lease_lasts_while_decode_waits_for_blocks_and_shelters_no_other, PULL
        ),
        faults.a_lease_that_ends_lets_go_of_what_is_written: case(
            cases.test_a_lease_that_ends_while_its_blocks_are_written_keeps_them_until_that_has_ended, PUSH
        ),
        faults.nothing_has_a_deadline: case(cases.test_a_registration_that_is_lost_fails_at_the_deadline, PUSH),
        faults.prefill_does_not_hear_that_it_was_read: case(cases.test_a_full_prefix_hit_frees_prefill_at_once, PULL),
        faults.a_peer_is_asked_once: case(
            cases.test_a_prefill_that_does_not_answer_at_once_is_asked_again, PULL, cases.HANDSHAKE_TRIES - 1
        ),
        faults.a_renewal_outlives_its_request: schedules,
        faults.a_sleeping_engine_is_not_woken: schedules,
        # A slab.
        faults.blocks_are_free_while_they_are_copied: schedules,
        faults.what_is_copied_is_told_before: schedules,
        faults.a_copy_that_failed_counts: schedules,
        faults.slots_are_free_while_they_are_written_from: schedules,
        faults.slots_are_free_while_they_may_be_written: schedules,
        faults.slots_are_copied_when_one_rank_has_written: case(
            cases.test_slots_are_copied_when_every_rank_has_written
        ),
        faults.slots_are_never_free_again: schedules,
        faults.who_waits_for_slots_is_forgotten: schedules,
        faults.no_slot_is_kept_for_what_moves: case(cases.test_two_engines_whose_slabs_are_full_serve_each_other, PULL),
        # What is verified.
        faults.what_has_come_is_not_compared: case(
            verified.test_other_bytes_are_not_used_and_their_sender_is_not_believed_again, all_of(PUSH), EQUAL, (0, 0)
        ),
        faults.an_engine_that_lied_is_believed_again: case(
            verified.test_other_bytes_are_not_used_and_their_sender_is_not_believed_again, all_of(PULL), EQUAL, (0, 0)
        ),
        faults.decode_s_blocks_are_free_while_they_are_compared: case(
            verified.test_blocks_are_not_free_while_a_digest_of_them_is_found, all_of(PUSH), "decode"
        ),
        faults.prefill_s_blocks_are_free_while_their_digest_is_found: case(
            verified.test_blocks_are_not_free_while_a_digest_of_them_is_found, all_of(PUSH), "prefill"
        ),
        # Want of memory.
        faults.offers_never_give_way: case(
            pressure.test_two_full_engines_that_prefill_for_each_other_do_not_wait_for_each_other, PULL, True
        ),
        faults.what_is_fetched_gives_way: case(pressure.test_what_decode_fetches_does_not_give_way, PULL),
        faults.what_is_revoked_keeps_its_token: case(
            pressure.test_a_request_that_waits_for_blocks_gets_those_of_the_oldest_offers, PULL, 1
        ),
        faults.what_is_freed_for_others_stays_in_the_cache: case(
            pressure.test_a_lower_limit_takes_back_what_exceeds_it, PULL, 4, True
        ),
        faults.what_is_owed_waits_for_the_next_request: case(
            pressure.test_a_lower_limit_takes_back_what_exceeds_it, PULL, 0, False
        ),
        faults.an_idle_engine_does_not_look: case(
            pressure.test_an_idle_decode_gives_its_prefix_cache_to_a_neighbour, PULL
        ),
        faults.decode_never_yields: case(
            pressure.test_decode_gives_up_what_has_not_come_for_a_prefill_without_memory, True
        ),
        faults.every_prompt_begins_at_once: case(pressure.test_prefill_computes_little_that_decode_has_no_room_for),
        faults.nobody_says_that_decode_has_registered: case(
            pressure.test_what_decode_has_registered_for_overtakes_what_it_has_not
        ),
        faults.a_digest_is_of_all_heads: case(
            verified.test_what_is_right_is_found_to_be_right, all_of(PUSH), (Shape(tp_size=2), Shape())
        ),
        # Decode asks prefill.
        faults.who_waits_for_an_equal_prompt_is_forgotten: schedules,
        faults.what_was_promised_stays_promised: schedules,
        faults.a_client_that_left_is_still_computed_for: schedules,
    }
)


@pytest.mark.parametrize("fault", CAUGHT_BY, ids=[f"{fault.__name__}-{by.__name__}" for fault, by in CAUGHT_BY.items()])
def test_a_planted_fault_is_caught(fault: faults.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        CAUGHT_BY[fault]()
    # The fault itself must not be what breaks.
    assert not re.search("an exception was contained|unexpected keyword|positional argument", str(caught.value))


@pytest.mark.parametrize("caught_by", {by.__name__: by for by in CAUGHT_BY.values() if by is not schedules}.values())
def test_what_catches_them_passes_without_them(caught_by: Callable[[], None]) -> None:
    """The schedules do so in `test_property`."""
    caught_by()


def test_every_fault_has_its_row() -> None:
    planted = {
        function
        for function in vars(faults).values()
        if inspect.isfunction(function) and [*inspect.signature(function).parameters] == ["patch"]
    }
    assert planted == set(CAUGHT_BY) and len(planted) >= 20
