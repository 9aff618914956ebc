# SPDX-License-Identifier: Apache-2.0
"""Defines what counts as equal. Pure functions over recorded observations; no server, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from experiments.common.client import Answer, HandOver, clients_id

Aspect = Literal["tokens", "log-probabilities", "blocks", "hand-over"]

LOGPROB_TOLERANCE = {"bfloat16": 0.125, "float32": 1e-3}
"""Against the single instance, nats. P/D computes the prompt's last token once more, alone, where the single instance
computes it among others; the product of a matrix with one row may be rounded differently. Against another P/D arm the
tolerance is zero."""


@dataclass(frozen=True)
class Difference:
    prompt: str
    aspect: Aspect
    text: str


@dataclass(frozen=True)
class Check:
    """One row. ``outcome`` is text for people; ``failed_setup``: a server did not start, so nothing was compared."""

    arm: str
    what: str
    passed: bool
    outcome: str
    figures: dict[str, Any] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    failed_setup: bool = False


def compared(arm: str, what: str, differences: Iterable[Difference], outcome: str, **figures: Any) -> Check:
    """Return a row that passes if there are no differences; ``outcome`` describes what was compared."""
    found = tuple(differences)
    prompts = len({difference.prompt for difference in found})
    text = f"{prompts} prompts differ ({outcome})" if found else outcome
    return Check(arm, what, not found, text, dict(figures), found)


def largest_logprob_gap(expected: Answer, found: Answer) -> float:
    """Return the largest difference, nats, over chosen tokens and shared alternatives; inf if not comparable."""
    if len(expected.logprobs) != len(found.logprobs):
        return float("inf")
    gaps = [0.0]
    gaps += [abs(ours - theirs) for ours, theirs in zip(expected.logprobs, found.logprobs, strict=True)]
    for ours, theirs in zip(expected.top_logprobs, found.top_logprobs, strict=False):
        gaps += [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
    # max() would ignore a NaN that is not the first element.
    return float("inf") if any(math.isnan(gap) for gap in gaps) else max(gaps)


def until_tie(expected: Answer, found: Answer, tolerance: float) -> tuple[Answer, Answer]:
    """Cut both answers at the first place where they chose different tokens because of a tie.

    A tie: both answers list both tokens there, and these are no further apart than the tolerance may move each. After
    a tie the two continue different texts, so nothing can be compared. That all P/D arms continue in the same way is
    compared separately, without a tolerance.
    """
    for place, (ours, theirs) in enumerate(zip(expected.token_ids, found.token_ids, strict=False)):
        if ours == theirs:
            continue
        names = [f"token_id:{token}" for token in (ours, theirs)]
        tops = [answer.top_logprobs[place] for answer in (expected, found) if place < len(answer.top_logprobs)]
        known = [[top[name] for name in names if name in top] for top in tops]
        if len(known) == 2 and all(len(two) == 2 and abs(two[0] - two[1]) <= 2 * tolerance for two in known):
            return _first(expected, place), _first(found, place)
        break
    return expected, found


def _first(answer: Answer, tokens: int) -> Answer:
    return Answer(answer.token_ids[:tokens], answer.logprobs[:tokens], answer.top_logprobs[:tokens])


def compare_answers(prompt: str, expected: Answer, found: Answer, tolerance: float | None) -> list[Difference]:
    """Compare token ids, and log-probabilities unless ``tolerance`` (nats) is None; no further than `until_tie`."""
    differences = []
    if tolerance is not None:
        expected, found = until_tie(expected, found, tolerance)
    ours, theirs = found.token_ids, expected.token_ids
    if ours != theirs:
        unlike = (place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
        place = next(unlike, min(len(ours), len(theirs)))
        text = f"from token {place} on: found {ours[place : place + 4]}, expected {theirs[place : place + 4]}"
        differences.append(Difference(prompt, "tokens", text))
    if tolerance is not None:
        gap = largest_logprob_gap(expected, found)
        if gap > tolerance:
            differences.append(Difference(prompt, "log-probabilities", f"apart by {gap:.4g}, allowed {tolerance:g}"))
    return differences


@dataclass(frozen=True)
class Expected:
    """How many blocks of one KV-cache group travel.

    Attributes:
        fewest_offered, most_offered: P's.
        fewest_received: D may have some of them from an earlier prompt.
        unneeded: P's last blocks that D does not take, because it computes the last token itself.
    """

    fewest_offered: int
    most_offered: int
    fewest_received: int
    unneeded: int = 0


def compare_groups(prompt: str, seen: HandOver, expected: Sequence[Expected]) -> list[Difference]:
    """Compare the SHA-256 of every transferred block on both sides, after checking that blocks were transferred at
    all."""
    record = seen.record
    if record is None:
        return [Difference(prompt, "hand-over", "D recorded no transfer: it computed the prompt itself")]
    differences = []
    if record["remote_block_ids"] not in (None, seen.sent_block_ids):
        text = f"D read from {record['remote_block_ids']}, P offered {seen.sent_block_ids}"
        differences.append(Difference(prompt, "hand-over", text))
    if not len(seen.sent_digests) == len(record["digests"]) == len(expected) or not expected:
        text = f"P has {len(seen.sent_digests)} KV-cache groups, D received {len(record['digests'])}"
        differences.append(Difference(prompt, "hand-over", text))
    groups = zip(seen.sent_digests, record["digests"], expected, strict=False)
    for group, (offered, received, wanted) in enumerate(groups):
        if not wanted.fewest_offered <= len(offered) <= wanted.most_offered:
            text = f"group {group}: P offered {len(offered)} blocks, the prompt fills {wanted.most_offered}"
            differences.append(Difference(prompt, "hand-over", text))
        # D receives the tail only: the blocks after its own cached prefix.
        needed = offered[: len(offered) - wanted.unneeded]
        if not wanted.fewest_received <= len(received) <= len(needed):
            wanted_words = f"expected {wanted.fewest_received} to {len(needed)}"
            text = f"group {group}: D received {len(received)} blocks, {wanted_words}"
            differences.append(Difference(prompt, "hand-over", text))
            continue
        tail = needed[len(needed) - len(received) :]
        wrong = [place for place, (ours, theirs) in enumerate(zip(tail, received, strict=True)) if ours != theirs]
        if wrong:
            text = f"group {group}: {len(wrong)} of {len(received)} blocks differ in bytes on D (first: {wrong[0]})"
            differences.append(Difference(prompt, "blocks", text))
    return differences


def compare_senders(prompt: str, expected: HandOver, found: HandOver, full_blocks: int) -> list[Difference]:
    """Compare what two arms' P computed, over full blocks only (the unused end of a tail block keeps older bytes)."""
    for group, (ours, theirs) in enumerate(zip(expected.sent_digests, found.sent_digests, strict=False)):
        if ours[:full_blocks] != theirs[:full_blocks]:
            return [Difference(prompt, "blocks", f"group {group}: KV bytes of P differ from the stock arm's P")]
    return []


def match_records(
    hand_overs: Sequence[HandOver], records: Sequence[Mapping[str, Any]], sent: Sequence[Mapping[str, Any]] = ()
) -> list[HandOver]:
    """Pair each hand-over with D's record of it, and with P's where the client could not read P's blocks itself."""
    received = {record["transfer"]: record for record in records}
    pushed = {record["transfer"]: record for record in sent}
    asked = {clients_id(record["request_id"]): name for name, record in received.items()}
    seen = []
    for hand_over in hand_overs:
        hand_over = replace(hand_over, transfer=asked.get(hand_over.transfer, hand_over.transfer))
        ours = pushed.get(hand_over.transfer)
        if ours is not None and not hand_over.sent_digests:
            hand_over = replace(hand_over, sent_block_ids=ours["block_ids"], sent_digests=ours["digests"])
        seen.append(replace(hand_over, record=received.get(hand_over.transfer)))
    return seen


def catches(
    prompt: str, answer: Answer, seen: HandOver, expected: Sequence[Expected], *, tolerance: float
) -> tuple[list[Aspect], list[Aspect]]:
    """Return (caught by bytes, caught by output) for a request that was corrupted on purpose."""
    by_bytes = [difference.aspect for difference in compare_groups(prompt, seen, expected)]
    by_output = [difference.aspect for difference in compare_answers(prompt, answer, seen.answer, tolerance)]
    return [aspect for aspect in by_bytes if aspect == "blocks"], by_output
