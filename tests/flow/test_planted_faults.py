# SPDX-License-Identifier: Apache-2.0
"""Planted faults are caught, by the schedules of the property test or by a case.

The table names the case that catches a fault; the first `SEEDS` schedules catch the others. More schedules would catch
most of those with a case, too.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from unittest import mock

import pytest
from flow import test_conversations as conversations
from flow import test_hand_over_cases as cases
from flow import test_memory_pressure as pressure
from flow import test_verified_hand_overs as verified
from support.faults import FAULTS
from support.flow_memory import Shape
from support.flow_pair import PULL, PUSH, Pair, nothing_is_left_of_any
from support.flow_schedule import Schedule

from kvcached_nixl.scheduler.asking import questions
from kvcached_nixl.settings import TransferMode

SEEDS = 400


def schedules() -> None:
    for seed in range(SEEDS):
        Schedule(seed).run()


def case(test: Callable[..., None], *arguments: object) -> Callable[[], None]:
    """A case, with arguments that pytest's fixtures would give it; a mode stands for a pair of engines."""

    def run() -> None:
        makes_pair = "mode" not in inspect.signature(test).parameters
        # Cases of conversations have short prompts.
        with mock.patch.object(questions, "LEAST_TOKENS", 4):
            test(*(Pair(one) if makes_pair and isinstance(one, TransferMode) else one for one in arguments))
            nothing_is_left_of_any()

    run.__name__ = test.__name__
    return run


def all_of(mode: TransferMode) -> verified.Made:
    """What makes pairs all of whose hand-overs are verified."""
    return functools.partial(Pair, mode, verify_fraction=1.0)


EQUAL = (Shape(), Shape())


CAUGHT_BY: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        # What a hand-over says of itself.
        "transfers_to_a_removed_peer_count_as_ended": case(
            cases.test_blocks_are_held_while_a_transfer_is_in_flight_to_a_peer_that_stands_still, PULL, "it comes back"
        ),
        "stages_need_not_have_every_layer": case(
            cases.test_pipeline_stages_that_lack_a_layer_together_are_refused, PULL
        ),
        "prefill_pairs_by_name_alone": case(
            cases.test_two_prompts_under_one_name_get_their_own_kv, PUSH, "X-Request-Id", "crossed"
        ),
        "decode_believes_the_last_write": case(
            cases.test_what_prefill_says_that_it_has_written_is_compared, PUSH, {"digest": "0" * 32}, "digest"
        ),
        "the_token_stands_for_the_request_alone": case(
            cases.test_wrong_parameters_cost_their_request, PULL, "the blocks in another order", True
        ),
        "the_start_is_not_compared": case(cases.test_a_prefill_that_was_started_again_is_another_one, PUSH),
        # Blocks and their ends.
        "stopped_is_said_before_it_is_idle": case(
            cases.test_decode_that_is_aborted_keeps_blocks_until_nothing_is_in_flight, PUSH, True
        ),
        "a_failed_transfer_is_taken_for_idle": case(
            cases.test_a_transfer_that_has_failed_is_idle_when_its_peer_was_removed, PULL
        ),
        "each_handshake_is_a_connection_of_its_own": case(
            cases.test_one_clients_end_does_not_free_the_blocks_of_another, PULL
        ),
        "blocks_that_may_be_lost_are_copied": case(
            cases.test_a_staged_pull_that_was_preempted_is_copied_when_it_has_ended
        ),
        "what_was_copied_before_a_preemption_is_used": case(
            cases.test_what_was_copied_of_a_pull_that_begins_anew_is_not_used, False
        ),
        "an_unneeded_offer_is_given_back_while_it_is_read": case(
            cases.test_decode_that_is_aborted_keeps_blocks_until_nothing_is_in_flight, PULL, True
        ),
        "an_aborted_requests_offer_waits_for_its_lease": case(
            cases.test_decode_that_is_aborted_keeps_blocks_until_nothing_is_in_flight, PULL, False
        ),
        "other_ranks_are_not_told_of_a_failure": case(cases.test_a_rank_that_fails_ends_the_attempt_on_all_of_them),
        "a_withdrawal_is_forgotten": case(cases.test_a_withdrawal_that_overtakes_its_registration_wins, PUSH),
        "another_engine_in_its_place_is_taken_for_the_end": case(
            cases.test_workers_whose_engine_was_replaced_write_into_blocks_that_are_held, PUSH
        ),
        "nobody_listens_is_taken_for_the_end": case(
            cases.test_workers_that_outlive_their_engine_for_a_moment_write_into_blocks_that_are_held, PUSH
        ),
        "a_gate_is_not_closed_and_counts_as_closed": case(
            cases.test_one_that_stood_still_changes_no_byte_of_what_others_got_meanwhile, False, PUSH
        ),
        "who_could_write_past_a_gate_is_fenced_by_it": case(
            cases.test_one_that_stood_still_changes_no_byte_of_what_others_got_meanwhile, True, PUSH
        ),
        "the_end_of_a_process_is_not_seen": case(
            cases.test_who_waits_for_blocks_that_are_in_quarantine_is_told_so, True
        ),
        # Messages and time.
        "the_last_write_is_taken_for_all_of_them": case(cases.test_decode_goes_on_when_every_write_has_arrived, PUSH),
        "leases_are_not_renewed": case(
            cases.test_a_lease_lasts_while_decode_waits_for_blocks_and_shelters_no_other, PULL
        ),
        "a_lease_that_ends_lets_go_of_what_is_written": case(
            cases.test_a_lease_that_ends_while_its_blocks_are_written_keeps_them_until_that_has_ended, PUSH
        ),
        "nothing_has_a_deadline": case(cases.test_a_registration_that_is_lost_fails_at_the_deadline, PUSH),
        "prefill_does_not_hear_that_it_was_read": case(cases.test_a_full_prefix_hit_frees_prefill_at_once, PULL),
        "a_peer_is_asked_once": case(
            cases.test_a_prefill_that_does_not_answer_at_once_is_asked_again, PULL, cases.HANDSHAKE_TRIES - 1
        ),
        # A slab.
        "slots_are_copied_when_one_rank_has_written": case(cases.test_slots_are_copied_when_every_rank_has_written),
        "no_slot_is_kept_for_what_moves": case(cases.test_two_engines_whose_slabs_are_full_serve_each_other, PULL),
        # What is verified.
        "what_has_come_is_not_compared": case(
            verified.test_other_bytes_are_not_used_and_their_sender_is_not_believed_again, all_of(PUSH), EQUAL, (0, 0)
        ),
        "an_engine_that_lied_is_believed_again": case(
            verified.test_other_bytes_are_not_used_and_their_sender_is_not_believed_again, all_of(PULL), EQUAL, (0, 0)
        ),
        "decode_s_blocks_are_free_while_they_are_compared": case(
            verified.test_blocks_are_not_free_while_a_digest_of_them_is_found, all_of(PUSH), "decode"
        ),
        "prefill_s_blocks_are_free_while_their_digest_is_found": case(
            verified.test_blocks_are_not_free_while_a_digest_of_them_is_found, all_of(PUSH), "prefill"
        ),
        # Want of memory.
        "offers_never_give_way": case(
            pressure.test_two_full_engines_that_prefill_for_each_other_do_not_wait_for_each_other, PULL, True
        ),
        "what_is_fetched_gives_way": case(pressure.test_what_decode_fetches_does_not_give_way, PULL),
        "what_is_revoked_keeps_its_token": case(
            pressure.test_a_request_that_waits_for_blocks_gets_those_of_the_oldest_offers, PULL, 1
        ),
        "what_is_freed_for_others_stays_in_the_cache": case(
            pressure.test_a_lower_limit_takes_back_what_exceeds_it, PULL, 4, True
        ),
        "what_is_owed_waits_for_the_next_request": case(
            pressure.test_a_lower_limit_takes_back_what_exceeds_it, PULL, 0, False
        ),
        # What is cached is offered without a step.
        "what_else_was_offered_is_not_released": case(
            conversations.test_of_several_that_offer_it_one_is_fetched_and_the_others_keep_nothing, "pull"
        ),
        "what_is_cached_is_offered_before_the_workers_know_of_it": case(
            conversations.test_workers_know_of_what_is_offered_without_a_step, "pull"
        ),
        "an_idle_engine_does_not_look": case(pressure.test_an_idle_decode_gives_its_prefix_cache_to_a_neighbour, PULL),
        "decode_never_yields": case(pressure.test_decode_gives_up_what_has_not_come_for_a_prefill_without_memory, True),
        "every_prompt_begins_at_once": case(pressure.test_prefill_computes_little_that_decode_has_no_room_for),
        "nobody_says_that_decode_has_registered": case(
            pressure.test_what_decode_has_registered_for_overtakes_what_it_has_not
        ),
        "a_digest_is_of_all_heads": case(
            verified.test_what_is_right_is_found_to_be_right, all_of(PUSH), (Shape(tp_size=2), Shape())
        ),
    }
)


@pytest.mark.parametrize(
    ("name", "caught_by"),
    [
        pytest.param(name, by, id=f"{name}-{by.__name__}", marks=[pytest.mark.long] if by is schedules else [])
        for name in FAULTS
        for by in (CAUGHT_BY.get(name, schedules),)
    ],
)
def test_a_planted_fault_is_caught(name: str, caught_by: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError) as caught:
        caught_by()
    Pair.made.clear()
    # The fault itself must not be what breaks.
    assert not re.search("an exception was contained|unexpected keyword|positional argument", str(caught.value))


def test_every_row_has_its_fault() -> None:
    assert {*CAUGHT_BY} <= {*FAULTS} and len(FAULTS) >= 80
