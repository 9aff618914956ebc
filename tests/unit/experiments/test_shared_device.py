# SPDX-License-Identifier: Apache-2.0
"""experiments/shared_device: its load is the same for every arm, its arithmetic, and what its arms differ in."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("httpx")

import httpx

from experiments.common.client import Answer
from experiments.common.report import Narrator
from experiments.common.servers import ServerError, ServerSpec
from experiments.shared_device import clients, reference, table
from experiments.shared_device.arms import (
    ALONE,
    ARMS,
    BEHIND,
    FULL_ATTENTION,
    HYBRID_ARMS,
    MAX_MODEL_LEN,
    NEVER_SECONDS,
    PULL,
    PUSH,
    QUEUE_SECONDS,
    STATIC,
    STATIC_PUSH,
    WITH_HYBRID,
    WITHOUT_REVOCATION,
    Arm,
    Device,
)
from experiments.shared_device.clients import (
    LENGTHS,
    MAX_TOKENS,
    Arrival,
    Outcome,
    Received,
    Swell,
    Target,
    arrivals,
    ask,
    draw_prompts,
    merged,
)
from experiments.shared_device.counts import Counts, Sample, moved_tokens
from experiments.shared_device.measure import ASKS, Overloaded, Ran
from experiments.shared_device.measure import BEHIND as BEHIND_ROUTER
from experiments.shared_device.reference import chosen
from experiments.shared_device.report import (
    FIRST_TOKEN_SECONDS,
    TOKEN_SECONDS,
    figures_of,
    is_good,
    judge,
    judge_overload,
    peaks,
    table_of_overload,
    tables_of,
)

GOOD = Received("a", 0.0, 256, Outcome.RIGHT, 1.0, "100 100")


def received(**more: Any) -> Received:
    return dataclasses.replace(GOOD, **more)


def test_every_arm_gets_the_same_requests() -> None:
    swell = Swell(0.5, 4.0)
    load = arrivals("a", swell, 60.0, 10, seed=1)
    assert load == arrivals("a", swell, 60.0, 10, seed=1)
    assert load != arrivals("a", swell, 60.0, 10, seed=2) and load != arrivals("b", swell, 60.0, 10, seed=1)
    assert {one.max_tokens for one in load} == set(MAX_TOKENS) and {one.prompt for one in load} == set(range(10))


def test_loads_swell_at_opposite_times() -> None:
    one, other = Swell(0.5, 4.0), Swell(0.5, 4.0, phase=0.5)
    assert (one.at(0), one.at(9), other.at(0), other.at(9)) == pytest.approx((0.5, 4.0, 4.0, 0.5))
    early, late = (
        [each for each in arrivals("a", swell, 3000.0, 4, 3) if each.at_seconds % 18 < 2.25] for swell in (one, other)
    )
    assert len(late) > 4 * len(early)
    # The mean rate is that between low and high.
    assert len(arrivals("a", one, 3000.0, 4, 3)) == pytest.approx(3000 * 2.25, rel=0.05)
    both = merged(arrivals("a", one, 60.0, 4, 3), arrivals("b", other, 60.0, 4, 3))
    assert [each.at_seconds for each in both] == sorted(each.at_seconds for each in both)


def test_prompts_are_whole_blocks_and_fit() -> None:
    prompts = draw_prompts(12, seed=1)
    assert sorted(map(len, prompts)) == sorted(2 * LENGTHS)
    assert all(length + max(MAX_TOKENS) <= MAX_MODEL_LEN for length in LENGTHS)
    for device in (FULL_ATTENTION, WITH_HYBRID):
        for one in device.models.values():
            assert all(length % one.block_size == 0 for length in LENGTHS)
            assert one.block_size * min(one.split_blocks.values()) >= MAX_MODEL_LEN + bool(one.state_bytes)


@pytest.mark.parametrize(
    ("more", "good"),
    [
        ({}, True),
        ({"outcome": Outcome.WRONG}, False),
        ({"outcome": Outcome.LEFT}, False),
        ({"first_token_seconds": FIRST_TOKEN_SECONDS}, True),
        ({"first_token_seconds": FIRST_TOKEN_SECONDS + 0.01}, False),
        ({"gaps_ms": f"0 {2000 * TOKEN_SECONDS:.0f}"}, True),
        ({"gaps_ms": f"0 {2000 * TOKEN_SECONDS + 10:.0f}"}, False),
        ({"gaps_ms": ""}, True),
    ],
    ids=str,
)
def test_goodput_counts_right_answers_in_time(more: dict[str, Any], good: bool) -> None:
    assert is_good(received(**more)) is good
    assert figures_of([received(**more), GOOD], 4.0).goodput == (good + 1) / 4


def test_who_got_no_token_is_in_no_percentile() -> None:
    found = figures_of([received(first_token_seconds=None, gaps_ms="", outcome=Outcome.REFUSED), GOOD], 1.0)
    assert (found.first_p50, found.token_p99, found.outcomes["refused"], found.outcomes["right"]) == (1.0, 0.1, 1, 1)


@pytest.mark.parametrize(("prefilled", "moved", "share"), [(0, 0, None), (1000, 750, 0.25), (1000, 1032, 0.0)])
def test_what_no_decode_received_is_wasted(prefilled: float, moved: float, share: float | None) -> None:
    begun = Counts(100, 50)
    assert Counts(100 + prefilled, 50 + moved).since(begun).wasted_share == share


def specs(arm: Arm, device: Device = FULL_ATTENTION, model: str = "a") -> list[ServerSpec]:
    return arm.specs(device, model, Path("m"), "d")


def extra_of(spec: ServerSpec) -> Any:
    return dict(spec.kv_transfer or {})["kv_connector_extra_config"]


def test_arms_differ_in_what_their_names_say() -> None:
    assert len({arm.tag for arm in ARMS}) == len(ARMS)
    assert [arm.asks for arm in (PULL, PUSH, *WITHOUT_REVOCATION, *BEHIND)] == [True] * 4 + [False] * 2
    assert not any(arm.asks for arm in ARMS if not arm.name.startswith("this package"))
    for arm, beside in zip((*WITHOUT_REVOCATION, *BEHIND), (PULL, PUSH) * 2, strict=True):
        assert arm.name.startswith(f"{beside.name}, ")
        for mine, other in zip(specs(arm), specs(beside), strict=True):
            assert (mine.environment, mine.arguments) == (other.environment, other.arguments)
            differs = extra_of(mine).items() ^ extra_of(other).items()
            is_asking = other.name.endswith("decode")
            expected = {("queue_timeout", QUEUE_SECONDS)} if is_asking else set()
            assert differs == (expected if arm in BEHIND else {("give_way_after", NEVER_SECONDS)})


def test_stock_push_differs_from_stock_pull_in_its_connector() -> None:
    for pull, push in zip(specs(STATIC), specs(STATIC_PUSH), strict=True):
        assert {**(pull.kv_transfer or {}), "kv_connector": "NixlPushConnector"} == push.kv_transfer
        assert (pull.environment, pull.arguments) == (push.environment, push.arguments)


@pytest.mark.parametrize("device", [FULL_ATTENTION, WITH_HYBRID])
def test_a_split_has_the_whole_device_and_elastic_servers_may(device: Device) -> None:
    def blocks(spec: ServerSpec) -> int:
        return int(spec.arguments[spec.arguments.index("--num-gpu-blocks-override") + 1])

    split = 0
    for model, served in device.models.items():
        split += sum(blocks(one) for one in specs(STATIC, device, model)) * served.block_bytes
        for one in specs(PULL, device, model):
            assert blocks(one) * served.block_bytes == device.num_bytes
            assert one.environment["KVCACHED_HOSTVMM_DEVICE"] == "d"
            assert float(one.environment["KVCACHED_HOSTVMM_GIB"]) * 2**30 == device.num_bytes
    assert split == device.num_bytes
    assert [one.environment for one in specs(STATIC)] == [{}, {}]


def test_a_hybrid_model_has_states_and_the_flags_that_they_need() -> None:
    hybrid, other = WITH_HYBRID.models.values()
    assert (other.state_bytes, other.kv_bytes_per_token, other.block_bytes) == (0, 64 << 10, 2 << 20)
    # Two layers of attention, and two of Mamba2: a recurrence's state and that of a convolution.
    assert hybrid.kv_bytes_per_token == 2 * 2 * 16 * 128 * 4
    assert hybrid.state_bytes == 2 * 4 * (32 * 64 * 128 + 3 * (32 * 64 + 2 * 2 * 128))
    assert hybrid.state_bytes <= hybrid.block_bytes == 4 << 20
    for arm in HYBRID_ARMS:
        for one in specs(arm, WITH_HYBRID):
            assert "--no-disable-hybrid-kv-cache-manager" in one.arguments and one.block_size == hybrid.block_size
            assert one.environment.get("VLLM_SSM_CONV_STATE_LAYOUT") == ("DS" if arm is STATIC else None)
        assert not any("hybrid" in word for one in specs(arm, WITH_HYBRID, "b") for word in one.arguments)
    assert [len(specs(arm, WITH_HYBRID)) for arm in (STATIC, ALONE, PULL)] == [2, 1, 2]


def test_states_are_no_tokens() -> None:
    hybrid, other = WITH_HYBRID.models.values()
    padded, bare = (512 * hybrid.kv_bytes_per_token + 2 * each for each in (hybrid.block_bytes, hybrid.state_bytes))
    assert moved_tokens(hybrid, padded, 2, is_stock=False) == moved_tokens(hybrid, bare, 2, is_stock=True) == 512
    assert moved_tokens(other, 512 * other.kv_bytes_per_token, 2, is_stock=False) == 512
    assert moved_tokens(hybrid, 0, 1, is_stock=True) == 0


def answer(lead_nats: float, tokens: int = 2) -> Answer:
    return Answer([1] * tokens, [0.0] * tokens, [{"1": 0.0, "2": -1.0}] * (tokens - 1) + [{"2": -lead_nats, "1": 0.0}])


def test_prompts_with_a_close_decision_are_left_out() -> None:
    assert answer(0.5).lead == 0.5 and answer(2.0).lead == 1.0
    prompts = draw_prompts(2 * len(LENGTHS), seed=1)
    answers = [answer(0.0001 if number < len(LENGTHS) else 0.5) for number in range(len(prompts))]
    found = chosen(prompts, answers, count=len(LENGTHS))
    assert sorted(map(len, found.prompts)) == sorted(LENGTHS)
    assert all(prompt in prompts[len(LENGTHS) :] for prompt in found.prompts)
    with pytest.raises(ServerError, match="without a close decision"):
        chosen(prompts, answers, count=2 * len(LENGTHS))


def test_the_right_answers_are_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each vLLM, model and way of drawing."""
    asked_for = []

    def ask_servers(device: Device, folders: Mapping[str, Path], *_: Any) -> dict[str, reference.Asked]:
        asked_for.append(list(folders))
        return {model: reference.Asked([[1, 2]], [[3]]) for model in folders}

    monkeypatch.setattr(reference, "_reference_of", ask_servers)
    for folder in ("m1", "m1", "m2"):
        found = reference.reference_of(FULL_ATTENTION, {"a": Path(folder)}, tmp_path, lambda _: None, cache=tmp_path)
        assert found == {"a": reference.Asked([[1, 2]], [[3]])}
    monkeypatch.setattr(reference, "LEAST_LEAD", 0.5)
    reference.reference_of(FULL_ATTENTION, {"a": Path("m1")}, tmp_path, lambda _: None, cache=tmp_path)
    assert len(asked_for) == 3


ARRIVAL = Arrival(0.0, "a", 0, 3)
RIGHT = (4, 5, 6, 7)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def tokens(*ids: int) -> bytes:
    return event(choices=[{"text": "", "token_ids": list(ids)}])


DONE = b"data: [DONE]\n\n"


def asked(reply: Callable[[], Any]) -> Received:
    async def run() -> Received:
        transport = httpx.MockTransport(lambda request: reply())
        async with httpx.AsyncClient(transport=transport) as http:
            return await ask(http, Target("http://x", [[1, 2]], [RIGHT]), ARRIVAL, "salt")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "headers", "body", "outcome", "num_gaps"),
    [
        (200, {}, b": comment\n\n" + tokens(4) + tokens(5, 6) + DONE, Outcome.RIGHT, 2),
        (200, {}, tokens(4, 5, 6) + DONE, Outcome.RIGHT, 2),
        (200, {}, tokens(4) + tokens(5, 7) + DONE, Outcome.WRONG, 2),
        (200, {}, tokens(4) + tokens(5) + DONE, Outcome.WRONG, 1),
        (200, {}, tokens(4) + tokens(5, 6), Outcome.FAILED, 2),
        (200, {}, tokens(4) + event(error={"code": 503, "message": "x"}), Outcome.FAILED, 0),
        (200, {}, event(error={"code": 503, "message": "x"}) + DONE, Outcome.REFUSED, 0),
        (503, {"Retry-After": "3"}, b"{}", Outcome.REFUSED, 0),
        (500, {}, b"{}", Outcome.FAILED, 0),
    ],
)
def test_outcomes(status: int, headers: dict[str, str], body: bytes, outcome: Outcome, num_gaps: int) -> None:
    found = asked(lambda: httpx.Response(status, headers=headers, content=body))
    assert (found.outcome, len(found.gaps_seconds)) == (outcome, num_gaps)
    assert found.retry_after is bool(headers)
    assert (found.first_token_seconds is None) is (b"token_ids" not in body)


class Silent(httpx.AsyncByteStream):
    """Sends ``first``, then nothing for ever."""

    def __init__(self, first: bytes) -> None:
        self.first = first

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.first
        await asyncio.Event().wait()


@pytest.mark.parametrize(("first", "outcome"), [(b"\n", Outcome.LEFT), (tokens(4), Outcome.NO_END)])
def test_a_client_gives_up(first: bytes, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.05)
    assert asked(lambda: httpx.Response(200, stream=Silent(first))).outcome is outcome


MIB = 2**20
SAMPLES = [
    Sample(0.0, {"a, prefill": 10 * MIB, "a, decode": 20 * MIB, "b, prefill": 0, "b, decode": 5 * MIB}),
    Sample(1.0, {"a, prefill": 0, "a, decode": 5 * MIB, "b, prefill": 20 * MIB, "b, decode": 10 * MIB}),
]
RAN = Ran(PULL.name, 10.0, [GOOD], Counts(1000, 900, revoked=2), SAMPLES)


def test_peaks_are_of_one_moment() -> None:
    assert peaks(RAN) == (35 * MIB, {"a": 30 * MIB, "b": 30 * MIB})
    assert peaks(Ran("x")) == (0, {})


@pytest.mark.parametrize(
    ("ran", "missed"),
    [
        (RAN, []),
        (dataclasses.replace(RAN, received=[received(outcome=Outcome.WRONG)]), ["wrong answers"]),
        (dataclasses.replace(RAN, received=[received(outcome=Outcome.NO_END)]), ["wrong answers"]),
        (
            dataclasses.replace(RAN, samples=[Sample(0.0, {"a, decode": FULL_ATTENTION.num_bytes + 1})]),
            ["within the device"],
        ),
        (dataclasses.replace(RAN, arm=STATIC.name, received=[received(outcome=Outcome.WRONG)]), []),
        (Ran(PULL.name, not_run="it does not start"), ["serves throughout"]),
        (Ran(STATIC.name, not_run="it does not start"), []),
    ],
)
def test_targets_of_the_table(ran: Ran, missed: list[str]) -> None:
    found = [one.target for one in judge([ran], FULL_ATTENTION) if not one.reached]
    assert len(found) == len(missed) and all(word in one for word, one in zip(missed, found, strict=True))


def overloaded(way: str, moved: float, *each: Received) -> Overloaded:
    return Overloaded(way, 1.0, 10.0, list(each or [GOOD]), Counts(1000, moved))


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        ([overloaded(ASKS, 1000), overloaded(BEHIND_ROUTER, 500)], []),
        ([overloaded(ASKS, 999)], ["prefill wasted"]),
        ([overloaded(ASKS, 1000, received(outcome=Outcome.REFUSED))], ["when to try again"]),
        ([overloaded(ASKS, 1000, received(outcome=Outcome.REFUSED, retry_after=True))], []),
        ([overloaded(BEHIND_ROUTER, 500, received(outcome=Outcome.WRONG))], ["wrong answers"]),
    ],
)
def test_targets_of_the_overload(found: list[Overloaded], missed: list[str]) -> None:
    targets = [one.target for one in judge_overload(found) if not one.reached]
    assert len(targets) == len(missed) and all(word in one for word, one in zip(missed, targets, strict=True))


def test_tables_add_up_and_say_what_was_not_run() -> None:
    speed, fate = tables_of([RAN, Ran("kvcached's own Nixl patch", not_run="it does not start")], "title")
    assert [list(column.cells)[0] for column in speed.columns][0:2] == [PULL.name, "0.10"]
    assert [list(column.cells)[0] for column in fate.columns] == [PULL.name, *"100000", "10.0%", "2", "0", "35"]
    assert list(speed.columns[1].cells)[1] == list(fate.columns[1].cells)[1] == "not run"
    assert "it does not start" in str(fate.caption)
    rounds = [overloaded(ASKS, 500), overloaded(ASKS, 700, GOOD, received(outcome=Outcome.LEFT))]
    cells = {column.header: list(column.cells) for column in table_of_overload(rounds).columns}
    assert (cells["right"], cells["left"], cells["wasted"]) == (["2"], ["1"], ["40.0%"])
    assert (cells["asked/s"], cells["goodput/s"]) == (["0.15"], ["0.10"])


@pytest.mark.parametrize(
    ("quick", "word", "arms"),
    [
        (False, "", [arm.name for arm in HYBRID_ARMS]),
        (True, "", [STATIC.name, PULL.name]),
        (True, "without P/D", [ALONE.name]),
    ],
)
def test_arms_take_turns_with_the_same_load(
    quick: bool, word: str, arms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, places = [], set()

    def run_arm(
        arm: Arm, device: Device, folders: Any, asked: Any, load: Any, seconds: float, logs: Path, _: Any
    ) -> Ran:
        assert device is WITH_HYBRID and logs.is_dir()
        loads.append(load)
        places.add(logs / arm.tag)
        return Ran(arm.name, seconds)

    monkeypatch.setattr(table, "run_arm", run_arm)
    asked = {model: reference.Asked([[1]] * 18, [[2]] * 18) for model in "ab"}
    with Narrator("test") as narrator:
        options = argparse.Namespace(quick=quick, arm=word, seed=1)
        found = list(table.measure(table.TABLES["hybrid"], {}, asked, options, tmp_path / "logs", narrator))
    assert [one.arm for one in found] == arms
    assert len(places) == len(loads) == len(arms) and loads[0] and all(load == loads[0] for load in loads)
